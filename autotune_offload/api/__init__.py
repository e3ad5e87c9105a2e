"""What you call.

From below: report, reached, notices, probe, given, profile, call, deciding, initialize, install.
"""
