"""Rules on probes, bits, choices and plain copies: what was found, held against one claim each."""

from __future__ import annotations

from typing import Any

from autotune_offload import units
from benchmarks.device.answers import FAILS, HOLDS, UNKNOWN, Answer, Found, largest, on_host, part, word


def works(found: Found) -> Answer:
    """A probe came to a choice."""
    probes, here = part(found, "probes", "probes"), found.get("here", {})
    kind = here.get("kind")
    if kind in {None, "cpu"}:
        return UNKNOWN, "there is no accelerator" if kind else "nothing is known of the device"
    if not probes:
        return FAILS, f"no probe of the {kind} device came to an end"
    return (
        HOLDS,
        f"{kind}: {probes[0]['way']}, in {units.duration(probes[0]['elapsed_seconds'])} with imports",
    )


def same_bits(found: Found) -> Answer:
    """Cases of the matrix, and pairs of the benchmarks."""
    cases = [c for c in part(found, "identity", "cases") or [] if not str(c["name"]).startswith("step:")]
    pairs = part(found, "training", "gradients") or []
    return _identical(found, cases, pairs)


def same_bits_of_steps(found: Found) -> Answer:
    """The same for the optimizer step."""
    cases = [c for c in part(found, "identity", "cases") or [] if str(c["name"]).startswith("step:")]
    pairs = part(found, "training", "steps") or []
    return _identical(found, cases, pairs)


def _identical(found: Found, cases: list[dict[str, Any]], pairs: list[dict[str, Any]]) -> Answer:
    """On the CPU this is no claim about an accelerator; a difference is one anywhere."""
    ran = [case for case in cases if case["stock_failed"] is None]
    identity = found.get("identity", {})
    if identity.get("control") is not None:
        return UNKNOWN, f"DeepSpeed's own code differs from itself in a second run: {identity['control']}"
    differ = [f"{case['name']}: {case['difference']}" for case in ran if case["difference"] is not None]
    differ += [f"{pair['name']}: bits differ" for pair in pairs if not pair["bit_identical"]]
    if differ:
        return FAILS, "; ".join(differ)
    if not ran and not pairs:
        return UNKNOWN, "nothing was trained to an end"
    slept = sum(case.get("sleeps", 0) for case in ran)
    held = f"{slept:,} sleeps in the streams" if slept else "no sleeps in the streams"
    steps, larger = sum(case["steps"] for case in ran), sum(pair["pairs"] for pair in pairs)
    told = f"cases: {len(ran)}, steps in them: {steps:,} ({held}); pairs of a larger model: {larger}; all the same"
    return (HOLDS, told) if on_host(found) is None else (UNKNOWN, f"{told}, but on the host itself")


def best_choice(found: Found) -> Answer:
    """The median ratio over the limit of the benchmark."""
    sweep = found.get("sweep", {})
    if "median_ratio" not in sweep:
        return UNKNOWN, "no sweep came to an end"
    ratios = sweep["ratios"]
    told = f"{sweep['median_ratio']:.3f} ({min(ratios):.3f} to {max(ratios):.3f}, sweeps: {len(ratios)})"
    return word(holds=sweep["median_ratio"] <= sweep["limit"]), told


def plain_rates(found: Found) -> Answer:
    """Of the largest size, each direction and memory."""
    if (why := on_host(found)) is not None:
        return UNKNOWN, why
    copies = list(largest(found))
    if not copies:
        return UNKNOWN, "no copy was timed"
    told = ", ".join(f"{c['kind']} {c['memory']} {c['ratio']:.2f}" for c in copies)
    return word(holds=all(0.9 <= c["ratio"] <= 1.1 for c in copies)), told


def below_ceiling(found: Found) -> Answer:
    """No copy is faster than its link."""
    ceiling = found.get("here", {}).get("ceiling")
    if (why := on_host(found)) is not None or ceiling is None:
        return UNKNOWN, why or "neither NVML nor /sys tells the link of this device"
    copies = list(largest(found))
    if not copies:
        return UNKNOWN, "no copy was timed"
    fastest = max(copies, key=lambda c: max(c["our_gbps"], c["plain_gbps"]))
    rate = max(fastest["our_gbps"], fastest["plain_gbps"])
    told = (
        f"{fastest['kind']} {fastest['memory']} {units.rate(rate)}, {rate / ceiling['gbps']:.0%} of "
        f"{ceiling['name']} ({units.rate(ceiling['gbps'])})"
    )
    over = rate > ceiling["gbps"] * 1.02
    return word(holds=not over), told + ("; so copies take another link, or the link is told wrongly" * over)


def pageable_blocks(found: Found) -> Answer:
    """By the share of a copy's time that its call takes."""
    if (why := on_host(found)) is not None:
        return UNKNOWN, why
    shares = {(c["kind"], c["memory"]): c["call_share"] for c in largest(found)}
    pinned = [share for (_, memory), share in shares.items() if memory == "pinned"]
    pageable = [share for (_, memory), share in shares.items() if memory == "pageable"]
    if not pinned or not pageable:
        return UNKNOWN, found.get("copies", {}).get(
            "pinned_left_out"
        ) or "not both kinds of memory were timed"
    told = ", ".join(f"{kind} {memory} {share:.0%}" for (kind, memory), share in shares.items())
    return word(holds=max(pinned) <= 0.1 and min(pageable) >= 0.5), f"the call takes of a copy's time: {told}"
