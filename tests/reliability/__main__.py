"""Inject every fault and write the table: `python -m tests.reliability --write docs/reliability.md`."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.conftest import set_environment
from tests.reliability import FAULTS, training_loops
from tests.reliability.registry import AREAS, Outcome, cells, run

_HEAD = """\
# Reliability

A tool that touches other people's training runs must be the last thing they suspect: what a loop may do comes
first, then what may go wrong. Each fault was injected for real in one run of

    python -m tests.reliability --write docs/reliability.md

which wrote this page; `make test` injects the same ones. A time-out is around each. What a machine does not allow (a
mount, a cgroup, another user) is "not possible here" with its reason. `python -m tests.reliability.soak` starts and
destroys 500 engines in one process and prints what it held before and after.

The last table holds public reports, each tried as its author would have met it, with the thread that tells it: what
must be said or done for them.

"""


def main() -> int:
    """Exit 0 where no fault failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.reliability", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table to this file")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these faults")
    given = parser.parse_args()
    set_environment()
    wanted = [one for name, one in FAULTS.items() if not given.names or name in given.names]
    outcomes = []
    for one in wanted:
        outcomes.append(run(one))
        print(f"{outcomes[-1].result:18} {one.area}: {one.name}: {outcomes[-1].happened}", flush=True)
    if given.write:
        given.write.write_text(page(outcomes), encoding="utf-8")
    return int(any(outcome.result == "fail" for outcome in outcomes))


def page(outcomes: Sequence[Outcome]) -> str:
    """The whole document."""
    count = {
        result: sum(o.result == result for o in outcomes) for result in ("pass", "fail", "not possible here")
    }
    import deepspeed
    import torch

    lines = [
        "## Faults",
        "",
        f"Run on {platform.system()} {platform.machine()} as {'root' if os.geteuid() == 0 else 'a user'}, Python "
        f"{platform.python_version()}, torch {torch.__version__}, DeepSpeed {deepspeed.__version__}: "
        + ", ".join(f"{number} {result}" for result, number in count.items())
        + ".",
    ]
    for area in AREAS:
        lines += ["", f"## {area}", "", "| fault | injected | must | happened | |", "|---|---|---|---|---|"]
        lines += [_row(outcome) for outcome in outcomes if outcome.fault.area == area]
    return _HEAD + training_loops.section() + "\n" + "\n".join(lines) + "\n"


def _row(outcome: Outcome) -> str:
    one = outcome.fault
    return cells(one.name, one.injected, one.expected, outcome.happened, outcome.result)


if __name__ == "__main__":
    sys.exit(main())
