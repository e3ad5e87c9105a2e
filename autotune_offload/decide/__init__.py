"""From measurements to a choice.

From below: cost_model, candidates, entrant, trial, race, search, verdict, reasons, pins, accumulations, sizes,
decision, step, decide, drive.
"""
