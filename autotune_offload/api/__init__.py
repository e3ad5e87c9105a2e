"""What you call.

From below: report, notices, probe, given, profile, call, deciding, initialize, install.
"""
