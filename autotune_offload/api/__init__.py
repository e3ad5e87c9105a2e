"""What you call.

From below: page_locked, report, reached, notices, probe, given, foreseen, profile, call, deciding, confirming,
initialize, install.
"""
