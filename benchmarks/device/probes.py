"""Part: the probe twice, then quick ones, and how often their choice is another."""

from __future__ import annotations

import collections
import time
from typing import Any

from benchmarks.device.scene import Scene

PROFILE = "profile.yaml"


def run(scene: Scene) -> None:
    """Each probe as `autotune-offload probe` makes it; the first profile is kept as a file for later parts."""
    from autotune_offload.api.probe import probe
    from autotune_offload.profiles.store import replace_file
    from autotune_offload.profiles.yaml_form import to_text
    from autotune_offload.records import Profile

    device, sizes, workload = scene.device(), scene.sizes, scene.workload()

    def one(plan: str, seconds: float | None) -> tuple[Profile, float]:
        before = time.monotonic()
        return probe(
            device=device, plan=plan, budget_seconds=seconds, workload=workload
        ), time.monotonic() - before

    probes: list[dict[str, Any]] = []
    for _ in scene.in_time(["probe 1", "probe 2"]):
        profile, seconds = one(sizes.probe_plan, sizes.probe_seconds)
        if not probes:
            replace_file(scene.folder / PROFILE, to_text(nameless(profile)))
        probes.append(_told(profile, seconds))
        scene.keep(probes=probes)
    quick: list[dict[str, Any]] = []
    several = [f"quick probe {number + 1}" for number in range(sizes.quick_probes)]
    for _ in scene.in_time(several, name="quick_left_out"):
        quick.append(_told(*one("quick", sizes.probe_seconds)))
        scene.keep(quick=quick, flips=flips([each["way"] for each in quick]))


def nameless(profile: Any) -> Any:
    """The same without this host's name, so that it can be shown."""
    from msgspec import structs

    return structs.replace(profile, host=structs.replace(profile.host, name="HOST"))


def flips(ways: list[str]) -> dict[str, Any]:
    """How many choices are not the most frequent one, of how many."""
    counted = collections.Counter(ways)
    most = counted.most_common(1)[0][1] if counted else 0
    return {"other": len(ways) - most, "of": len(ways), "ways": dict(counted)}


def _told(profile: Any, seconds: float) -> dict[str, Any]:
    from autotune_offload.decide.candidates import key
    from autotune_offload.decide.reasons import words

    choice = profile.choice
    chosen = next((each for each in profile.candidates if key(each) == key(choice)), None)
    return {
        "path": choice.path,
        "cast": choice.cast,
        "way": words(chosen) if chosen is not None else choice.path,
        "kind": f"{choice.path}, cast on the {choice.cast}"
        + (", with host threads" if choice.host_threads else ""),
        "carried": choice.beats_deepspeed,
        "gain": choice.gain,
        "noise": choice.noise,
        "tie": choice.tie,
        "pins": {"optimizer": choice.pin_optimizer, "parameters": choice.pin_parameters},
        "reasons": list(choice.reasons),
        "warnings": list(profile.warnings),
        "stability": list(profile.stability),
        "pin": {
            "seconds_per_gib": profile.pin.seconds_per_gib,
            "largest_bytes": profile.pin.largest_bytes,
            "reason": profile.pin.reason,
        },
        "sync_seconds": {
            "device": profile.sync.device_seconds,
            "stream": profile.sync.stream_seconds,
            "event": profile.sync.event_seconds,
        },
        "elapsed_seconds": seconds,
    }
