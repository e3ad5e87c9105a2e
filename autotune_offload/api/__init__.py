"""What you call.

From below: page_locked, report, reached, notices, voice, probe, given, foreseen, profile, call, deciding, confirming,
carrying, initialize, install.
"""
