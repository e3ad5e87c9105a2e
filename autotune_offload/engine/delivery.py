"""Takes partitions where they belong, by a path or, should that fail, without it.

Whatever is under way is known by its partition. Nothing is sent where something is still under way; whoever
wants to read waits for all of it; whatever is interrupted or fails is delivered from the accumulation buffer.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor

from autotune_offload.engine.norms import Norms
from autotune_offload.engine.stage3 import Stage3
from autotune_offload.machine import host_pass
from autotune_offload.machine.device import Device
from autotune_offload.paths.accumulation import Accumulation, HostSums, Moment
from autotune_offload.paths.build import build
from autotune_offload.paths.path import GradientPath, Spec, moved_bytes, page_locks

_log = logging.getLogger("autotune_offload")


class _UnderWay(msgspec.Struct, frozen=True):
    """A partition that was sent and may not have arrived everywhere; no destination where it was only added up."""

    low: Tensor
    destination: Tensor | None


class Delivery:
    """One path with what adds up before it, for one optimizer.

    Args:
        stage3: the optimizer.
        device: where gradients are reduced.
        choice: the path, and where to add up.
        failed: is told what made a path fail, once everything else that was sent is to be delivered without it.
        norms: of this optimizer, known to all of its deliveries.
    """

    def __init__(
        self,
        stage3: Stage3,
        device: Device,
        choice: Spec,
        failed: Callable[[BaseException], None],
        norms: Norms,
    ) -> None:
        """Builds the path for the dtype that gradients accumulate in. Raises what `paths.build` does."""
        self.device, self.stage3, self.norms = device, stage3, norms
        self._choice, self._tell = choice, failed
        self._failed = False
        self._under_way: dict[int, _UnderWay] = {}
        self._accumulation = Accumulation(
            device, getattr(choice, "accumulate", "device"), page_lock=page_locks(choice.path)
        )
        dtype: torch.dtype = stage3.optimizer.gradient_accumulation_dtype
        if device.shares_host_memory or self._accumulation.place == "host":
            host_pass.why_not_fused(dtype)  # compiles it, if need be
        self._path = build(device, choice, dtype)

    @property
    def pinned_bytes(self) -> dict[str, int]:
        """What is page-locked here, by what it is for."""
        return {
            "the path's ring": self._path.pinned_bytes,
            "sums on the host": self._accumulation.pinned_bytes,
        }

    def link_bytes(self, gradient: Tensor, low: Tensor, moment: Moment) -> int:
        """What crosses the link for one partition; 0 where there is none."""
        if self.device.shares_host_memory:
            return 0
        before = self._accumulation.link_bytes(gradient, low, moment)
        by_path = moment.boundary and not self._accumulation.adds_on_host(moment)
        return before + (moved_bytes(self._choice, low) if by_path else 0)

    def prepare(
        self, param: Any, gradient: Tensor, low: Tensor, destination: Tensor | None, moment: Moment
    ) -> Callable[[], None]:
        """What sends one partition, with everything made ready that can fail before DeepSpeed's memory changes.

        Args:
            param: whose partition it is.
            gradient: device memory, shape (n,).
            low: the partition in the accumulation buffer, with nothing under way.
            destination: its fp32 gradient; None before the boundary.
            moment: where in an accumulation.
        """
        if destination is None:
            self.norms.make_exact(param)
        if self._accumulation.adds_on_host(moment):
            sums, sent = self._accumulation.on_host(gradient, low)
            return functools.partial(self._added_on_host, sums, param, sent, low, destination)
        value = self._accumulation.value(gradient, low, moment)
        return functools.partial(self._sent, param, value, low, destination)

    def _added_on_host(
        self, sums: HostSums, param: Any, gradient: Tensor, low: Tensor, destination: Tensor | None
    ) -> None:
        """Into the sum, and with a destination from there to fp32; the norm comes with the next drain."""
        self._under_way[param.ds_id] = _UnderWay(low, destination)
        key = None if destination is None else self.norms.will_land(param, gradient.numel())
        try:
            sums.add(gradient, low, destination, key)
        except Exception as error:
            self._fail(error)  # which finishes this partition, too
        except BaseException:
            self._recover()  # the same
            raise

    def _sent(self, param: Any, value: Tensor, low: Tensor, destination: Tensor | None) -> None:
        """To the buffer, and with a destination to both by the path, or plainly should that fail; and the norm."""
        if not self.device.synchronous:
            self._under_way[param.ds_id] = _UnderWay(low, destination)
        try:
            if destination is None:
                self._accumulation.keep(value, low)
            else:
                norm = self._path.offload_with_norm(value, destination, low)
                self.norms.give(param, norm, value.numel())
        except Exception as error:
            self._fail(error)
            self._plainly(param, value, low, destination)
        except BaseException:  # Ctrl-C: the path goes on
            self._recover()
            self._plainly(param, value, low, destination)
            raise

    def _plainly(self, param: Any, value: Tensor, low: Tensor, destination: Tensor | None) -> None:
        low.copy_(value)
        if destination is not None:
            destination.copy_(value)
            key = self.stage3.optimizer.get_param_id(param)
            self.stage3.norms[key] = self.stage3.optimizer._constant_buffered_norm2(value)

    # -- waiting, and what to do when that fails --

    def settle(self, param: Any) -> None:
        """Return when nothing is under way for this partition."""
        if param.ds_id in self._under_way:
            self.drain()

    def drain(self) -> None:
        """Return when every gradient is where it belongs, by the path or, should that fail, without it."""
        try:
            with self.device.on(self.stage3.stream):
                self._path.drain()
                self.norms.landed(self._accumulation.drain())
        except Exception as error:
            self._fail(error)
        else:
            if not self._failed:
                self._under_way.clear()

    def end(self) -> None:
        """Deliver what is under way, and give the buffers back."""
        self.drain()
        if self._failed:
            self._recover()
        close_quietly(self._path)
        close_quietly(self._accumulation)

    def _fail(self, error: BaseException) -> None:
        self._failed = True
        self._tell(error)

    def _recover(self) -> None:
        """After a failure or an interruption: deliver what was sent, from the buffer that holds it."""
        with self.device.on(self.stage3.stream):
            self.device.synchronize_stream()
            self._path.recover()
            self.norms.landed(self._accumulation.recover())
            for sent in self._under_way.values():
                if sent.destination is not None:
                    sent.destination.copy_(sent.low)
            self._under_way.clear()


def close_quietly(what: GradientPath | Accumulation) -> None:
    """Give the buffers back; what fails in that is not worth a run."""
    try:
        what.close()
    except Exception:
        _log.debug("autotune-offload: buffers could not be given back", exc_info=True)
