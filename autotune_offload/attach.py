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
import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from autotune_offload import kernel
from autotune_offload.device import AcceleratorDevice, Device
from autotune_offload.errors import DeviceError
from autotune_offload.paths import GradientPath, Spec, build, moved_bytes
from autotune_offload.records import Record

_STAGE3 = "DeepSpeedZeroOptimizer_Stage3"
_LOW_PRECISION = f"_{_STAGE3}__param_id_to_grad_partition"
"""DeepSpeed's private name of the low-precision accumulation buffer's views, by ds_id."""

_PARTITION, _EPILOGUE, _DESTROY = "partition_grads", "independent_gradient_partition_epilogue", "destroy"
_SETTERS = (
    "set_fp32_grad_for_param",
    "set_local_grad_for_param",
    "update_fp32_grad_for_param_vectorized",
)
"""What changes an fp32 gradient between backward and step; 0.14.5 lacks the second, 0.15.4 the third."""

_NEEDED = (
    _PARTITION,
    _EPILOGUE,
    "grad_position",
    "norm_for_param_grads",
    "fp32_partitioned_groups_flat",
    "gradient_accumulation_dtype",
    "is_gradient_accumulation_boundary",
    "micro_step_id",
    _LOW_PRECISION,
)
_CHECKED_PARTITIONS = 4
_CHECKED_ELEMENTS = 1 << 24
"""The self-check runs both ways over at most so many partitions and elements of one backward."""

_KEPT_TIMES = 100

_log = logging.getLogger("autotune_offload")


class SelfCheck(Record, frozen=True, kw_only=True):
    """How the path compared with DeepSpeed's own code on the first gradients of the first backward."""

    partitions: int
    elements: int
    mismatch: str | None = None


class Status(msgspec.Struct, kw_only=True):
    """What an attached path has done so far. Times are host seconds in one backward pass."""

    why_not: str | None = None
    """Why DeepSpeed's own code runs: from the start, or since the path was taken out."""
    check: SelfCheck | None = None
    """None until a backward pass that ends an accumulation has been compared."""
    backward_seconds: deque[float] = msgspec.field(default_factory=lambda: deque(maxlen=_KEPT_TIMES))
    """Without the pass in which the self-check ran both ways."""
    link_bytes: int = 0
    """Moved between device and host for gradients since attaching; 0 where they share memory."""
    stock_link_bytes: int = 0
    """What DeepSpeed's own code would have moved for the same gradients."""
    left_to_deepspeed: int = 0
    """Partitions that DeepSpeed's own code carried."""


class _Entry(msgspec.Struct, frozen=True):
    """What is known of an engine.

    The optimizer's replaced methods keep the attachment alive. The optimizer may hold the engine, so that
    a strong reference here would keep all three for ever.
    """

    attachment: weakref.ref[Attachment]
    status: Status


_entries: weakref.WeakKeyDictionary[Any, _Entry] = weakref.WeakKeyDictionary()


def attach(engine: Any, choice: Spec, device: Device | None = None, check: bool = True) -> Status:
    """Carry out `choice` in a running engine, in place of a path that is attached already.

    Args:
        engine: what `deepspeed.initialize` returned.
        choice: a `Choice` or `Candidate`.
        device: None takes DeepSpeed's accelerator.
        check: compare with DeepSpeed's own code in the first backward pass.

    Returns:
        The status, which goes on counting; its `why_not` says why nothing was replaced, if so.
    """
    why_not = why_not_attachable(engine)
    if why_not is not None:
        return Status(why_not=why_not)
    detach(engine)
    try:
        attachment = Attachment(engine, choice, device or AcceleratorDevice(), check=check)
    except Exception as error:  # whatever it is, DeepSpeed trains without us
        return Status(why_not=f"the {choice.path} path cannot be built: {_in_words(error)}")
    attachment.replace_methods()
    _entries[engine] = _Entry(weakref.ref(attachment), attachment.status)
    return attachment.status


def detach(engine: Any) -> bool:
    """Give the optimizer its own methods back; False where none were replaced."""
    entry = _entries.pop(engine, None)
    attachment = None if entry is None else entry.attachment()
    return attachment is not None and attachment.remove()


def status(engine: Any) -> Status | None:
    """What the path attached to `engine` has done, or did until it failed; None where there was none."""
    entry = _entries.get(engine)
    return None if entry is None else entry.status


def why_not_attachable(engine: Any) -> str | None:
    """None where the paths do exactly what this engine's own code does, else what stands against it."""
    optimizer = getattr(engine, "optimizer", None)
    if optimizer is None:
        return "the engine has no optimizer"
    if type(optimizer).__name__ != _STAGE3 or not type(optimizer).__module__.startswith("deepspeed."):
        return f"the optimizer is a {type(optimizer).__name__}, not exactly {_STAGE3}"
    return _unsuitable(optimizer) or _replaced_by_others(optimizer) or _compiled(engine)


def _unsuitable(optimizer: Any) -> str | None:
    if not getattr(optimizer, "offload_optimizer", False):
        return "the optimizer is not offloaded"
    if getattr(optimizer, "zenflow", False):
        return "ZenFlow offloads gradients in its own way"
    if getattr(optimizer, "use_muon", False):
        return "Muon rewrites the gradients between backward and step"
    if (dtype := getattr(optimizer, "master_weights_and_grads_dtype", torch.float32)) != torch.float32:
        return f"the master gradients are {dtype}, not fp32"
    missing = [name for name in _NEEDED if not hasattr(optimizer, name)]
    return f"this DeepSpeed's {_STAGE3} has no {', '.join(missing)}" if missing else None


def _replaced_by_others(optimizer: Any) -> str | None:
    own = vars(optimizer)
    others = [
        name
        for name in (_PARTITION, _EPILOGUE)
        if name in own and not isinstance(getattr(own[name], "__self__", None), Attachment)
    ]
    return f"{', '.join(others)} of this optimizer was replaced by somebody else" if others else None


def _compiled(engine: Any) -> str | None:
    enabled = getattr(engine, "is_deepcompile_enabled", None)
    if enabled is not None and enabled():
        return "DeepCompile reduces gradients past partition_grads"
    return None


class _Moment(msgspec.Struct, frozen=True):
    """Where in an accumulation a call of `partition_grads` lies."""

    first: bool
    """The first micro-step: gradients are copied, later they are added."""
    boundary: bool
    """The last one: gradients go to the host in fp32."""
    keep: bool
    """Whether anything may read the accumulation buffer after this."""


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
        self.optimizer: Any = engine.optimizer
        self._engine = weakref.ref(engine)
        self._choice = choice
        self._stock: dict[str, Callable[..., Any]] = {}
        self._ours: dict[str, Callable[..., Any]] = {}
        self._before: dict[str, Any] = {}
        self._paths: dict[torch.dtype, GradientPath] = {}
        self._accumulators: dict[torch.dtype, Tensor] = {}
        self._undrained: list[_Undrained] = []
        self._stale: dict[int, Tensor] = {}
        self._checks = _Checks(self) if check else None
        self._failed = False
        self._epilogue_ran = False
        self._seconds = 0.0
        if device.shares_host_memory:
            kernel.why_not_fused(self.optimizer.gradient_accumulation_dtype)  # compiles it, if need be
        self._path(self.optimizer.gradient_accumulation_dtype)

    @property
    def active(self) -> bool:
        """Whether the path carries gradients: from `replace_methods` until `remove`."""
        return bool(self._ours)

    def replace_methods(self) -> None:
        """Put the path in charge."""
        replacements: dict[str, Callable[..., Any]] = {
            _PARTITION: self._partition_grads,
            _EPILOGUE: self._epilogue,
            _DESTROY: self._destroy,
            **{name: functools.partial(self._set_gradient, name) for name in _SETTERS},
        }
        self._ours = {name: own for name, own in replacements.items() if hasattr(self.optimizer, name)}
        self._stock = {name: getattr(self.optimizer, name) for name in self._ours}
        self._before = {name: own for name, own in vars(self.optimizer).items() if name in self._ours}
        vars(self.optimizer).update(self._ours)

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
        own = vars(self.optimizer)
        for name in [name for name, method in ours.items() if own.get(name) is method]:
            del own[name]
            own.update({name: self._before[name]} if name in self._before else {})
        self.drain()
        self._close_paths()
        if self._failed:
            self._recover()
        if self._window_open():
            self.freshen()
        self._accumulators.clear()
        self._stale.clear()
        self._checks = None
        return True

    def _close_paths(self) -> None:
        for path in self._paths.values():
            try:
                path.close()
            except Exception:
                _log.debug("autotune-offload: a path could not be closed", exc_info=True)
        self._paths.clear()

    def give_up(self, cause: str) -> None:
        """Hand over to DeepSpeed's own code for good, and say so once."""
        if not self.active:
            return
        self.status.why_not = cause
        _log.warning("autotune-offload: %s; from here on DeepSpeed's own code carries the gradients", cause)
        self.remove()

    # -- what DeepSpeed calls --

    def _partition_grads(
        self, params_to_release: Sequence[Any], grad_partitions: Sequence[Tensor]
    ) -> list[Tensor]:
        """Same arguments, result and effects as `DeepSpeedZeroOptimizer_Stage3.partition_grads`."""
        if not self.active:
            return list(self._stock[_PARTITION](params_to_release, grad_partitions))
        began = time.perf_counter()
        for undrained in self._undrained:  # a bucket's memory has been filled anew
            undrained.source = None
        moment = self._moment()
        buffers: list[Tensor] = []
        for param, gradient in zip(params_to_release, grad_partitions, strict=False):
            if not self.active:
                buffers += self.leave(param, gradient)
            elif not self._holds_data(param):
                param.grad = None
            elif self._checks is not None:
                buffers += self._checks.compare(param, gradient, moment)
            else:
                buffers += self.move(param, gradient, moment)
        self._seconds += time.perf_counter() - began
        return buffers

    def _epilogue(self) -> None:
        """DeepSpeed's own epilogue, then what the path still holds."""
        self._stock[_EPILOGUE]()
        if not self.active:
            return
        began = time.perf_counter()
        self.drain()
        self._epilogue_ran = True
        seconds, self._seconds = self._seconds + time.perf_counter() - began, 0.0
        if self._checks is None:
            self.status.backward_seconds.append(seconds)
        elif self._at_boundary():
            self.status.check, self._checks = self._checks.result(), None

    def _destroy(self) -> None:
        self.remove()
        self._stock[_DESTROY]()

    def _set_gradient(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """The buffer is made fresh from the fp32 gradient while that still is what was accumulated."""
        if self._window_open():
            self.freshen()
        return self._stock[name](*args, **kwargs)

    # -- one partition --

    def move(self, param: Any, gradient: Tensor, moment: _Moment) -> list[Tensor]:
        """All that is done with one partition; DeepSpeed's buffer view."""
        buffers = self.carry(param, gradient, moment)
        if param.grad is not None:  # its memory may be used again only after this stream's work
            self.device.record_stream(param.grad)
        param.grad = None
        return buffers

    def carry(self, param: Any, gradient: Tensor, moment: _Moment) -> list[Tensor]:
        """Accumulate one partition's gradient, and at the boundary offload it; DeepSpeed's buffer view."""
        z = self.optimizer
        destination = self.destination(param, gradient)
        if destination is None:
            return self.leave(param, gradient)
        low, gradient = self.buffer(param, gradient), gradient.contiguous().view(-1)
        try:
            path = self._path(_accumulated_dtype(low, gradient, moment)) if moment.boundary else None
            value = self._accumulated(param.ds_id, gradient, low, moment)
        except Exception as error:  # nothing of DeepSpeed's has been changed so far
            self.give_up(self._failure(error))
            return self.leave(param, gradient)
        if hasattr(z, "_offload_boundary_param_ids"):
            z._offload_boundary_param_ids.add(param.ds_id)
        if path is not None:
            z.norm_for_param_grads[z.get_param_id(param)] = self._offloaded(path, param, value, destination)
            if not moment.keep and self.active:
                self._stale[param.ds_id] = destination
        return [low]

    def leave(self, param: Any, gradient: Tensor) -> list[Tensor]:
        """One partition by DeepSpeed's own code."""
        self.status.left_to_deepspeed += 1
        self._stale.pop(param.ds_id, None)
        moved: list[Tensor] = self._stock[_PARTITION]([param], [gradient])
        return moved

    def destination(self, param: Any, gradient: Tensor) -> Tensor | None:
        """This partition's fp32 gradient in host memory; None where it goes to NVMe or stays on the device."""
        z = self.optimizer
        group, offset, _ = z.grad_position[z.get_param_id(param)]
        if z._swappable_optimizer_subgroup(group):
            return None
        fp32: Tensor | None = z.fp32_partitioned_groups_flat[group].grad
        if fp32 is None or fp32.device.type != "cpu":
            return None
        return fp32.narrow(0, offset, gradient.numel())

    def buffer(self, param: Any, gradient: Tensor) -> Tensor:
        """This partition in DeepSpeed's accumulation buffer."""
        view: Tensor = getattr(self.optimizer, _LOW_PRECISION)[param.ds_id]
        return view.narrow(0, 0, gradient.numel())

    def _offloaded(self, path: GradientPath, param: Any, value: Tensor, destination: Tensor) -> Tensor:
        """Into the destination by the path, or plainly should that fail; the norm."""
        if self.active:
            if not self.device.synchronous:
                self._undrained.append(_Undrained(param.ds_id, destination, self._lasting(value)))
            try:
                norm = path.offload_with_norm(value, destination)
            except Exception as error:
                self._failed = True
                self.give_up(self._failure(error))
            else:
                self._count(ours=moved_bytes(self._choice, value), stock=4 * value.numel())
                return norm
        self.buffer(param, value).copy_(value)
        destination.copy_(value)
        plain: Tensor = self.optimizer._constant_buffered_norm2(value)
        return plain

    def _failure(self, error: Exception) -> str:
        return f"the {self._choice.path} path failed ({_in_words(error)})"

    def _lasting(self, value: Tensor) -> Tensor | None:
        """`value` unless it is scratch, which the next partition overwrites."""
        scratch = self._accumulators.get(value.dtype)
        return None if scratch is not None and scratch.data_ptr() == value.data_ptr() else value

    def _accumulated(self, ds_id: int, gradient: Tensor, low: Tensor, moment: _Moment) -> Tensor:
        """The accumulated gradient where it was reduced, and in DeepSpeed's buffer if it is to be kept."""
        if not moment.first:
            self.freshen(ds_id)
        self._stale.pop(ds_id, None)
        if _same_place(low, gradient):
            return self._accumulated_in_place(gradient, low, moment)
        value = gradient
        if not moment.first:
            value = self._accumulator(low)
            self.device.h2d(value, low, non_blocking=True)
            value.add_(gradient.to(low.dtype))
            self._count(ours=low.nbytes)
        elif _narrower(low.dtype, gradient.dtype):
            value = gradient.to(low.dtype)
        self._count(stock=2 * low.nbytes)
        if moment.keep:
            self.device.d2h(low, value, non_blocking=True)
            self._count(ours=low.nbytes)
        return value

    def _accumulated_in_place(self, gradient: Tensor, low: Tensor, moment: _Moment) -> Tensor:
        """Where device memory is host memory, the buffer itself is what accumulates."""
        if not moment.first:
            return low.add_(gradient.to(low.dtype))
        if moment.keep or _narrower(low.dtype, gradient.dtype):
            return low.copy_(gradient)
        return gradient

    def _accumulator(self, low: Tensor) -> Tensor:
        """Scratch on the device, grown to the largest partition and kept."""
        scratch = self._accumulators.get(low.dtype)
        if scratch is None or scratch.numel() < low.numel():
            scratch = self._accumulators[low.dtype] = self.device.empty(low.numel(), low.dtype)
        return scratch[: low.numel()]

    # -- the accumulation buffer, where nothing was kept in it --

    def is_fresh(self, ds_id: int) -> bool:
        """Whether the buffer holds what DeepSpeed's own code would have left there."""
        return ds_id not in self._stale

    def freshen(self, ds_id: int | None = None) -> None:
        """Write what the buffer would hold, which is the fp32 gradient: that is its exact widening."""
        stale = [ds_id] if ds_id in self._stale else list(self._stale) if ds_id is None else []
        if stale:
            self.drain()
        views = getattr(self.optimizer, _LOW_PRECISION)
        for one in stale:
            gradient = self._stale.pop(one)
            if one in views:  # `offload_states` takes them away
                views[one].narrow(0, 0, gradient.numel()).copy_(gradient)

    def _window_open(self) -> bool:
        """Whether gradients were accumulated since the last step: until then fp32 is left as it was."""
        z = self.optimizer
        deferred = getattr(z, "_epilogue_ran_this_backward", False)  # 0.18.9 and newer count up in forward
        return z.micro_step_id != 0 or deferred or not self._epilogue_ran

    def _moment(self) -> _Moment:
        if not self._window_open():
            self._stale.clear()
        self._epilogue_ran = False
        boundary = self._at_boundary()
        keep = not boundary or self.optimizer.dtype == torch.float16 or not self._accumulates_once()
        return _Moment(self.optimizer.micro_step_id == 0, boundary, keep)

    def _accumulates_once(self) -> bool:
        """Whether a step takes one backward pass, and nobody moves the boundary by hand.

        With more of them, a parameter that gets no gradient in the first finds what an earlier step left
        in the buffer, and DeepSpeed adds to that.
        """
        engine = self._engine()
        if engine is None or engine._is_gradient_accumulation_boundary is not None:
            return False
        managed = getattr(engine, "managed_gradient_accumulation", None)  # 0.19.5 and newer
        return engine.gradient_accumulation_steps() == 1 and (managed is None or managed())

    # -- waiting, and what to do when that fails --

    def drain(self) -> None:
        """Return when every fp32 gradient is where it belongs, by the path or, should that fail, without it."""
        try:
            with self.device.on(self._stream()):
                for path in self._paths.values():
                    path.drain()
        except Exception as error:
            self._failed = True
            self.give_up(self._failure(error))
        else:
            if not self._failed:
                self._undrained.clear()

    def _recover(self) -> None:
        """Deliver what a failed path was given, from what still holds it.

        Raises:
            DeviceError: a gradient is neither on the device nor in the accumulation buffer any more.
        """
        undrained, self._undrained = self._undrained, []
        with self.device.on(self._stream()):
            self.device.synchronize_stream()
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
        view: Tensor = getattr(self.optimizer, _LOW_PRECISION)[item.ds_id]
        return view.narrow(0, 0, item.destination.numel())

    def _stream(self) -> Any:
        return getattr(self.optimizer, "reduce_and_partition_stream", None)

    def _path(self, dtype: torch.dtype) -> GradientPath:
        if dtype not in self._paths:
            self._paths[dtype] = build(self.device, self._choice, dtype)
        return self._paths[dtype]

    # -- shims over versions --

    def _at_boundary(self) -> bool:
        """An attribute up to 0.19.4, a method from 0.19.5."""
        boundary = self.optimizer.is_gradient_accumulation_boundary
        return bool(boundary() if callable(boundary) else boundary)

    def _holds_data(self, param: Any) -> bool:
        """Whether this rank's partition lies within the parameter (the last ranks' may be padding)."""
        z = self.optimizer
        rank_of = getattr(z, "_get_param_partition_rank", None)  # 0.19.4 and newer
        rank = rank_of(param) if rank_of is not None else torch.distributed.get_rank(z.dp_process_group)
        return bool(param.partition_numel() * rank < param.ds_numel)

    def _count(self, *, ours: int = 0, stock: int = 0) -> None:
        if not self.device.shares_host_memory:
            self.status.link_bytes += ours
            self.status.stock_link_bytes += stock


class _Checks:
    """The first partitions of the first backward that ends an accumulation, by our code and by DeepSpeed's.

    DeepSpeed's comes last, so that its results stay whatever ours has done. Until one partition has
    been found equal, those that are too large to be compared are left to DeepSpeed.
    """

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment
        self._partitions = self._elements = 0

    def compare(self, param: Any, gradient: Tensor, moment: _Moment) -> list[Tensor]:
        """Move one partition; at a boundary, while the check still runs, both ways."""
        ours = self._attachment
        if not moment.boundary or self._partitions >= _CHECKED_PARTITIONS:
            return ours.move(param, gradient, moment)
        if self._elements + gradient.numel() > _CHECKED_ELEMENTS:
            return ours.move(param, gradient, moment) if self._partitions else ours.leave(param, gradient)
        destination = ours.destination(param, gradient)
        if destination is None:
            return ours.leave(param, gradient)
        return self._both(param, gradient, moment, destination)

    def _both(self, param: Any, gradient: Tensor, moment: _Moment, destination: Tensor) -> list[Tensor]:
        ours, low = self._attachment, self._attachment.buffer(param, gradient)
        try:
            ours.freshen(param.ds_id)
            ours.device.synchronize_stream()
            before, kept, found = low.clone(), torch.empty_like(low), torch.empty_like(destination)
        except Exception as error:  # most likely no memory for the copies
            ours.give_up(f"the self-check could not be made ({_in_words(error)})")
            return ours.leave(param, gradient)
        buffers = ours.carry(param, gradient, moment)
        ours.drain()
        if not ours.active:  # it failed, and DeepSpeed's code has done the work
            param.grad = None
            return buffers
        kept_any = ours.is_fresh(param.ds_id)
        kept.copy_(low)
        found.copy_(destination)
        norm = self._norm(param)
        low.copy_(before)
        buffers = ours.leave(param, gradient)
        ours.status.left_to_deepspeed -= 1
        ours.device.synchronize_stream()
        self._partitions += 1
        self._elements += gradient.numel()
        self._judge(
            lambda: (
                _difference("fp32 gradient", found, destination)
                or (_difference("accumulation buffer", kept, low) if kept_any else None)
                or _norms_differ(norm, self._norm(param))
            )
        )
        return buffers

    def _norm(self, param: Any) -> Tensor:
        z = self._attachment.optimizer
        norm: Tensor = z.norm_for_param_grads[z.get_param_id(param)]
        return norm

    def _judge(self, compare: Callable[[], str | None]) -> None:
        try:
            mismatch = compare()
        except Exception as error:  # no memory to compare in
            mismatch = _in_words(error)
        if mismatch is not None:
            ours = self._attachment
            ours.status.check = self.result(mismatch)
            ours.give_up(f"the self-check failed: {mismatch}")

    def result(self, mismatch: str | None = None) -> SelfCheck:
        """What was compared."""
        return SelfCheck(partitions=self._partitions, elements=self._elements, mismatch=mismatch)


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _difference(what: str, ours: Tensor, stock: Tensor) -> str | None:
    """In words; None where the bits are the same, or both are NaN: torch itself is free with their payload."""
    word = _WORDS[stock.element_size()]
    differ = (ours.view(word) != stock.view(word)) & ~(ours.isnan() & stock.isnan())
    wrong = int(differ.sum())
    return f"{wrong:,} of {ours.numel():,} values of one partition's {what} differ" if wrong else None


def _norms_differ(ours: Tensor, stock: Tensor) -> str | None:
    """In words; None where they agree as closely as two orders of adding 2**24 squares must."""
    tolerance = _CHECKED_ELEMENTS * torch.finfo(stock.dtype).eps
    mine, theirs = float(ours), float(stock)
    if math.isfinite(theirs) and math.isfinite(mine):
        same = abs(mine - theirs) <= tolerance * theirs
    else:
        same = mine == theirs or (math.isnan(mine) and math.isnan(theirs))
    return None if same else f"the norm of one partition is {mine!r}, DeepSpeed's is {theirs!r}"


def _accumulated_dtype(low: Tensor, gradient: Tensor, moment: _Moment) -> torch.dtype:
    """Of what `_accumulated` returns."""
    if _same_place(low, gradient) and moment.keep:
        return low.dtype
    return low.dtype if not moment.first or _narrower(low.dtype, gradient.dtype) else gradient.dtype


def _same_place(one: Tensor, other: Tensor) -> bool:
    return one.device == other.device


def _narrower(buffer: torch.dtype, gradient: torch.dtype) -> bool:
    """Whether the accumulation buffer rounds the gradient."""
    return buffer != gradient and buffer != torch.float32


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
