"""Timing loops over a `Device`: curves, casts, costs, and the bench that the trials of whole paths run on.

From below: arenas, sampling, curves, attempts, rehearsal, costs, step, measure, compute, bench,
aio_child, drive.
"""
