"""One section of the page for each part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autotune_offload.units import MISSING, duration, percent, rate, size
from benchmarks.device.cells import Lines, more, moved, pair, table, times


def here(found: dict[str, Any], document: dict[str, Any]) -> Lines:
    """Device, link, limits, and the block of `doctor`."""
    device, limits, ceiling = found["device"], found["limits"], found["ceiling"]
    host = found["host"]
    link = (
        f"{ceiling['name']}, {rate(ceiling['gbps'])} one way ({ceiling['source']})" if ceiling else "not told"
    )
    driver = device["driver"] or "not told"
    yield (
        f"* Device: {found['kind']}, {device['name']}, {device['count']} of them, {size(device['memory_bytes'])}, "
        f"driver {driver}."
    )
    yield f"* Link: {link}."
    yield (
        f"* Host: {host['cpu_model']}, {host['affinity_cpus']} of {host['cpu_count']} CPUs, {size(host['ram_bytes'])}, "
        f"NUMA nodes: {host['numa_nodes']}{', bound to one' if host['numa_bound'] else ''}."
    )
    offer = (
        "is on offer" if found["why_not_pinned"] is None else f"is not on offer: {found['why_not_pinned']}"
    )
    busy, cpus = found["load"], host["affinity_cpus"]
    remark = "other work was running, so times say little" if busy > 0.5 * cpus else "quiet"
    yield f"* Load when it began: {busy:.1f} on {cpus} CPUs, {remark}."
    yield f"* Page-locking {offer}; the limits leave {size(limits['pinnable_bytes'])} for it."
    if found.get("doctor"):
        yield ""
        yield from found["doctor"].split("\n")


def build(found: dict[str, Any], document: dict[str, Any]) -> Lines:
    """What could not be compiled."""
    del document
    yield f"* DeepSpeed's CPU Adam: {found.get('cpu_adam') or 'there'} ({duration(found.get('seconds'))})."
    yield f"* The compiled pass of ours: {found.get('pass_why_not') or 'there'}."


def probes(found: dict[str, Any], document: dict[str, Any]) -> Lines:
    """Each choice, then the flips."""
    del document
    rows = [
        (kind, each["way"], f"{each['gain']:.2f}x", percent(each["noise"]), duration(each["elapsed_seconds"]))
        for kind, several in (("standard", found.get("probes", [])), ("quick", found.get("quick", [])))
        for each in several
    ]
    yield from table(("probe", "choice", "against DeepSpeed's own", "noise", "took"), rows)
    yield ""
    if found.get("flips"):
        flips = found["flips"]
        yield f"Of {flips['of']} quick probes {flips['other']} chose otherwise than most of them."
    yield "Why the first probe chose so:"
    first = found["probes"][0]
    yield from (
        "",
        *(f"* {reason}" for reason in (*first["reasons"], *first["warnings"], *first["stability"])),
    )
    pin, sync = first["pin"], first["sync_seconds"]
    yield (
        f"* Page-locking: {duration(pin['seconds_per_gib'])} a GiB, up to {size(pin['largest_bytes'])} tried; waiting "
        f"costs {duration(sync['device'])} (device), {duration(sync['stream'])} (stream), "
        f"{duration(sync['event'])} (event)."
    )


def copies(found: dict[str, Any], document: dict[str, Any]) -> Lines:
    """Both loops, both clocks, and the link."""
    ceiling = document["parts"].get("here", {}).get("found", {}).get("ceiling")
    rows = [
        (
            f"{each['kind']} {each['memory']}",
            size(each["bytes"]),
            rate(each["plain_gbps"]),
            rate(each["plain_device_gbps"]) if each["plain_device_gbps"] else MISSING,
            rate(each["our_gbps"]),
            f"{each['ratio']:.2f}",
            percent(each["call_share"]),
            percent(each["our_best_gbps"] / ceiling["gbps"]) if ceiling else MISSING,
        )
        for each in found.get("copies", [])
    ]
    head = (
        "copy",
        "bytes",
        "plain, host's clock",
        "plain, device's clock",
        "ours",
        "ours over plain, best",
        "of its time the call takes",
        "of the link",
    )
    yield from table(head, rows)


def sweep(found: dict[str, Any], document: dict[str, Any]) -> Lines:
    """Each probe against every candidate."""
    del document
    rows = [
        (
            each["chosen"],
            duration(each["chosen_seconds"]),
            each["best"],
            duration(each["best_seconds"]),
            f"{each['ratio']:.3f}",
            str(len(each["sweep_seconds"])),
        )
        for each in found["repeats"]
    ]
    yield from table(("chosen", "takes", "best", "takes", "ratio", "candidates"), rows)
    quick = dict.fromkeys(f"{each['way']}: {each['ratio']:.2f}" for each in found.get("flipped", []))
    if quick:
        yield ""
        yield f"What the quick probes chose, over the best of the first sweep: {'; '.join(quick)}."


def training(found: dict[str, Any], document: dict[str, Any]) -> Lines:
    """Gradients, then steps, then what failed."""
    del document
    gradients = [
        (
            each["name"],
            f"{each['rows']:,}",
            each["stock_memory"],
            *pair(each, "partition_grads"),
            *pair(each, "backward"),
            *pair(each, "step"),
            str(each["pairs"]),
            "same" if each["bit_identical"] else "DIFFERENT",
        )
        for each in found.get("gradients", [])
    ]
    head = (
        "path",
        "rows",
        "memory",
        "`partition_grads`",
        "ratio",
        "backward",
        "ratio",
        "step",
        "ratio",
        "pairs",
        "bits",
    )
    yield (
        "In each cell DeepSpeed's own code, then ours: medians (interquartile range) of steps that ran in turn. "
        "A ratio is the median of the pairs' ratios; above 1 ours is faster."
    )
    yield ""
    yield from table(head, gradients)
    steps = [
        (
            each["name"],
            *pair(each, "step_phase"),
            *pair(each, "train_step"),
            f"{each['floor_ratio']:.2f}",
            str(each["threads"]),
            "same" if each["bit_identical"] else "DIFFERENT",
        )
        for each in found.get("steps", [])
    ]
    if steps:
        yield ""
        columns = (
            "optimizer step",
            "step phase",
            "ratio",
            "training step",
            "ratio",
            "the pass over the floor",
            "threads",
            "bits",
        )
        yield from table(columns, steps)
    yield from _failed(found)


def profiled(found: dict[str, Any], document: dict[str, Any]) -> Lines:
    """What crossed the link in one backward pass and one step, and what of it hid."""
    del document
    rows = [
        (
            each["name"],
            *moved(each["gradients_to_host"], each["elements"]),
            *moved(each["sums_to_device"], each["elements"])[:1],
            duration(each["backward_seconds"]),
            *moved(each["weights_to_device"], each["elements"]),
            duration(each["step_seconds"]),
            f"`{each['file']}`",
        )
        for each in found.get("ways", [])
    ]
    head = (
        "way",
        "gradients to host",
        "time",
        "hidden",
        "sums back",
        "backward",
        "weights to device",
        "time",
        "hidden",
        "step",
        "trace",
    )
    rows_told = sorted({f"{each['rows']:,}" for each in found.get("ways", [])})
    yield (
        f"Bytes a parameter as the profiler counts them, one backward pass ({', '.join(rows_told)} rows) and one step; "
        "hidden is what lies beside kernels, or beside the computing of the step."
    )
    yield ""
    yield from table(head, rows)
    yield from _failed(found)


def identity(found: dict[str, Any], document: dict[str, Any]) -> Lines:
    """Each case."""
    del document
    sleeps = found.get("sleeps") or "none: this device has no way to hold a stream up"
    control = found["control"] or "the same"
    yield f"{found['steps']} steps a case, or fewer where time is short, twice; overlap on; sleeps: {sleeps}."
    yield ""
    yield f"Control, DeepSpeed's own code against itself: {control}."
    yield ""
    rows = [
        (
            each["name"],
            str(each["steps"]),
            _case(each),
            str(each.get("overflows", 0)),
            f"{each['sleeps']:,}",
            duration(each["seconds"]),
        )
        for each in found.get("cases", [])
    ]
    yield from table(("case", "steps", "against DeepSpeed's own code", "overflows", "sleeps", "took"), rows)


def memory(found: dict[str, Any], document: dict[str, Any]) -> Lines:
    """While an engine lives, and after it; on the host, memory is the process's, and says nothing."""
    on_host = document["parts"].get("here", {}).get("found", {}).get("training_kind") == "cpu"
    rows = [
        (
            each["name"],
            size(each["our_bytes"]),
            size(each["counted_bytes"]) if found.get("counted_by") else MISSING,
            size(each["backward_peak_bytes"]) if each["backward_peak_bytes"] > 0 and not on_host else MISSING,
            size(each["scratch_bytes"]),
            more(each, "host_bytes"),
            MISSING if on_host else more(each, "device_bytes"),
        )
        for each in found.get("runs", [])
    ]
    yield f"Page-locked bytes are counted by {found.get('counted_by') or 'nobody here'} besides us."
    yield ""
    head = (
        "way",
        "page-locked, ours",
        "theirs",
        "device's peak in a backward pass",
        "stated scratch",
        "page-locked after it",
        "on the device after it",
    )
    yield from table(head, rows)
    yield from _failed(found)


def described(found: dict[str, Any], document: dict[str, Any]) -> Lines:
    """Trials, then training."""
    del document
    yield f"The description is `{found['file']}`, {found['numbers']} numbers."
    yield ""
    trials = [
        (
            t["way"],
            duration(t["measured_seconds"]),
            duration(t["predicted_seconds"]),
            times(t["predicted_seconds"], t["measured_seconds"]),
        )
        for t in found.get("trials", [])
    ]
    yield from table(("trial of the probe", "measured", "on the description", "ratio"), trials)
    saved = [
        (
            t["name"],
            duration(t["predicted_saved_seconds"]),
            duration(t["measured_saved_seconds"]),
            times(t["predicted_saved_seconds"], t["measured_saved_seconds"]),
        )
        for t in found.get("training", [])
    ]
    if saved:
        yield ""
        yield from table(("path", "saves of a backward pass, predicted", "measured", "ratio"), saved)


SECTIONS: dict[str, Callable[[dict[str, Any], dict[str, Any]], Lines]] = {
    section.__name__: section
    for section in (here, build, probes, copies, sweep, training, profiled, identity, memory, described)
}


def _case(case: dict[str, Any]) -> str:
    if case["stock_failed"] is not None:
        return f"DeepSpeed's own code fails: {case['stock_failed']}"
    return "same" if case["difference"] is None else f"**DIFFERENT**: {case['difference']}"


def _failed(found: dict[str, Any]) -> Lines:
    failed = found.get("failed") or []
    if failed:
        yield ""
    for each in failed:
        yield f"* Failed: {each['name']}: {each['why']}"
