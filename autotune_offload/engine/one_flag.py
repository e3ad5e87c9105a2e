"""Stages 1 and 2 with the optimizer on the host: one flag for the overflow of all gradients, read once a step.

DeepSpeed asks each gradient at the boundary whether it is finite, and waits for the device to know: once a
parameter, in bf16 too. Here the least and the greatest value of each are added to a flag on the device, zero times,
which makes it a NaN exactly where one of them is no finite number; an infinity is one of the two, and a NaN becomes
both. The flag is read when DeepSpeed asks for the overflow of the step, which waits in any case. So the gradients that
are looked at are the same, and so is what is found.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import msgspec
import torch
from torch import Tensor

from autotune_offload.engine.replacement import Replacement
from autotune_offload.errors import in_words
from autotune_offload.machine.device import Device
from autotune_offload.upstream import DESTROY, LOCAL_OVERFLOW, OVERFLOW, RESET, STAGE12, TRACKERS

CHECKED = 16
"""Gradients at first that DeepSpeed's own code looks at, too."""

_log = logging.getLogger("autotune_offload")


class FlagStatus(msgspec.Struct, kw_only=True):
    """What has become of it."""

    why_not: str | None = None
    """Why DeepSpeed looks at each gradient itself: from the start, or since it was taken out."""
    checked: int = 0
    """Gradients that both looked at, and found the same of."""
    gradients: int = 0
    """That were looked at without waiting."""


_entries: weakref.WeakKeyDictionary[Any, tuple[weakref.ref[OneFlag], FlagStatus]] = (
    weakref.WeakKeyDictionary()
)


def attach_flag(engine: Any, device: Device) -> FlagStatus:
    """Put it into a running engine, in place of one that is there.

    Args:
        engine: what `deepspeed.initialize` returned.
        device: where gradients are reduced.
    """
    detach_flag(engine)
    if (why_not := why_not_attachable(engine)) is not None:
        return FlagStatus(why_not=why_not)
    flag = OneFlag(engine.optimizer, device)
    flag.replace_methods()
    _entries[engine] = weakref.ref(flag), flag.status
    return flag.status


def detach_flag(engine: Any) -> bool:
    """Give the optimizer its own methods back; False where it has them."""
    entry = _entries.pop(engine, None)
    flag = None if entry is None else entry[0]()
    return flag is not None and flag.remove()


def why_not_attachable(engine: Any) -> str | None:
    """None where it is exactly what this engine's own code finds."""
    optimizer = getattr(engine, "optimizer", None)
    kind = type(optimizer)
    if kind.__name__ != STAGE12 or not kind.__module__.startswith("deepspeed."):
        return f"the optimizer is {kind.__name__}, not exactly {STAGE12}"
    if not getattr(optimizer, "cpu_offload", False):
        return "the optimizer is not offloaded"
    names = (_tracker(optimizer), OVERFLOW, RESET, DESTROY)
    missing = [name for name in (*names, LOCAL_OVERFLOW) if name is None or not hasattr(optimizer, name)]
    if missing:
        return f"this DeepSpeed's {STAGE12} tracks overflows in another way"
    own = [name for name in names if name in vars(optimizer)]
    return f"{', '.join(map(str, own))} of this optimizer was replaced by somebody else" if own else None


def _tracker(optimizer: Any) -> str | None:
    return next((name for name in TRACKERS if hasattr(optimizer, name)), None)


class OneFlag:
    """One optimizer with the flag in it."""

    def __init__(self, optimizer: Any, device: Device) -> None:
        """Replaces nothing yet."""
        self.status = FlagStatus()
        self._optimizer, self._device = optimizer, device
        self._name = _tracker(optimizer) or TRACKERS[0]
        self._methods = Replacement(optimizer)
        self._flag: Tensor | None = None

    def replace_methods(self) -> None:
        """Put ours in charge."""
        self._methods.put(
            {
                self._name: self._look,
                OVERFLOW: self._has_overflow,
                RESET: self._reset,
                DESTROY: self._destroy,
            }
        )

    def remove(self) -> bool:
        """Put DeepSpeed's back, with what has been found; False where that has been done before."""
        if not self._methods.active:
            return False
        self._settle()
        self._methods.take_out()
        return True

    # -- what DeepSpeed calls --

    def _look(self, of: Any) -> None:
        """At one gradient, or that of one parameter: same argument and effect as DeepSpeed's, which comes later."""
        gradient = of if self._name == TRACKERS[0] else self._optimizer.get_param_gradient_attribute(of)
        if gradient is None:
            return
        if not self._methods.active or not _plain(gradient):
            self._methods.former(self._name)(of)
            return
        try:
            extremes = torch.aminmax(gradient.detach())
        except Exception as error:  # whatever it is, DeepSpeed looks itself
            self._give_up(f"a gradient could not be looked at ({in_words(error)})")
            self._methods.former(self._name)(of)
            return
        if self.status.checked < CHECKED:
            self._compare(of, extremes)
            return
        flag = self._flag
        if flag is None or flag.device != gradient.device:
            self._settle()
            flag = self._flag = torch.zeros((), dtype=torch.float32, device=gradient.device)
        for extreme in extremes:
            flag.add_(extreme.mul(0))
        self.status.gradients += 1

    def _has_overflow(self, *args: Any, **kwargs: Any) -> Any:
        """DeepSpeed's own, which then knows of all gradients."""
        self._settle()
        return self._methods.former(OVERFLOW)(*args, **kwargs)

    def _reset(self) -> None:
        self._methods.former(RESET)()
        if self._flag is not None:
            self._flag.zero_()

    def _destroy(self) -> None:
        self.remove()
        self._methods.former(DESTROY)()

    # -- --

    def _compare(self, of: Any, extremes: tuple[Tensor, Tensor]) -> None:
        optimizer = self._optimizer
        before = getattr(optimizer, LOCAL_OVERFLOW)
        setattr(optimizer, LOCAL_OVERFLOW, False)
        self._methods.former(self._name)(of)
        found = bool(getattr(optimizer, LOCAL_OVERFLOW))
        setattr(optimizer, LOCAL_OVERFLOW, before or found)
        if found is not bool(torch.stack([extreme.mul(0) for extreme in extremes]).isnan().any()):
            self._give_up(f"DeepSpeed's own code found {'an' if found else 'no'} overflow, ours did not")
            return
        self.status.checked += 1

    def _settle(self) -> None:
        """Tell DeepSpeed what has been found so far; waits for the device."""
        if self._flag is None:
            return
        with self._on_its_stream():
            if bool(self._flag.isnan()):
                setattr(self._optimizer, LOCAL_OVERFLOW, True)
            self._flag.zero_()

    @contextlib.contextmanager
    def _on_its_stream(self) -> Iterator[None]:
        """The one on which gradients were looked at."""
        stream = getattr(self._optimizer, "reduction_stream", None)
        beside = stream if getattr(self._optimizer, "overlap_comm", False) else None
        with self._device.on(beside):
            yield

    def _give_up(self, cause: str) -> None:
        if self.status.why_not is None:
            self.status.why_not = cause
            _log.warning("autotune-offload: %s; from here on DeepSpeed looks at each gradient itself", cause)
            self.remove()


def _plain(gradient: Any) -> bool:
    """Whether it is a tensor with values in a row, and has some."""
    return isinstance(gradient, Tensor) and gradient.layout == torch.strided and gradient.numel() > 0
