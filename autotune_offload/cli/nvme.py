"""`autotune-offload probe --nvme FOLDER`: a drive, measured the way DeepSpeed swaps to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autotune_offload import units
from autotune_offload.cli.outcome import SAVED
from autotune_offload.cli.output import console, notice
from autotune_offload.cli.progress import Reporter

if TYPE_CHECKING:
    from rich.console import Console

    from autotune_offload.profiles.store import Store
    from autotune_offload.records import Drive, DriveTimes, Workload

SECONDS = 40.0
MOST_WRITTEN_BYTES = 4 << 30
MOST_RANKS = 8
FILE_BYTES = 8 << 20
_SHOWN = 6


def measure(
    store: Store, folder: Path, workload: Workload | None, *, seconds: float | None, ranks: int, save: bool
) -> Drive:
    """Measure, choose and keep; what is about to be written is said before it is.

    Raises:
        ConfigError, BudgetError, MeasurementError: as `decide.drive.choose`; DeepSpeed's own settings are left.
    """
    from autotune_offload.config.nvme import most_block_bytes
    from autotune_offload.decide.drive import choose
    from autotune_offload.measure.drive import Bench

    ranks = min(ranks, MOST_RANKS)
    bench = Bench(folder, ranks=ranks, file_bytes=FILE_BYTES, most_written_bytes=MOST_WRITTEN_BYTES)
    notice(
        f"measuring {folder} with {ranks} rank{'s' * (ranks > 1)}: {units.size(bench.kept_bytes)} are needed there "
        f"meanwhile, {units.size(MOST_WRITTEN_BYTES)} are written at most, in {seconds or SECONDS:g} s; a first build "
        "of DeepSpeed's async_io comes before and takes minutes"
    )
    cap = None if workload is None else most_block_bytes(workload)
    with Reporter("measuring the drive") as progress:
        drive = choose(
            folder,
            bench,
            seconds=seconds or SECONDS,
            most_block_bytes=cap,
            progress=lambda share: progress("writing and reading", share),
        )
    if save:
        _save(store, drive)
    return drive


def _save(store: Store, drive: Drive) -> None:
    from autotune_offload.errors import ProfileError
    from autotune_offload.profiles import drives

    try:
        path = drives.save(store, drive)
    except ProfileError as error:
        notice(f"not saved: {error}")
    else:
        click.get_current_context().meta[SAVED] = path
        notice(f"saved: {path}; `autotune-offload apply` writes it into a ds_config that swaps there")


def show(drive: Drive) -> None:
    """The table of what was tried, the reasons, and the section to paste."""
    out = console()
    out.print(
        f"{drive.folder}: {drive.ranks} x {drive.files} files of {units.size(drive.file_bytes)}, "
        f"{units.size(drive.written_bytes)} written in {units.duration(drive.elapsed_seconds)}, DeepSpeed "
        f"{drive.deepspeed}\n"
    )
    _table(out, drive)
    for reason in drive.reasons:
        out.print(f"  - {reason}")
    out.print("\nfor the ds_config:")
    out.print(json.dumps(section(drive), indent=2))


def section(drive: Drive) -> dict[str, Any]:
    """The ``aio`` section, as the DeepSpeed that it was measured with reads it."""
    from autotune_offload.config.nvme import as_keys

    return {"aio": as_keys(drive.chosen, drive.deepspeed)}


def _table(out: Console, drive: Drive) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="")
    for heading in ("", "block", "depth", "threads", "submit", "waits", "write", "read", "both"):
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    own, *others = drive.times
    shown = [own, *(each for each in others if each.setting == drive.chosen), *others][:_SHOWN]
    for times in dict.fromkeys(shown):
        table.add_row(*_row(drive, times))
    out.print(table)
    out.print("GB/s, medians; > chosen, = DeepSpeed's own; both: written and read at once, of each so much\n")


def _row(drive: Drive, times: DriveTimes) -> tuple[str, ...]:
    import statistics

    from autotune_offload.records import AioSetting

    setting = times.setting
    mark = ">" * (setting == drive.chosen) + "=" * (setting == AioSetting())
    rates = [
        f"{drive.round_bytes / statistics.median(seconds) / 1e9:.2f}" if seconds else "-"
        for seconds in (times.write_seconds, times.read_seconds, times.both_seconds)
    ]
    return (
        mark,
        units.size(setting.block_bytes),
        str(setting.queue_depth),
        str(setting.threads),
        "single" if setting.single_submit else "batch",
        "as they come" if setting.overlap_events else "for all",
        *rates,
    )
