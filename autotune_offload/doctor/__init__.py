"""What stands in the way on this host and in a ds_config, and how to fix it.

From below: self_report, checks, examine, pasted.
"""
