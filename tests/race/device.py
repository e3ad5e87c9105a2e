"""A device whose schedule is drawn: when each queued operation runs, which host thread is next, who gets freed memory.

It extends `tests.fakes.DeferredDevice`, whose queues it keeps: work runs in the order of its stream and after the
events that this stream waits for, and the host knows that it has run only when it has waited. In between a draw
decides, from a seed, so that a schedule that fails is had again. Device memory is `tests.race.memory`'s, host threads
are `tests.race.host_threads`'. A copy reads and writes host memory when it runs, if that is page-locked; otherwise it
is as on CUDA: to pageable memory it has been done when the call returns, from there the values have been taken by then.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from autotune_offload.machine import adam
from tests.fakes import DeferredDevice, DeferredEvent, DeferredStream
from tests.race.host_threads import DrawnThreads
from tests.race.memory import Memory, Pages

EAGERNESS = (0.0, 0.1, 0.3, 0.6, 0.9)
"""How likely one more operation runs at each call: nothing until it is waited for, up to nearly everything at once."""

_aten = torch.ops.aten


INJECTED = "bus error"
"""What the device raises, a RuntimeError, where a test wants it to."""


def _by_a_path() -> bool:
    """Whether it is code of a path that calls; what DeepSpeed's own code calls does not fail without us either."""
    frame: Any = sys._getframe(2)
    while frame.f_globals["__name__"].startswith(("tests.race", "tests.fakes", "contextlib", "torch.utils")):
        frame = frame.f_back
    return bool(frame.f_globals["__name__"].startswith("autotune_offload.paths"))


class RaceDevice(DeferredDevice):
    """See the module.

    Args:
        seed: of the schedule.

    `fails_in` is the number of calls by a path until one of them raises `fails_with`, once; None is never. `faults`
    says what was done wrong.
    """

    def __init__(self, seed: object) -> None:
        super().__init__()
        self.draw = random.Random(f"schedule {seed}")
        self._eagerness, self._idleness = self.draw.choice(EAGERNESS), self.draw.choice(EAGERNESS)
        self.memory, self.pages = Memory(self.draw, self.lock), Pages()
        self.fails_in: int | None = None
        self.fails_with: BaseException = RuntimeError(INJECTED)
        self._threads: list[DrawnThreads] = []
        self._inside = threading.local()

    @property
    def faults(self) -> list[str]:
        """In words."""
        return self.pages.faults

    # -- time --

    def tick(self) -> None:
        """The device and the host threads go on for a while, as drawn."""
        task = getattr(self._inside, "task", None)
        while self.draw.random() < self._eagerness:
            ready: list[Any] = [stream for stream in self.streams if stream.queue]
            if task is None:
                ready += [one for threads in self._threads for one in threads.candidates()]
            if not ready:
                break
            chosen = self.draw.choice(ready)
            if isinstance(chosen, DeferredStream):
                with self.plainly():
                    chosen.run_to(chosen.done + 1)
            else:
                chosen.go_on()
        if task is not None and self.draw.random() < self._idleness:
            task.stand()

    def call(self) -> None:
        """What every call begins with."""
        on_main = getattr(self._inside, "task", None) is None
        if self.fails_in is not None and _by_a_path() and (on_main or isinstance(self.fails_with, Exception)):
            self.fails_in -= 1
            if self.fails_in < 0:
                self.fails_in = None
                raise self.fails_with
        self.tick()

    def now(self) -> float:
        """Drawn as well, so that paths take turns as in no two runs."""
        self._now = getattr(self, "_now", 0.0) + self.draw.random()
        return self._now

    def own_threads(self, count: int) -> Executor:
        """Drawn ones."""
        self._threads.append(DrawnThreads(count, self.tick, self._inside))
        return self._threads[-1]

    # -- memory --

    def empty(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Of the current stream."""
        self.log.append(("empty", elements))
        with self.plainly():
            return self.memory.allocate(elements, dtype, self.current)

    def norm_memory(self) -> Tensor:
        """Of the current stream, too."""
        with self.plainly():
            return self.memory.allocate(1, torch.float64, self.current).view(())

    def operand(self, tensor: Tensor) -> Tensor:
        """By address."""
        with self.plainly():
            return self.memory.alias(tensor)

    def record_stream(self, tensor: Tensor) -> None:
        """See `tests.race.memory`."""
        self.memory.used_on(tensor, self.current)

    def release_pinned(self, pinned: Tensor) -> None:
        """Overwritten at once."""
        super().release_pinned(pinned)
        with self.plainly():
            self.pages.give_back(pinned)

    # -- work --

    def _queue(self, call: str, work: Callable[[], object], *, blocking: bool = False) -> None:
        with self.plainly():
            super()._queue(call, work, blocking=blocking)
        self.tick()

    def _queue_copy(self, call: str, destination: Tensor, source: Tensor, *, blocking: bool = False) -> None:
        self.call()
        with self.plainly():
            host = {"d2h": destination, "h2d": source}.get(call)
            if call == "h2d" and not self.is_pinned(source):
                source = source.clone()
            to, of = self.operand(destination), self.operand(source)
            work: Callable[[], object] = lambda: to.copy_(of)  # noqa: E731
            if host is not None and self.is_pinned(host):
                work = self.pages.during(work, host)
        self._queue(call, work, blocking=blocking)

    def h2d(self, destination: Tensor, source: Tensor, *, non_blocking: bool = False) -> None:
        """From pageable memory the values are taken at once, and arrive later."""
        self._queue_copy("h2d", destination, source, blocking=not non_blocking)

    def h2h(self, destination: Tensor, source: Tensor) -> None:
        """In the host's own time."""
        self._by_halves(super().h2h, destination, source)

    def host_add(self, total: Tensor, addend: Tensor) -> None:
        """The same."""
        self._by_halves(super().host_add, total, addend)

    def widen(self, destination: Tensor, source: Tensor, kept: Tensor | None = None) -> float:
        """The same."""
        places = [destination, source] if kept is None else [destination, source, kept]
        return float(sum(self._by_halves(super().widen, *places)))

    def _by_halves(self, work: Callable[..., Any], *places: Tensor) -> list[Any]:
        """What a host thread does takes so long that others come in the middle of it, and at its end."""
        self.call()
        half, found = places[0].numel() // 2, []
        for part in (slice(0, half), slice(half, None)):
            with self.plainly():
                found.append(work(*(place[part] for place in places)))
            self.tick()
        return found

    def optimizer_pass(self, *args: Any) -> adam.Piece:
        """Each piece in a thread that may be left before and behind it."""
        piece = super().optimizer_pass(*args)

        def drawn(*where: Any) -> None:
            self.call()
            with self.plainly():
                piece(*where)
            self.tick()

        return drawn

    def finish(self) -> None:
        """Whatever was begun comes to its end."""
        for threads in self._threads:
            threads.shutdown()
        self.synchronize()

    # -- order --

    def new_stream(self) -> DeferredStream:
        """One more, whose waits let others go on."""
        self.streams.append(RaceStream(self, f"stream {len(self.streams)}"))
        return self.streams[-1]

    def record_event(self) -> DeferredEvent:
        """Behind what is queued."""
        self.call()
        return RaceEvent(super().record_event().stream)

    def synchronize(self) -> None:
        """Everything that is queued."""
        self.tick()
        with self.plainly():
            super().synchronize()

    def synchronize_stream(self) -> None:
        """What the current stream has."""
        self.tick()
        with self.plainly():
            super().synchronize_stream()

    # -- plain torch --

    @contextlib.contextmanager
    def plainly(self) -> Iterator[None]:
        """Torch's operations inside are the host's own."""
        before, self._inside.plainly = getattr(self._inside, "plainly", False), True
        try:
            yield
        finally:
            self._inside.plainly = before

    @contextlib.contextmanager
    def in_stream_order(self) -> Iterator[None]:
        """Torch's own operations on device memory are queued inside, as those of an accelerator's tensors are."""
        with _Queued(self):
            yield

    def operation(self, function: Any, args: Any, kwargs: Any) -> Any:
        """One of torch's, where device memory takes part."""
        returns, name = function._schema.returns, function._schema.name
        if any(one.alias_info is not None and not one.alias_info.is_write for one in returns):
            return function(*args, **kwargs)  # a view
        if function is _aten.copy_.default and not (self.memory.has(args[0]) and self.memory.has(args[1])):
            copy = self.h2d if self.memory.has(args[0]) else self.d2h
            copy(args[0], args[1], non_blocking=len(args) > 2 and bool(args[2]))
            return args[0]
        changed = [
            value for spec, value in zip(function._schema.arguments, args, strict=False)
            if spec.alias_info is not None and spec.alias_info.is_write
        ]  # fmt: skip
        results_on_host = not returns or not isinstance(returns[0].type, torch.TensorType)
        if results_on_host or any(not self.memory.has(value) for value in changed):
            self.current.synchronize()
            return function(*args, **kwargs)
        raw_args, raw_kwargs = tree_map(self._taken, (args, kwargs))
        if changed:
            self._queue(name, lambda: function(*raw_args, **raw_kwargs))
            return changed[0]
        shaped = function(*args, **kwargs)
        result = self.memory.allocate(shaped.numel(), shaped.dtype, self.current).view(shaped.shape)
        to = self.operand(result)
        self._queue(name, lambda: to.copy_(function(*raw_args, **raw_kwargs)))
        return result

    def _taken(self, value: Any) -> Any:
        """An argument of queued work: device memory by address, the host's by value."""
        if not isinstance(value, Tensor):
            return value
        return self.operand(value) if self.memory.has(value) else value.clone()

    def is_plain(self) -> bool:
        """Whether the calling thread is inside `plainly`."""
        return bool(getattr(self._inside, "plainly", False))


class RaceStream(DeferredStream):
    """A stream whose waits let others go on first."""

    def synchronize(self) -> None:
        """What it has."""
        device: Any = self.device
        device.tick()
        with device.plainly():
            super().synchronize()


class RaceEvent(DeferredEvent):
    """An event, likewise."""

    def synchronize(self) -> None:
        """What was before it."""
        device: Any = self.stream.device
        device.call()
        with device.plainly():
            super().synchronize()


class _Queued(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class is untyped
    """Torch's operations of one thread."""

    def __init__(self, device: RaceDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = self._device
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if device.is_plain() or not any(device.memory.has(tensor) for tensor in tensors):
            return func(*args, **kwargs)
        return device.operation(func, args, kwargs)
