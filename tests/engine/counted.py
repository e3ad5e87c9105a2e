"""The loops of `tests.engine.loops` with spies on copies, pins and who moves what: the report tells the same.

The spies know nothing of the report's counters. They sit where the work is done: on DeepSpeed's own methods, on the
paths, on the copies of the test's device, and on every page-locked block until its memory goes.

    python -m tests.engine.counted --examples 300

Exits 1 and prints the loop when a count differs; with --shrink the shortest one, which takes minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from torch import Tensor

from autotune_offload.api.page_locked import page_locked
from autotune_offload.engine.attach import status
from autotune_offload.engine.norms import Norms
from autotune_offload.engine.tally import Carried
from autotune_offload.paths.accumulation import Accumulation, HostSums
from autotune_offload.paths.destination import DestinationPath
from autotune_offload.paths.path import GradientPath
from autotune_offload.paths.ring import StagedPath
from autotune_offload.testing import FakeAccelerator
from autotune_offload.upstream import PARTITION
from tests.engine.loops import DTYPES, OFFERED, LateDevice, Loops, World, config, experts, run


class Pins:
    """Which memory is page-locked now, by what was locked and not given back."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int, int]] = {}
        self._made = 0

    def lock(self, tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        """A copy that counts as page-locked until its memory goes."""
        copy = tensor.clone()
        self._made += 1
        self.blocks[self._made] = (copy.data_ptr(), copy.nbytes)
        weakref.finalize(copy.untyped_storage(), self.blocks.pop, self._made, None)
        return copy

    def unlock(self, tensor: Tensor) -> None:
        """Given back, whoever still refers to it: the test's device remembers every copy."""
        for key in [key for key, (begin, _) in self.blocks.items() if begin == tensor.data_ptr()]:
            del self.blocks[key]

    def has(self, tensor: Tensor, *_: Any) -> bool:
        """Whether it lies in one of them."""
        at = tensor.data_ptr()
        return any(begin <= at < begin + size for begin, size in self.blocks.values())

    @property
    def bytes(self) -> int:
        """Of all of them."""
        return sum(size for _, size in self.blocks.values())


class Spies:
    """What was really done to the gradients of optimizers that have a path in them."""

    def __init__(self) -> None:
        self.path: list[tuple[int, bool]] = []
        self.stock: list[tuple[int, bool]] = []
        """Bytes of each partition, and whether it went to fp32."""
        self.crossed = 0
        self.pins = Pins()
        self._to_fp32: list[int] | None = None
        self._norms = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Everything that is done inside is seen."""
        from deepspeed.accelerator import get_accelerator
        from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Stage3

        with contextlib.ExitStack() as stack:

            def put(owner: Any, name: str, wrapped: Callable[[Any], Any]) -> None:
                stack.enter_context(mock.patch.object(owner, name, wrapped(getattr(owner, name))))

            put(Stage3, PARTITION, self._stock)
            put(Stage3, "_offload_grad_partition_at_boundary", self._stock_to_fp32)
            for path in (DestinationPath, StagedPath):
                put(path, "offload_with_norm", self._offloaded)
            put(Accumulation, "keep", self._kept)
            put(HostSums, "add", self._added)
            put(Norms, "_compute", self._without_norms)
            for name in ("d2h", "h2d"):
                put(LateDevice, name, self._copied)
            put(
                type(get_accelerator()),
                "pin_memory",
                lambda _: lambda _, *args, **more: self.pins.lock(*args),
            )
            put(FakeAccelerator, "pin_memory", lambda _: lambda _, tensor: self.pins.lock(tensor))
            put(FakeAccelerator, "unpin_memory", lambda _: lambda _, tensor: self.pins.unlock(tensor))
            put(FakeAccelerator, "is_pinned", lambda _: lambda _, tensor: self.pins.has(tensor))
            put(torch.Tensor, "is_pinned", lambda _: lambda tensor, *_: self.pins.has(tensor))
            yield

    # -- DeepSpeed's own code --

    def _stock(self, right: Callable[..., Any]) -> Callable[..., Any]:
        def partition_grads(z: Any, params: Any, gradients: Any) -> Any:
            if PARTITION not in vars(z):
                return right(z, params, gradients)
            self._to_fp32, before = [], self._to_fp32
            try:
                buffers = right(z, params, gradients)
                sizes = [buffer.nbytes for buffer in buffers]
                for size in self._to_fp32:
                    sizes.remove(size)
                    self.stock.append((size, True))
                self.stock += [(size, False) for size in sizes]
            finally:
                self._to_fp32 = before
            return buffers

        return partition_grads

    def _stock_to_fp32(self, right: Callable[..., Any]) -> Callable[..., Any]:
        def offload(z: Any, param: Any, low: Tensor, *more: Any) -> Any:
            if self._to_fp32 is not None:
                self._to_fp32.append(low.nbytes)
            elif PARTITION in vars(z):  # at the step: from the buffer and to fp32
                self.stock.append((low.nbytes, True))
                if self.late:
                    self.crossed += low.nbytes + 4 * low.numel()
            return right(z, param, low, *more)

        return offload

    late = False

    # -- ours --

    def _offloaded(self, right: Callable[..., Any]) -> Callable[..., Any]:
        def offload(path: GradientPath, source: Tensor, destination: Tensor, low: Tensor) -> Any:
            self.path.append((low.nbytes, True))
            return right(path, source, destination, low)

        return offload

    def _kept(self, right: Callable[..., Any]) -> Callable[..., Any]:
        def keep(accumulation: Accumulation, value: Tensor, low: Tensor) -> Any:
            self.path.append((low.nbytes, False))
            return right(accumulation, value, low)

        return keep

    def _added(self, right: Callable[..., Any]) -> Callable[..., Any]:
        def add(
            sums: HostSums, gradient: Tensor, low: Tensor, destination: Any = None, key: Any = None
        ) -> Any:
            self.path.append((low.nbytes, destination is not None))
            return right(sums, gradient, low, destination, key)

        return add

    def _copied(self, right: Callable[..., Any]) -> Callable[..., Any]:
        def copy(device: Any, destination: Tensor, source: Tensor, **more: Any) -> Any:
            if not self._norms and source.dtype != torch.float64:
                self.crossed += source.nbytes
            return right(device, destination, source, **more)

        return copy

    def _without_norms(self, right: Callable[..., Any]) -> Callable[..., Any]:
        def compute(norms: Norms, key: int) -> Any:
            self._norms = True
            try:
                return right(norms, key)
            finally:
                self._norms = False

        return compute


def told(carried: list[Carried]) -> tuple[int, int, int, int]:
    """The numbers of several reports together."""
    return (
        sum(of.partitions for of in carried),
        sum(of.bytes for of in carried),
        sum(of.summed_partitions for of in carried),
        sum(of.summed_bytes for of in carried),
    )


def seen(moved: list[tuple[int, bool]]) -> tuple[int, int, int, int]:
    """The same numbers of what a spy saw."""
    wide, low = ([size for size, to_fp32 in moved if to_fp32 is kind] for kind in (True, False))
    return len(wide), sum(wide), len(low), sum(low)


class Counted(Loops):
    """One loop, in a world whose engines may accumulate unmanaged and pin what they like."""

    def __init__(self) -> None:
        super().__init__()
        self.spies = Spies()
        self.folders.enter_context(self.spies.watching())

    @initialize(
        spec=st.sampled_from(OFFERED),
        check=st.booleans(),
        dtype=st.sampled_from(sorted(DTYPES)),
        accumulation=st.sampled_from([1, 1, 2, 3]),
        bucket=st.sampled_from([10, 300]),
        offload_param=st.booleans(),
        pins=st.booleans(),
        managed=st.sampled_from([False, True]),
    )
    def begin(self, spec: str, check: bool, dtype: str, accumulation: int, bucket: int, offload_param: bool,
              pins: bool, managed: bool) -> None:  # fmt: skip
        """The same weights twice."""
        wanted = config(dtype, accumulation, bucket, 0.05, offload_param, managed)
        for name in ("offload_optimizer", "offload_param"):
            if name in wanted["zero_optimization"]:
                wanted["zero_optimization"][name]["pin_memory"] = pins
        self.offload_param = offload_param
        self.spies.late = spec.startswith("late")
        self.worlds = [World(None, check, dtype, wanted), World(spec, check, dtype, wanted)]

    @rule(experts=experts, steps=st.integers(1, 3), more=st.integers(0, 2))
    def train(self, experts: tuple[int, ...], steps: int, more: int) -> None:
        """As a user does it: here most of the gradients come from."""
        for _ in range(steps):
            for _ in range(1 + more):
                self.batch("none", 1.0, experts=experts, fails=-1, through=0, twice=False, forwards=1)
            self.both(lambda world: world.main.step())
        self.counts()

    @rule()
    def look(self) -> None:
        """Anywhere, also in the middle of an accumulation."""
        self.counts()

    def compare(self) -> None:
        """What a user can see is the same, and what is told of it is so."""
        super().compare()
        self.counts()

    def counts(self) -> None:
        """Raises AssertionError where the report does not tell what was seen."""
        spies, statuses = self.spies, self.worlds[1].statuses
        for engine in self.worlds[1].engines:
            status(engine)
        start = [each.tally.since_start for each in statuses]
        both = [shares.compared for shares in start]
        assert told([*(s.path for s in start), *both]) == seen(spies.path), "by the path"
        assert told([*(s.deepspeed for s in start), *both]) == seen(spies.stock), "by DeepSpeed"
        if spies.late:
            assert sum(each.link_bytes for each in statuses) == spies.crossed, "over the link"
        pinned = sum(sum(page_locked(engine).values()) for world in self.worlds for engine in world.engines)
        assert pinned == spies.pins.bytes, "page-locked"


def main(arguments: list[str]) -> int:
    """Run so many loops; 1 where a count differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=5)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--shrink", action="store_true")
    given = parser.parse_args(arguments)
    return run(Counted, given.examples, given.steps, given.seed, shrinks=given.shrink)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
