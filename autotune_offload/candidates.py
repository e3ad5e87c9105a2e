"""Who takes part in the contest: the combinations that differ here, what each should cost, what forbids it.

A user's fixed values come first, then the limits of the host, then the cost model's prediction.
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autotune_offload import host
from autotune_offload.accumulation import PINNED_BYTES
from autotune_offload.cost_model import CostModel
from autotune_offload.device import Device
from autotune_offload.ds_config import Settings
from autotune_offload.errors import ConfigError
from autotune_offload.paths import page_locks
from autotune_offload.records import Candidate, Choice, Limits, Path, PinCost, Workload
from autotune_offload.workload import DTYPE_BYTES

PARAMETERS = ("path", "cast", "buffer_bytes", "buffer_count", "host_threads")
"""The fields of a candidate that tell it from the others."""

SUB_GROUP_ELEMENTS = 1_000_000_000  # DeepSpeed's default

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


# -- limits ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PinRules:
    """What page-locking is possible in this process, asked for one path or key at a time."""

    workload: Workload
    pin: PinCost
    limits: Limits
    locks: bool = True
    """False where the accelerator's `pin_memory` locks nothing, as the CPU's own."""
    bounces: bool = False
    """Whether the installed DeepSpeed pins a bounce buffer whatever is chosen, as 0.15.4 to 0.16.2 do."""

    @property
    def not_on_offer(self) -> str | None:
        """Why nothing can be page-locked at all, if so."""
        if self.limits.pinnable_bytes < mmap.PAGESIZE:
            left = f"the limits leave {self.limits.pinnable_bytes:,} bytes to page-lock"
            return f"{left}{host.tightest(self.limits.bounds)}"
        return self.pin.reason if not self.pin.largest_bytes else None

    def against_path(self, path: Path) -> str | None:
        """Why no candidate of this path can run, if so."""
        if not page_locks(path):
            return None
        if self.not_on_offer is not None:
            return f"page-locked memory is not on offer: {self.not_on_offer}"
        return self.against_optimizer() if path == "pinned" else None

    def against(self, candidate: Candidate | Choice) -> str | None:
        """Why this candidate, or a choice that was made earlier, cannot run, if so."""
        why = self.against_path(candidate.path)
        if why is None and candidate.path == "staged":
            ring = candidate.buffer_bytes * candidate.buffer_count
            why = self._against_blocks([ring], "lower buffer_bytes")
        return why

    def against_host_sums(self, candidate: Candidate) -> str | None:
        """Why adding micro-steps up on the host has no room beside what this path page-locks itself, if so."""
        if not page_locks(candidate.path):
            return None
        if candidate.path == "staged":
            own = [candidate.buffer_bytes * candidate.buffer_count]
        else:
            own = optimizer_blocks(self.workload)
        return self._against_blocks([*own, PINNED_BYTES], 'set "accumulate" to "device"')

    def against_optimizer(self) -> str | None:
        """Why what `offload_optimizer.pin_memory` page-locks does not fit, if so."""
        return self._against_blocks(optimizer_blocks(self.workload), "lower sub_group_size")

    def against_parameters(self, *, with_optimizer: bool) -> str | None:
        """Why this rank's parameters do not fit, beside the optimizer's blocks if those are pinned too."""
        blocks = optimizer_blocks(self.workload) if with_optimizer else []
        way_out = "lower sub_group_size" if with_optimizer else "more ranks make it smaller"
        return self._against_blocks([*blocks, *parameter_blocks(self.workload)], way_out)

    def against_deepspeeds_own(self) -> str | None:
        """Why even what DeepSpeed page-locks whatever is chosen does not fit, if so."""
        if not self.locks:
            return None
        return host.check_pinned(self._own_blocks, self.limits, beside_bytes=state_bytes(self.workload))

    def against_bounce_buffer(self) -> str | None:
        """Why DeepSpeed's sequence with a bounce buffer cannot be timed here, if so."""
        if not self.locks:
            return None
        return self.not_on_offer or self._against_blocks(
            [_bounce_bytes(self.workload)], "more ranks make it smaller"
        )

    @property
    def _own_blocks(self) -> list[int]:
        return flat_blocks(self.workload) + [_bounce_bytes(self.workload)] * self.bounces

    @property
    def _in_any_case(self) -> list[int]:
        """DeepSpeed's own, unless they do not fit: such a run has no `offload_param`, or starts with no choice."""
        return [] if self.against_deepspeeds_own() else self._own_blocks

    def _against_blocks(self, blocks: Sequence[int], way_out: str) -> str | None:
        if not self.pin.capped and max(blocks) > self.pin.largest_bytes:
            return (
                f"needs a page-locked block of {max(blocks):,} bytes, but the largest that could be "
                f"locked here is {self.pin.largest_bytes:,} ({self.pin.reason}); {way_out}"
            )
        return host.check_pinned(
            blocks,
            self.limits,
            in_any_case_bytes=self._in_any_case,
            beside_bytes=state_bytes(self.workload),
        )


def optimizer_blocks(workload: Workload) -> list[int]:
    """Bytes of each block that DeepSpeed pins for `offload_optimizer.pin_memory`, before rounding.

    The flat low-precision accumulation buffer and the fp32 gradients of each sub-group (stage3.py:
    grad_partitions_flat_buffer, initialize_optimizer_states).
    """
    low = DTYPE_BYTES[workload.dtype] * workload.elements
    whole, rest = divmod(workload.elements, SUB_GROUP_ELEMENTS)
    return [low, *[4 * SUB_GROUP_ELEMENTS] * whole, *([4 * rest] if rest else [])]


def parameter_blocks(workload: Workload) -> list[int]:
    """The same for `offload_param.pin_memory`: one for each parameter's slice (partition_parameters.py)."""
    size = DTYPE_BYTES[workload.dtype]
    sizes = workload.parameters
    return [-(-each // workload.world_size) * size for each, count in sizes for _ in range(count)]


def flat_blocks(workload: Workload) -> list[int]:
    """The same for what DeepSpeed pins with `offload_param` whatever `pin_memory` says.

    One flat copy of this rank's trainable parameters (stage3.py: _create_param_groups_fp16_flat_cpu_memory).
    """
    return [DTYPE_BYTES[workload.dtype] * workload.elements]


def _bounce_bytes(workload: Workload) -> int:
    """One block for the largest partition, in torch's default dtype (stage3.py of 0.15.4: pinned_grad_buffer)."""
    return 4 * workload.largest_elements


def state_bytes(workload: Workload) -> int:
    """Host memory beside gradients and parameters: fp32 weights and Adam's two moments.

    Source: Rajbhandari et al., arXiv:1910.02054, section 3.1, which counts 12 bytes a parameter for them.
    """
    return 12 * workload.elements


# -- the space ------------------------------------------------------------------------------------


def admitted(model: CostModel, device: Device, rules: PinRules, steer: Settings) -> list[Candidate]:
    """Every combination the user left open, with its prediction, and with what rules it out, if anything.

    Of a path that cannot run at all, one candidate a cast stands for the rest. What the model puts far
    behind is ruled out too, but for the best of each kind: a wrong model must not lose a whole path.

    Raises:
        ConfigError: the user fixed something that cannot run here.
    """
    found = sorted((_predict(c, model) for c in grid(device, model.workload, steer)), key=predicted)
    limits = {key(c): rules.against(c) for c in found}
    able = [c for c in found if limits[key(c)] is None]
    if not able:
        raise ConfigError(
            f"{_fixed(steer)} cannot run here: {limits[key(found[0])]}; "
            'leave it at "auto", or set "path" to "direct"'
        )
    barred = _one_a_cast(replace(c, rejected=limits[key(c)]) for c in found if limits[key(c)])
    return sorted([*_pruned(able, _NEVER_PRUNED * model.compute_seconds), *barred], key=predicted)


def _predict(c: Candidate, model: CostModel) -> Candidate:
    seconds = model.path_seconds(c.path, c.cast, c.buffer_bytes, c.buffer_count, c.host_threads)
    return replace(c, predicted_seconds=seconds)


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
        yield replace(candidate, rejected=why)


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
        "path": ("direct", "pinned", "staged"),
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
