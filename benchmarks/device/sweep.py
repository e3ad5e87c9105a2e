"""Part: `benchmarks.choice` on the accelerator, and what a choice that flips costs in its sweep."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

from benchmarks import choice
from benchmarks.device.scene import Scene


def run(scene: Scene) -> None:
    """Probe and sweep as often as time allows; then the quick probes' choices looked up in the first sweep."""
    repeats: list[Any] = []
    sizes, quick = scene.sizes, scene.told("probes").get("quick", [])
    ways = {each["way"] for each in quick}
    for _ in scene.in_time([f"sweep {number + 1}" for number in range(sizes.sweeps)]):
        repeats.append(
            choice.repeat(
                sizes.probe_seconds,
                sizes.sweep_rounds,
                scene.device(),
                scene.left_seconds,
                scene.workload(),
                ways,
                sizes.sweep_elements,
            )
        )
        ratios = [each.ratio for each in repeats]
        scene.keep(
            limit=choice.LIMIT,
            median_ratio=statistics.median(ratios),
            ratios=ratios,
            repeats=[dataclasses.asdict(each) for each in repeats],
            flipped=flipped(repeats[0], quick),
        )


def flipped(first: choice.Repeat, quick: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each quick probe's choice, with its time over that of the best in the sweep; those not swept are left out."""
    swept = first.sweep_seconds
    return [
        {"way": each["way"], "ratio": swept[each["way"]] / max(first.best_seconds, 1e-12)}
        for each in quick
        if each["way"] in swept
    ]
