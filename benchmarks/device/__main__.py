"""`python -m benchmarks.device`: every part in turn, then what holds and what does not."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autotune_offload.interruption import Terminated, raising
from benchmarks.device import outcomes, page
from benchmarks.device.answers import FAILS
from benchmarks.device.children import CHECKOUT, perform
from benchmarks.device.claims import Verdict, judged
from benchmarks.device.outcomes import Outcome
from benchmarks.device.parts import PARTS, Part, asked_for, limit_seconds
from tests import shared_memory

LEAST_MINUTES = 0.5
LEAST_SECONDS = 1.0
_RESERVE_SECONDS = 2.0
"""For ending the last part and writing the page."""


class Run:
    """All parts, and what is on disk of them."""

    def __init__(self, folder: Path, about: dict[str, Any], parts: tuple[Part, ...], seconds: float) -> None:
        self.folder, self.about, self.parts, self.seconds = folder, about, parts, seconds
        self.outcomes = [Outcome(name=part.name, title=part.title) for part in parts]
        self.began = time.monotonic()
        self.interrupted = False

    def all(self, options: list[str]) -> None:
        """One after another; what is found is written after each, whatever ends it."""
        for index, (part, outcome) in enumerate(zip(self.parts, self.outcomes, strict=True)):
            left = self.began + self.seconds - _RESERVE_SECONDS - time.monotonic()
            limit = limit_seconds(left, self.parts[index:])
            print(f"{index + 1}/{len(self.parts)} {part.title}: at most {max(limit, 0):.0f} s", flush=True)
            if limit < LEAST_SECONDS:
                outcome.why = "no time was left; give more --minutes"
                continue
            try:
                perform(outcome, self.folder, limit, options)
            finally:
                self.write()
            print(f"    {outcome.state} after {outcome.seconds:.0f} s", *_why(outcome), flush=True)

    def write(self) -> list[Verdict]:
        """Results and page, as far as they go."""
        verdicts = judged({outcome.name: outcome.found for outcome in self.outcomes})
        document = outcomes.document(self.about, self.outcomes, verdicts)
        outcomes.write(self.folder / "results.json", document)
        (self.folder / "page.md").write_text(page.page(document), encoding="utf-8")
        return verdicts


def main() -> int:
    """0 where no claim fails, 1 where one does, 130 where it was interrupted."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=8.0, help="that all of it may take (8)")
    parser.add_argument("-o", "--output", type=Path, metavar="FOLDER", help="build/device-DATE if not given")
    names = [part.name for part in PARTS]
    parser.add_argument(
        "--parts", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names)
    )
    parser.add_argument(
        "--short", action="store_true", help="small sizes, for tests: no number means anything"
    )
    parser.add_argument(
        "--fake", metavar="KIND", help="a stand-in for an accelerator of that kind, for tests"
    )
    options = parser.parse_args()
    if options.minutes < LEAST_MINUTES:
        parser.error(f"--minutes {options.minutes:g}: expected at least {LEAST_MINUTES:g}")
    now = datetime.datetime.now(datetime.timezone.utc)
    folder = (options.output or CHECKOUT / "build" / f"device-{now:%Y-%m-%d-%H%M%S}").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    passed_on = ["--short"] * options.short + (["--fake", options.fake] if options.fake else [])
    about = {
        "date": now.isoformat(timespec="seconds"),
        "minutes": options.minutes,
        "commit": commit(),
        "short": options.short,
        "fake": options.fake,
    }
    run = Run(folder, about, asked_for(options.parts), options.minutes * 60)
    before = shared_memory.buffers()
    try:
        with _stoppable():
            run.all(passed_on)
    except (KeyboardInterrupt, Terminated):
        print("interrupted; what was measured so far is kept", flush=True)
        run.interrupted = True
    finally:
        shared_memory.remove_since(before)
    verdicts = run.write()
    print(
        page.verdict_lines(verdicts),
        f"in {folder}: page.md, results.json, traces, logs",
        sep="\n",
        flush=True,
    )
    if run.interrupted:
        return 130
    return 1 if any(each.verdict == FAILS for each in verdicts) else 0


def _why(outcome: Outcome) -> Iterator[str]:
    if outcome.why is not None:
        yield f"({outcome.why})"


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM and a lost terminal unwind as Ctrl-C does, so that no part goes on alone."""

    def hung_up(number: int, frame: Any) -> None:
        del number, frame
        raise Terminated

    ours = signal.getsignal(signal.SIGHUP) is signal.SIG_DFL  # under nohup it is ignored, and stays so
    if ours:
        signal.signal(signal.SIGHUP, hung_up)
    try:
        with raising():
            yield
    finally:
        if ours:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)


def commit() -> str | None:
    """Of this checkout, with a mark where files differ from it."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=CHECKOUT,
            capture_output=True,
            text=True,
            check=False,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


if __name__ == "__main__":
    sys.exit(main())
