"""What you call.

From below: report, reached, notices, probe, given, foreseen, profile, call, deciding, confirming, initialize, install.
"""
