"""What you call.

From below: report, probe, call, deciding, initialize, install.
"""
