"""Several ranks, one decision.

From below: patience, group, ballots, agreement, agree, turns.
"""
