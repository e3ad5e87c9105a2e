"""The report: one or several profiles as a single HTML file that needs nothing else, and as one picture.

The page has its style, its charts and a few lines of script inside it; it asks the network for nothing, and
a content security policy in it says so to the browser.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import msgspec

from autotune_offload import units
from autotune_offload.config import tune
from autotune_offload.described import machine as described_machine
from autotune_offload.errors import ConfigError
from autotune_offload.records import Baseline, Change, Kind, Profile
from autotune_offload.reports import bandwidth, costs, drawing, stages
from autotune_offload.reports.alternatives import (
    Alternative,
    alternatives,
    best_of_each,
    chosen_candidate,
    deciding,
    detail_of,
    name_of,
    verdict,
)
from autotune_offload.reports.bandwidth import KIND_WORDS, Ceiling
from autotune_offload.reports.drawing import IN_PAGE, Spec
from autotune_offload.reports.steps import step_parts, step_rows
from autotune_offload.reports.timeline import Timeline, timeline

_TEMPLATE = Path(__file__).with_name("page.html")
_NARROW, _WIDE, _PANEL = 330, 1000, 330
"""CSS pixels: on a phone, on a desktop, and of one of several side by side."""

LANE_GBPS = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""PCI Express, one lane, one direction, after line coding and before packet headers (PCI-SIG, base
specifications 1.0 to 6.0: 2.5 and 5 GT/s with 8b/10b, 8 to 32 GT/s with 128b/130b, 64 GT/s in 242B/256B flits)."""

_DESCRIBED = "described: "
"""How the CPU of a described machine begins (see `simulated`)."""

_PLAIN_CONFIG: dict[str, Any] = {
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
    }
}
"""What a choice is written into where no config is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diff:
    """What a choice changes in a config: the changes, what its owner should know, and whose config it is."""

    config: str
    changes: tuple[Change, ...]
    notices: tuple[str, ...]


def html(profiles: Sequence[tuple[str, Profile]], *, config: Mapping[str, Any] | None = None) -> str:
    """The page for (name, profile) pairs.

    Args:
        profiles: at least one; the name says where each came from.
        config: a ds_config that the choices are written into; None takes plain ZeRO-3 offload to the CPU.

    Raises:
        ConfigError: jinja2 or vl-convert is not installed.
    """
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        raise ConfigError(
            "the page is filled in by jinja2, which is not installed; "
            "run `pip install 'autotune-offload[report]'`"
        ) from error
    # trim: no blank lines where a statement of the template stood
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    sections = [_section(name, profile, config, number) for number, (name, profile) in enumerate(profiles)]
    return template.render(
        title=_title(profiles), sections=sections, light=drawing.LIGHT, dark=drawing.DARK, units=units
    )


def png(profile: Profile) -> bytes:
    """One picture of `profile`: the decision, what each way costs, and the curves off the device.

    Raises:
        ConfigError: vl-convert is not installed.
    """
    found = {"What each way costs": _costs(profile, _shown(profile), _WIDE, drawing.LIGHT)}
    for kind in ("d2h", "h2d"):
        found[f"{kind}, {KIND_WORDS[kind]}"] = _bandwidth(profile, kind, _WIDE, drawing.LIGHT)
    lines = [where(profile), f"DeepSpeed {profile.software.deepspeed}, torch {profile.software.torch}"]
    drawn = {name: spec for name, spec in found.items() if spec is not None}
    return drawing.png(drawing.picture(headline(profile), lines, drawn))


# -- words ----------------------------------------------------------------------------------------


def headline(profile: Profile) -> str:
    """The decision in a few words: ``Use direct with the cast on the host: 2.75x as fast ...``."""
    choice = profile.choice
    if choice.beats_deepspeed:
        return f"Use {_way(profile)}: {units.times(choice.gain)} as fast as DeepSpeed's own code"
    return "Keep DeepSpeed's own gradient path: nothing beats it beyond the noise"


def decision(profile: Profile) -> str:
    """The decision in one sentence, with both times and the noise."""
    choice, found = profile.choice, deciding(profile)
    noise = f"the noise of these trials is {units.percent(choice.noise)}"
    ours = units.duration(found.chosen_seconds)
    if found.own_seconds is None:
        return f"Use {_way(profile)}: it adds {ours} to {found.over}; DeepSpeed's own code was not timed."
    theirs = units.duration(found.own_seconds)
    if choice.beats_deepspeed:
        return (
            f"Use {_way(profile)}: it adds {ours} to {found.over} where DeepSpeed's own code adds {theirs}, "
            f"{units.times(choice.gain)} as much ({noise})."
        )
    return (
        f"Keep DeepSpeed's own gradient path, which adds {theirs} to {found.over}: the best other way, "
        f"{_way(profile)}, adds {ours}, and {noise}."
    )


def where(profile: Profile) -> str:
    """The device and the host that it was measured on, or the machine that was simulated."""
    if simulated(profile):
        return f"simulated: {profile.device.name}"
    device, host = profile.device, profile.host
    named = device.kind if device.name == device.kind else f"{device.kind} {device.name}"
    return f"{named} on {host.name}, {host.cpu_model}"


def simulated(profile: Profile) -> bool:
    """Whether its times are those of a described machine on a virtual clock."""
    return profile.host.cpu_model.startswith(_DESCRIBED)


def installed(profile: Profile) -> Baseline | None:
    """What the installed DeepSpeed does by default."""
    return next((each for each in profile.baselines if each.installed), None)


def _way(profile: Profile) -> str:
    choice = profile.choice
    detail = detail_of(choice)
    way = f"{choice.path} with the cast on the {choice.cast}" + (f" ({detail})" if detail else "")
    return f"{way}, micro-steps added up on the host" if choice.accumulate == "host" else way


def _title(profiles: Sequence[tuple[str, Profile]]) -> str:
    if len(profiles) == 1:
        return f"Offload report: {where(profiles[0][1])}"
    return f"Offload report: {len(profiles)} machines"


# -- one profile ----------------------------------------------------------------------------------


def _section(name: str, profile: Profile, config: Mapping[str, Any] | None, number: int) -> dict[str, Any]:
    rows = _shown(profile)
    own, found = installed(profile), deciding(profile)
    return {
        "id": f"profile-{number + 1}",
        "name": name,
        "profile": profile,
        "simulated": simulated(profile),
        "where": where(profile),
        "headline": headline(profile),
        "decision": decision(profile),
        "chosen_name": name_of(profile.choice.path, profile.choice.cast),
        "chosen_seconds": found.chosen_seconds,
        "own_name": own.name if own else "",
        "own_seconds": found.own_seconds,
        "over": found.over,
        "rows": [(row, verdict(row, profile)) for row in alternatives(profile)],
        "costs": _both_widths(lambda width: _costs(profile, rows, width, IN_PAGE)),
        "timelines": _timelines(profile),
        "stages": _both_widths(lambda width: _stages(profile, width, IN_PAGE)),
        "curves": list(_curves(profile)),
        "steps": step_rows(profile),
        "step_parts": step_parts(profile),
        "ceiling": ceiling(profile),
        "diff": diff(profile, config),
        "json": _json(profile),
        "facts": list(_facts(profile)),
        "kinds": KIND_WORDS,
    }


def _shown(profile: Profile) -> list[Alternative]:
    """The best of each kind that has a time to draw."""
    rows = best_of_each(alternatives(profile))
    return [row for row in rows if row.measured_seconds or (row.predicted_seconds and not row.rejected)]


def _both_widths(draw: Any) -> dict[str, str] | None:
    """The same chart for a phone and for a desktop; the style sheet shows one of them."""
    specs = {"narrow": draw(_NARROW), "wide": draw(_WIDE)}
    return {name: drawing.svg(spec) for name, spec in specs.items()} if all(specs.values()) else None


def _costs(profile: Profile, rows: list[Alternative], width: int, colours: Mapping[str, str]) -> Spec | None:
    own = installed(profile)
    seconds = own.measured_seconds if own else None
    if not rows:
        return None
    return costs.costs(rows, own_seconds=seconds, noise=profile.choice.noise, width=width, colours=colours)


def _timelines(profile: Profile) -> dict[str, Timeline]:
    """The chosen path's and DeepSpeed's own, by a short name."""
    chosen, own = chosen_candidate(profile), installed(profile)
    found: dict[str, Timeline] = {}
    if chosen is not None:
        label = name_of(chosen.path, chosen.cast)
        found[f"chosen ({label})" if profile.choice.beats_deepspeed else f"best other ({label})"] = timeline(
            profile, chosen
        )
    if own is not None:
        found["DeepSpeed's own"] = timeline(profile, own)
    return found


def _stages(profile: Profile, width: int, colours: Mapping[str, str]) -> Spec | None:
    found = _timelines(profile)
    return stages.stages(found, width=width, colours=colours) if found else None


def _curves(profile: Profile) -> Iterator[dict[str, Any]]:
    for kind in get_args(Kind):
        spec = _bandwidth(profile, kind, _PANEL, IN_PAGE)
        if spec is not None:
            yield {
                "kind": kind,
                "words": KIND_WORDS[kind],
                "svg": drawing.svg(spec),
                "best": _best(profile, kind),
            }


def _best(profile: Profile, kind: Kind) -> str:
    """The highest points of a chart in words, for whoever does not see it."""
    highest: dict[str, float] = {}
    for each in profile.transfers:
        name = bandwidth.series_of(each)
        if each.kind == kind and name:
            highest[name] = max(highest.get(name, 0.0), each.gbps)
    return "; ".join(f"{name} up to {units.rate(gbps)}" for name, gbps in highest.items())


def _bandwidth(profile: Profile, kind: Kind, width: int, colours: Mapping[str, str]) -> Spec | None:
    top = ceiling(profile) if kind != "h2h" else None
    return bandwidth.bandwidth(profile, kind, ceiling=top, width=width, colours=colours)


def ceiling(profile: Profile) -> Ceiling | None:
    """What the device's link can carry one way, where the device or the machine's description tells it."""
    device = profile.device
    if simulated(profile):
        return _described_ceiling(device.name)
    lane = LANE_GBPS.get(device.link_generation or 0)
    if lane is None or not device.link_width:
        return None
    return Ceiling(gbps=lane * device.link_width, name=f"PCIe {device.link_generation} x{device.link_width}")


def _described_ceiling(title: str) -> Ceiling | None:
    for name in described_machine.names():
        machine = described_machine.load(name)
        if machine.title == title and machine.link.peak_gbps:
            return Ceiling(gbps=machine.link.peak_gbps, name=machine.link.name)
    return None


def diff(profile: Profile, config: Mapping[str, Any] | None) -> Diff:
    """What the choice changes in `config`, with DeepSpeed's version of the profile."""
    tuned = tune.tune(
        _PLAIN_CONFIG if config is None else config,
        profile.choice,
        version=profile.software.deepspeed,
        carried=profile.choice.beats_deepspeed,
    )
    whose = "a plain ZeRO-3 offload config" if config is None else "your config"
    return Diff(config=whose, changes=tuned.changes, notices=tuned.notices)


def _facts(profile: Profile) -> Iterator[tuple[str, str]]:
    host, device, software, work = profile.host, profile.device, profile.software, profile.workload
    if not simulated(profile):
        yield (
            "Host",
            f"{host.name}: {host.cpu_model}, {host.affinity_cpus} of {host.cpu_count} CPUs, "
            f"{units.size(host.ram_bytes)} RAM, {host.numa_nodes} NUMA node{'s' if host.numa_nodes != 1 else ''}",
        )
    yield "Device", f"{device.kind} {device.index} of {device.count}: {device.name}"
    yield (
        "Software",
        f"Python {software.python}, torch {software.torch}, DeepSpeed {software.deepspeed}, "
        f"autotune-offload {software.autotune_offload}",
    )
    yield (
        "Workload",
        f"{units.count(work.parameter_elements)} parameters ({work.source}); on this rank "
        f"{units.count(work.elements)} {work.dtype} gradients, world size {work.world_size}",
    )
    yield (
        "Measured",
        f"{profile.created}, plan {profile.plan}, in {units.duration(profile.elapsed_seconds)}"
        + (" of virtual time" if simulated(profile) else ""),
    )


def _json(profile: Profile) -> str:
    """As `probe --json` gives it: infinities and not-a-numbers are null."""
    return msgspec.json.format(msgspec.json.encode(profile), indent=1).decode()
