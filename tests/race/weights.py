"""Drawn optimizer steps on the race device: the pass with its ring, against DeepSpeed's own step.

16-bit weights lie in device memory, where the next forward pass reads them on a stream of its own; or they lie in
page-locked host memory, from which they are gathered, and a gathering may be under way when the next step begins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from autotune_offload.engine import step_stage3
from autotune_offload.engine.step_attach import StepSpec, attach_step, detach_step
from autotune_offload.paths.pieces import Target
from tests.engine.stand_ins import DeepSpeedZeroOptimizer_Stage3, Engine
from tests.race.device import INJECTED, RaceDevice
from tests.race.drawn import Differs, Draw

SIZES = (1000, 77, 1280)
PIECE_ELEMENTS = 128
STEPS = 4


class Optimizer(DeepSpeedZeroOptimizer_Stage3):
    """With a device, weights are gathered there after each step; `seen` is what came of it."""

    def __init__(
        self, dtype: torch.dtype, device: RaceDevice | None = None, *, on_host: bool = False
    ) -> None:
        super().__init__(SIZES, dtype)
        self.device, self.on_host = device, on_host
        self.seen: list[list[Tensor]] = []
        if device is None:
            return
        self.gathers, flats = device.new_stream(), self.fp16_partitioned_groups_flat
        for number, flat in enumerate(flats if not on_host else ()):
            flats[number] = device.empty(flat.numel(), dtype)
            flats[number].copy_(flat)
        for flat in flats if on_host else ():
            device.pinned[flat.data_ptr()] = flat.nbytes

    def _post_step(self, timer_names: Any) -> None:
        """The next forward pass gathers the weights."""
        del timer_names
        flats = self.fp16_partitioned_groups_flat
        if self.device is None:
            self.seen.append([flat.clone() for flat in flats])
            return
        with self.device.on(self.gathers):
            there = [self.device.empty(flat.numel(), flat.dtype) for flat in flats]
            for memory, flat in zip(there, flats, strict=True):
                if self.on_host:
                    self.device.h2d(memory, flat, non_blocking=True)
                else:
                    self.device.cast(memory, flat)
        self.seen.append(there)

    def unscale_and_clip_grads(self, sub_group_id: int, total_norm: Any) -> None:
        """DeepSpeed's own step: what it overwrites while it is gathered is not for us to judge."""
        if self.device is not None:
            self.device.synchronize()
        super().unscale_and_clip_grads(sub_group_id, total_norm)

    def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id: int) -> None:
        if self.device is not None:
            self.device.synchronize()
        super()._reassign_or_swap_out_partitioned_parameters(sub_group_id)


Optimizer.__module__ = DeepSpeedZeroOptimizer_Stage3.__module__
Optimizer.__name__ = DeepSpeedZeroOptimizer_Stage3.__name__


class Pair:
    """The same steps with and without the pass."""

    def __init__(self, seed: object, **fixed: Any) -> None:
        self.draw = Draw(seed, fixed)
        self.device = RaceDevice(seed)
        dtype = self.draw.one("dtype", torch.bfloat16, torch.float16)
        self.on_host = self.draw.chance("on host", 0.3)
        self.ours = Optimizer(dtype, self.device, on_host=self.on_host)
        self.stock = Optimizer(dtype)
        self.engine = Engine(self.ours)
        self.random = torch.Generator().manual_seed(0)

    def attach(self) -> None:
        """The pass, or turns of it and of DeepSpeed's own step."""
        draw = self.draw
        spec = StepSpec(
            step=draw.one("step", "fused", "fused", "auto"),
            threads=draw.one("threads", 1, 2, 3),
            page_lock=draw.chance("page lock", 0.8),
            piece_elements=PIECE_ELEMENTS,
        )
        check = draw.chance("check", 0.2)
        self.status = attach_step(self.engine, spec, self.device, check=check)
        if self.status.why_not is not None:
            raise Differs(self.status.why_not)

    def step(self) -> None:
        """One, with gradients that exceed the clipping in half of all."""
        size = self.draw.one("size", 1e-4, 1.0)
        for number, master in enumerate(self.stock.fp32_partitioned_groups_flat):
            values = torch.randn(master.numel(), generator=self.random) * size
            for optimizer in (self.ours, self.stock):
                gradient = optimizer.fp32_partitioned_groups_flat[number].grad
                assert gradient is not None
                gradient.copy_(values)
        if self.draw.chance("fail", 0.1):
            self.device.fails_in = self.draw.one("fails in", *range(80))
        for optimizer in (self.ours, self.stock):
            optimizer.step()
        self.device.fails_in = None

    def compare(self, when: str) -> None:
        """What is on the host, now; what was gathered, once nothing is under way."""
        ours, stock = self.ours.leaves(), self.stock.leaves()
        rounded = range(4, len(ours), 6)
        pairs = [(a, b) for at, (a, b) in enumerate(zip(ours, stock, strict=True)) if at not in rounded]
        if any(not _same(*pair) for pair in pairs):
            raise Differs(f"master weights, gradients or moments differ {when}")
        self.device.finish()
        for step, seen in enumerate(zip(self.ours.seen, self.stock.seen, strict=True)):
            for number, (mine, theirs) in enumerate(zip(*seen, strict=True)):
                with self.device.plainly():
                    if not _same(mine, theirs):
                        raise Differs(
                            f"weights of sub-group {number} that step {step} gathered differ {when}"
                        )
        if self.device.faults:
            raise Differs(self.device.faults[0])

    def run(self) -> None:
        """All of it."""
        with self.device.in_stream_order():
            self.attach()
            for step in range(STEPS):
                self.step()
                if self.draw.chance("look", 0.3):
                    self.compare(f"after step {step}")
                if self.draw.chance("detach", 0.1):
                    detach_step(self.engine)
            detach_step(self.engine)
            self.compare("in the end")
        if not set(self.device.pinned) <= {
            flat.data_ptr() for flat in self.ours.fp16_partitioned_groups_flat
        }:
            raise Differs("page-locked memory is left")
        mismatch = None if self.status.check is None else self.status.check.mismatch
        for said in (self.status.why_not, mismatch):
            if said is not None and INJECTED not in said and "not faster" not in said:
                raise Differs(said)


def _same(ours: Tensor, stock: Tensor) -> bool:
    word = {2: torch.int16, 4: torch.int32}[ours.element_size()]
    return torch.equal(ours.view(word), stock.view(word))


@contextlib.contextmanager
def apart(device: RaceDevice) -> Iterator[None]:
    """Weights that are memory of the device's do not count as the host's, as they lie in the host's here."""
    real = step_stage3.target

    def target(*args: Any) -> Target | None:
        found = real(*args)
        if found is None or not device.memory.has(found.memory):
            return found
        return Target(memory=found.memory, on_host=False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_stage3, "target", target)
        yield


def steps(seed: object, **fixed: Any) -> None:
    """Drawn steps. Raises Differs, or what our code raises."""
    pair = Pair(seed, **fixed)
    with apart(pair.device):
        try:
            pair.run()
        finally:
            detach_step(pair.engine)
            pair.device.finish()
