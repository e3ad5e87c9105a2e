"""What you call.

From below: report, reached, notices, probe, given, foreseen, profile, call, deciding, initialize, install.
"""
