"""Drawn partitions on paths, DeepSpeed's own sequences and sums on the host, without an optimizer around them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autotune_offload.paths.accumulation import HostSums
from autotune_offload.paths.build import build
from autotune_offload.paths.path import GradientPath, destination_memory
from autotune_offload.paths.stock import stock_path
from autotune_offload.upstream import STOCK_SEQUENCES
from tests.race.device import INJECTED, RaceDevice
from tests.race.drawn import SIZES, Differs, Draw, small, spec


class Moves:
    """Gradients on a stream beside the default one, in memory that is used again as soon as it may be."""

    def __init__(self, seed: object, **fixed: Any) -> None:
        self.draw = Draw(seed, fixed)
        self.device = RaceDevice(seed)
        self.side = self.device.new_stream()
        self.dtype = self.draw.one("dtype", torch.bfloat16, torch.float16, torch.float32)
        self._values = torch.Generator().manual_seed(random.Random(f"values {seed}").getrandbits(32))

    def value(self, size: int) -> Tensor:
        """Of a gradient, in host memory."""
        return torch.randn(size, generator=self._values).to(self.dtype)

    def gradient(self, value: Tensor) -> Tensor:
        """The same on the device."""
        memory = self.device.empty(value.numel(), value.dtype)
        self.device.h2d(memory, value, non_blocking=True)
        return memory

    def host(self, size: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
        """Host memory."""
        with self.device.plainly():
            memory = torch.full((size,), 7.0, dtype=dtype)
        if pinned:
            self.device.pinned[memory.data_ptr()] = memory.nbytes
        return memory

    def same(self, what: str, ours: Tensor, expected: Tensor) -> None:
        """Bits."""
        word = {2: torch.int16, 4: torch.int32}[ours.element_size()]
        if not torch.equal(ours.view(word), expected.view(word)):
            raise Differs(f"{what} differs")

    # -- what is moved how --

    def path(self) -> None:
        """Passes over the same destinations, by a path that may fail."""
        drawn = spec(self.draw)
        path = build(self.device, drawn, self.dtype)
        pinned = destination_memory(drawn.path) == "pinned"
        wide = [self.host(size, torch.float32, pinned=pinned) for size in SIZES]
        lows = [self.host(size, self.dtype, pinned=pinned) for size in SIZES]
        if self.draw.chance("fail", 0.2):
            self.device.fails_in = self.draw.one("fails in", *range(30))
        try:
            for _ in range(2):
                values = [self.value(size) for size in SIZES]
                sent: list[int] = []
                with self.device.on(self.side):
                    for at, value in enumerate(values):
                        path.offload_with_norm(self.gradient(value), wide[at], lows[at])
                        sent.append(at)
                path.drain()
                for value, fp32, low in zip(values, wide, lows, strict=True):
                    self.same("fp32 gradient", fp32, value.float())
                    self.same("low precision", low, value)
        except RuntimeError as error:
            if INJECTED not in str(error):
                raise
            self.recovered(path, [(wide[at], lows[at], values[at]) for at in sent])
        self.device.fails_in = None
        path.close()

    def recovered(self, path: GradientPath, sent: list[tuple[Tensor, Tensor, Tensor]]) -> None:
        """What was sent is there in low precision, and nobody writes any more."""
        self.device.synchronize()
        path.recover()
        for fp32, low, value in sent:
            self.same("low precision", low, value)
            fp32.fill_(3.0)
        self.device.finish()
        for fp32, _, _ in sent:
            self.same("what was written after a failure", fp32, torch.full_like(fp32, 3.0))

    def stock(self) -> None:
        """DeepSpeed's own sequences."""
        sequence = self.draw.one("sequence", *STOCK_SEQUENCES)
        path = stock_path(sequence, self.device, self.dtype, max(SIZES))
        pinned = self.draw.chance("pinned", 0.5)
        wide = [self.host(size, torch.float32, pinned=pinned) for size in SIZES]
        lows = [self.host(size, self.dtype, pinned=pinned) for size in SIZES]
        for _ in range(2):
            values = [self.value(size) for size in SIZES]
            with self.device.on(self.side):
                for value, fp32, low in zip(values, wide, lows, strict=True):
                    path.offload_with_norm(self.gradient(value), fp32, low)
                path.drain()
            for value, fp32 in zip(values, wide, strict=True):
                self.same("fp32 gradient", fp32, value.float())
        path.close()

    def sums(self) -> None:
        """Gradients added to sums on the host, several to one sum without a wait in between."""
        sums = HostSums(self.device, self.dtype, page_lock=self.draw.chance("page lock", 0.8))
        lows = [self.host(size, self.dtype, pinned=False) for size in SIZES]
        expected = [low.clone() for low in lows]
        with self.device.on(self.side):
            for _ in range(3):
                for at in self.draw.one("order", (0, 1, 2), (2, 2, 0), (1, 1, 1)):
                    value = self.value(SIZES[at])
                    sums.add(self.gradient(value), lows[at])
                    expected[at] = (expected[at].float() + value.float()).to(self.dtype)
        sums.drain()
        for low, total in zip(lows, expected, strict=True):
            self.same("sum", low, total)
        sums.close()

    def host_memory(self) -> None:
        """Where device memory is host memory, host threads share a copy; the source is overwritten behind it."""
        self.device.shares_host_memory = self.device.synchronous = True
        path = build(self.device, spec(self.draw, path="direct"), self.dtype)
        for size in SIZES:
            value, with_norm = self.value(size), self.draw.chance("norm", 0.5)
            source, fp32 = value.clone(), self.host(size, torch.float32, pinned=False)
            low = self.host(size, self.dtype, pinned=False)
            offload: Callable[..., Any] = path.offload_with_norm if with_norm else path.offload
            offload(source, fp32, low)
            source.fill_(3.0)
            path.drain()
            self.same("fp32 gradient", fp32, value.float())
            self.same("low precision", low, value)
        path.close()

    def run(self) -> None:
        """One of them."""
        what = self.draw.one("what", "path", "path", "stock", "sums", "host_memory")
        with self.device.in_stream_order():
            getattr(self, what)()
            self.device.finish()
        if self.device.faults:
            raise Differs(self.device.faults[0])


def moves(seed: object, **fixed: Any) -> None:
    """Drawn partitions. Raises Differs, or what our code raises."""
    with small():
        drawn = Moves(seed, **fixed)
        try:
            drawn.run()
        finally:
            drawn.device.fails_in = None
            drawn.device.finish()
