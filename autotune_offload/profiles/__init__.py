"""What was measured, kept: stored, trusted or not, found again, checked again, compared.

From below: environment, trust, yaml_form, store, outcomes, drives, recheck, lookup, fleet.
"""
