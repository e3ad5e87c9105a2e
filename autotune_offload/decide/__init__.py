"""From measurements to a choice.

From below: cost_model, candidates, entrant, trial, race, search, reasons, verdict, accumulations, sizes, decide.
"""
