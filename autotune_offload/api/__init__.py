"""What you call.

From below: report, notices, probe, given, foreseen, profile, call, deciding, initialize, install.
"""
