"""What a path holds in device memory, over whole accumulations, against DeepSpeed's own code and what is stated."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from autotune_offload.decide.candidates import PARAMETERS
from autotune_offload.engine.attach import attach, detach
from autotune_offload.paths import accumulation
from autotune_offload.paths.device_memory import device_memory
from autotune_offload.records import Workload, histogram
from autotune_offload.testing import FakeAccelerator, FakeAcceleratorDevice
from tests.engine.test_attach import Engine, candidate
from tests.factories import make_choice

BUCKETS, A_BUCKET, ELEMENTS = 10, 2, 1000
SIZES = (ELEMENTS,) * (BUCKETS * A_BUCKET)
NORM_BYTES = 8
SPECS = [
    candidate(path=path, cast=cast, host_threads=threads)
    for path in ("direct", "pinned", "staged")
    for cast in ("device", "host")
    for threads in (0, 2)
]


class Meter:
    """Device memory that somebody still refers to, and the most of it so far."""

    def __init__(self) -> None:
        self.bytes = self.most = 0

    def watch(self, tensor: Tensor) -> Tensor:
        """Counted until its memory goes; whoever views it holds all of it."""
        memory = tensor.untyped_storage()
        self._add(memory.nbytes())
        weakref.finalize(memory, self._add, -memory.nbytes())
        return tensor

    def _add(self, size: int) -> None:
        self.bytes += size
        self.most = max(self.most, self.bytes)


class MeteredDevice(FakeAcceleratorDevice):
    """Has memory of its own, which is counted; work is done at once, as if a stream had come to it."""

    def __init__(self, meter: Meter) -> None:
        super().__init__(FakeAccelerator("cuda"))
        self.meter = meter

    def empty(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Counted."""
        return self.meter.watch(super().empty(elements, dtype))

    def record_stream(self, tensor: Tensor) -> None:
        """There is one."""
        del tensor


def trained(meter: Meter, engine: Engine, dtype: torch.dtype, accumulation: int) -> list[tuple[int, int]]:
    """Two steps; the most and the standing bytes of each. A bucket is one piece of memory, gone when it is moved."""
    z, found = engine.optimizer, []
    for step in range(2):
        meter.most = meter.bytes
        for micro_step in range(accumulation):
            z.is_gradient_accumulation_boundary = micro_step == accumulation - 1
            for number in range(BUCKETS):
                bucket = meter.watch(torch.full((A_BUCKET * ELEMENTS,), 0.5 + step, dtype=dtype))
                params = z.parameters[number * A_BUCKET : (number + 1) * A_BUCKET]
                z.partition_grads(params, list(torch.split(bucket, ELEMENTS)))
                del bucket
            z.independent_gradient_partition_epilogue()
        z.step()
        found.append((meter.most, meter.bytes))
    return found


@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("accumulation_steps", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.path}-{s.cast}-{s.host_threads}")
def test_a_path_holds_what_is_stated_and_no_gradient(
    monkeypatch: pytest.MonkeyPatch, spec: Any, dtype: torch.dtype, accumulation_steps: int, place: str
) -> None:
    """At the worst moment DeepSpeed's own bucket and the scratch; between steps the scratch alone."""
    monkeypatch.setattr(accumulation, "_PIECE_BYTES", 256)  # a gradient in many pieces, more than the buffers
    choice = make_choice(**{name: getattr(spec, name) for name in PARAMETERS}, accumulate=place)
    workload = Workload(
        partitions=histogram(SIZES),
        parameters=histogram(SIZES),
        dtype=str(dtype).removeprefix("torch."),
        world_size=1,
        accumulation_steps=accumulation_steps,
        source="a test",
    )
    ours, stock = Meter(), Meter()
    engine = Engine(accumulation_steps, dtype=dtype, sizes=SIZES)
    attached = attach(engine, choice, MeteredDevice(ours), check=False)
    assert attached.why_not is None
    stated = device_memory(choice, workload, shares_host_memory=False).bytes
    norms = NORM_BYTES * len(SIZES) if place == "host" and accumulation_steps > 1 else 0
    found = trained(ours, engine, dtype, accumulation_steps)
    plain = trained(stock, Engine(accumulation_steps, dtype=dtype, sizes=SIZES), dtype, accumulation_steps)
    assert plain[0] == (A_BUCKET * ELEMENTS * dtype.itemsize, 0)
    for (most, standing), (stock_most, stock_standing) in zip(found, plain, strict=True):
        assert most <= stock_most + stated + 2 * norms
        assert standing - norms == stock_standing + stated
    assert found[1][1] == found[0][1]
    detach(engine)
    engine.optimizer.norm_for_param_grads.clear()
    assert ours.bytes == 0
