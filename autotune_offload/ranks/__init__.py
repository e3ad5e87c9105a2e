"""Several ranks, one decision.

From below: group, ballots, agreement, agree, turns.
"""
