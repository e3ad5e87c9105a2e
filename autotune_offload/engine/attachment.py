"""Puts a gradient path into a live `DeepSpeedZeroOptimizer_Stage3`, and takes it out again.

The path replaces two methods on the optimizer instance, never on the class: `partition_grads`, which
moves gradients as they are reduced, and the epilogue of a backward pass, at whose end everything must
be on the host. What DeepSpeed keeps beside the fp32 gradient (the low-precision accumulation buffer,
the norm of each partition) is kept as it keeps it, except where nothing reads it.

DeepSpeed's own code stays in charge of what a path would not do exactly: NVMe sub-groups, sub-groups
that stay on the device (`ratio` below 1), and the deferred copies of unmanaged accumulation. It also
takes over, for good, as soon as a path fails.
"""

from __future__ import annotations

import functools
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from autotune_offload.engine import stage3
from autotune_offload.engine.self_check import Checks, SelfCheck
from autotune_offload.engine.stage3 import Stage3
from autotune_offload.errors import DeviceError, in_words
from autotune_offload.machine import host_pass
from autotune_offload.machine.device import Device
from autotune_offload.paths.accumulation import Accumulation, HostSums, Moment
from autotune_offload.paths.build import build
from autotune_offload.paths.path import GradientPath, Spec, moved_bytes, page_locks
from autotune_offload.upstream import DESTROY, EPILOGUE, PARTITION, SETTERS

_KEPT_TIMES = 100

_log = logging.getLogger("autotune_offload")


class Status(msgspec.Struct, kw_only=True):
    """What an attached path has done so far. Times are host seconds in one backward pass."""

    why_not: str | None = None
    """Why DeepSpeed's own code runs: from the start, or since the path was taken out."""
    check: SelfCheck | None = None
    """None until a backward pass that ends an accumulation has been compared."""
    backward_seconds: deque[float] = msgspec.field(default_factory=lambda: deque(maxlen=_KEPT_TIMES))
    """Without the passes in which DeepSpeed's own code ran, for comparison or for its time."""
    stock_backward_seconds: list[float] = msgspec.field(default_factory=list)
    """The same of DeepSpeed's own code, in the one accumulation after the self-check that was left to it."""
    link_bytes: int = 0
    """Moved between device and host for the gradients that the path carried; 0 where they share memory."""
    stock_link_bytes: int = 0
    """What DeepSpeed's own code would have moved for the same gradients."""
    left_to_deepspeed: int = 0
    """Partitions that DeepSpeed's own code carried because the path does not do them exactly."""


class _Undrained(msgspec.Struct):
    """A partition that a path was given and may not have delivered yet."""

    ds_id: int
    destination: Tensor
    source: Tensor | None
    """None as soon as later device work may overwrite it."""


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
        self._stock: dict[str, Callable[..., Any]] = {}
        self._ours: dict[str, Callable[..., Any]] = {}
        self._before: dict[str, Any] = {}
        self._paths: dict[torch.dtype, GradientPath] = {}
        self._accumulation = Accumulation(
            device, getattr(choice, "accumulate", "device"), page_lock=page_locks(choice.path)
        )
        self._undrained: list[_Undrained] = []
        self._norms: dict[int, float] = {}
        self._stale: dict[int, Tensor] = {}
        self._checks = Checks(self) if check else None
        self._times_stock = False
        self._failed = False
        self._epilogue_ran = False
        self._seconds = 0.0
        dtype: torch.dtype = engine.optimizer.gradient_accumulation_dtype
        if device.shares_host_memory or self._accumulation.place == "host":
            host_pass.why_not_fused(dtype)  # compiles it, if need be
        self._path(dtype)

    @property
    def active(self) -> bool:
        """Whether the path carries gradients: from `replace_methods` until `remove`."""
        return bool(self._ours)

    def replace_methods(self) -> None:
        """Put the path in charge."""
        optimizer = self.stage3.optimizer
        replacements: dict[str, Callable[..., Any]] = {
            PARTITION: self._partition_grads,
            EPILOGUE: self._epilogue,
            DESTROY: self._destroy,
            **{name: functools.partial(self._set_gradient, name) for name in SETTERS},
        }
        self._ours = {name: own for name, own in replacements.items() if hasattr(optimizer, name)}
        self._stock = {name: getattr(optimizer, name) for name in self._ours}
        self._before = {name: own for name, own in vars(optimizer).items() if name in self._ours}
        vars(optimizer).update(self._ours)

    def remove(self) -> bool:
        """Put DeepSpeed's methods back, finish what is under way, and give the buffers back.

        A method that somebody has wrapped since stays, and does what DeepSpeed's own does. False where
        all this has been done before.

        Raises:
            DeviceError: a gradient is lost, see `_recover`.
        """
        if not self.active:
            return False
        ours, self._ours = self._ours, {}
        own = vars(self.stage3.optimizer)
        for name in [name for name, method in ours.items() if own.get(name) is method]:
            del own[name]
            own.update({name: self._before[name]} if name in self._before else {})
        self.drain()
        self._close_paths()
        if self._failed:
            self._recover()
        if self._window_open():
            self.freshen()
        close_quietly(self._accumulation)
        self._stale.clear()
        self._checks = None
        return True

    def _close_paths(self) -> None:
        for path in self._paths.values():
            close_quietly(path)
        self._paths.clear()

    def give_up(self, cause: str) -> None:
        """Hand over to DeepSpeed's own code for good, and say so once."""
        if not self.active:
            return
        self.status.why_not = cause
        _log.warning("autotune-offload: %s; from here on DeepSpeed's own code carries the gradients", cause)
        self.remove()

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
            return list(self._stock[PARTITION](params_to_release, grad_partitions))
        if self._times_stock:
            return self._stock_timed(params_to_release, grad_partitions)
        began = time.perf_counter()
        for undrained in self._undrained:  # a bucket's memory has been filled anew
            undrained.source = None
        moment = self._moment()
        buffers: list[Tensor] = []
        for param, gradient in zip(params_to_release, grad_partitions, strict=False):
            if not self.active:
                buffers += self.leave(param, gradient)
            elif not self.stage3.holds_data(param):
                param.grad = None
            elif self._checks is not None:
                buffers += self._checks.compare(param, gradient, moment)
            else:
                buffers += self.move(param, gradient, moment)
        self._seconds += time.perf_counter() - began
        return buffers

    def _stock_timed(self, params: Sequence[Any], gradients: Sequence[Tensor]) -> list[Tensor]:
        """DeepSpeed's own code for all of them, so that its time is known beside ours."""
        self._moment()
        self.freshen()
        began = time.perf_counter()
        buffers = list(self._stock[PARTITION](params, gradients))
        self._seconds += time.perf_counter() - began
        return buffers

    def _epilogue(self) -> None:
        """DeepSpeed's own epilogue, then what the path still holds."""
        self._stock[EPILOGUE]()
        if not self.active:
            return
        began = time.perf_counter()
        self.drain()
        self._epilogue_ran = True
        seconds, self._seconds = self._seconds + time.perf_counter() - began, 0.0
        self._passed(seconds)

    def _passed(self, seconds: float) -> None:
        """One backward pass: first until the self-check is made, then one accumulation of DeepSpeed's, then ours."""
        boundary = self.stage3.at_boundary
        if self._checks is not None:
            if boundary:
                self.status.check, self._checks = self._checks.result(), None
                self._times_stock = True
        elif self._times_stock:
            self.status.stock_backward_seconds.append(seconds)
            self._times_stock = not boundary
        else:
            self.status.backward_seconds.append(seconds)

    def _destroy(self) -> None:
        self.remove()
        self._stock[DESTROY]()

    def _set_gradient(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """The buffer is made fresh from the fp32 gradient while that still is what was accumulated."""
        if self._window_open():
            self.freshen()
        return self._stock[name](*args, **kwargs)

    # -- one partition --

    def move(self, param: Any, gradient: Tensor, moment: Moment) -> list[Tensor]:
        """All that is done with one partition; DeepSpeed's buffer view."""
        buffers = self.carry(param, gradient, moment)
        if param.grad is not None:  # its memory may be used again only after this stream's work
            self.device.record_stream(param.grad)
        param.grad = None
        return buffers

    def carry(self, param: Any, gradient: Tensor, moment: Moment) -> list[Tensor]:
        """Accumulate one partition's gradient, and at the boundary offload it; DeepSpeed's buffer view."""
        destination = self.stage3.destination(param, gradient)
        if destination is None:
            return self.leave(param, gradient)
        low, gradient = self.stage3.buffer(param, gradient), gradient.contiguous().view(-1)
        if not moment.first:
            self.freshen(param.ds_id)
            if not self.active:
                return self.leave(param, gradient)
        try:
            carry = self._carrier(param, gradient, low, destination, moment)
        except Exception as error:  # nothing of DeepSpeed's has been changed so far
            self.give_up(self._failure(error))
            return self.leave(param, gradient)
        self._stale.pop(param.ds_id, None)
        self.stage3.saw(param)
        bytes_before_path = self._accumulation.link_bytes(gradient, low, moment)
        carry()
        if self.active:
            widened = low.numel() if moment.boundary else 0
            self._count(ours=bytes_before_path, stock=2 * low.nbytes + 4 * widened)
        return [low]

    def _carrier(
        self, param: Any, gradient: Tensor, low: Tensor, destination: Tensor, moment: Moment
    ) -> Callable[[], None]:
        """What changes things of DeepSpeed's, with everything made ready that can fail before."""
        if self._accumulation.adds_on_host(moment):
            sums, sent = self._accumulation.on_host(gradient, low)
            goal = destination if moment.boundary else None
            return functools.partial(self._added_on_host, sums, param, sent, low, goal)
        path = self._path(self._accumulation.dtype(gradient, low, moment)) if moment.boundary else None
        value = self._accumulation.value(gradient, low, moment)
        return functools.partial(self._offloaded, path, param, value, destination, moment)

    def _added_on_host(
        self, sums: HostSums, param: Any, gradient: Tensor, low: Tensor, destination: Tensor | None
    ) -> None:
        """Into the sum, and with a destination from there to fp32; the norm comes with the next drain."""
        try:
            if destination is None:
                sums.add(gradient, low)
            else:
                sums.add_and_widen(gradient, low, destination, self.stage3.optimizer.get_param_id(param))
        except Exception as error:
            self._failed = True
            self.give_up(self._failure(error))  # which finishes this partition, too

    def _offloaded(
        self, path: GradientPath | None, param: Any, value: Tensor, destination: Tensor, moment: Moment
    ) -> None:
        """At the boundary into the destination by the path, or plainly should that fail; and the norm."""
        if path is None:
            return
        if not self.device.synchronous:
            lasting = None if self._accumulation.is_scratch(value) else value
            self._undrained.append(_Undrained(param.ds_id, destination, lasting))
        try:
            norm = path.offload_with_norm(value, destination)
        except Exception as error:
            self._failed = True
            self.give_up(self._failure(error))
            self.stage3.buffer(param, value).copy_(value)
            destination.copy_(value)
            norm = self.stage3.optimizer._constant_buffered_norm2(value)
        else:
            self._count(ours=moved_bytes(self._choice, value))
            if not moment.keep:
                self._stale[param.ds_id] = destination
        self.stage3.norms[self.stage3.optimizer.get_param_id(param)] = norm

    def leave(self, param: Any, gradient: Tensor) -> list[Tensor]:
        """One partition by DeepSpeed's own code, counted as left to it."""
        self.status.left_to_deepspeed += 1
        return self.stock(param, gradient)

    def stock(self, param: Any, gradient: Tensor) -> list[Tensor]:
        """One partition by DeepSpeed's own code."""
        self._stale.pop(param.ds_id, None)
        moved: list[Tensor] = self._stock[PARTITION]([param], [gradient])
        return moved

    def _failure(self, error: Exception) -> str:
        return f"the {self._choice.path} path failed ({in_words(error)})"

    # -- the accumulation buffer, where nothing was kept in it --

    def is_fresh(self, ds_id: int) -> bool:
        """Whether the buffer holds what DeepSpeed's own code would have left there."""
        return ds_id not in self._stale

    def freshen(self, ds_id: int | None = None) -> None:
        """Write what the buffer would hold, which is the fp32 gradient: that is its exact widening."""
        stale = [ds_id] if ds_id in self._stale else list(self._stale) if ds_id is None else []
        if stale:
            self.drain()
        views = self.stage3.buffers
        for one in stale:
            gradient = self._stale.pop(one, None)
            if gradient is not None and one in views:  # `offload_states` takes them away
                views[one].narrow(0, 0, gradient.numel()).copy_(gradient)

    def _window_open(self) -> bool:
        """Whether gradients were accumulated since the last step: until then fp32 is left as it was."""
        later = self.stage3.epilogue_is_counted_later
        return not self.stage3.at_first or later or not self._epilogue_ran

    def _moment(self) -> Moment:
        if not self._window_open():
            self._stale.clear()
        self._epilogue_ran = False
        boundary = self.stage3.at_boundary
        once = stage3.accumulates_once(self._engine())
        keep = not boundary or self.stage3.scans_for_overflow or not once
        return Moment(self.stage3.at_first, boundary, keep)

    # -- waiting, and what to do when that fails --

    def drain(self) -> None:
        """Return when every gradient is where it belongs, by the path or, should that fail, without it."""
        try:
            with self.device.on(self.stage3.stream):
                for path in self._paths.values():
                    path.drain()
                self._hand_over(self._accumulation.drain())
        except Exception as error:
            self._failed = True
            self.give_up(self._failure(error))
        else:
            if not self._failed:
                self._undrained.clear()

    def _hand_over(self, norms: Mapping[int, float]) -> None:
        """To DeepSpeed, on the device: it adds norms up, and those of other partitions may lie there."""
        self._norms.update(norms)
        if self._norms:
            there = self.device.empty(len(self._norms), torch.float64)
            values = torch.tensor(list(self._norms.values()), dtype=torch.float64, device="cpu")
            self.device.h2d(there, values)
            self.stage3.norms.update(zip(self._norms, there.unbind(), strict=True))
            self._norms.clear()

    def _recover(self) -> None:
        """Deliver what a failed path was given, from what still holds it.

        Raises:
            DeviceError: a gradient is neither on the device nor in the accumulation buffer any more.
        """
        undrained, self._undrained = self._undrained, []
        with self.device.on(self.stage3.stream):
            self.device.synchronize_stream()
            self._hand_over(self._accumulation.recover())
            for item in undrained:
                item.destination.copy_(self._still_held(item))

    def _still_held(self, item: _Undrained) -> Tensor:
        if item.source is not None:
            return item.source
        if not self.is_fresh(item.ds_id):
            raise DeviceError(
                f"the {self._choice.path} path failed after its source was overwritten, and a gradient is lost: "
                'resume from the last checkpoint with "autotune_offload": {"path": "deepspeed"} in the ds_config'
            )
        return self.stage3.buffers[item.ds_id].narrow(0, 0, item.destination.numel())

    def _path(self, dtype: torch.dtype) -> GradientPath:
        if dtype not in self._paths:
            self._paths[dtype] = build(self.device, self._choice, dtype)
        return self._paths[dtype]

    def _count(self, *, ours: int = 0, stock: int = 0) -> None:
        if not self.device.shares_host_memory:
            self.status.link_bytes += ours
            self.status.stock_link_bytes += stock


def close_quietly(what: GradientPath | Accumulation) -> None:
    """Give the buffers back; what fails in that is not worth a run."""
    try:
        what.close()
    except Exception:
        _log.debug("autotune-offload: buffers could not be given back", exc_info=True)
