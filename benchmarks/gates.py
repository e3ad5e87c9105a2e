"""Whether the latest recorded runs reach their goals.

    python -m benchmarks.gates

Of each number in results.jsonl that has a goal the latest counts: the regret on described machines, the choice against
a sweep, what a confirmation costs, how often it comes to another choice than the probe's and what that was worth, copy
rates, start-up. Nothing is measured. Exits 1 where a goal is missed or one of GATES was never recorded.
"""

from __future__ import annotations

import sys

from benchmarks import results
from benchmarks.goals import judged
from benchmarks.tables import Latest

GATES = (
    ("regret", "mean regret"),
    ("regret", "worst regret"),
    ("regret", "mean regret of a step"),
    ("regret", "worst regret of a step"),
    ("choice", "the choice over the best of a sweep"),
    ("confirm", "cost over 200 steps"),
    *(("confirm", f"starts that came to another choice, {host} host") for host in ("quiet", "loaded")),
    *(("confirm", f"the probe's choice over the confirmed one, {host} host") for host in ("quiet", "loaded")),
)
"""What a release rests on."""


def main() -> int:
    """Print every goal."""
    latest = Latest(results.read())
    recorded = {
        (run.benchmark, what): latest.number(run.benchmark, what, "found") for run, what in latest.rows()
    }
    status = judged(
        number.goal for number in recorded.values() if number is not None and number.goal is not None
    )
    never = [f"{benchmark}: {what}" for benchmark, what in GATES if recorded.get((benchmark, what)) is None]
    for each in never:
        print(f"never recorded: {each}; run `python -m benchmarks.{each.split(':')[0]} --record CONDITIONS`")
    return 1 if never else status


if __name__ == "__main__":
    sys.exit(main())
