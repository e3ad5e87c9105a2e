"""Rules on what crosses the link, what of it hides, and on memory: what was found, held against one claim each."""

from __future__ import annotations

from typing import Any

from autotune_offload import units
from benchmarks.device.answers import (
    FAILS,
    HOLDS,
    SMALL_BYTES,
    UNKNOWN,
    Answer,
    Found,
    on_host,
    part,
    profiled,
    uncounted,
    word,
)


def hides(found: Found) -> Answer:
    """At least half of what can hide of the copies into page-locked memory does."""
    pinned = [way for way in profiled(found) if way["path"] == "pinned"]
    return _hidden(found, pinned, "gradients_to_host")


def waited_for_hides_less(found: Found) -> Answer:
    """Of copies that the training thread waits for, a smaller part hides."""
    if (why := uncounted(found)) is not None:
        return UNKNOWN, why
    shares = {}
    for path in ("direct", "pinned"):
        ways = [
            w["gradients_to_host"] for w in profiled(found) if w["path"] == path and not w["host_threads"]
        ]
        seconds = sum(each["seconds"] for each in ways)
        if not seconds:
            return UNKNOWN, f"no copy of path {path} is in a trace"
        shares[path] = sum(each["hidden_seconds"] for each in ways) / seconds
    told = ", ".join(f"{share:.0%} of {path}'s copies" for path, share in shares.items())
    return word(holds=shares["direct"] <= shares["pinned"]), f"hidden: {told}"


def pass_hides(found: Found) -> Answer:
    """Weights go back beside the computing of later ones."""
    return _hidden(found, [way for way in profiled(found) if way["step"] == "the pass"], "weights_to_device")


def _hidden(found: Found, ways: list[dict[str, Any]], what: str) -> Answer:
    if (why := uncounted(found)) is not None:
        return UNKNOWN, why
    seen = [(way["name"], way[what]) for way in ways if way[what]["hideable_seconds"] > 0]
    if not seen:
        return UNKNOWN, "no copy of that kind, or nothing beside it, is in a trace"
    told = ", ".join(
        f"{name}: {units.duration(each['hidden_seconds'])} of {units.duration(each['seconds'])}, "
        f"beside {units.duration(each['beside_seconds'])} of other work"
        for name, each in seen
    )
    return word(holds=all(e["hidden_seconds"] >= 0.5 * e["hideable_seconds"] for _, e in seen)), told


def pinned_waits_not(found: Found) -> Answer:
    """The training thread spends less in `partition_grads` than the copies of the same way take."""
    if (why := uncounted(found)) is not None:
        return UNKNOWN, why
    timed = {case["name"]: case for case in reversed(part(found, "training", "gradients") or [])}
    told, holds = [], True
    for way in profiled(found):
        if way["path"] != "pinned" or way["cast"] != "device" or way["name"] not in timed:
            continue
        host = timed[way["name"]]["partition_grads_ours_seconds"]["median"]
        copies = way["gradients_to_host"]["seconds"]
        told.append(
            f"{way['name']}: {units.duration(host)} in partition_grads, copies {units.duration(copies)}"
        )
        holds &= host < copies
    return (
        (word(holds=holds), ", ".join(told)) if told else (UNKNOWN, "the path was not both timed and traced")
    )


def bytes_of_paths(found: Found) -> Answer:
    """By the profiler's count, within 1 %, of what is expected of path and cast."""
    if (why := uncounted(found)) is not None:
        return UNKNOWN, why
    told, holds = [], True
    for way in profiled(found):
        if way["path"] is None or way["gradients_to_host"]["bytes"] is None:
            continue
        each = (2 if way["cast"] == "host" else 6) * way["elements"]
        counted = way["gradients_to_host"]["bytes"]
        told.append(f"{way['name']}: {counted / way['elements']:.2f} a parameter")
        holds &= abs(counted - each) <= 0.01 * each
    return (word(holds=holds), ", ".join(told)) if told else (UNKNOWN, "the profiler counts no bytes")


def bytes_reported(found: Found) -> Answer:
    """The report's own count of both directions, within 1 % of the profiler's."""
    if (why := uncounted(found)) is not None:
        return UNKNOWN, why
    told, holds = [], True
    for way in profiled(found):
        there, back = way["gradients_to_host"]["bytes"], way["sums_to_device"]["bytes"]
        if way["path"] is None or there is None or back is None or not way["reported_link_bytes"]:
            continue
        told.append(
            f"{way['name']}: {units.size(there + back)} counted, {units.size(way['reported_link_bytes'])} reported"
        )
        holds &= abs(there + back - way["reported_link_bytes"]) <= 0.01 * (there + back)
    return (word(holds=holds), ", ".join(told)) if told else (UNKNOWN, "the profiler counts no bytes")


def stock_bytes(found: Found) -> Answer:
    """DeepSpeed's own sequence: the sums there and back, and fp32 there."""
    if (why := uncounted(found)) is not None:
        return UNKNOWN, why
    told, holds = [], True
    for way in profiled(found):
        there, back = way["gradients_to_host"]["bytes"], way["sums_to_device"]["bytes"]
        if way["path"] is not None or there is None or back is None:
            continue
        size = way["elements"]
        told.append(f"{way['name']}: {there / size:.2f} there and {back / size:.2f} back a parameter")
        holds &= abs(there - 6 * size) <= 0.06 * size and abs(back - 2 * size) <= 0.02 * size
    return (word(holds=holds), ", ".join(told)) if told else (UNKNOWN, "the profiler counts no bytes")


def weights_two_bytes(found: Found) -> Answer:
    """Both ways of a step send 16 bits a weight."""
    if (why := uncounted(found)) is not None:
        return UNKNOWN, why
    ways = [way for way in profiled(found) if way["weights_to_device"]["bytes"]]
    told = [f"{w['name']}: {w['weights_to_device']['bytes'] / w['elements']:.2f} a weight" for w in ways]
    holds = all(abs(w["weights_to_device"]["bytes"] / w["elements"] - 2) <= 0.02 for w in ways)
    return (word(holds=holds), ", ".join(told)) if told else (UNKNOWN, "the profiler counts no bytes")


def faster_where_chosen(found: Found) -> Answer:
    """The chosen way is no slower in training than DeepSpeed's own code, beyond 5 %."""
    if (why := on_host(found)) is not None:
        return UNKNOWN, why
    cases = [c for c in part(found, "training", "gradients") or [] if c["name"] == "the choice"]
    probes = part(found, "probes", "probes") or []
    if not cases or not probes or not probes[0]["carried"]:
        return UNKNOWN, "the choice was not trained with" if probes else "nothing was chosen"
    told = ", ".join(
        f"backward {c['backward_ratio']:.2f}x, step {c['step_ratio']:.2f}x with {c['rows']:,} rows"
        for c in cases
    )
    return word(holds=cases[0]["backward_ratio"] >= 0.95), told


def locks_counted(found: Found) -> Answer:
    """Our count within what rounding each block up to a power of two makes of it."""
    if (why := on_host(found)) is not None:
        return UNKNOWN, why
    memory = found.get("memory", {})
    runs = [run for run in memory.get("runs") or [] if run["our_bytes"]]
    if memory.get("counted_by") is None or not runs:
        return UNKNOWN, "nothing was page-locked"
    told = [
        f"{run['name']}: {units.size(run['our_bytes'])} by ours, {units.size(run['counted_bytes'])} by theirs"
        for run in runs
    ]
    if not any(run["counted_bytes"] for run in runs):
        return UNKNOWN, f"{memory['counted_by']} counts nothing of what this device page-locks"
    holds = all(
        run["our_bytes"] <= run["counted_bytes"] <= 2 * run["our_bytes"] + SMALL_BYTES for run in runs
    )
    return word(holds=holds), f"{', '.join(told)} ({memory['counted_by']})"


def all_given_back(found: Found) -> Answer:
    """Page-locked and device memory after a destroyed engine as before it, but for small blocks of the runtime."""
    if (why := on_host(found)) is not None:
        return UNKNOWN, why
    runs = found.get("memory", {}).get("runs") or []
    if not runs:
        return UNKNOWN, "no engine was made and destroyed"
    kept = [
        f"{run['name']}: {units.size(max(more, 0))} {name} not given back"
        for run in runs
        for name, key in (("page-locked", "host_bytes"), ("of the device", "device_bytes"))
        if (more := run["after"][key] - run["before"][key]) > SMALL_BYTES
    ]
    return (FAILS, ", ".join(kept)) if kept else (HOLDS, f"{len(runs)} engines: nothing is left of any")


def device_scratch(found: Found) -> Answer:
    """The peak of a backward pass against DeepSpeed's own and the stated scratch."""
    if (why := on_host(found)) is not None:
        return UNKNOWN, why
    runs = {run["name"]: run for run in found.get("memory", {}).get("runs") or []}
    own = runs.pop("DeepSpeed's own", None)
    if own is None or not runs or own["backward_peak_bytes"] <= 0:
        return UNKNOWN, "this device does not tell the peak of its memory, or not both were trained"
    allowed = own["backward_peak_bytes"] + SMALL_BYTES
    told = [f"{name}: {units.size(run['backward_peak_bytes'])}" for name, run in runs.items()]
    holds = all(run["backward_peak_bytes"] <= allowed + run["scratch_bytes"] for run in runs.values())
    return word(holds=holds), f"DeepSpeed's own: {units.size(own['backward_peak_bytes'])}, {', '.join(told)}"
