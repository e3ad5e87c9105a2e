"""A path in the running optimizer: the same bits as DeepSpeed's own code, and out of the way when it fails."""

# ruff: noqa: D102  # the stand-ins' methods are those of what they stand in for
from __future__ import annotations

import contextlib
import gc
import logging
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from autotune_offload.decide.candidates import PARAMETERS
from autotune_offload.engine.attach import attach, detach, status, why_not_attachable
from autotune_offload.engine.status import Status
from autotune_offload.errors import PinError
from autotune_offload.machine.accelerator import AcceleratorDevice
from autotune_offload.machine.device import Device
from autotune_offload.paths import accumulation
from autotune_offload.paths.destination import DestinationPath
from autotune_offload.records import Candidate, Choice
from autotune_offload.upstream import LOW_PRECISION
from tests.factories import make_choice
from tests.fakes import DeferredDevice, DeferredEvent, FakeAccelerator
from tests.matrix.__main__ import GROUPS, Result, run

# -- real training --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained() -> list[Result]:
    """Every case of the matrix on the DeepSpeed that is installed, with DeepSpeed's own code and with a path."""
    return run(None, GROUPS)


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_training_is_the_same_to_the_bit(trained: list[Result], group: str) -> None:
    """Gradients, master weights, losses, overflows and loss scales over 20 steps; norms to 1e-12."""
    mine = [result for result in trained if result["group"] == group]
    assert len(mine) >= 4
    assert [(result["case"], result["difference"]) for result in mine if result["difference"]] == []
    assert [(result["case"], result["stock_failed"]) for result in mine if result["stock_failed"]] == []


@pytest.mark.slow
def test_the_forced_overflows_happened(trained: list[Result]) -> None:
    """In one rank and in two, several steps were skipped."""
    forced = [result for result in trained if "overflow" in result["case"]]
    assert len(forced) == 6 and all(result["overflows"] > 2 for result in forced)


# -- an optimizer as DeepSpeed has it, without DeepSpeed ------------------------------------------

DTYPE = torch.bfloat16
SIZES = (5, 300, 4096)


class Parameter:
    """What `partition_grads` reads of a parameter."""

    def __init__(self, ds_id: int, size: int) -> None:
        self.ds_id, self.ds_numel = ds_id, size
        self.grad: Tensor | None = None

    def partition_numel(self) -> int:
        return self.ds_numel


class DeepSpeedZeroOptimizer_Stage3:
    """The gradient side of the real one, one rank, in the order of its source (0.19.4, one group)."""

    def __init__(self, *, dtype: torch.dtype = DTYPE, sizes: tuple[int, ...] = SIZES) -> None:
        self.offload_optimizer = True
        self.dtype = self.gradient_accumulation_dtype = dtype
        self.parameters = [Parameter(number, size) for number, size in enumerate(sizes)]
        starts = [sum(sizes[:number]) for number in range(len(sizes))]
        self.grad_position = {n: [0, starts[n], size] for n, size in enumerate(sizes)}
        self.norm_for_param_grads: dict[int, Tensor] = {}
        self.fp32_partitioned_groups_flat = [SimpleNamespace(grad=torch.zeros(sum(sizes)))]
        self.buffer = torch.zeros(sum(sizes), dtype=dtype)
        views = {n: self.buffer.narrow(0, starts[n], size) for n, size in enumerate(sizes)}
        setattr(self, LOW_PRECISION, views)
        self.micro_step_id = 0
        self.is_gradient_accumulation_boundary = True
        self.swappable = False
        self.destroyed = 0

    def get_param_id(self, param: Parameter) -> int:
        return param.ds_id

    def _get_param_partition_rank(self, param: Parameter) -> int:
        return 0

    def _swappable_optimizer_subgroup(self, group: int) -> bool:
        return self.swappable

    def _constant_buffered_norm2(self, value: Tensor) -> Tensor:
        norm: Tensor = value.double().norm(2)
        return norm

    def partition_grads(self, params: list[Parameter], gradients: list[Tensor]) -> list[Tensor]:
        buffers = []
        for param, gradient in zip(params, gradients, strict=True):
            low = getattr(self, LOW_PRECISION)[param.ds_id]
            buffers.append(low)
            if self.micro_step_id == 0:
                low.copy_(gradient)
            else:
                low.add_(gradient.to(self.gradient_accumulation_dtype))
            if self.is_gradient_accumulation_boundary:
                _, offset, size = self.grad_position[param.ds_id]
                self.norm_for_param_grads[param.ds_id] = self._constant_buffered_norm2(low)
                self.fp32_partitioned_groups_flat[0].grad.narrow(0, offset, size).copy_(low)
            param.grad = None
        return buffers

    def independent_gradient_partition_epilogue(self) -> None:
        self.micro_step_id += 1

    def set_fp32_grad_for_param(self, value: float, param: Parameter) -> None:
        _, offset, size = self.grad_position[param.ds_id]
        self.fp32_partitioned_groups_flat[0].grad.narrow(0, offset, size).fill_(value)

    def destroy(self) -> None:
        self.destroyed += 1

    def complete_grad_norm_calculation_for_cpu_offload(self, params: list[Parameter]) -> Tensor:
        total = sum(self.norm_for_param_grads[param.ds_id] ** 2.0 for param in params)
        return torch.tensor([float(total)]) ** 0.5

    def _pre_step(self) -> None:
        self.micro_step_id = 0

    def step(self) -> None:
        """As clipping leaves it: the gradient is no longer what was accumulated."""
        self._pre_step()
        self.fp32_partitioned_groups_flat[0].grad.mul_(0.5)
        self.norm_for_param_grads = {}


DeepSpeedZeroOptimizer_Stage3.__module__ = "deepspeed.runtime.zero.stage3"


class Engine:
    """What is read of a DeepSpeedEngine."""

    def __init__(self, accumulation: int = 1, **optimizer: Any) -> None:
        self.optimizer = DeepSpeedZeroOptimizer_Stage3(**optimizer)
        self.accumulation = accumulation
        self._is_gradient_accumulation_boundary: bool | None = None

    def gradient_accumulation_steps(self) -> int:
        return self.accumulation

    def backward(self, gradients: list[Tensor], boundary: bool = True, calls: int = 2) -> list[Tensor]:
        """One backward pass, its gradients in `calls` buckets; returns the views that DeepSpeed was given."""
        z = self.optimizer
        z.is_gradient_accumulation_boundary = boundary
        buffers: list[Tensor] = []
        for number in range(calls):
            bucket = [gradient.clone() for gradient in gradients]
            share = slice(number, None, calls)
            for param, gradient in zip(z.parameters[share], bucket[share], strict=True):
                param.grad = gradient
            buffers += z.partition_grads(z.parameters[share], bucket[share])
            if number < calls - 1:
                self.overwrite(bucket)
        z.independent_gradient_partition_epilogue()
        return buffers

    def overwrite(self, bucket: list[Tensor]) -> None:
        """The next bucket uses the same memory, in stream order."""
        device = getattr(self, "device", None)
        if device is not None:
            device._queue("reuse", lambda: [gradient.fill_(float("nan")) for gradient in bucket])


def gradients(seed: int, dtype: torch.dtype = DTYPE) -> list[Tensor]:
    """One a parameter."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).to(dtype) for size in SIZES]


def candidate(**changes: Any) -> Candidate:
    """A path with buffers smaller than the partitions."""
    fields = {"path": "direct", "cast": "host", "buffer_bytes": 1024, "buffer_count": 2, "host_threads": 0}
    return Candidate(**{**fields, **changes})


def host() -> AcceleratorDevice:
    """The CPU accelerator."""
    return AcceleratorDevice(FakeAccelerator("cpu"))


def state(engine: Engine) -> tuple[list[int], list[int], list[float]]:
    """Bits of the fp32 gradient and of the accumulation buffer, and the norms."""
    z = engine.optimizer
    word = {2: torch.int16, 4: torch.int32}[z.buffer.element_size()]
    return (
        z.fp32_partitioned_groups_flat[0].grad.view(torch.int32).tolist(),
        z.buffer.view(word).tolist(),
        [float(norm) for _, norm in sorted(z.norm_for_param_grads.items())],
    )


def assert_same(engine: Engine, stock: Engine, *, buffer: bool = True) -> None:
    """The same bits; norms as close as two orders of addition come."""
    fp32, low, norms = state(engine)
    expected_fp32, expected_low, expected_norms = state(stock)
    assert fp32 == expected_fp32
    assert norms == pytest.approx(expected_norms, rel=1e-13)
    assert low == expected_low or not buffer


def attached(
    engine: Engine, spec: Candidate | Choice | None = None, device: Device | None = None, **options: Any
) -> Status:
    """A status that says the path is in."""
    found = attach(engine, spec or candidate(), device or host(), **options)
    assert found.why_not is None
    return found


@contextlib.contextmanager
def warnings_of(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """What is warned about inside."""
    caplog.clear()
    messages: list[str] = []
    with caplog.at_level(logging.WARNING, logger="autotune_offload"):
        yield messages
    messages += [record.getMessage() for record in caplog.records]


# -- putting it in and taking it out --------------------------------------------------------------


def test_detach_leaves_the_optimizer_as_it_was() -> None:
    """Nothing more in its instance, nothing less, and its own methods again."""
    engine = Engine()
    before = dict(vars(engine.optimizer))
    attached(engine)
    assert vars(engine.optimizer).keys() - before.keys() == {
        "partition_grads", "independent_gradient_partition_epilogue", "destroy", "set_fp32_grad_for_param",
        "_pre_step", "complete_grad_norm_calculation_for_cpu_offload",
    }  # fmt: skip
    assert detach(engine)
    assert vars(engine.optimizer) == before
    assert not detach(engine)


def test_a_path_that_goes_leaves_norms_in_deepspeeds_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is there any more who would see to it before they are added up."""
    engine, stock = Engine(), Engine()
    spoil(monkeypatch, lambda _, norm: norm * (1 + 1e-15))
    attached(engine, check=False)
    engine.backward(gradients(1))
    stock.backward(gradients(1))
    assert state(engine)[2] != state(stock)[2]
    detach(engine)
    assert state(engine) == state(stock)


@pytest.mark.parametrize("left", [False, True])
def test_a_later_pass_leaves_the_norms_of_the_boundary_exact(
    monkeypatch: pytest.MonkeyPatch, left: bool
) -> None:
    """It changes the values that they could be computed from, by our code or, where that is left to it, DeepSpeed's."""
    engine, stock = Engine(), Engine()
    spoil(monkeypatch, lambda _, norm: norm * (1 + 1e-15))
    attached(engine, check=False)
    for one in (engine, stock):
        one.backward(gradients(1))
    engine.optimizer.swappable = left
    for one in (engine, stock):
        one.backward(gradients(2), boundary=False)
    detach(engine)
    assert state(engine) == state(stock)


def test_before_the_buffer_goes_away_the_norms_are_made_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """`offload_states` takes the values from which they could be computed."""
    engine, stock = Engine(), Engine()
    z: Any = engine.optimizer
    z.offload_states = lambda: setattr(z, LOW_PRECISION, {})
    spoil(monkeypatch, lambda _, norm: norm * (1 + 1e-15))
    attached(engine, check=False)
    engine.backward(gradients(1))
    stock.backward(gradients(1))
    z.offload_states()
    assert state(engine) == state(stock)
    detach(engine)


def test_attaching_again_replaces_the_path() -> None:
    """The first path's threads end; one detach is enough afterwards."""
    engine, before = Engine(), threading.active_count()
    attached(engine, candidate(host_threads=3))
    assert threading.active_count() == before + 3
    second = attached(engine, candidate(host_threads=1))
    assert threading.active_count() == before + 1
    assert status(engine) is second
    assert detach(engine) and status(engine) is None
    assert "partition_grads" not in vars(engine.optimizer)


def test_two_engines_do_not_disturb_each_other() -> None:
    """Each has its own path, threads and status."""
    one, other, stock = Engine(), Engine(), Engine()
    first, second = attached(one), attached(other, candidate(host_threads=2))
    one.backward(gradients(1))
    detach(one)
    other.backward(gradients(1))
    stock.backward(gradients(1))
    assert_same(one, stock)
    assert_same(other, stock, buffer=False)
    assert status(other) is second and first is not second
    detach(other)


def test_a_wrapper_of_somebody_else_survives_detaching() -> None:
    """It goes on to DeepSpeed's own code, and may put our method back without harm."""
    engine, stock = Engine(), Engine()
    attached(engine)
    ours, calls = engine.optimizer.partition_grads, []

    def wrapper(*args: Any) -> Any:
        calls.append(args)
        return ours(*args)

    engine.optimizer.partition_grads = wrapper  # type: ignore[method-assign, assignment]
    assert detach(engine)
    assert vars(engine.optimizer)["partition_grads"] is wrapper
    engine.backward(gradients(1))
    engine.optimizer.partition_grads = ours  # type: ignore[method-assign]
    engine.optimizer.step()
    engine.backward(gradients(2))
    stock.backward(gradients(2))
    assert_same(engine, stock)
    assert len(calls) == 2


def test_destroying_the_engine_ends_the_path() -> None:
    """Threads and methods go, then DeepSpeed's own code runs."""
    engine, before = Engine(), threading.active_count()
    attached(engine, candidate(host_threads=2))
    engine.optimizer.destroy()
    assert threading.active_count() == before
    assert engine.optimizer.destroyed == 1
    engine.optimizer.destroy()
    assert engine.optimizer.destroyed == 2


def test_an_engine_that_is_dropped_leaves_nothing() -> None:
    """Garbage collection ends the threads, though the optimizer holds its engine."""
    engine, before = Engine(), threading.active_count()
    engine.optimizer.engine = engine  # type: ignore[attr-defined]  # as hooks of 0.18.9 and newer do
    attached(engine, candidate(host_threads=2))
    engine.backward(gradients(1))
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None
    _until(lambda: threading.active_count() == before)


def _until(holds: Callable[[], bool]) -> None:
    for _ in range(100):
        if holds():
            return
        threading.Event().wait(0.02)
    raise AssertionError("still not so after 2 s")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda e: setattr(e, "optimizer", None), "no optimizer"),
        (lambda e: setattr(e.optimizer, "offload_optimizer", False), "not offloaded"),
        (lambda e: setattr(e.optimizer, "zenflow", True), "ZenFlow"),
        (lambda e: setattr(e.optimizer, "use_muon", True), "Muon"),
        (lambda e: setattr(e.optimizer, "master_weights_and_grads_dtype", DTYPE), "bfloat16, not fp32"),
        (lambda e: setattr(e.optimizer, "partition_grads", lambda *_: []), "somebody else"),
        (lambda e: setattr(e, "is_deepcompile_enabled", lambda: True), "DeepCompile"),
        (lambda e: delattr(e.optimizer, "micro_step_id"), "has no micro_step_id"),
    ],
    ids=["inference", "device", "zenflow", "muon", "bf16 masters", "override", "deepcompile", "unknown"],
)
def test_what_a_path_would_not_do_exactly_is_refused(change: Callable[[Engine], None], reason: str) -> None:
    """With the reason, and nothing is replaced."""
    engine = Engine()
    change(engine)
    optimizer = getattr(engine, "optimizer", None)
    before = dict(vars(optimizer)) if optimizer is not None else {}
    assert reason in str(attach(engine, candidate(), host()).why_not)
    assert reason in str(why_not_attachable(engine))
    assert optimizer is None or vars(optimizer) == before


@pytest.mark.parametrize("name", ["MiCS_Optimizer", "SuperOffloadOptimizer_Stage3", "DeepSpeedZeroOptimizer"])
def test_subclasses_and_other_stages_are_refused(name: str) -> None:
    """They move gradients in their own way."""
    engine = Engine()
    engine.optimizer.__class__ = type(
        name, (DeepSpeedZeroOptimizer_Stage3,), {"__module__": "deepspeed.other"}
    )
    assert name in str(attach(engine, candidate(), host()).why_not)


def test_a_namesake_from_elsewhere_is_refused() -> None:
    """Only DeepSpeed's own class is known."""
    engine = Engine()
    engine.optimizer.__class__ = type(
        "DeepSpeedZeroOptimizer_Stage3", (DeepSpeedZeroOptimizer_Stage3,), {"__module__": "fork.zero"}
    )
    assert "not exactly" in str(why_not_attachable(engine))


def test_a_path_that_cannot_be_built_is_said_at_once() -> None:
    """The CPU pins nothing; the optimizer is left alone."""
    engine = Engine()
    before = dict(vars(engine.optimizer))
    found = attach(
        engine, candidate(path="staged"), AcceleratorDevice(FakeAccelerator("cpu", pinning="same object"))
    )
    assert "the staged path cannot be built: PinError" in str(found.why_not)
    assert vars(engine.optimizer) == before and status(engine) is None


# -- the same bits --------------------------------------------------------------------------------

SPECS = [
    candidate(),
    candidate(host_threads=2),
    candidate(cast="device"),
    candidate(path="pinned"),
    candidate(path="pinned", cast="device"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.path}-{s.cast}-{s.host_threads}")
def test_gradients_are_the_same(spec: Candidate, accumulation: int, dtype: torch.dtype) -> None:
    """Over three steps; the buffer too, wherever anything could read it."""
    engine, stock = Engine(accumulation, dtype=dtype), Engine(accumulation, dtype=dtype)
    found = attached(engine, spec)
    for step in range(3):
        for micro_step in range(accumulation):
            views = engine.backward(gradients(10 * step + micro_step, dtype), micro_step == accumulation - 1)
            stock.backward(gradients(10 * step + micro_step, dtype), micro_step == accumulation - 1)
            assert [view.numel() for view in views] == [SIZES[0], SIZES[2], SIZES[1]]
        assert_same(engine, stock, buffer=accumulation > 1 or dtype == torch.float16 or step == 0)
        engine.optimizer.step()
        stock.optimizer.step()
    assert found.check is not None and found.check.partitions == len(SIZES) and found.check.mismatch is None
    assert found.left_to_deepspeed == 0 and found.link_bytes == 0
    assert len(found.accumulation_seconds) == len(found.stock_accumulation_seconds) == 1
    detach(engine)


@pytest.mark.parametrize("between", ["nothing", "set", "detach"])
def test_a_backward_after_the_boundary_finds_what_was_accumulated(between: str) -> None:
    """Without a step in between; even if the fp32 gradient was set by hand, or the path taken out."""
    engine, stock = Engine(), Engine()
    attached(engine, check=False)
    for one in (engine, stock):
        one.backward(gradients(1))
        if between == "set":
            one.optimizer.set_fp32_grad_for_param(9.0, one.optimizer.parameters[1])
        elif between == "detach":
            detach(one)
        one.backward(gradients(2))
    assert_same(engine, stock)


def test_a_boundary_set_by_hand_keeps_the_buffer() -> None:
    """From then on anything may accumulate into it."""
    engine, stock = Engine(), Engine()
    attached(engine, check=False)
    for one in (engine, stock):
        one._is_gradient_accumulation_boundary = True
        one.backward(gradients(1))
    assert_same(engine, stock)


def test_a_parameter_that_comes_late_finds_what_deepspeed_left() -> None:
    """In a window where its first gradient is not in the first micro-step, DeepSpeed adds to the window before."""
    engine, stock = Engine(2), Engine(2)
    attached(engine, check=False)
    for one in (engine, stock):
        one.backward(gradients(1), boundary=False)
        one.backward(gradients(2))
        one.optimizer.step()
        late, others = one.optimizer.parameters[1], gradients(3)
        one.optimizer.is_gradient_accumulation_boundary = False
        one.optimizer.partition_grads([one.optimizer.parameters[0]], [others[0]])
        one.optimizer.independent_gradient_partition_epilogue()
        one.optimizer.is_gradient_accumulation_boundary = True
        one.optimizer.partition_grads([late], [others[1]])
        one.optimizer.independent_gradient_partition_epilogue()
    assert_same(engine, stock)


def test_sub_groups_on_nvme_or_on_the_device_are_left_to_deepspeed() -> None:
    """They are counted."""
    engine, stock = Engine(), Engine()
    found = attached(engine)
    engine.optimizer.swappable = True
    engine.backward(gradients(1))
    stock.backward(gradients(1))
    assert_same(engine, stock)
    assert found.left_to_deepspeed == len(SIZES)
    detach(engine)


def test_a_rank_whose_partition_is_padding_does_nothing() -> None:
    """Its gradient is dropped, as DeepSpeed drops it."""
    engine = Engine()
    attached(engine)
    engine.optimizer._get_param_partition_rank = lambda param: 1  # type: ignore[method-assign]
    assert engine.backward(gradients(1)) == []
    assert all(param.grad is None for param in engine.optimizer.parameters)
    assert engine.optimizer.norm_for_param_grads == {}


# -- the self-check -------------------------------------------------------------------------------


def spoil(patch: pytest.MonkeyPatch, change: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Make the path wrong: `change(destination, norm)` runs after it and gives the norm."""
    right = DestinationPath.offload_with_norm

    def wrong(path: DestinationPath, source: Tensor, destination: Tensor, low: Tensor) -> Tensor:
        return change(destination, right(path, source, destination, low))

    patch.setattr(DestinationPath, "offload_with_norm", wrong)


def _one_bit(destination: Tensor, norm: Tensor) -> Tensor:
    destination.view(torch.int32)[-1] ^= 1
    return norm


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_one_bit, "1 of 5 values of one partition's fp32 gradient differ"),
        (lambda _, n: n * (1 + 1e-6), "norm"),
    ],
    ids=["bit", "norm"],
)
def test_a_wrong_path_is_found_and_taken_out(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[Tensor, Tensor], Tensor],
    words: str,
    accumulation: int,
) -> None:
    """At the first boundary, with one warning, and training goes on with DeepSpeed's own bits."""
    engine, stock = Engine(accumulation), Engine(accumulation)
    spoil(monkeypatch, change)
    found = attached(engine)
    with warnings_of(caplog) as warned:
        for step in range(2):
            for micro_step in range(accumulation):
                for one in (engine, stock):
                    one.backward(gradients(10 * step + micro_step), micro_step == accumulation - 1)
            assert_same(engine, stock)
            assert engine.optimizer.norm_for_param_grads == stock.optimizer.norm_for_param_grads
    assert len(warned) == 1 and words in warned[0]
    assert words in str(found.why_not) and found.check is not None and words in str(found.check.mismatch)
    assert status(engine) is found and "partition_grads" not in vars(engine.optimizer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_overflow_in_the_first_backward_is_no_mismatch(dtype: torch.dtype) -> None:
    """Infinite and NaN gradients are what a first loss scale gives."""
    engine, stock = Engine(dtype=dtype), Engine(dtype=dtype)
    found = attached(engine)
    for one in (engine, stock):
        values = gradients(1, dtype)
        values[0][1], values[1][7], values[2][:3] = float("nan"), float("inf"), float("-inf")
        one.backward(values)
    assert found.check is not None and found.check.mismatch is None and found.check.partitions == 3
    assert math.isnan(float(engine.optimizer.norm_for_param_grads[0]))
    assert float(engine.optimizer.norm_for_param_grads[1]) == float("inf")


# -- failures in the middle of training -----------------------------------------------------------


def fail_at(patch: pytest.MonkeyPatch, owner: type, name: str, number: int, error: BaseException) -> None:
    """The `number`-th call of a method raises, and only that one."""
    right, calls = getattr(owner, name), iter(range(1, 1000))

    def failing(self: Any, *args: Any, **kwargs: Any) -> Any:
        if next(calls) == number:
            raise error
        return right(self, *args, **kwargs)

    patch.setattr(owner, name, failing)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("number", [1, 2, 3, 5])
@pytest.mark.parametrize("error", [PinError("no pages"), MemoryError(), RuntimeError("copy failed")])
def test_a_path_that_fails_hands_over_to_deepspeed(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    number: int,
    accumulation: int,
    check: bool,
) -> None:
    """Whatever partition it fails at: one warning with the cause, and the same bits then and later."""
    engine, stock = Engine(accumulation), Engine(accumulation)
    fail_at(monkeypatch, DestinationPath, "offload_with_norm", number, error)
    found = attached(engine, check=check)
    with warnings_of(caplog) as warned:
        for step in range(3):
            for micro_step in range(accumulation):
                for one in (engine, stock):
                    one.backward(gradients(10 * step + micro_step), micro_step == accumulation - 1)
            assert_same(engine, stock, buffer=accumulation > 1 or found.why_not is not None)
            engine.optimizer.step()
            stock.optimizer.step()
    assert len(warned) == 1 and type(error).__name__ in warned[0]
    assert type(error).__name__ in str(found.why_not) and status(engine) is found
    assert "partition_grads" not in vars(engine.optimizer)


def test_a_self_check_without_memory_hands_over_to_deepspeed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its copies are asked for before anything is moved."""
    engine, stock = Engine(), Engine()
    found = attached(engine)
    fail_at(monkeypatch, torch.Tensor, "clone", 4, MemoryError())  # three are this test's own
    with warnings_of(caplog) as warned:
        engine.backward(gradients(1), calls=1)
    monkeypatch.undo()
    stock.backward(gradients(1), calls=1)
    assert_same(engine, stock)
    assert len(warned) == 1 and "self-check could not be made (MemoryError)" in warned[0]
    assert "self-check" in str(found.why_not)


def test_a_path_that_cannot_be_closed_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The methods are DeepSpeed's again all the same."""
    engine = Engine()
    attached(engine)
    monkeypatch.setattr(DestinationPath, "close", lambda path: 1 / 0)
    assert detach(engine)
    assert "partition_grads" not in vars(engine.optimizer)


def test_what_somebody_put_into_the_instance_comes_back() -> None:
    """Of the methods that are only watched, theirs goes on being called."""
    engine, calls = Engine(), []
    engine.optimizer.destroy = lambda: calls.append("theirs")  # type: ignore[method-assign]
    before = dict(vars(engine.optimizer))
    attached(engine)
    detach(engine)
    assert vars(engine.optimizer) == before
    attached(engine)
    engine.optimizer.destroy()
    assert calls == ["theirs"] and vars(engine.optimizer) == before


def test_gradients_in_another_dtype_than_the_accumulations_are_the_same() -> None:
    """Wider ones are rounded as DeepSpeed's own copy rounds them, narrower ones widened."""
    for kept, given in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        engine, stock = Engine(2, dtype=kept), Engine(2, dtype=kept)
        attached(engine, check=False)
        for one in (engine, stock):
            one.backward(gradients(1, given), boundary=False)
            one.backward(gradients(2, given))
        assert_same(engine, stock)


# -- an asynchronous device -----------------------------------------------------------------------


class Streamed(Engine):
    """An engine whose gradients live on an asynchronous device and reuse one another's memory."""

    def __init__(self, device: DeferredDevice, accumulation: int = 1, *, pinned: bool = False) -> None:
        super().__init__(accumulation)
        self.device = device
        z = self.optimizer
        z.reduce_and_partition_stream = device.new_stream()  # type: ignore[attr-defined]
        if pinned:
            fp32 = z.fp32_partitioned_groups_flat[0].grad
            device.pinned[fp32.data_ptr()] = fp32.nbytes

    def backward(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        with self.device.on(self.optimizer.reduce_and_partition_stream):  # type: ignore[attr-defined]
            return super().backward(*args, **kwargs)

    def settled(self) -> None:
        """The norms are read long after."""
        self.device.synchronize()


STREAMED = [
    candidate(path=path, cast=cast, host_threads=threads)
    for path in ("direct", "pinned", "staged")
    for cast in ("device", "host")
    for threads in (0, 2)
]


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("spec", STREAMED, ids=lambda s: f"{s.path}-{s.cast}-{s.host_threads}")
def test_everything_is_on_the_host_when_the_epilogue_ends(
    monkeypatch: pytest.MonkeyPatch, spec: Candidate, check: bool, pinned: bool
) -> None:
    """Also where a copy runs late, and the memory it reads is used again at once."""
    engine, stock = Streamed(DeferredDevice(), pinned=pinned), Engine()
    found = attached(engine, spec, engine.device, check=check)
    for step in range(3):
        engine.backward(gradients(step))
        fp32 = engine.optimizer.fp32_partitioned_groups_flat[0].grad.clone()
        stock.backward(gradients(step))
        assert torch.equal(fp32, stock.optimizer.fp32_partitioned_groups_flat[0].grad)
        engine.settled()
        assert_same(engine, stock)
        engine.optimizer.step()
        stock.optimizer.step()
    assert engine.device.count("synchronize") == 3, "only this test's own"
    detach(engine)
    assert set(engine.device.pinned.values()) <= {sum(SIZES) * 4}
    per_element = crossing(spec)
    carried = 2 if check else 3  # the step after the self-check is DeepSpeed's
    assert found.link_bytes == carried * per_element * sum(SIZES)
    assert found.stock_link_bytes == carried * 8 * sum(SIZES)


def crossing(spec: Candidate) -> int:
    """Bytes of an element on its way to the fp32 gradient and the accumulation buffer."""
    if spec.cast == "host":
        return 2
    return 4 if spec.path == "staged" else 2 + 4


def on_host(spec: Candidate) -> Choice:
    """A choice of this path that adds micro-steps up on the host."""
    return make_choice(**{name: getattr(spec, name) for name in PARAMETERS}, accumulate="host")


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that adding on the host takes many of them."""
    monkeypatch.setattr(accumulation, "_PIECE_BYTES", 256)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("spec", STREAMED, ids=lambda s: f"{s.path}-{s.cast}-{s.host_threads}")
def test_accumulation_crosses_the_link_only_as_often_as_it_must(
    spec: Candidate, check: bool, place: str
) -> None:
    """The same bits, the buffer included, with scratch that is allocated once, in either place."""
    engine, stock = Streamed(DeferredDevice(), 3, pinned=True), Engine(3)
    found = attached(engine, on_host(spec) if place == "host" else spec, engine.device, check=check)
    for step in range(4):
        allocated = [engine.device.count(call) for call in ("empty", "pinned_empty")]
        for micro_step in range(3):
            engine.backward(gradients(10 * step + micro_step), micro_step == 2)
            stock.backward(gradients(10 * step + micro_step), micro_step == 2)
        fp32 = engine.optimizer.fp32_partitioned_groups_flat[0].grad.clone()
        assert torch.equal(fp32, stock.optimizer.fp32_partitioned_groups_flat[0].grad)
        engine.settled()
        assert_same(engine, stock)
        engine.optimizer.step()
        stock.optimizer.step()
    norms = 3 if place == "host" and check else 1
    assert engine.device.count("empty") - allocated[0] <= norms  # the norms that DeepSpeed is given
    assert engine.device.count("pinned_empty") == allocated[1]
    assert (found.check.partitions if found.check else 0) == (3 if check else 0)
    carried = 3 if check else 4
    per_element = {"host": 2 + 2 + 2, "device": 2 + 4 + 2 + crossing(spec)}[place]
    assert found.link_bytes == carried * per_element * sum(SIZES)
    assert found.stock_link_bytes == carried * (3 * 4 + 4) * sum(SIZES)
    assert engine.device.count("synchronize") == 4, "only this test's own"
    detach(engine)
    assert set(engine.device.pinned.values()) <= {sum(SIZES) * 4}


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("path", ["direct", "pinned", "staged"])
@pytest.mark.parametrize("operation", ["d2h", "h2d", "host_add", "widen", "record_event"])
@pytest.mark.parametrize("number", [1, 3, 20, 40, 75, 110])
def test_adding_on_the_host_that_fails_hands_over_to_deepspeed(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    number: int,
    operation: str,
    path: str,
    check: bool,
) -> None:
    """Wherever it fails: no piece is lost or added twice, and the same bits then and later."""
    engine, stock = Streamed(DeferredDevice(), 2), Engine(2)
    spec = on_host(candidate(path=path, buffer_bytes=1 << 16))
    found = attached(engine, spec, engine.device, check=check)
    fail_at(monkeypatch, DeferredDevice, operation, number, RuntimeError("bus error"))
    with warnings_of(caplog) as warned:
        for step in range(5):
            for micro_step in range(2):
                for one in (engine, stock):
                    one.backward(gradients(10 * step + micro_step), micro_step == 1)
            engine.settled()
            assert_same(engine, stock)
            engine.optimizer.step()
            stock.optimizer.step()
    failed = found.why_not is not None
    assert len(warned) == failed and failed == ("bus error" in str(found.why_not))
    assert failed or number > (2 if operation == "h2d" else 10)
    detach(engine)
    assert engine.device.pinned == {}


def test_the_norms_of_sums_on_the_host_lie_on_the_device() -> None:
    """DeepSpeed adds all norms up in place, and those of partitions that it carried itself lie there."""
    engine = Streamed(DeferredDevice(), 2)
    attached(engine, on_host(candidate()), engine.device, check=False)
    made: list[Tensor] = []
    right = engine.device.empty

    def empty(elements: int, dtype: torch.dtype) -> Tensor:
        made.append(right(elements, dtype))
        return made[-1]

    engine.device.empty = empty  # type: ignore[method-assign]
    for micro_step in range(2):
        engine.backward(gradients(micro_step), micro_step == 1)
    (norms,) = (each for each in made if each.dtype == torch.float64)
    assert [norm.data_ptr() for norm in engine.optimizer.norm_for_param_grads.values()] == [
        each.data_ptr() for each in norms
    ]


@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_accumulation_after_the_self_check_is_deepspeeds(
    monkeypatch: pytest.MonkeyPatch, accumulation: int
) -> None:
    """So that the report can say what an accumulation takes without the path."""
    engine, calls, by_stock = Engine(accumulation), [], []
    right = DeepSpeedZeroOptimizer_Stage3.partition_grads

    def counted(*args: Any) -> list[Tensor]:
        calls.append(args)
        return right(*args)

    monkeypatch.setattr(DeepSpeedZeroOptimizer_Stage3, "partition_grads", counted)
    found = attached(engine)
    for step in range(4):
        for micro_step in range(accumulation):
            before = len(calls)
            engine.backward(gradients(10 * step + micro_step), micro_step == accumulation - 1)
            by_stock.append(len(calls) - before)
        engine.optimizer.step()
    window = slice(accumulation, 2 * accumulation)
    assert by_stock[window] == [2] * accumulation  # the buckets of a pass
    assert sum(by_stock[2 * accumulation :]) == 0
    assert len(found.stock_accumulation_seconds) == 1 and min(found.stock_accumulation_seconds) > 0
    assert len(found.accumulation_seconds) == 2
    assert found.left_to_deepspeed == 0


@pytest.mark.parametrize("threads", [0, 1])
@pytest.mark.parametrize("calls", [1, 2])
def test_a_copy_that_fails_late_is_made_good(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, calls: int, threads: int
) -> None:
    """From where it has arrived, though the memory that it came from is used again."""
    engine, stock = Streamed(DeferredDevice()), Engine()
    spec = candidate(path="staged", host_threads=threads, buffer_bytes=1 << 16, buffer_count=8)
    found = attached(engine, spec, engine.device, check=False)
    operation = "widen" if threads else "h2h"  # a thread of its own does both in one pass
    fail_at(monkeypatch, DeferredDevice, operation, 1, RuntimeError("bus error"))
    with warnings_of(caplog) as warned:
        engine.backward(gradients(1), calls=calls)
    assert len(warned) == 1 and "bus error" in warned[0]
    stock.backward(gradients(1))
    engine.settled()
    assert_same(engine, stock)
    assert "bus error" in str(found.why_not)
    assert engine.device.pinned == {}


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("number", [1, 7, 11, 12, 17])
def test_a_failure_that_shows_at_a_later_partition_is_made_good(
    monkeypatch: pytest.MonkeyPatch, number: int, accumulation: int
) -> None:
    """The ring is small, so a buffer's failure is met while another partition wants it."""
    engine, stock = Streamed(DeferredDevice(), accumulation), Engine(accumulation)
    found = attached(engine, candidate(path="staged", host_threads=1), engine.device, check=False)
    fail_at(monkeypatch, DeferredDevice, "widen", number, RuntimeError("bus error"))
    for step in range(2):
        for one in (engine, stock):
            for micro_step in range(accumulation):
                one.backward(gradients(10 * step + micro_step), micro_step == accumulation - 1, calls=1)
        engine.settled()
        assert_same(engine, stock)
        engine.optimizer.step()
        stock.optimizer.step()
    assert "bus error" in str(found.why_not)


def test_a_path_is_closed_when_it_is_taken_out() -> None:
    """Its ring is unpinned, after everything in it has arrived."""
    engine, stock = Streamed(DeferredDevice()), Engine()
    attached(engine, candidate(path="staged"), engine.device, check=False)
    z = engine.optimizer
    z.partition_grads(z.parameters, gradients(1))
    detach(engine)
    stock.optimizer.partition_grads(stock.optimizer.parameters, gradients(1))
    engine.settled()
    assert_same(engine, stock)
    assert engine.device.pinned == {}


# -- what a training loop may do besides ----------------------------------------------------------


@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("spec", STREAMED, ids=lambda s: f"{s.path}-{s.cast}-{s.host_threads}")
def test_a_partition_met_again_before_the_epilogue_lands_in_order(spec: Candidate, place: str) -> None:
    """A shared layer in reentrant checkpoints, a pass that raised and the next one, another engine's backward."""
    engine, stock = Streamed(DeferredDevice(), 2, pinned=True), Engine(2)
    attached(engine, on_host(spec) if place == "host" else spec, engine.device, check=False)
    for one in (engine, stock):
        one.backward(gradients(0), boundary=False)
        z, again = one.optimizer, gradients(1)
        z.is_gradient_accumulation_boundary = True
        z.partition_grads(z.parameters, [gradient.clone() for gradient in again])
        one.overwrite(again)
        one.backward(gradients(2))
    engine.settled()
    assert_same(engine, stock)


@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("reader", ["_pre_step", "set_fp32_grad_for_param"])
def test_whatever_reads_waits_for_a_pass_that_never_ended(reader: str, place: str) -> None:
    """Its gradients and norms are where DeepSpeed's would be."""
    engine, stock = Streamed(DeferredDevice(), 2, pinned=True), Engine(2)
    spec = candidate(path="pinned")
    attached(engine, on_host(spec) if place == "host" else spec, engine.device, check=False)
    for one in (engine, stock):
        one.backward(gradients(0), boundary=False)
        z = one.optimizer
        z.is_gradient_accumulation_boundary = True
        z.partition_grads(z.parameters, gradients(1))
        given = (9.0, z.parameters[1]) if reader.startswith("set") else ()
        getattr(z, reader)(*given)
    fp32 = engine.optimizer.fp32_partitioned_groups_flat[0].grad
    assert torch.equal(fp32, stock.optimizer.fp32_partitioned_groups_flat[0].grad)
    assert torch.equal(engine.optimizer.buffer, stock.optimizer.buffer)
    assert sorted(engine.optimizer.norm_for_param_grads) == [0, 1, 2]


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize(
    "operation", ["d2h", "h2d", "record_event", "synchronize", "norm", "cast", "h2h", "host_add", "widen"]
)
@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize("path", ["direct", "pinned", "staged"])
def test_ctrl_c_leaves_every_partition_whole(
    monkeypatch: pytest.MonkeyPatch, path: str, number: int, operation: str, place: str
) -> None:
    """As before the pass or as after it; the path goes on, and what comes then is the same to the bit."""
    engine, stock, before = Streamed(DeferredDevice(), 2, pinned=True), Engine(2), Engine(2)
    cast: Any = "device" if operation == "cast" else "host"
    spec = candidate(path=path, cast=cast, buffer_bytes=2048)
    found = attached(engine, on_host(spec) if place == "host" else spec, engine.device, check=False)
    for one in (engine, stock, before):
        one.backward(gradients(0), boundary=False)
    stock.backward(gradients(1))
    with monkeypatch.context() as once:
        owner = DeferredEvent if operation == "synchronize" else DeferredDevice
        fail_at(once, owner, operation, number, KeyboardInterrupt())
        for wait in (lambda: engine.backward(gradients(1)), *[engine.optimizer._pre_step] * 2):
            with contextlib.suppress(KeyboardInterrupt):
                wait()
    engine.settled()
    ours, theirs, old = (one.optimizer for one in (engine, stock, before))
    for param in ours.parameters:
        _, offset, size = ours.grad_position[param.ds_id]
        low, fp32 = (
            [source.narrow(0, offset, size) for source in sources]
            for sources in (
                [z.buffer for z in (ours, theirs, old)],
                [z.fp32_partitioned_groups_flat[0].grad for z in (ours, theirs, old)],
            )
        )
        after = torch.equal(low[0], low[1]) and torch.equal(fp32[0], fp32[1])
        assert after or (torch.equal(low[0], low[2]) and torch.equal(fp32[0], fp32[2]))
    for one in (engine, stock):
        one.optimizer.micro_step_id = 0
        one.backward(gradients(3), boundary=False)
        one.backward(gradients(4))
    engine.settled()
    assert_same(engine, stock)
    assert found.why_not is None and found.left_to_deepspeed == 0
    detach(engine)
    assert set(engine.device.pinned.values()) <= {sum(SIZES) * 4}


@pytest.mark.parametrize("kind", ["second backward", "met twice", "accumulation", "boundary by hand"])
def test_the_first_pass_of_each_kind_is_compared(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """A path that goes wrong by then is found there, however many passes of other kinds were equal before."""
    engine, stock = Engine(2), Engine(2)
    found = attached(engine)
    for step in range(4):
        for one in (engine, stock):
            one.backward(gradients(step), boundary=False)
            one.backward(gradients(10 + step))
            if step < 3:
                one.optimizer.step()
    compared = found.check.partitions if found.check else 0
    with warnings_of(caplog) as warned:
        for one in (engine, stock):
            z = one.optimizer
            if kind != "second backward":
                z.step()
                one.backward(gradients(5), boundary=False)
            if kind == "met twice":
                z.is_gradient_accumulation_boundary = True
                z.partition_grads(z.parameters, gradients(6))
            elif kind == "accumulation":
                one.accumulation = 3
                one.backward(gradients(7), boundary=False)
            elif kind == "boundary by hand":
                one._is_gradient_accumulation_boundary = True
            if one is engine:
                spoil(monkeypatch, _one_bit)
            one.backward(gradients(8))
    assert compared == len(SIZES)
    assert len(warned) == 1 and "differ" in warned[0]
    assert_same(engine, stock)


def test_a_kind_is_compared_once() -> None:
    """Its second pass is the path's alone, and the times of both are told apart."""
    engine = Engine()
    found = attached(engine)
    for step in range(6):
        engine.backward(gradients(step))
        engine.backward(gradients(10 + step))
        engine.optimizer.step()
    assert found.check is not None and found.check.partitions == 2 * len(SIZES)
    assert len(found.stock_accumulation_seconds) == 1
    assert len(found.accumulation_seconds) == 6 - 2
