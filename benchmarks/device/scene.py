"""What a part is given: the device, how large things are, how much time there is, where to keep what it finds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.device import outcomes

if TYPE_CHECKING:
    from autotune_offload.machine.device import Device
    from autotune_offload.records import Workload

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large and how often. The defaults are those of a run that counts."""

    parameters: int | None = None
    """Of the model that is probed for; None takes a probe's own default."""
    probe_plan: str = "standard"
    probe_seconds: float | None = None
    quick_probes: int = 5
    copies: tuple[int, ...] = (MIB, 16 * MIB, 256 * MIB)
    sweeps: int = 3
    sweep_rounds: int = 9
    sweep_elements: int = 1 << 26
    """Of the sample at most: 256 MiB of fp32."""
    layers: int = 16
    width: int = 2048
    rows: int = 8192
    """Rows of a batch where copies can hide behind compute: as many as two sequences of 4,096 tokens have."""
    pairs: int = 5
    steps: int = 200


SHORT = Sizes(
    parameters=20_000_000,
    probe_plan="quick",
    probe_seconds=0.5,
    quick_probes=2,
    copies=(MIB // 16, MIB),
    sweeps=1,
    sweep_rounds=2,
    sweep_elements=1 << 22,
    layers=2,
    width=256,
    rows=8,
    pairs=2,
    steps=6,
)
"""For tests: everything runs, and nothing that comes out means anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One of the things that a part does, if there is time."""

    name: str
    work: Callable[..., dict[str, Any]]

    def __str__(self) -> str:
        """Its name."""
        return self.name


@dataclass(slots=True, kw_only=True)
class Scene:
    """Where a part runs."""

    name: str
    folder: Path
    seconds: float
    """From `began` on; a part begins nothing that it does not expect to end by then."""
    sizes: Sizes = field(default_factory=Sizes)
    fake: str | None = None
    """The kind of a stand-in for an accelerator, for tests. Training itself is on the CPU then."""
    began: float = field(default_factory=time.monotonic)
    found: dict[str, Any] = field(default_factory=dict)

    def keep(self, **found: Any) -> None:
        """On disk from now on, whatever becomes of this process."""
        self.found |= found
        outcomes.write(part_file(self.folder, self.name), self.found)

    def told(self, name: str) -> dict[str, Any]:
        """What an earlier part has found."""
        return outcomes.read(part_file(self.folder, name))

    def why_no_cpu_adam(self) -> str | None:
        """None where DeepSpeed's CPU Adam was built; a part that built it itself would wait for a killed build."""
        why: str | None = self.told("build").get("cpu_adam", "it was not built in time")
        return why

    @property
    def left_seconds(self) -> float:
        """Until the part should have ended."""
        return self.began + self.seconds - time.monotonic()

    def device(self) -> Device:
        """DeepSpeed's accelerator, or what stands for one."""
        from autotune_offload.machine.accelerator import AcceleratorDevice

        return AcceleratorDevice() if self.fake is None else stand_in(self.fake)

    def workload(self) -> Workload | None:
        """What is probed for."""
        from autotune_offload.workload import from_parameter_count

        return None if self.sizes.parameters is None else from_parameter_count(self.sizes.parameters)

    def attached_device(self) -> Device | None:
        """For `attach`: None is the accelerator itself."""
        return None if self.fake is None else stand_in(self.fake)

    def in_time(self, work: Iterable[Any], *, name: str = "left_out") -> Iterator[Any]:
        """Each of `work` for which there should be time, going by the longest so far; the others are kept as a list.

        The first is always given.
        """
        longest, left_out = 0.0, []
        for each in work:
            if longest and longest > self.left_seconds:
                left_out.append(str(each))
                continue
            before = time.monotonic()
            yield each
            longest = max(longest, time.monotonic() - before)
        if left_out:
            self.keep(**{name: left_out})


def part_file(folder: Path, name: str) -> Path:
    """Where a part keeps what it finds."""
    return folder / "parts" / f"{name}.json"


def stand_in(kind: str) -> Device:
    """A fake accelerator of that kind, whose memory is the host's."""
    from torch import Tensor

    from autotune_offload.testing import FakeAccelerator, FakeAcceleratorDevice, habana_modules

    if kind == "hpu":
        sys.modules.update(habana_modules([]))

    class StandIn(FakeAcceleratorDevice):
        def record_stream(self, tensor: Tensor) -> None:
            """Host memory knows no streams."""
            del tensor

        def matmul(self, out: Tensor, left: Tensor, right: Tensor) -> None:
            """The stand-in for compute would take the host minutes, and hides nothing here."""
            del out, left, right

    return StandIn(FakeAccelerator(kind))


def real_kind() -> str:
    """What DeepSpeed's accelerator calls itself: "cpu", "cuda", "hpu" and so on."""
    from autotune_offload.machine.accelerator import deepspeed_accelerator

    return str(deepspeed_accelerator().device_name()).partition(":")[0]
