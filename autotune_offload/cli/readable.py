"""A profile as a person reads it: 80 columns, words before numbers, nothing said by colour alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from autotune_offload import units
from autotune_offload.cli.steps import print_steps
from autotune_offload.paths.device_memory import device_memory
from autotune_offload.reports.alternatives import (
    Alternative,
    alternatives,
    best_of_each,
    deciding,
    detail_of,
    name_of,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from autotune_offload.records import Choice, Limits, Profile, Transfer, Workload

MOST_ALTERNATIVES = 12
_COLUMNS_A_TABLE = 4
_PLOT_WIDTH = 78

MARKS = "> chosen  = installed DeepSpeed's own  * other versions' own"
"""What `mark` means."""

_KINDS = {"d2h": "device to host", "h2d": "host to device", "h2h": "host to host"}


def print_profile(out: Console, profile: Profile, path: Path | None, *, plots: bool = False) -> None:
    """Everything in `profile` that a person decides by, and where it is stored; with `plots`, the curves drawn."""
    print_facts(out, profile, path)
    print_transfers(out, profile.transfers, plots=plots)
    print_costs(out, profile)
    print_alternatives(out, profile)
    print_accumulations(out, profile)
    print_steps(out, profile, rates=True)
    print_choice(out, profile)


def print_facts(out: Console, profile: Profile, path: Path | None) -> None:
    """Where and when it was measured, and for what."""
    host, software = profile.host, profile.software
    facts = {
        "host": f"{host.name}: {host.cpu_model}, {host.affinity_cpus} of {host.cpu_count} CPUs, "
        f"{units.size(host.ram_bytes)} RAM, NUMA nodes: {host.numa_nodes}",
        "device": _device(profile),
        "software": f"Python {software.python}, torch {software.torch}, DeepSpeed {software.deepspeed}, "
        f"autotune-offload {software.autotune_offload}",
        "limits": _limits(profile.limits),
        "workload": _workload(profile.workload),
        "measured": f"{profile.created}, plan {profile.plan}, {units.duration(profile.elapsed_seconds)}",
    }
    if path is not None:
        facts["profile"] = str(path)
    grid = pairs()
    for name, text in facts.items():
        grid.add_row(name, text)
    out.print(grid)


def print_transfers(out: Console, transfers: Sequence[Transfer], *, plots: bool = False) -> None:
    """The bandwidth curves, one table a kind: sizes down, kinds of memory across; with `plots`, drawn too."""
    for kind, words in _KINDS.items():
        points = [each for each in transfers if each.kind == kind]
        columns = list(dict.fromkeys(_column(each) for each in sorted(points, key=_column_order)))
        for first in range(0, len(columns), _COLUMNS_A_TABLE):
            part = columns[first : first + _COLUMNS_A_TABLE]
            heading(out, f"{kind}, {words}: GB/s (spread: interquartile range over median)")
            out.print(_curve(points, part))
        if plots:
            _print_plot(out, points)


def _print_plot(out: Console, points: Sequence[Transfer]) -> None:
    from autotune_offload.cli.plot import curves

    drawn = curves(points, min(out.width, _PLOT_WIDTH))
    if drawn:
        out.print()
        out.print(drawn, soft_wrap=True)


def print_costs(out: Console, profile: Profile) -> None:
    """Casts, synchronization and pinning."""
    heading(out, "Casts, synchronization, pinning")
    grid = pairs()
    for cast in profile.casts:
        threads = f", {units.threads(cast.threads)}" if cast.threads else ""
        grid.add_row(
            f"cast {cast.where}",
            f"{cast.dtype} to fp32, {units.size(cast.bytes)}{threads}: {units.rate(cast.gbps)} "
            f"({_spread(cast.median_seconds, cast.iqr_seconds)})",
        )
    sync = profile.sync
    grid.add_row(
        "synchronize",
        f"device {units.duration(sync.device_seconds)}, stream {units.duration(sync.stream_seconds)}, "
        f"event {units.duration(sync.event_seconds)}",
    )
    grid.add_row("pinning", _pinning(profile))
    out.print(grid)
    bullets(out, profile.stability)


def print_alternatives(out: Console, profile: Profile) -> None:
    """The cheapest candidates beside DeepSpeed's own sequences, all of which are shown."""
    rows = alternatives(profile)
    shown = _most_telling(rows)
    heading(out, "Candidates against DeepSpeed's own (time added to a backward pass)")
    grid = table("", "path", folds="details", right=("predicted", "measured", "spread"))
    for row in shown:
        grid.add_row(
            mark(row),
            row.name,
            row.detail,
            units.duration(row.predicted_seconds),
            "rejected" if row.rejected else units.duration(row.measured_seconds),
            units.percent(row.spread),
        )
    out.print(grid)
    hidden = f"  ({len(rows) - len(shown)} more in --json)" if len(rows) > len(shown) else ""
    out.print(f"{MARKS}{hidden}")


def print_accumulations(out: Console, profile: Profile) -> None:
    """What was decided by where several micro-steps are added up; else nothing."""
    if not profile.accumulations:
        return
    heading(out, f"Over {deciding(profile).over}, which decides (time added)")
    grid = table("", folds="way", right=("added up on", "measured", "spread", "rounds"))
    for row in profile.accumulations:
        sign = ">" if row.chosen else "=" if row.installed else "*" if row.stock else ""
        grid.add_row(
            sign,
            row.way,
            row.place,
            units.duration(row.measured_seconds),
            units.percent(row.spread),
            str(row.samples),
        )
    out.print(grid)
    out.print(f"{MARKS}; few rounds: clearly behind")


def print_choice(out: Console, profile: Profile) -> None:
    """The decision, the reasons, the keys it writes, the warnings."""
    choice = profile.choice
    heading(out, f"Choice: {describe_choice(choice)}")
    bullets(out, (*choice.reasons, *choice.sizes.reasons.values(), _device_memory(profile)))
    heading(out, "It would write")
    for line in _nested(profile.zero_optimization, depth=1):
        out.print(line, soft_wrap=True)
    if profile.warnings:
        heading(out, "Warnings")
        bullets(out, profile.warnings)


def _device_memory(profile: Profile) -> str:
    """What the path keeps on the device."""
    on_host = profile.device.kind == "cpu"
    kept = device_memory(profile.choice, profile.workload, shares_host_memory=on_host)
    parts = ((kept.cast_bytes, "for casts"), (kept.sums_bytes, "for sums of micro-steps"))
    words = " and ".join(f"{units.size(count)} {what}" for count, what in parts if count)
    return f"scratch of the path in device memory: {words or 'none'}"


def describe_choice(choice: Choice) -> str:
    """The choice in one line: ``direct, cast host; optimizer state pageable, parameters pageable``."""
    memory = {True: "pinned", False: "pageable"}
    place = "micro-steps added up on the host" if choice.accumulate == "host" else ""
    kept = f"optimizer state {memory[choice.pin_optimizer]}, parameters {memory[choice.pin_parameters]}"
    return "; ".join(
        part for part in (name_of(choice.path, choice.cast), detail_of(choice), place, kept) if part
    )


def mark(row: Alternative) -> str:
    """``>`` chosen, ``=`` what the installed DeepSpeed runs, ``*`` another of DeepSpeed's own."""
    if row.chosen:
        return ">"
    if row.installed:
        return "="
    return "*" if row.stock else ""


def heading(out: Console, text: str) -> None:
    """A blank line and a bold one."""
    out.print()
    out.print(text, style="bold")


def bullets(out: Console, sentences: Iterable[str]) -> None:
    """Each sentence once, behind a dash, its further lines indented."""
    grid = pairs()
    for sentence in dict.fromkeys(sentences):
        grid.add_row("-", sentence)
    if grid.row_count:
        out.print(grid)


def pairs() -> Table:
    """Two columns without lines: a short word and the text that belongs to it."""
    from rich.table import Table

    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    return grid


def table(*left: str, folds: str = "", right: Sequence[str] = ()) -> Table:
    """A table with a rule below its header: columns of text, one that may fold, columns of numbers."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for name in left:
        made.add_column(name, no_wrap=True)
    if folds:
        made.add_column(folds, overflow="fold")
    for name in right:
        made.add_column(name, justify="right", no_wrap=True)
    return made


def _most_telling(rows: list[Alternative]) -> list[Alternative]:
    """The dozen to show: the best of each path and every stock sequence, then the cheapest."""
    first = best_of_each(rows)
    rest = [row for row in rows if row not in first]
    return sorted((first + rest)[:MOST_ALTERNATIVES], key=lambda row: row.order)


def _device(profile: Profile) -> str:
    device = profile.device
    parts = [
        f"{device.kind} {device.index} of {device.count}: {device.name}",
        f"memory {units.size(device.memory_bytes)}" if device.memory_bytes else "",
        f"capability {device.capability}" if device.capability else "",
        f"driver {device.driver}" if device.driver else "",
        f"link generation {device.link_generation} x{device.link_width}" if device.link_generation else "",
        f"MIG {device.mig_slice}" if device.mig_slice else "",
        f"pins through: {device.pin_backend}",
    ]
    return ", ".join(part for part in parts if part)


def _limits(limits: Limits) -> str:
    text = f"{units.size(limits.available_bytes)} available, {units.size(limits.pinnable_bytes)} pinnable"
    bounds = ", ".join(f"{each.name} {units.size(each.bytes)}" for each in limits.bounds)
    return f"{text} ({bounds})" if bounds else text


def _workload(workload: Workload) -> str:
    return (
        f"{units.count(workload.parameter_elements)} parameters, {workload.source}; on this rank "
        f"{units.count(workload.elements)} {workload.dtype} gradients, world size {workload.world_size}, "
        f"accumulation steps {workload.accumulation_steps}"
    )


def _pinning(profile: Profile) -> str:
    pin = profile.pin
    if pin.seconds_per_gib is None:
        return f"not on offer: {pin.reason}" if pin.reason else "not on offer"
    most = "at least " if pin.capped else ""
    why = f" ({pin.reason})" if pin.reason else ""
    largest = f"largest block {most}{units.size(pin.largest_bytes)}{why}"
    return f"{units.duration(pin.seconds_per_gib)} a GiB, {largest}"


def _column_order(each: Transfer) -> tuple[bool, str, str, int]:
    return each.duplex, each.memory, each.state, each.threads


def _column(each: Transfer) -> str:
    """``pageable cold``, ``pinned both ways``, ``pageable 2 threads``."""
    words: list[str] = [each.memory]
    if each.memory == "pageable" or each.state == "cold":
        words.append(each.state)
    if each.duplex:
        words.append("both ways")
    if each.threads:
        words.append(units.threads(each.threads))
    return " ".join(words)


def _curve(points: Sequence[Transfer], columns: Sequence[str]) -> Table:
    cells = {
        (each.bytes, _column(each)): f"{units.significant(each.gbps)} "
        f"({_spread(each.median_seconds, each.iqr_seconds)})"
        for each in points
    }
    grid = table(right=("size", *columns))
    for size_bytes in sorted({size_bytes for size_bytes, column in cells if column in columns}):
        row = (cells.get((size_bytes, column), units.MISSING) for column in columns)
        grid.add_row(units.size(size_bytes), *row)
    return grid


def _spread(median_seconds: float, iqr_seconds: float) -> str:
    return units.percent(iqr_seconds / median_seconds) if median_seconds else units.MISSING


def _nested(keys: dict[str, object], depth: int) -> Iterable[str]:
    """A nested dict as indented ``key: value`` lines, values as in JSON."""
    import json

    for key, value in keys.items():
        indent = "  " * depth
        if isinstance(value, dict):
            yield f"{indent}{key}:"
            yield from _nested(value, depth + 1)
        else:
            yield f"{indent}{key}: {json.dumps(value)}"
