"""The race device beneath a real DeepSpeed on the CPU, whose own memory is used in the order of the host.

What DeepSpeed hands over as device memory it uses again in the order of its calls, as if its stream were never late: so
it is read when the call comes. All that is ours, and every copy to and from the host, goes by the drawn schedule.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.race.device import RaceDevice


class GuestDevice(RaceDevice):
    """See the module. All host memory counts as page-locked: whatever need not block, does not."""

    def is_pinned(self, tensor: Tensor) -> bool:
        """Any that is not the device's."""
        return not self.memory.has(tensor)

    def _read_now(self, tensor: Tensor) -> Tensor:
        with self.plainly():
            return tensor if self.memory.has(tensor) else tensor.clone()

    def d2h(self, destination: Tensor, source: Tensor, *, non_blocking: bool = False) -> None:
        """To the host some time."""
        super().d2h(destination, self._read_now(source), non_blocking=non_blocking)

    def cast(self, destination: Tensor, source: Tensor) -> None:
        """Within the device."""
        super().cast(destination, self._read_now(source))

    def add(self, total: Tensor, addend: Tensor) -> None:
        """The same."""
        super().add(total, self._read_now(addend))

    def norm(self, source: Tensor) -> Tensor:
        """At once and in memory of DeepSpeed's, which adds it up to others."""
        self.synchronize_stream()
        with self.plainly():
            found: Tensor = torch.linalg.vector_norm(source, dtype=torch.float64)
            return found

    def empty(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Norms that come with a drain are DeepSpeed's, too."""
        if dtype == torch.float64:
            return torch.empty(elements, dtype=dtype)
        return super().empty(elements, dtype)

    def record_stream(self, tensor: Tensor) -> None:
        """Of DeepSpeed's memory, which knows no streams."""
        del tensor

    def _queue(self, call: str, work: Callable[[], object], *, blocking: bool = False) -> None:
        super()._queue(call, work, blocking=blocking)
        self.log.clear()  # a whole training would fill it
