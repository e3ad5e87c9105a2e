"""Drawn training on the race device: an optimizer as DeepSpeed has it, with a path or several, against one without.

A drawn loop has everything that may happen between two steps: micro-steps, passes that do not come to their epilogue,
partitions that are met again, reads and writes in the middle, a change of who carries, a failure of the device, a
path that is taken out. The fp32 gradients, the accumulation buffer and the norms must be those of DeepSpeed's own code.
"""

from __future__ import annotations

import functools
import math
import random
import traceback
from collections.abc import Callable
from typing import Any

import torch

from autotune_offload.engine.attach import attach, detach
from autotune_offload.engine.entrants import Confirm
from tests.race.device import INJECTED, RaceDevice
from tests.race.drawn import SIZES, Differs, Draw, small, spec
from tests.race.rank import Rank

ORDERS = ((0, 1, 2), (2, 1, 0), (2, 1, 1, 0), (1, 1, 2, 0, 0), (2, 2, 1, 0))
"""Of the partitions in a pass, some of which are met again."""

STEPS = 3


class Pair:
    """The same loop with and without paths."""

    def __init__(self, seed: object, **fixed: Any) -> None:
        self.draw = draw = Draw(seed, fixed)
        self.device = RaceDevice(seed)
        self.dtype = draw.one("dtype", torch.bfloat16, torch.float16, torch.float32)
        self.values = torch.Generator().manual_seed(random.Random(f"values {seed}").getrandbits(32))
        self.accumulation = draw.one("accumulation", 1, 2, 3)
        self.ours = Rank(self.dtype, self.accumulation, self.device, draw)
        self.stock = Rank(self.dtype, self.accumulation, None, draw)
        self.ranks = (self.ours, self.stock)
        self.failed = False
        self.gradient_dtype = draw.one("gradient", self.dtype, self.dtype, torch.float32)

    # -- what is attached --

    def attach(self) -> None:
        """One path, or several that take turns."""
        confirm = None
        if self.draw.chance("turns", 0.3):
            confirm = Confirm(others=(spec(self.draw),), fewest_rounds=1, most_rounds=2)
        check = self.draw.chance("check", 0.3)
        self.checks = check
        found = attach(self.ours, spec(self.draw), self.device, check=check, confirm=confirm)
        assert found.why_not is None, found.why_not
        self.status = found

    # -- what happens --

    def micro_step(self, *, boundary: bool) -> None:
        """One backward pass in several buckets."""
        for number in self.draw.one("order", *ORDERS):
            value = torch.randn(SIZES[number], generator=self.values).to(self.gradient_dtype)
            view = self.draw.chance("view", 0.5)
            self.ours.optimizer.swappable = self.draw.chance("left", 0.1)
            self.stock.reduce([number], [value], boundary=boundary, view=view)
            reduce = functools.partial(self.ours.reduce, [number], [value], boundary=boundary, view=view)
            self.interruptible(reduce)
            self.ours.optimizer.swappable = False
            self.in_between(number)
        if self.draw.chance("no epilogue", 0.1):  # the pass raised, and the user went on
            for rank in self.ranks:
                rank.optimizer.micro_step_id += 1
            self.ours.stream.synchronize()
            return
        for rank in self.ranks:
            rank.optimizer.independent_gradient_partition_epilogue()
        if self.draw.chance("look", 0.5):
            self.compare("after the epilogue")

    def interruptible(self, reduce: Callable[[], None]) -> None:
        """Ctrl-C in it costs nothing where it had begun to send; else the user repeats it."""
        if self.draw.chance("interrupt", 0.05) and not self.checks:
            self.device.fails_in, self.device.fails_with = (
                self.draw.one("fails in", *range(20)),
                KeyboardInterrupt(),
            )
        try:
            reduce()
        except KeyboardInterrupt as interrupt:
            frames = {frame.name for frame in traceback.extract_tb(interrupt.__traceback__)}
            if not frames & {"_sent", "_added_on_host"}:
                reduce()
        if isinstance(self.device.fails_with, KeyboardInterrupt):
            self.device.fails_in = None

    def in_between(self, number: int) -> None:
        """Whatever a user may do after a bucket."""
        what = self.draw.one("between", *[None] * 8, "sums", "read", "write", "detach", "fail")
        if what == "sums":
            self.same("the buffer", lambda z: z.finalize_gradient_accumulation_boundary())
        elif what == "read":
            self.same("a gradient", lambda z: z.get_fp32_grad_for_param(z.parameters[number]))
        elif what == "write":
            for rank in self.ranks:
                rank.optimizer.set_fp32_grad_for_param(0.25, rank.optimizer.parameters[number])
        elif what == "detach":
            detach(self.ours)
        elif what == "fail" and not self.failed:
            self.failed, self.device.fails_with = True, RuntimeError(INJECTED)
            self.device.fails_in = self.draw.one("fails in", *range(20))

    def same(self, what: str, ask: Callable[[Any], Any]) -> None:
        """Both give the same answer."""
        ours, stock = (ask(rank.optimizer) for rank in self.ranks)
        if ours != stock:
            raise Differs(f"{what} differs")

    def step(self) -> None:
        """As DeepSpeed's begins; what is left is compared at once and when all has run."""
        for rank in self.ranks:
            rank.optimizer._pre_step()
        self.compare("when the step begins")
        met = self.stock.optimizer.norm_for_param_grads
        norms = [
            float(
                z.complete_grad_norm_calculation_for_cpu_offload([p for p in z.parameters if p.ds_id in met])
            )
            for z in (rank.optimizer for rank in self.ranks)
        ]
        if not math.isclose(*norms, rel_tol=1e-12):
            raise Differs(f"norms are {norms}")
        for rank in self.ranks:
            rank.optimizer.fp32_partitioned_groups_flat[0].grad.mul_(0.5)
            rank.optimizer.norm_for_param_grads = {}
        if self.draw.chance("all runs", 0.5):
            self.finish("after the step")

    def finish(self, when: str) -> None:
        """Nothing is under way any more, and nothing has changed for that."""
        self.device.finish()
        self.compare(when)

    def compare(self, when: str) -> None:
        """Both optimizers have the same."""
        ours, stock = (rank.left() for rank in self.ranks)
        for what, bits in ours.items():
            if bits != stock[what]:
                wrong = sum(a != b for a, b in zip(bits, stock[what], strict=True))
                raise Differs(f"{wrong} values of the {what} differ {when}")
        if self.device.faults:
            raise Differs(self.device.faults[0])

    def run(self) -> None:
        """All of it."""
        with self.device.in_stream_order():
            self.attach()
            for _ in range(STEPS):
                for micro_step in range(self.accumulation):
                    self.micro_step(boundary=micro_step == self.accumulation - 1)
                self.step()
                if self.draw.chance("detach", 0.1):
                    detach(self.ours)
            detach(self.ours)
            self.finish("in the end")
        held = set(self.device.pinned) - {
            memory.data_ptr()
            for memory in (
                self.ours.optimizer.fp32_partitioned_groups_flat[0].grad,
                self.ours.optimizer.buffer,
            )
        }
        if held:
            raise Differs("page-locked memory is left")
        if self.status.check is not None and self.status.check.mismatch is not None:
            raise Differs(f"the self-check found {self.status.check.mismatch}")
        if self.status.why_not is not None and INJECTED not in self.status.why_not:
            raise Differs(self.status.why_not)


def gradients(seed: object, **fixed: Any) -> None:
    """One drawn loop. Raises Differs, or what our code raises."""
    with small():
        pair = Pair(seed, **fixed)
        try:
            pair.run()
        finally:
            detach(pair.ours)
            pair.device.finish()
