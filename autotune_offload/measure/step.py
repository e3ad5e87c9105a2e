"""What the optimizer's step goes through: casts to 16 bits, and the compiled pass by threads, on made-up data.

What cannot be had is left out with the reason; nothing here fails a probe.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autotune_offload.errors import in_words
from autotune_offload.machine import adam
from autotune_offload.machine.device import Device
from autotune_offload.measure.arenas import slots, touched_per_second
from autotune_offload.measure.sampling import Sampled, sample
from autotune_offload.paths.pieces import Pieces, Target, thread_counts
from autotune_offload.paths.step_stages import PIECE_ELEMENTS
from autotune_offload.records import Cast, Narrowing, PassRate, Plan, State, StepRates

STEP_SHARE = 0.2
"""Of the measuring time, where steps are looked at."""

_MAKING_SHARE = 0.25
"""Of that for making the data."""

_CASTS_SHARE = 0.3
"""Of that until the casts are done; the pass has the rest."""

_BYTES = 20
"""Of memory for a weight: itself, its gradient and two moments in fp32, and 16 bits twice for a moment."""

_CAST_ELEMENTS = 4 << 20
"""Of one cast at most, as large as those of gradients: one after the other through the data, and often enough."""

_LEAST_PIECES = 8
"""With less, all of it would stay in a cache, whatever the time is."""

_PIECES_A_THREAD = 2
"""With fewer, what one thread does alone at the end would count for much."""

_VALUES = {"scale": 1.0, "beta1": 0.9, "beta2": 0.999, "rest1": 0.1, "rest2": 0.001, "bias2": 1.0}


def step_rates(
    device: Device,
    plan: Plan,
    dtype: torch.dtype,
    *,
    cache_bytes: int,
    memory_bytes: int,
    deadline: float,
) -> StepRates:
    """Everything of a step that can be timed here until the deadline.

    Args:
        device: what the weights go to; its host makes the step.
        plan: how many samples.
        dtype: of the weights there.
        cache_bytes: last-level cache, which the data exceeds where time and memory allow.
        memory_bytes: of the host that may be taken altogether.
        deadline: on the device's clock; what would not end by then is left out.
    """
    threads = device.threads_of_deepspeeds_step()
    try:
        state = _State.made(device, dtype, cache_bytes, memory_bytes, deadline)
    except (RuntimeError, MemoryError, OSError) as error:
        return StepRates(threads=threads, why_no_pass=f"no memory for its data: {in_words(error)}")
    if isinstance(state, str):
        return StepRates(threads=threads, why_no_pass=state)
    now = device.now()
    narrowings: list[Narrowing] = []
    passes: list[PassRate] = []
    why_not = device.why_no_pass(dtype)
    try:
        narrowings += _narrowings(device, plan, state, now + (deadline - now) * _CASTS_SHARE)
        passes += [] if why_not else _passes(device, plan, state, deadline)
    except (RuntimeError, MemoryError, OSError) as error:
        why_not = f"it failed ({in_words(error)})"
    return StepRates(narrowings=tuple(narrowings), passes=tuple(passes), threads=threads, why_no_pass=why_not)


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """What a step works on: a sub-group, made up."""

    memory: adam.Memory
    rounded: Tensor

    @classmethod
    def made(
        cls, device: Device, dtype: torch.dtype, cache_bytes: int, memory_bytes: int, deadline: float
    ) -> _State | str:
        """As much as memory and time allow; in words why there is none."""
        most = memory_bytes // _BYTES
        if most < PIECE_ELEMENTS:
            return f"{memory_bytes:,} bytes of host memory for its data; expected at least {_BYTES * PIECE_ELEMENTS:,}"
        seconds = max(deadline - device.now(), 0.0) * _MAKING_SHARE
        affordable = touched_per_second(device, min(8 << 20, memory_bytes // 4)) * seconds / _BYTES
        wanted = max(cache_bytes // 8, _PIECES_A_THREAD * device.most_threads() * PIECE_ELEMENTS)
        least = min(_LEAST_PIECES * PIECE_ELEMENTS, most)
        pieces = int(max(min(wanted, most, affordable), least)) // PIECE_ELEMENTS
        make = functools.partial(device.host_empty, pieces * PIECE_ELEMENTS, torch.float32)
        memory = adam.Memory(weights=make(), gradients=make(), first=make(), second=make())
        for tensor, value in zip(memory.tensors(), (0.01, 1e-3, 0.0, 0.0), strict=True):
            tensor.fill_(value)  # an ordinary step: no number so small that a processor takes long over it
        return cls(memory=memory, rounded=device.host_empty(memory.elements, dtype))

    def shared_by(self, threads: int) -> _State:
        """As many pieces for each of them, so that none waits for the others at the end."""
        pieces = self.memory.elements // PIECE_ELEMENTS
        elements = pieces // threads * threads * PIECE_ELEMENTS
        return _State(memory=self.memory.part(0, elements), rounded=self.rounded[:elements])


# -- casts ----------------------------------------------------------------------------------------


def _narrowings(device: Device, plan: Plan, state: _State, deadline: float) -> Iterator[Narrowing]:
    """On the host by torch's threads into pages that are there and new ones, by one thread, and on the device."""
    if state.rounded.dtype == torch.float32:
        return
    cases: list[tuple[Cast, State, int]] = [("host", "warm", 0), ("host", "cold", 0), ("host", "warm", 1)]
    if not device.shares_host_memory:
        cases.append(("device", "warm", 0))
    for index, (where, pages, threads) in enumerate(cases):
        share = max(deadline - device.now(), 0.0) / (len(cases) - index)
        with device.intraop(threads or device.threads_of_deepspeeds_step()):
            run = _on_device(device, state) if where == "device" else _on_host(device, state, pages)
            sampled = sample(device, plan, run, device.now() + share, warm_up=False)
        size = 4 * _cast_elements(state)
        yield Narrowing(
            where=where,
            state=pages,
            dtype=_name(state),
            bytes=size,
            gbps=size / sampled.median / 1e9,
            threads=threads,
            **_times(sampled),
        )


def _cast_elements(state: _State) -> int:
    return min(state.memory.elements, _CAST_ELEMENTS)


def _on_host(device: Device, state: _State, pages: State) -> Callable[[int], float]:
    places = slots(_cast_elements(state), state.memory.weights, state.rounded)

    def run(count: int) -> float:
        seconds = 0.0
        for source, to in itertools.islice(places, count):
            if pages == "cold":
                to = device.host_empty(to.numel(), to.dtype, touched=False)
            before = device.now()
            device.h2h(to, source)
            seconds += device.now() - before
        return seconds

    return run


def _on_device(device: Device, state: _State) -> Callable[[int], float]:
    source = device.empty(_cast_elements(state), torch.float32)
    to = device.empty(source.numel(), state.rounded.dtype)

    def run(count: int) -> float:
        before = device.now()
        for _ in range(count):
            device.cast(to, source)
        device.record_event().synchronize()
        return device.now() - before

    return run


# -- the pass -------------------------------------------------------------------------------------


def _passes(device: Device, plan: Plan, state: _State, deadline: float) -> Iterator[PassRate]:
    """The most threads first, so that it is the slow ones for which there is no time."""
    pieces = Pieces(device, page_lock=False)
    counts = [
        count
        for count in reversed(thread_counts(device.most_threads()))
        if count == 1 or count * _PIECES_A_THREAD * PIECE_ELEMENTS <= state.memory.elements
    ]
    last: PassRate | None = None
    try:
        for index, count in enumerate(counts):
            left = deadline - device.now()
            if last is not None and _expected(last, count) * (plan.min_samples + 1) > left:
                return
            share = max(left, 0.0) / (len(counts) - index)
            run = _timed(device, pieces, part := state.shared_by(count), count)
            sampled = sample(device, plan, run, device.now() + share, warm_up=last is None)
            last = PassRate(
                threads=count, dtype=_name(state), elements=part.memory.elements, **_times(sampled)
            )
            yield last
    finally:
        pieces.close()


def _expected(last: PassRate, threads: int) -> float:
    """Seconds with fewer threads, at most."""
    return last.median_seconds * last.threads / threads


def _timed(device: Device, pieces: Pieces, state: _State, threads: int) -> Callable[[int], float]:
    values = adam.Constants(**_VALUES, epsilon=1e-8, step_size=-1e-3)
    to = Target(memory=state.rounded, on_host=True)

    def run(count: int) -> float:
        before = device.now()
        for _ in range(count):
            pieces.run(state.memory, values, to, threads, pieces.progress(state.memory.elements))
        return device.now() - before

    return run


def _name(state: _State) -> str:
    return str(state.rounded.dtype).removeprefix("torch.")


def _times(sampled: Sampled) -> dict[str, Any]:
    return {
        "median_seconds": sampled.median,
        "iqr_seconds": sampled.iqr,
        "samples": len(sampled.seconds),
        "raw_seconds": sampled.seconds,
    }
