"""What you call.

From below: report, reached, notices, voice, probe, given, foreseen, profile, call, deciding, initialize, install.
"""
