"""Puts a gradient path into a live `DeepSpeedZeroOptimizer_Stage3`, and takes it out again.

The path replaces methods on the optimizer instance, never on the class: `partition_grads`, which moves
gradients as they are reduced, the epilogue of a backward pass, at whose end everything must be on the host, and
whatever reads or writes what a path fills, so that it waits first. A backward pass need not come to its epilogue
(it may raise, or run through another engine's module), and a partition may be met again before it does: nothing
is sent to memory for which something is still under way.

What DeepSpeed keeps beside the fp32 gradient is kept as it keeps it: the accumulation buffer holds the values in
low precision whenever the fp32 gradient holds them, and each partition has its norm (see `norms`). A path that
fails has left the values there, so that none is lost.

DeepSpeed's own code stays in charge of what a path would not do exactly: NVMe sub-groups, sub-groups
that stay on the device (`ratio` below 1), and the deferred copies of unmanaged accumulation. It also
takes over, for good, as soon as a path fails.
"""

from __future__ import annotations

import functools
import logging
import time
import weakref
from collections.abc import Sequence
from typing import Any

import msgspec
from torch import Tensor

from autotune_offload.engine import overflow
from autotune_offload.engine.delivery import Delivery
from autotune_offload.engine.passes import Passes
from autotune_offload.engine.replacement import Replacement
from autotune_offload.engine.self_check import Checks, SelfCheck
from autotune_offload.engine.stage3 import Stage3
from autotune_offload.engine.tally import By, Counter, Tally
from autotune_offload.errors import in_words
from autotune_offload.machine.device import Device
from autotune_offload.paths.accumulation import Moment
from autotune_offload.paths.path import Spec
from autotune_offload.upstream import (
    AWAY,
    DESTROY,
    EPILOGUE,
    FINALIZE,
    NORMS,
    OVERFLOW,
    PARTITION,
    READERS,
    STEP_BEGINS,
)

_KEPT_TIMES = 100

_log = logging.getLogger("autotune_offload")


class Status(msgspec.Struct, kw_only=True):
    """What an attached path has done so far. Times are host seconds in one backward pass.

    Every value is put in place as a whole and never changed afterwards, so that another thread may read and copy it.
    """

    why_not: str | None = None
    """Why DeepSpeed's own code runs: from the start, or since the path has failed."""
    ended: str | None = None
    """Why the path carries nothing any more though it has not failed: it was detached, or the engine destroyed."""
    replaced: tuple[str, ...] = ()
    """Methods that somebody else has put in place of ours since: what they do with gradients is not known here."""
    check: SelfCheck | None = None
    """None until a backward pass that ends an accumulation has been compared; grows with each new kind of pass."""
    tally: Tally = Tally()
    """Who carried how many partitions and bytes, now and since the start."""
    backward_seconds: tuple[float, ...] = ()
    """The latest hundred, without the passes in which DeepSpeed's own code ran, for comparison or for its time."""
    stock_backward_seconds: tuple[float, ...] = ()
    """The same of DeepSpeed's own code, in the one accumulation after the self-check that was left to it."""
    link_bytes: int = 0
    """Moved between device and host for the gradients that came to the path, by it or, where DeepSpeed takes them on to
    fp32 later, by both; 0 where they share memory. Values of gradients alone: no norms."""
    stock_link_bytes: int = 0
    """What DeepSpeed's own code would have moved for the same gradients."""
    left_to_deepspeed: int = 0
    """Partitions that DeepSpeed's own code carried because the path does not do them exactly."""


class Attachment:
    """One optimizer with one path in it."""

    def __init__(self, engine: Any, choice: Spec, device: Device, *, check: bool) -> None:
        """Builds the path for the dtype that gradients accumulate in; replaces nothing yet.

        Raises what `paths.build` does.
        """
        self.status = Status()
        self.device = device
        self.stage3 = Stage3(engine.optimizer)
        self._engine = weakref.ref(engine)
        self._choice = choice
        self._methods = Replacement(engine.optimizer)
        self._delivery = Delivery(self.stage3, device, choice, self._path_failed)
        self._passes = Passes()
        self._counter = Counter()
        self._checks = Checks(self) if check else None
        self._times_stock = False
        self._seconds = 0.0

    @property
    def active(self) -> bool:
        """Whether the path carries gradients: from `replace_methods` until `remove`."""
        return self._methods.active

    def replace_methods(self) -> None:
        """Put the path in charge."""
        readers = (NORMS, STEP_BEGINS, AWAY, *READERS)
        self._methods.put(
            {
                PARTITION: self._partition_grads,
                EPILOGUE: self._epilogue,
                DESTROY: self._destroy,
                **{name: functools.partial(self._read, name) for name in readers},
            }
        )

    def look(self) -> None:
        """Note in the status who is called now; from any thread."""
        replaced = self._methods.replaced(PARTITION, EPILOGUE)
        if self.active:
            self.status.replaced = replaced

    def _publish(self) -> None:
        tally = self._counter.changed()
        if tally is not None:
            self.status.tally = tally

    @property
    def pinned_bytes(self) -> dict[str, int]:
        """What is page-locked for the path now, by what it is for."""
        return self._delivery.pinned_bytes if self.active else {}

    def remove(self, why: str) -> bool:
        """Put DeepSpeed's methods back, finish what is under way, and give the buffers back.

        A method that somebody has wrapped since stays, and does what DeepSpeed's own does. False where
        all this has been done before.
        """
        if not self.active:
            return False
        self.look()
        self._publish()
        self._methods.take_out()
        self._delivery.end()
        self._checks = None
        self.status.ended = why if self.status.why_not is None else None
        return True

    def give_up(self, cause: str) -> None:
        """Hand over to DeepSpeed's own code for good, and say so once."""
        if not self.active:
            return
        self.status.why_not = cause
        _log.warning("autotune-offload: %s; from here on DeepSpeed's own code carries the gradients", cause)
        self.remove(cause)

    def _path_failed(self, error: BaseException) -> None:
        self.give_up(f"the {self._choice.path} path failed ({in_words(error)})")

    def mismatch(self, found: str, result: SelfCheck) -> None:
        """The self-check found a difference."""
        self.status.check = result
        self.give_up(f"the self-check failed: {found}")

    # -- what DeepSpeed calls --

    def _partition_grads(
        self, params_to_release: Sequence[Any], grad_partitions: Sequence[Tensor]
    ) -> list[Tensor]:
        """Same arguments, result and effects as `DeepSpeedZeroOptimizer_Stage3.partition_grads`."""
        if not self.active:
            return list(self._methods.former(PARTITION)(params_to_release, grad_partitions))
        began = time.perf_counter()
        moment = Moment(self.stage3.at_first, self.stage3.at_boundary)
        if self._times_stock:
            for param, gradient in zip(params_to_release, grad_partitions, strict=False):
                self.count("deepspeed", param, gradient, moment)
            buffers = self.stock(params_to_release, grad_partitions)
        else:
            buffers = []
            for param, gradient in zip(params_to_release, grad_partitions, strict=False):
                buffers += self._one(param, gradient, moment)
        self._publish()
        self._seconds += time.perf_counter() - began
        return buffers

    def _one(self, param: Any, gradient: Tensor, moment: Moment) -> list[Tensor]:
        if not self.active:
            return self.leave(param, gradient)
        if not self.stage3.holds_data(param):
            param.grad = None
            return []
        if self._checks is None:
            return self.move(param, gradient, moment)
        kind = self._passes.kind(self._engine(), param, moment)
        self._passes.met(param, moment)
        return self._checks.compare(param, gradient, moment, kind)

    def _epilogue(self) -> None:
        """DeepSpeed's own epilogue, then what the path still holds."""
        self._methods.former(EPILOGUE)()
        if not self.active:
            return
        began = time.perf_counter()
        self.drain()
        self._passes.passed()
        seconds, self._seconds = self._seconds + time.perf_counter() - began, 0.0
        self._passed(seconds)

    def _passed(self, seconds: float) -> None:
        """One backward pass: first until the self-check is made, then one accumulation of DeepSpeed's, then ours."""
        boundary = self.stage3.at_boundary
        if self._times_stock:
            self.status.stock_backward_seconds += (seconds,)
            self._times_stock = not boundary
            return
        first = self._checks is not None and self.status.check is None
        compared = self._checks is not None and boundary and self._checks.end_of_accumulation()
        if self._checks is not None and (compared or (first and boundary)):
            self.status.check = self._checks.result()
            self._times_stock = first
        elif not first:
            self.status.backward_seconds = (*self.status.backward_seconds, seconds)[-_KEPT_TIMES:]

    def _destroy(self) -> None:
        self.remove("the engine was destroyed")
        self._methods.former(DESTROY)()

    def _read(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """What reads or writes that which a path fills: everything has arrived before it does."""
        if self.active:
            self.drain()
            if name == NORMS:
                self._delivery.norms.make_exact_where_it_shows(*args, **kwargs)
            elif name == STEP_BEGINS:
                self._passes.stepped()
                self._counter.stepped()
                self._publish()
                self.look()
            elif name == FINALIZE:
                self._count_deferred()
            elif name == AWAY:
                self._delivery.norms.make_all_exact()
            elif name == OVERFLOW:
                former = self._methods.former(name)
                return overflow.by_extremes(self.stage3.optimizer, former, *args, **kwargs)
        return self._methods.former(name)(*args, **kwargs)

    # -- one partition --

    def move(self, param: Any, gradient: Tensor, moment: Moment) -> list[Tensor]:
        """All that is done with one partition; DeepSpeed's buffer view."""
        buffers = self.carry(param, gradient, moment)
        if param.grad is not None:  # its memory may be used again only after this stream's work
            self.device.record_stream(param.grad)
        param.grad = None
        return buffers

    def carry(self, param: Any, gradient: Tensor, moment: Moment, by: By = "path") -> list[Tensor]:
        """Accumulate one partition's gradient, and at the boundary offload it; DeepSpeed's buffer view."""
        destination = self.stage3.destination(param, gradient)
        if destination is None:
            return self.leave(param, gradient)
        self._delivery.settle(param)
        if not self.active:
            return self.leave(param, gradient)
        low, gradient = self.stage3.buffer(param, gradient), gradient.contiguous().view(-1)
        goal = destination if moment.boundary else None
        try:
            send = self._delivery.prepare(param, gradient, low, goal, moment)
        except Exception as error:  # nothing of DeepSpeed's has been changed so far
            self._path_failed(error)
            return self.leave(param, gradient)
        self.stage3.saw(param)
        send()
        self._sent(by, gradient, low, moment)
        return [low]

    def _sent(self, by: By, gradient: Tensor, low: Tensor, moment: Moment) -> None:
        """Count one partition that our code has carried, or delivered plainly when the path failed."""
        self._counter.add(by if self.active else "path", low.nbytes, to_fp32=moment.boundary)
        if self.active:
            self._count_link(gradient, low, moment)

    def carry_piece(self, param: Any, gradient: Tensor, moment: Moment, piece: slice) -> bool:
        """The same of a piece, as if there were no more of it, and its norm; there when this returns, or False."""
        destination = self.stage3.destination(param, gradient)
        assert destination is not None
        self._delivery.settle(param)
        low = self.stage3.buffer(param, gradient)[piece]
        values, goal = gradient.contiguous().view(-1)[piece], destination[piece]
        try:
            send = self._delivery.prepare(param, values, low, goal, moment)
            send()
            self.drain()
        except Exception as error:
            self._path_failed(error)
        if self.active:
            self._count_link(values, low, moment)
        return self.active

    def count(self, by: By, param: Any, gradient: Tensor, moment: Moment) -> None:
        """One partition was moved, if it holds any data."""
        if self.stage3.holds_data(param):
            itemsize = self.stage3.optimizer.gradient_accumulation_dtype.itemsize
            self._counter.add(by, gradient.numel() * itemsize, to_fp32=moment.boundary)

    def _count_deferred(self) -> None:
        """What unmanaged accumulation has summed, and DeepSpeed's own code takes to fp32 at the step."""
        for low in self.stage3.deferred:
            self._counter.add("deepspeed", low.nbytes, to_fp32=True)
            if not self.device.shares_host_memory:
                taken = low.nbytes + 4 * low.numel()
                self.status.link_bytes += taken
                self.status.stock_link_bytes += taken
        self._publish()

    def _count_link(self, gradient: Tensor, low: Tensor, moment: Moment) -> None:
        if not self.device.shares_host_memory:
            self.status.link_bytes += self._delivery.link_bytes(gradient, low, moment)
            self.status.stock_link_bytes += 2 * low.nbytes + (4 * low.numel() if moment.boundary else 0)

    def leave(self, param: Any, gradient: Tensor) -> list[Tensor]:
        """One partition by DeepSpeed's own code, counted as left to it."""
        self.status.left_to_deepspeed += self.stage3.holds_data(param)
        self.count("deepspeed", param, gradient, Moment(self.stage3.at_first, self.stage3.at_boundary))
        return self.stock([param], [gradient])

    def stock(self, params: Sequence[Any], gradients: Sequence[Tensor]) -> list[Tensor]:
        """Partitions by DeepSpeed's own code."""
        for param in params if self.active else ():
            self._delivery.settle(param)
            if not self.stage3.at_boundary:
                self._delivery.norms.make_exact(param)
        moved: list[Tensor] = self._methods.former(PARTITION)(params, gradients)
        return moved

    def drain(self) -> None:
        """Return when every gradient is where it belongs."""
        self._delivery.drain()
