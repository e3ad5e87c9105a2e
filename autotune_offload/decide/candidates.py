"""Who takes part in the contest: the combinations that differ here, what each should cost, what forbids it.

A user's fixed values come first, then the limits of the host, then the cost model's prediction.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from msgspec import structs

from autotune_offload import packaged
from autotune_offload.decide.cost_model import CostModel
from autotune_offload.errors import ConfigError
from autotune_offload.machine.device import Device
from autotune_offload.paths.device_memory import against_device_memory
from autotune_offload.paths.page_locking import PinRules
from autotune_offload.records import PATHS, Candidate, Choice, Settings, Workload

PARAMETERS = ("path", "cast", "buffer_bytes", "buffer_count", "host_threads")
"""The fields of a candidate that tell it from the others."""

_BUFFER_BYTES = tuple(1 << power for power in range(18, 26))
"""256 KiB to 32 MiB: below, the cost of each piece dominates; above, no curve gains."""

_BUFFER_COUNTS = (2, 3, 4)
_PRUNE_BEYOND = 2.0
"""A candidate that is predicted to take this many times the best is not tried."""

_NEVER_PRUNED = 0.02
"""What is predicted to add less than this part of a backward's compute is tried in any case."""


def key(candidate: Candidate | Choice) -> tuple[Any, ...]:
    """Its values of `PARAMETERS`: those of a choice are the candidate's that was chosen."""
    return tuple(getattr(candidate, name) for name in PARAMETERS)


def kind(candidate: Candidate) -> tuple[Any, ...]:
    """What it does, apart from how finely: path, cast, and whether threads of its own work beside the caller."""
    return candidate.path, candidate.cast, candidate.host_threads > 0


def predicted(candidate: Candidate) -> float:
    """What the cost model says, for ordering; without a prediction, 0."""
    return candidate.predicted_seconds or 0.0


# -- the space ------------------------------------------------------------------------------------


def admitted(model: CostModel, device: Device, rules: PinRules, steer: Settings) -> list[Candidate]:
    """Every combination the user left open, with its prediction, and with what rules it out, if anything.

    Of a path that cannot run at all, one candidate a cast stands for the rest. What the model puts far
    behind is ruled out too, but for the best of each kind: a wrong model must not lose a whole path.

    Raises:
        ConfigError: the user fixed something that cannot run here.
    """
    every = (_with_prediction(c, model) for c in grid(device, model.workload, steer))
    found = sorted(every, key=predicted)
    limits = {
        key(c): c.rejected or rules.against(c) or _against_device_memory(c, model, device) for c in found
    }
    able = [c for c in found if limits[key(c)] is None]
    if not able:
        raise ConfigError(
            f"{_fixed(steer)} cannot run here: {limits[key(found[0])]}; "
            'leave it at "auto", or set "path" to "direct"'
        )
    barred = _one_a_cast(structs.replace(c, rejected=limits[key(c)]) for c in found if limits[key(c)])
    return sorted([*_pruned(able, _NEVER_PRUNED * model.compute_seconds), *barred], key=predicted)


def _with_prediction(candidate: Candidate, model: CostModel) -> Candidate:
    try:
        return structs.replace(candidate, predicted_seconds=model.seconds(candidate))
    except Exception as error:
        if candidate.path in PATHS:
            raise
        why = f"what it goes through cannot be told: {type(error).__name__}: {error}"
        return structs.replace(candidate, rejected=why)


def _against_device_memory(candidate: Candidate, model: CostModel, device: Device) -> str | None:
    return against_device_memory(
        candidate,
        model.workload,
        device.identity.memory_bytes,
        shares_host_memory=device.shares_host_memory,
    )


def _one_a_cast(rejected: Iterable[Candidate]) -> Iterator[Candidate]:
    seen: set[object] = set()
    for candidate in rejected:
        cast = (candidate.path, candidate.cast)
        if cast not in seen:
            seen.add(cast)
            yield candidate


def _pruned(able: Sequence[Candidate], least_seconds: float) -> Iterator[Candidate]:
    """Best first; those too far behind the first get the reason."""
    best = predicted(able[0])
    seen: set[object] = set()
    for candidate in able:
        with_threads = (candidate.path, candidate.cast, candidate.host_threads)
        why = None
        if with_threads in seen and predicted(candidate) > max(_PRUNE_BEYOND * best, least_seconds):
            times = predicted(candidate) / max(best, 1e-12)
            why = f"not tried: predicted to take {times:.1f} times as long as the best"
        seen.add(with_threads)
        yield structs.replace(candidate, rejected=why)


def grid(device: Device, workload: Workload, steer: Settings) -> Iterator[Candidate]:
    """Every combination of path, cast, buffers and host threads that differs in effect here.

    What a combination does not use has one value: no host threads where the host casts nothing, one
    buffer where there is no ring, and no buffer larger than the largest partition needs.

    Raises:
        ConfigError: the user fixed buffers that hold no element.
    """
    seen = set()
    for values in itertools.product(*_options(device, workload, steer)):
        used = effective(device, workload, dict(zip(PARAMETERS, values, strict=True)))
        if used not in seen:
            seen.add(used)
            yield Candidate(**dict(zip(PARAMETERS, used, strict=True)))


def _options(device: Device, workload: Workload, steer: Settings) -> list[Sequence[Any]]:
    """The values of each parameter: the user's, or ours."""
    if not isinstance(steer.buffer_bytes, str) and steer.buffer_bytes < 4:
        raise ConfigError(
            f"buffer_bytes is {steer.buffer_bytes}; expected at least 4, the bytes of one fp32 element"
        )
    ours: dict[str, Sequence[Any]] = {
        "path": (*PATHS, *packaged.usable()),
        "cast": ("device", "host"),
        "buffer_bytes": _buffer_sizes(workload),
        "buffer_count": _BUFFER_COUNTS,
        # torch's own pool, one thread apart, and as many as torch itself would use
        "host_threads": sorted({0, 1, device.intraop_threads()}),
    }
    fixed = {name: getattr(steer, name) for name in PARAMETERS}
    return [ours[n] if fixed[n] in ("auto", "deepspeed") else (fixed[n],) for n in PARAMETERS]


def _buffer_sizes(workload: Workload) -> list[int]:
    needed = 4 * workload.largest_elements
    return [size for size in _BUFFER_BYTES if size < 2 * needed] or [_BUFFER_BYTES[0]]


def effective(device: Device, workload: Workload, wanted: dict[str, Any]) -> tuple[Any, ...]:
    """The values of `wanted` in the order of `PARAMETERS`, with what has no effect at its one value."""
    path, cast, buffer_bytes, count, threads = (wanted[name] for name in PARAMETERS)
    if workload.dtype == "float32":
        cast = "host"  # nothing is cast, and nothing is allocated on the device for it
    if path != "staged":
        count = 1
        if cast == "host":
            buffer_bytes = _BUFFER_BYTES[0]  # the destination is the buffer
    copies_itself = device.shares_host_memory and cast == "host"
    casts = cast == "host" and workload.dtype != "float32"
    if not (path == "staged" or casts or copies_itself):
        threads = 0
    return path, cast, buffer_bytes, count, threads


def _fixed(steer: Settings) -> str:
    names = (*PARAMETERS, "max_pinned_bytes")
    fixed = {name: getattr(steer, name) for name in names if getattr(steer, name) != "auto"}
    return ", ".join(f"{name} {value}" for name, value in fixed.items())
