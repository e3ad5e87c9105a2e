"""Puts a gradient path into a live `DeepSpeedZeroOptimizer_Stage3`, and takes it out again.

The path replaces two methods on the optimizer instance, never on the class: `partition_grads`, which
moves gradients as they are reduced, and the epilogue of a backward pass, at whose end everything must
be on the host. What DeepSpeed keeps beside the fp32 gradient (the low-precision accumulation buffer,
the norm of each partition) is kept as it keeps it, except where nothing reads it.

DeepSpeed's own code stays in charge of what a path would not do exactly: NVMe sub-groups, sub-groups
that stay on the device (`ratio` below 1), and the deferred copies of unmanaged accumulation.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autotune_offload.device import AcceleratorDevice, Device
from autotune_offload.paths import GradientPath, Spec, build, moved_bytes

_STAGE3 = "DeepSpeedZeroOptimizer_Stage3"
_LOW_PRECISION = f"_{_STAGE3}__param_id_to_grad_partition"
"""DeepSpeed's private name of the low-precision accumulation buffer's views, by ds_id."""

_REPLACED = ("partition_grads", "independent_gradient_partition_epilogue")
_READ = (
    "grad_position",
    "norm_for_param_grads",
    "fp32_partitioned_groups_flat",
    "micro_step_id",
    _LOW_PRECISION,
)
_CHECKED_PARTITIONS = 4
_CHECKED_ELEMENTS = 1 << 24
"""The self-check runs both ways over at most so many partitions and elements of the first backward."""

_KEPT_TIMES = 100

_log = logging.getLogger("autotune_offload")

_attached: weakref.WeakKeyDictionary[Any, Attachment] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfCheck:
    """How the path compared with DeepSpeed's own code on the first gradients of the first backward."""

    partitions: int
    elements: int
    mismatch: str | None = None


@dataclass(slots=True, kw_only=True)
class Status:
    """What an attached path has done so far. Times are host seconds in one backward pass."""

    why_not: str | None = None
    check: SelfCheck | None = None
    backward_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_TIMES))
    link_bytes: int = 0
    """Moved between device and host for gradients since attaching; 0 where they share memory."""
    stock_link_bytes: int = 0
    """What DeepSpeed's own code would have moved for the same gradients."""
    left_to_deepspeed: int = 0
    """Partitions that DeepSpeed's own code carried."""


def attach(engine: Any, choice: Spec, *, device: Device | None = None, check: bool = True) -> Status:
    """Carry out `choice` in a running engine.

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
    attachment = Attachment(engine, choice, device or AcceleratorDevice(), check=check)
    _attached[engine] = attachment
    return attachment.status


def detach(engine: Any) -> bool:
    """Give the optimizer its own methods back; False where none were replaced."""
    attachment = _attached.pop(engine, None)
    if attachment is None:
        return False
    attachment.remove()
    return True


def status(engine: Any) -> Status | None:
    """What the path attached to `engine` has done; None where none is."""
    attachment = _attached.get(engine)
    return None if attachment is None else attachment.status


def why_not_attachable(engine: Any) -> str | None:
    """None where the paths do exactly what this engine's own code does, else what stands against it."""
    optimizer = getattr(engine, "optimizer", None)
    if type(optimizer).__name__ != _STAGE3 or not type(optimizer).__module__.startswith("deepspeed."):
        return f"the optimizer is a {type(optimizer).__name__}, not exactly {_STAGE3}"
    missing = [name for name in (*_REPLACED, *_READ) if not hasattr(optimizer, name)]
    if missing:
        return f"this DeepSpeed's {_STAGE3} has no {', '.join(missing)}"
    if not getattr(optimizer, "offload_optimizer", False):
        return "the optimizer is not offloaded"
    overridden = [name for name in _REPLACED if name in vars(optimizer)]
    if overridden:
        return f"{', '.join(overridden)} of this optimizer was already replaced by somebody else"
    if getattr(optimizer, "zenflow", False):
        return "ZenFlow offloads gradients in its own way"
    if getattr(optimizer, "use_muon", False):
        return "Muon rewrites the gradients between backward and step"
    compiled = getattr(engine, "is_deepcompile_enabled", None)
    if compiled is not None and compiled():
        return "DeepCompile reduces gradients past partition_grads"
    if getattr(optimizer, "master_weights_and_grads_dtype", torch.float32) != torch.float32:
        return "the master gradients are not fp32"
    return None


class Attachment:
    """One optimizer with one path in it."""

    def __init__(self, engine: Any, choice: Spec, device: Device, *, check: bool) -> None:
        """Replaces the two methods; the path's buffers are made at the first gradient."""
        self.status = Status()
        self._optimizer: Any = engine.optimizer
        self._engine = weakref.ref(engine)
        self._choice, self._device = choice, device
        self._stock: dict[str, Callable[..., Any]] = {
            name: getattr(engine.optimizer, name) for name in _REPLACED
        }
        self._paths: dict[torch.dtype, GradientPath] = {}
        self._accumulators: dict[torch.dtype, Tensor] = {}
        self._stale: dict[int, Tensor] = {}
        self._unchecked = _Checks(self) if check else None
        self._seconds = 0.0
        self._optimizer.partition_grads = self._partition_grads
        self._optimizer.independent_gradient_partition_epilogue = self._epilogue

    def remove(self) -> None:
        """Finish what is under way, put DeepSpeed's methods back, and give the buffers back."""
        self._drain()
        self._freshen()
        for name in _REPLACED:
            vars(self._optimizer).pop(name, None)
        for path in self._paths.values():
            path.close()
        self._paths.clear()
        self._accumulators.clear()

    # -- what DeepSpeed calls --

    def _partition_grads(
        self, params_to_release: Sequence[Any], grad_partitions: Sequence[Tensor]
    ) -> list[Tensor]:
        """Same arguments, result and effects as `DeepSpeedZeroOptimizer_Stage3.partition_grads`."""
        began = time.perf_counter()
        buffers: list[Tensor] = []
        for param, gradient in zip(params_to_release, grad_partitions, strict=True):
            if not self._holds_data(param):
                param.grad = None
            elif self._unchecked is not None:
                buffers += self._unchecked.compare(param, gradient)
            else:
                buffers += self.move(param, gradient)
        self._seconds += time.perf_counter() - began
        return buffers

    def _epilogue(self) -> None:
        """DeepSpeed's own epilogue, then what the path still holds."""
        self._stock["independent_gradient_partition_epilogue"]()
        began = time.perf_counter()
        self._drain()
        self.status.backward_seconds.append(self._seconds + time.perf_counter() - began)
        self._seconds = 0.0
        if self._unchecked is not None:
            self._conclude_check()

    # -- one partition --

    def move(self, param: Any, gradient: Tensor) -> list[Tensor]:
        """Accumulate one partition's gradient, and at the boundary offload it; DeepSpeed's buffer view."""
        z = self._optimizer
        group, offset, _ = z.grad_position[z.get_param_id(param)]
        destination_group = z.fp32_partitioned_groups_flat[group]
        if z._swappable_optimizer_subgroup(group) or not _on_host(destination_group.grad):
            return self.leave(param, gradient)
        if hasattr(z, "_offload_boundary_param_ids"):
            z._offload_boundary_param_ids.add(param.ds_id)
        low = getattr(z, _LOW_PRECISION)[param.ds_id].narrow(0, 0, gradient.numel())
        boundary = self._at_boundary()
        value = self._accumulated(
            param, gradient.view(-1), low, keep=not boundary or z.dtype == torch.float16
        )
        if boundary:
            destination = destination_group.grad.narrow(0, offset, gradient.numel())
            z.norm_for_param_grads[z.get_param_id(param)] = self._path(value.dtype).offload_with_norm(
                value, destination
            )
            self._count_boundary(value, low)
            if self._is_stale(param):
                self._stale[param.ds_id] = destination
        self._release(param)
        return [low]

    def leave(self, param: Any, gradient: Tensor) -> list[Tensor]:
        """One partition by DeepSpeed's own code."""
        self.status.left_to_deepspeed += 1
        moved: list[Tensor] = self._stock["partition_grads"]([param], [gradient])
        return moved

    def _accumulated(self, param: Any, gradient: Tensor, low: Tensor, *, keep: bool) -> Tensor:
        """The accumulated gradient where it was reduced; `keep` leaves it in DeepSpeed's buffer as well.

        Without `keep` the buffer is stale, and made fresh should anything accumulate into it.
        """
        first = self._optimizer.micro_step_id == 0
        if not first:
            self._freshen(param.ds_id)
        if _same_place(low, gradient):
            return self._accumulated_in_place(param, gradient, low, first=first, keep=keep)
        value = gradient
        if not first:
            value = self._accumulator(low)
            self._device.h2d(value, low, non_blocking=True)
            value.add_(gradient.to(self._optimizer.gradient_accumulation_dtype))
            self._count(ours=low.nbytes)
        elif _narrower(low.dtype, gradient.dtype):
            value = gradient.to(low.dtype)
        if keep:
            self._device.d2h(low, value, non_blocking=True)
            self._count(ours=low.nbytes)
        self._set_stale(param, stale=not keep)
        self._count(stock=2 * low.nbytes)
        return value

    def _accumulated_in_place(
        self, param: Any, gradient: Tensor, low: Tensor, *, first: bool, keep: bool
    ) -> Tensor:
        """Where device memory is host memory, the buffer itself is what accumulates."""
        if not first:
            low.add_(gradient.to(self._optimizer.gradient_accumulation_dtype))
            return low
        exact = not _narrower(low.dtype, gradient.dtype)
        self._set_stale(param, stale=not keep and exact)
        if exact and not keep:
            return gradient
        low.copy_(gradient)
        return low

    def _accumulator(self, low: Tensor) -> Tensor:
        """Scratch on the device, grown to the largest partition and kept."""
        scratch = self._accumulators.get(low.dtype)
        if scratch is None or scratch.numel() < low.numel():
            scratch = self._accumulators[low.dtype] = self._device.empty(low.numel(), low.dtype)
        return scratch[: low.numel()]

    # -- the accumulation buffer, where nothing was kept in it --

    def _is_stale(self, param: Any) -> bool:
        return param.ds_id in self._stale

    def _set_stale(self, param: Any, *, stale: bool) -> None:
        if stale:
            self._stale[param.ds_id] = _NOTHING
        else:
            self._stale.pop(param.ds_id, None)

    def _freshen(self, ds_id: int | None = None) -> None:
        """Write what the buffer would hold: the fp32 gradient is its exact widening."""
        views = getattr(self._optimizer, _LOW_PRECISION)
        for stale in list(self._stale) if ds_id is None else [ds_id]:
            gradient = self._stale.pop(stale, _NOTHING)
            if gradient is not _NOTHING and stale in views:
                self._drain()
                views[stale].narrow(0, 0, gradient.numel()).copy_(gradient)

    # -- shims over versions --

    def _at_boundary(self) -> bool:
        """An attribute up to 0.19.4, a method from 0.19.5."""
        boundary = self._optimizer.is_gradient_accumulation_boundary
        return bool(boundary() if callable(boundary) else boundary)

    def _holds_data(self, param: Any) -> bool:
        """Whether this rank's partition lies within the parameter (the last ranks' may be padding)."""
        z = self._optimizer
        rank_of = getattr(z, "_get_param_partition_rank", None)  # 0.19.4 and newer
        rank = rank_of(param) if rank_of is not None else torch.distributed.get_rank(z.dp_process_group)
        return bool(param.partition_numel() * rank < param.ds_numel)

    def _release(self, param: Any) -> None:
        """Drop the full gradient; its memory may be used again only after this stream's work."""
        if param.grad is not None:
            self._device.record_stream(param.grad)
        param.grad = None

    def _path(self, dtype: torch.dtype) -> GradientPath:
        if dtype not in self._paths:
            self._paths[dtype] = build(self._device, self._choice, dtype)
        return self._paths[dtype]

    def _drain(self) -> None:
        with self._device.on(getattr(self._optimizer, "reduce_and_partition_stream", None)):
            for path in self._paths.values():
                path.drain()

    # -- counting and checking --

    def _count(self, *, ours: int = 0, stock: int = 0) -> None:
        if not self._device.shares_host_memory:
            self.status.link_bytes += ours
            self.status.stock_link_bytes += stock

    def _count_boundary(self, value: Tensor, low: Tensor) -> None:
        """Stock reads the accumulation buffer back and sends fp32; see `partition_grads` of 0.19.8."""
        del low
        self._count(ours=moved_bytes(self._choice, value), stock=4 * value.numel())

    def _conclude_check(self) -> None:
        checks, self._unchecked = self._unchecked, None
        assert checks is not None
        self.status.check = checks.result()
        if self.status.check.mismatch is None:
            return
        _log.warning(
            "autotune-offload: the %s path gave other gradients than DeepSpeed's own code (%s); the path was "
            "taken out and training goes on without it",
            self._choice.path,
            self.status.check.mismatch,
        )
        engine = self._engine()
        if engine is not None:
            detach(engine)
        self.status.why_not = f"the self-check failed: {self.status.check.mismatch}"


_NOTHING = torch.empty(0, device="cpu")


class _Checks:
    """The first partitions of the first backward, by DeepSpeed's code and by ours."""

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment
        self._partitions = self._elements = 0
        self._mismatch: str | None = None

    def compare(self, param: Any, gradient: Tensor) -> list[Tensor]:
        """Move one partition; at a boundary, while the check still runs, both ways."""
        ours = self._attachment
        full = (
            self._partitions >= _CHECKED_PARTITIONS or self._elements + gradient.numel() > _CHECKED_ELEMENTS
        )
        if full or self._mismatch or not ours._at_boundary():
            return ours.move(param, gradient) if self._mismatch is None else ours.leave(param, gradient)
        return self._both(param, gradient)

    def _both(self, param: Any, gradient: Tensor) -> list[Tensor]:
        ours, z = self._attachment, self._attachment._optimizer
        group, offset, _ = z.grad_position[z.get_param_id(param)]
        target = z.fp32_partitioned_groups_flat[group].grad
        if z._swappable_optimizer_subgroup(group) or not _on_host(target):
            return ours.leave(param, gradient)
        low = getattr(z, _LOW_PRECISION)[param.ds_id].narrow(0, 0, gradient.numel())
        before, full_gradient = low.clone(), param.grad
        buffers = ours.leave(param, gradient)
        ours.status.left_to_deepspeed -= 1
        ours._device.synchronize()
        destination = target.narrow(0, offset, gradient.numel())
        stock, accumulated = destination.clone(), low.clone()
        stock_norm = float(z.norm_for_param_grads[z.get_param_id(param)])
        low.copy_(before)
        param.grad = full_gradient
        ours.move(param, gradient)
        ours._drain()
        self._partitions += 1
        self._elements += gradient.numel()
        self._mismatch = _difference(
            destination, stock, float(z.norm_for_param_grads[z.get_param_id(param)]), stock_norm
        )
        if self._mismatch is not None:
            destination.copy_(stock)
            low.copy_(accumulated)
            ours._set_stale(param, stale=False)
            z.norm_for_param_grads[z.get_param_id(param)] = torch.tensor(stock_norm, dtype=torch.float64)
        return buffers

    def result(self) -> SelfCheck:
        """What was compared."""
        return SelfCheck(partitions=self._partitions, elements=self._elements, mismatch=self._mismatch)


def _difference(ours: Tensor, stock: Tensor, our_norm: float, stock_norm: float) -> str | None:
    """In words, None where the bits are the same and the norms agree to 1e-12."""
    if not torch.equal(ours.view(torch.int32), stock.view(torch.int32)):
        wrong = int((ours.view(torch.int32) != stock.view(torch.int32)).sum())
        return f"{wrong:,} of {ours.numel():,} values of one partition differ"
    finite = abs(stock_norm) < float("inf")
    if finite and abs(our_norm - stock_norm) > 1e-12 * max(abs(stock_norm), 1e-300):
        return f"the norm of one partition is {our_norm!r}, DeepSpeed's is {stock_norm!r}"
    return None


def _on_host(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.device.type == "cpu"


def _same_place(one: Tensor, other: Tensor) -> bool:
    return one.device == other.device


def _narrower(buffer: torch.dtype, gradient: torch.dtype) -> bool:
    """Whether the accumulation buffer rounds the gradient."""
    return buffer != gradient and buffer != torch.float32
