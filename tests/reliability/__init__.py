"""Faults that users have met, injected for real: what must happen, and whether it did.

`python -m tests.reliability --write docs/reliability.md` runs them all and writes the table.
"""
