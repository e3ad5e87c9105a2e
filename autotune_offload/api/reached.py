"""Which processes below `autotune-offload run` called DeepSpeed, and what came of it, for the parent to say.

Each process appends lines to a file of its own, in a folder that the parent made and a variable names: "started" by
the hook, "imported" where it put the wrappers in, "tuned" or "untuned" for each `deepspeed.initialize`.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from autotune_offload.records import Record

VARIABLE = "AUTOTUNE_OFFLOAD_REACHED"
"""The folder's name is in it; `api/hook/sitecustomize.py`, which imports nothing, spells it too."""

_MOST_WORDS = 200
_NAMED_RANKS = 8


class Call(Record, frozen=True, kw_only=True):
    """One `deepspeed.initialize` of one process."""

    process: str
    rank: int
    local_ranks: int
    """Ranks on its host, as its launcher says; 0 where none does."""
    why_not: str
    """Why it was left untuned; "" where it was tuned."""


class Reached(Record, frozen=True, kw_only=True):
    """What all processes said."""

    started: int
    imported: int
    calls: tuple[Call, ...]

    def sentence(self) -> str:
        """What the parent says at the end."""
        if not self.calls:
            return (
                "nothing was tuned: no deepspeed.initialize was seen to return below the command "
                f"({_counted(self.started, 'Python process')} ran with this package in place, {self.imported} of "
                "them imported DeepSpeed). `python -I`, -E or -S keep it out, and so does a PYTHONPATH that is "
                "replaced on the way: call autotune_offload.install() in the script"
            )
        tuned = [call for call in self.calls if not call.why_not]
        parts = [f"tuned in {_processes(tuned)}"] if tuned else ["nothing was tuned"]
        for why, count in Counter(call.why_not for call in self.calls if call.why_not).most_common():
            parts.append(f"left untuned in {_counted(count, 'call')}: {why}")
        expected = max(call.local_ranks for call in self.calls)
        there = len({call.rank for call in self.calls})
        if there < expected:
            parts.append(
                f"{expected - there} of the {expected} ranks of this host did not report: they run untuned, or have "
                "not called deepspeed.initialize"
            )
        return "; ".join(parts)


def say(why_not: str | None) -> None:
    """Leave a line for the parent, where there is one: tuned, or why not."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return
    words = "" if why_not is None else " ".join(why_not.split())[:_MOST_WORDS] or "no reason was given"
    fields = ("untuned" if words else "tuned", _number("RANK"), _number("LOCAL_WORLD_SIZE"), words)
    with contextlib.suppress(OSError), open(Path(folder, str(os.getpid())), "a", encoding="utf-8") as file:
        file.write("\t".join(map(str, fields)) + "\n")


def read(folder: Path) -> Reached:
    """What the processes wrote, however they ended."""
    said = {file.name: file.read_text("utf-8", "replace").splitlines() for file in sorted(folder.iterdir())}
    return Reached(
        started=len(said),
        imported=sum("imported" in lines for lines in said.values()),
        calls=tuple(call for process, lines in said.items() for call in _calls(process, lines)),
    )


def _calls(process: str, lines: Sequence[str]) -> Iterator[Call]:
    for line in lines:
        fields = line.split("\t")
        if fields[0] in ("tuned", "untuned") and len(fields) == 4 and all(f.isdecimal() for f in fields[1:3]):
            yield Call(process=process, rank=int(fields[1]), local_ranks=int(fields[2]), why_not=fields[3])


def _processes(calls: Sequence[Call]) -> str:
    count = len({call.process for call in calls})
    ranks = sorted({call.rank for call in calls})
    named = ", ".join(map(str, ranks[:_NAMED_RANKS])) + ", ..." * (len(ranks) > _NAMED_RANKS)
    return f"{_counted(count, 'process')} (rank{'s' * (len(ranks) > 1)} {named})"


def _number(variable: str) -> int:
    text = os.environ.get(variable, "").strip()
    return int(text) if text.isascii() and text.isdecimal() else 0


def _counted(count: int, what: str) -> str:
    plural = "es" if what.endswith("s") else "s"
    return f"{count} {what}{'' if count == 1 else plural}"
