"""What holds training loops the same, taken out of the package one by one: the loops must find each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from autotune_offload.engine.attachment import Attachment
from autotune_offload.engine.delivery import Delivery
from autotune_offload.paths.accumulation import Moment
from autotune_offload.paths.destination import DestinationPath
from autotune_offload.paths.ring import StagedPath
from autotune_offload.upstream import STEP_BEGINS


def _without_keeping(patch: pytest.MonkeyPatch) -> None:
    """What a boundary made does not go into the accumulation buffer."""
    for path in (DestinationPath, StagedPath):
        right: Callable[..., Any] = path.offload_with_norm

        def forgetful(self: Any, source: Tensor, destination: Tensor, low: Tensor | None = None,
                      right: Callable[..., Any] = right) -> Any:  # fmt: skip
            del low
            return right(self, source, destination)

        patch.setattr(path, "offload_with_norm", forgetful)


def _without_leaving_edits(patch: pytest.MonkeyPatch) -> None:
    """The accumulation buffer is made anew from fp32 gradients, which a user may have changed."""
    right: Callable[..., Any] = Delivery.prepare

    def fresh(self: Delivery, param: Any, gradient: Tensor, low: Tensor, destination: Tensor | None,
              moment: Moment) -> Callable[[], None]:  # fmt: skip
        if destination is not None and not moment.first:
            low.copy_(destination)
        send: Callable[[], None] = right(self, param, gradient, low, destination, moment)
        return send

    patch.setattr(Delivery, "prepare", fresh)


def _without_settling(patch: pytest.MonkeyPatch) -> None:
    """A partition is sent where it is still under way."""
    patch.setattr(Delivery, "settle", lambda self, param: None)


def _without_waiting(patch: pytest.MonkeyPatch) -> None:
    """Whatever reads finds what has arrived so far."""
    patch.setattr(
        Attachment,
        "_read",
        lambda self, name, *args, **kwargs: self._methods.former(name)(*args, **kwargs),
    )
    patch.setattr(
        Attachment,
        "_step_begins",
        lambda self, *args, **kwargs: self._methods.former(STEP_BEGINS)(*args, **kwargs),
    )


def _without_draining(patch: pytest.MonkeyPatch) -> None:
    """Nobody waits at all."""
    patch.setattr(Delivery, "drain", lambda self: None)


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "keep": _without_keeping,
    "leave edits": _without_leaving_edits,
    "settle": _without_settling,
    "wait": _without_waiting,
    "drain": _without_draining,
}
"""What is taken out, by name."""
