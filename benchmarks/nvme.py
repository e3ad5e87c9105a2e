"""What a probe's aio setting is worth on a drive: against DeepSpeed's own, plain reads, and every other setting.

    python -m benchmarks.nvme FOLDER [--json] [--seconds S]

Three parts, all in FOLDER, with one rank and files of 8 MiB. First `decide.drive.choose` as `probe --nvme` calls it.
Then DeepSpeed's own setting, the chosen one and a plain loop take turns: the loop reads the same bytes with O_DIRECT,
one request at a time, by `os.preadv` into page-aligned memory. Then an exhaustive sweep of a small grid (DeepSpeed's
own block, each depth, one and two threads) with rounds in turn, and the choice against its best. No part begins a round
after its share of --seconds; rates are 1e9 bytes a second.

The exit status is 1 where the choice takes over 1.05 of the sweep's best. A virtual disk is good for a test of this
program, and not for numbers to quote.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from autotune_offload import units
from autotune_offload.decide.drive import DEPTHS, choose
from autotune_offload.measure.drive import Bench, What
from autotune_offload.records import AioSetting, Drive
from autotune_offload.spread import interquartile_range
from benchmarks.goals import Goal, judged
from benchmarks.output import add_output, reporting
from benchmarks.results import Number

MOST = 1.05
FILE_BYTES = 8 << 20
_TRANSFERS: tuple[What, ...] = ("write", "read", "both")


def plain_seconds(folder: Path, files: int) -> float:
    """As many bytes as a round reads, one request of a megabyte after the other."""
    with tempfile.NamedTemporaryFile(dir=folder) as file, mmap.mmap(-1, 1 << 20) as page:
        page[:] = os.urandom(1 << 20)
        descriptor = os.open(file.name, os.O_RDWR | os.O_DIRECT)
        try:
            for at in range(0, FILE_BYTES, 1 << 20):
                os.pwritev(descriptor, [page], at)
            began = time.perf_counter()
            for _ in range(files):
                for at in range(0, FILE_BYTES, 1 << 20):
                    os.preadv(descriptor, [page], at)
            return time.perf_counter() - began
        finally:
            os.close(descriptor)


def in_turn(
    bench: Bench, settings: list[AioSetting], seconds: float
) -> dict[AioSetting, dict[What, list[float]]]:
    """Rounds of all transfers by all settings."""
    took = {each: {what: list[float]() for what in _TRANSFERS} for each in settings}
    until = time.monotonic() + seconds
    number = 0
    while time.monotonic() < until or number < 3:
        turn = number % len(settings)
        for each in settings[turn:] + settings[:turn]:
            for what in _TRANSFERS:
                took[each][what].append(bench.time(what, each))
        number += 1
    return took


def total(took: dict[What, list[float]]) -> list[float]:
    """Seconds of each round."""
    return [sum(each) for each in zip(*took.values(), strict=True)]


def rate(bench: Bench, seconds: list[float]) -> float:
    """Of a transfer of all files."""
    return bench.round_bytes / statistics.median(seconds) / 1e9


def main() -> int:
    """Prints every part; 1 where the choice is behind."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    add_output(parser)
    parser.add_argument("--seconds", type=float, default=120, help="for all three parts (120)")
    options = parser.parse_args()
    with reporting(options) as emit:
        drive = choose(
            options.folder, Bench(options.folder, file_bytes=FILE_BYTES), seconds=options.seconds / 3
        )
        print(f"chosen: {_words(drive.chosen)}; {drive.reasons[0]}", flush=True)
        numbers = _against(options.folder, drive, options.seconds / 3)
        behind = _swept(options.folder, drive, options.seconds / 3)
        numbers.append(Number(what="the choice over the best of a small grid", value=behind, most=MOST))
        status = judged([Goal(name="the choice over the best of a small grid", found=behind, most=MOST)])
        emit({"drive": drive, "behind": behind}, numbers)
    return status


def _against(folder: Path, drive: Drive, seconds: float) -> list[Number]:
    bench, plain = Bench(folder, file_bytes=FILE_BYTES, most_written_bytes=1 << 40), list[float]()
    settings = list(dict.fromkeys((AioSetting(), drive.chosen)))
    numbers = []
    with bench.opened():
        with contextlib.suppress(OSError):  # a file system without O_DIRECT has been refused before
            plain += [plain_seconds(folder, bench.files) for _ in range(5)]
        took = in_turn(bench, settings, seconds)
        for what in _TRANSFERS:
            own, ours = (took[each][what] for each in (settings[0], settings[-1]))
            ratios = [a / b for a, b in zip(own, ours, strict=True)]
            ratio, iqr = statistics.median(ratios), interquartile_range(ratios)
            print(
                f"{what:5s}: DeepSpeed's own {rate(bench, own):.2f} GB/s, chosen {rate(bench, ours):.2f} GB/s: "
                f"{ratio:.2f}x (IQR {iqr:.2f}, {len(ratios)} rounds)",
                flush=True,
            )
            numbers.append(
                Number(
                    what=f"aio {what}: DeepSpeed's own setting over the chosen one",
                    of="ratio",
                    value=ratio,
                    iqr=iqr,
                    samples=len(ratios),
                )
            )
    if plain:
        print(f"plain O_DIRECT reads, one at a time: {rate(bench, plain):.2f} GB/s", flush=True)
    return numbers


def _swept(folder: Path, drive: Drive, seconds: float) -> float:
    """The choice's time over that of the grid's best, in the same rounds."""
    grid = [AioSetting(queue_depth=depth, threads=threads) for depth in DEPTHS for threads in (1, 2)]
    bench = Bench(folder, file_bytes=FILE_BYTES, most_written_bytes=1 << 40)
    with bench.opened():
        took = in_turn(bench, list(dict.fromkeys((drive.chosen, *grid))), seconds)
    totals = {each: total(times) for each, times in took.items()}
    best = min(grid, key=lambda each: statistics.median(totals[each]))
    behind = statistics.median(a / b for a, b in zip(totals[drive.chosen], totals[best], strict=True))
    print(f"best of {len(grid)}: {_words(best)}; the choice takes {behind:.3f} of its time", flush=True)
    return behind


def _words(setting: AioSetting) -> str:
    return (
        f"blocks of {units.size(setting.block_bytes)}, depth {setting.queue_depth}, {setting.threads} threads, "
        f"{'single' if setting.single_submit else 'batch'} submit"
    )


if __name__ == "__main__":
    sys.exit(main())
