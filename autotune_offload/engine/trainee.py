"""One engine that trains under the clock."""

from __future__ import annotations

import copy
import functools
import gc
import math
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from autotune_offload.engine.clock import OffloadClock
from autotune_offload.engine.replacement import Replacement
from autotune_offload.engine.toy_model import ModelSpec
from autotune_offload.errors import MeasurementError
from autotune_offload.records import Progress
from autotune_offload.spread import interquartile_range
from autotune_offload.upstream import EPILOGUE, OPTIMIZER_STEP, PARTITION, REASSIGN, UNSCALE

Metric = Literal["step", "backward", "gradient_offload"]
METRICS: tuple[Metric, ...] = ("step", "backward", "gradient_offload")
Phase = Literal["unscale", "adam", "copy_back"]
PHASES: dict[Phase, str] = {"unscale": UNSCALE, "adam": OPTIMIZER_STEP, "copy_back": REASSIGN}
"""Of an optimizer step, by the method of DeepSpeed's that each is. The compiled pass does all in the second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What is compared: a complete ds_config, and what is done to the engine that comes of it.

    `prepare` is called with the engine before the first step.
    """

    name: str
    config: dict[str, Any]
    prepare: Callable[[Any], None] | None = None


def stock_config(
    *,
    micro_batch: int,
    accumulation_steps: int = 1,
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16",
    torch_adam: bool = True,
) -> dict[str, Any]:
    """Plain ZeRO-3 with optimizer and parameters offloaded: a ds_config that says nothing more.

    The optimizer is torch's AdamW (`torch_adam`), on the host like DeepSpeedCPUAdam and reading the
    same gradients, but with no C++ extension to compile first. Without `torch_adam` it is DeepSpeedCPUAdam.
    """
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation_steps,
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-4, "torch_adam": torch_adam}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
        },
    }
    return config if dtype == "fp32" else {**config, dtype: {"enabled": True}}


# -- what comes out -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One metric of one variant over the counted steps."""

    median_seconds: float
    iqr_seconds: float
    raw_seconds: tuple[float, ...]

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """Median and interquartile range of at least two samples."""
        return cls(
            median_seconds=statistics.median(seconds),
            iqr_seconds=interquartile_range(seconds),
            raw_seconds=tuple(seconds),
        )


@contextmanager
def single_process_environment() -> Iterator[None]:
    """What `deepspeed.init_distributed` needs to start as a single process, while inside.

    Where a launcher has set RANK, nothing is touched. Afterwards `os.environ` is as before.
    """
    if "RANK" in os.environ:
        yield
        return
    port = _free_port()
    # LOCAL_SIZE: without it DeepSpeed up to 0.15.4 asks numactl, which may not be installed.
    numbers = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_SIZE": 1, "MASTER_PORT": port}
    before = dict(os.environ)
    os.environ.update({name: str(number) for name, number in numbers.items()}, MASTER_ADDR="127.0.0.1")
    # DeepSpeed builds its extensions with ninja, which is installed next to Python but maybe not on the path.
    os.environ["PATH"] = os.pathsep.join(
        [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    )
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        # DeepSpeed's shared-memory op leaves its buffer of 66 MB behind, under a name with the port in it.
        for buffer in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_{os.getuid()}_127.0.0.1_{port}_*"):
            buffer.unlink(missing_ok=True)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def counting_rows(spec: ModelSpec, shape: tuple[int, int], step: int) -> Tensor:
    """Rows of shape (*shape, length + 1) that count up from anywhere: easy to learn, so that the loss falls."""
    starts = torch.randint(spec.vocabulary, (*shape, 1), generator=torch.Generator().manual_seed(step))
    return (starts + torch.arange(spec.length + 1)) % spec.vocabulary


# -- training and timing --------------------------------------------------------------------------


BUILDING_SHARE = 0.3
"""How much of the progress is the making of the engines: a guess, for the bar alone."""


class Clock:
    """Marks moments on the current stream: events where the device runs on its own, else the host's clock.

    An event marks without stopping anything. Which of the two is DeepSpeed's own rule for its timers.
    """

    def __init__(self, accelerator: Any) -> None:
        self.accelerator = accelerator
        self.by_host = bool(accelerator.use_host_timers())

    def mark(self) -> Any:
        """A moment on the device's own clock, or on the host's."""
        if self.by_host:
            return time.perf_counter()
        event = self.accelerator.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, spans: Sequence[tuple[Any, Any]]) -> float:
        """Total of the spans; the device must have finished them."""
        if self.by_host:
            return math.fsum(end - start for start, end in spans)
        return math.fsum(start.elapsed_time(end) for start, end in spans) / 1e3


@dataclass(slots=True)
class Trainee:
    """One engine and the times of its steps."""

    name: str
    engine: Any
    clock: Clock
    offload: OffloadClock = field(default_factory=OffloadClock)
    phase_spans: dict[Phase, list[tuple[float, float]]] = field(
        default_factory=lambda: {p: [] for p in PHASES}
    )
    losses: list[float] = field(default_factory=list)
    phases: dict[Phase, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})
    seconds: dict[Metric, list[float]] = field(default_factory=lambda: {metric: [] for metric in METRICS})

    def watch(self) -> Callable[[], None]:
        """Time gradients and each phase of a step, whoever supplies them; returns what undoes that."""
        methods = Replacement(self.engine.optimizer)

        def partition_grads(*args: Any, **kwargs: Any) -> Any:
            self.offload.begin()
            return methods.former(PARTITION)(*args, **kwargs)

        def epilogue(*args: Any, **kwargs: Any) -> Any:
            result = methods.former(EPILOGUE)(*args, **kwargs)
            self.offload.end()
            return result

        def timed(phase: Phase, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = methods.former(PHASES[phase])(*args, **kwargs)
            self.phase_spans[phase].append((start, time.perf_counter()))
            return result

        phases = {name: functools.partial(timed, phase) for phase, name in PHASES.items()}
        methods.put({PARTITION: partition_grads, EPILOGUE: epilogue, **phases})
        return methods.take_out

    def train(self, micro_batches: Tensor) -> None:
        """One optimizer step over micro-batches of shape (accumulation steps, batch, length + 1)."""
        self.offload.take()
        for spans in self.phase_spans.values():
            spans.clear()
        losses: list[Tensor] = []
        backward_spans: list[tuple[Any, Any]] = []
        self.clock.accelerator.synchronize()
        began = time.perf_counter()
        for rows in micro_batches:
            loss = self.engine(rows)
            start = self.clock.mark()
            self.engine.backward(loss)
            backward_spans.append((start, self.clock.mark()))
            self.engine.step()
            losses.append(loss.detach())
        self.clock.accelerator.synchronize()
        self._record(time.perf_counter() - began, backward_spans)
        self.losses.append(statistics.fmean(loss.item() for loss in losses))

    def _record(self, step_seconds: float, backward_spans: Sequence[tuple[Any, Any]]) -> None:
        offload = self.offload.take()
        if not offload.whole:
            raise MeasurementError(
                f"{self.name}: DeepSpeed never called partition_grads in a step, so there is no gradient offload"
                " to time; expected plain ZeRO-3: turn off features that bypass it, such as DeepCompile"
            )
        self.seconds["step"].append(step_seconds)
        self.seconds["backward"].append(self.clock.seconds(backward_spans))
        self.seconds["gradient_offload"].append(offload.seconds)
        for phase, spans in self.phase_spans.items():
            self.phases[phase].append(math.fsum(end - start for start, end in spans))


def start_trainees(
    runs: Sequence[Variant], model: ModelSpec, cleanup: ExitStack, report: Progress
) -> list[Trainee]:
    """An engine for each variant, each on its own copy of the model."""
    import deepspeed.comm
    from deepspeed.accelerator import get_accelerator

    if not deepspeed.comm.is_initialized():
        cleanup.callback(leave_process_group)
    cleanup.callback(release_memory)
    trainees: list[Trainee] = []
    cleanup.callback(trainees.clear)
    for number, variant in enumerate(runs):
        report(f"building {variant.name}", BUILDING_SHARE * number / len(runs))
        # A copy: DeepSpeed up to 0.15 takes keys out of the dict it is given.
        engine = deepspeed.initialize(model=model.build(), config=copy.deepcopy(variant.config))[0]
        cleanup.callback(engine.destroy)
        if variant.prepare:
            variant.prepare(engine)
        trainee = Trainee(name=variant.name, engine=engine, clock=Clock(get_accelerator()))
        cleanup.callback(trainee.watch())
        trainees.append(trainee)
    return trainees


def leave_process_group() -> None:
    """Undo what the first engine set up."""
    import deepspeed.comm

    if deepspeed.comm.is_initialized():
        deepspeed.comm.destroy_process_group()


def release_memory() -> None:
    """Give back what an engine that is gone still holds in caches."""
    from deepspeed.accelerator import get_accelerator

    gc.collect()
    get_accelerator().empty_cache()
