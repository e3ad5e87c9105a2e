"""The pass in the running step: the same bits whatever happens in the middle, and out of the way when it fails."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import Tensor

from autotune_offload.engine import step_attach, step_stage3
from autotune_offload.engine.step import StepStatus
from autotune_offload.engine.step_adam import in_fp32
from autotune_offload.engine.step_attach import (
    StepSpec,
    attach_step,
    detach_step,
    step_pinned_bytes,
    step_status,
)
from autotune_offload.engine.step_check import CHECKED_STEPS, sampled
from autotune_offload.machine import adam, compiled
from autotune_offload.machine.device import Device
from autotune_offload.machine.ranges import PREFIX
from autotune_offload.paths.pieces import Pieces, Target
from tests.engine.stand_ins import REAL_PIECE_OF, CpuAdamOperation, DeepSpeedZeroOptimizer_Stage3, Engine
from tests.fakes import DeferredDevice

FUSED = StepSpec(step="fused", threads=2, piece_elements=256)
STEPS = 6


class Shared(DeferredDevice):
    """A device whose memory is the host's, as the CPU's is."""

    synchronous = True
    shares_host_memory = True


made: list[Engine] = []


@pytest.fixture(autouse=True)
def _apart_from_others(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whoever names no device gets one that is there; no thread outlives a test."""
    monkeypatch.setattr(step_attach, "AcceleratorDevice", Shared)
    yield
    while made:
        detach_step(made.pop())


def trained(
    optimizer: DeepSpeedZeroOptimizer_Stage3,
    steps: int = STEPS,
    before: Callable[[int], object] | None = None,
) -> list[list[Tensor]]:
    """What each step leaves, for gradients that exceed the clipping in every other step."""
    random, left = torch.Generator().manual_seed(1), []
    for step in range(steps):
        if before is not None:
            before(step)
        for master in optimizer.fp32_partitioned_groups_flat:
            values = torch.randn(master.numel(), generator=random) * (1e-4 if step % 2 else 1.0)
            assert master.grad is not None
            master.grad.copy_(values)
        optimizer.optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)
        optimizer.step()
        left.append(optimizer.leaves())
    return left


def same(stock: list[list[Tensor]], ours: list[list[Tensor]]) -> bool:
    """To the last bit."""
    words = {2: torch.int16, 4: torch.int32}
    pairs = [pair for steps in zip(stock, ours, strict=True) for pair in zip(*steps, strict=True)]
    return all(
        torch.equal(a.view(words[a.element_size()]), b.view(words[b.element_size()])) for a, b in pairs
    )


def attached(
    optimizer: DeepSpeedZeroOptimizer_Stage3, spec: StepSpec = FUSED, *, check: bool = False, **kwargs: Any
) -> tuple[Engine, StepStatus]:
    """An engine whose optimizer has the pass."""
    engine = Engine(optimizer)
    made.append(engine)
    return engine, attach_step(engine, spec, check=check, **kwargs)


def pairs(**kwargs: Any) -> tuple[DeepSpeedZeroOptimizer_Stage3, DeepSpeedZeroOptimizer_Stage3]:
    """Two optimizers alike."""
    repeats = kwargs.pop("repeats", True)
    made = [
        DeepSpeedZeroOptimizer_Stage3(operation=CpuAdamOperation(repeats=repeats), **kwargs) for _ in range(2)
    ]
    return made[0], made[1]


# -- the same bits --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("adamw_mode", [True, False])
@pytest.mark.parametrize("clip_grad", [0.0, 1.0])
def test_every_bit_is_deepspeeds(dtype: torch.dtype, adamw_mode: bool, clip_grad: float) -> None:
    """Master weights, gradients, moments, counters and 16-bit weights, in two param groups, with a schedule."""
    stock, ours = pairs(dtype=dtype, adamw_mode=adamw_mode, clip_grad=clip_grad)
    _, status = attached(ours)
    assert same(trained(stock), trained(ours))
    assert status.why_not is None and len(status.seconds) == STEPS
    assert ours.unflattened == stock.unflattened and len(ours.posted) == STEPS


@pytest.mark.parametrize(
    "sizes", [(1,), (127, 128, 129), (255, 256, 257, 5), (1 << 19,), tuple(range(1, 128, 9))]
)
def test_sub_groups_of_any_size(sizes: tuple[int, ...]) -> None:
    """Smaller and larger than a piece, smaller than a block, with every kind of tail."""
    stock, ours = pairs(sizes=sizes)
    attached(ours)
    assert same(trained(stock, 3), trained(ours, 3))


@pytest.mark.parametrize("repeats", [True, False])
def test_deepspeeds_operation_is_called_as_often_as_without(repeats: bool) -> None:
    """Once a sub-group, so that its own powers of beta go on, in every release."""
    stock, ours = pairs(repeats=repeats)
    attached(ours)
    assert same(trained(stock), trained(ours))
    assert ours.operation.calls[ours.optimizer.opt_id] == 3 * STEPS


@pytest.mark.parametrize("repeats", [True, False])
def test_it_may_come_and_go(repeats: bool) -> None:
    """Between any two steps: what is known of DeepSpeed's operation holds, or is found out."""
    stock, ours = pairs(repeats=repeats)
    engine = Engine(ours)
    made.append(engine)

    def toggle(step: int) -> None:
        if step in {2, 13}:
            attach_step(engine, StepSpec(step="fused", threads=1, piece_elements=256))
        if step == 12:
            assert detach_step(engine)

    assert same(trained(stock, 30), trained(ours, 30, toggle))
    status = step_status(engine)
    assert status is not None and status.why_not is None


def test_a_jump_of_the_step_is_followed() -> None:
    """As after a checkpoint was loaded."""
    stock, ours = pairs()
    attached(ours)

    def jump(optimizer: DeepSpeedZeroOptimizer_Stage3) -> Callable[[int], None]:
        def before(step: int) -> None:
            if step == 3:
                for state in optimizer.optimizer.state.values():
                    state["step"] = 1000

        return before

    assert same(trained(stock, 8, jump(stock)), trained(ours, 8, jump(ours)))


# -- first the check, then the trials, then the choice --------------------------------------------


def test_the_first_steps_are_deepspeeds_and_compared() -> None:
    """Then steps by either way are timed, and one is chosen; every step has the same bits."""
    stock, ours = pairs()
    _, status = attached(ours, StepSpec(piece_elements=256), check=True)
    seen: list[Any] = []
    assert same(
        trained(stock, 60), trained(ours, 60, lambda step: seen.append((status.check, status.threads)))
    )
    assert [check is not None for check, _ in seen[:5]] == [False] * CHECKED_STEPS + [True] * 2
    assert (
        status.check is not None
        and status.check.mismatch is None
        and status.check.elements == 3 * (896 + 4096)
    )
    assert seen[CHECKED_STEPS + 5][1] is None and status.threads is not None and status.confirmed is not None


def test_one_differing_bit_takes_the_pass_out(caplog: pytest.LogCaptureFixture) -> None:
    """With one warning, and no step lost: DeepSpeed's operation made it."""
    stock, ours = pairs()

    def one_bit(of: DeepSpeedZeroOptimizer_Stage3) -> Callable[[int, adam.Memory], None]:
        def wrong(number: int, memory: adam.Memory) -> None:
            if number == of.optimizer.opt_id and memory.elements > 1000:
                memory.second.view(torch.int32)[128] ^= 1

        return wrong

    stock.operation.wrong, ours.operation.wrong = one_bit(stock), one_bit(ours)
    _, status = attached(ours, check=True)
    with caplog.at_level(logging.WARNING, "autotune_offload"):
        assert same(trained(stock), trained(ours))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert status.check is not None and "1 of" in str(status.check.mismatch)
    assert "second moments" in str(status.why_not)
    assert ours.optimizer.ds_opt_adam is ours.operation


def test_another_build_is_found_out_before_anything_is_trained() -> None:
    """Whose operation rounds otherwise everywhere."""
    ours = DeepSpeedZeroOptimizer_Stage3()

    def otherwise(number: int, memory: adam.Memory) -> None:
        memory.weights.mul_(1 + 2**-23)

    ours.operation.wrong = otherwise
    _, status = attached(ours)
    assert "rounds otherwise" in str(status.why_not)
    assert ours.optimizer.ds_opt_adam is ours.operation


def test_a_sample_has_whole_blocks_from_everywhere() -> None:
    """Both ends and a middle that moves; everything where there is little."""
    assert sampled(1000, 4096, 1) == [(0, 896)]
    assert sampled(100, 4096, 1) == []
    (first, middle, last), (_, later, _) = sampled(100_000, 3 * 1280, 1), sampled(100_000, 3 * 1280, 2)
    assert first == (0, 1280) and last == (99_968 - 1280, 99_968) and middle != later
    assert all((end - begin, begin % 128) == (1280, 0) for begin, end in (middle, later))


# -- failures in the middle of a step -------------------------------------------------------------


def failing(
    monkeypatch: pytest.MonkeyPatch, number: int, error: BaseException, *, computed: bool
) -> list[int]:
    """The pass fails once, at piece `number` counted over a step, before or after it was computed."""
    seen: list[int] = []

    def piece_of(*args: Any) -> adam.Piece:
        real = REAL_PIECE_OF(*args)

        def piece(begin: int, end: int, at: int, to: Tensor | None) -> None:
            seen.append(at)
            fails = len(seen) == number + 1
            if fails and not computed:
                raise error
            real(begin, end, at, to)
            if fails:
                raise error

        return piece

    monkeypatch.setattr(adam, "piece_of", piece_of)
    return seen


PIECES = 3 + 16
"""Of 256 elements in sub-groups of 1000 and 4096; 77 elements are no whole block."""


@pytest.mark.parametrize("repeats", [True, False])
@pytest.mark.parametrize("computed", [False, True])
@pytest.mark.parametrize("number", range(PIECES))
def test_a_failure_at_any_piece_costs_no_bit(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    number: int,
    computed: bool,
    repeats: bool,
) -> None:
    """DeepSpeed's operation finishes the step from where it stood, whether the piece was computed or not."""
    stock, ours = pairs(repeats=repeats)
    _, status = attached(ours)
    left = trained(stock, 3)
    failing(monkeypatch, number, RuntimeError("out of order"), computed=computed)
    with caplog.at_level(logging.WARNING, "autotune_offload"):
        assert same(left, trained(ours, 3))
    assert "out of order" in str(status.why_not) and len(caplog.records) == 1
    assert ours.operation.calls[ours.optimizer.opt_id] == 3 * 3


@pytest.mark.parametrize("repeats", [True, False])
def test_pieces_that_were_whole_before_an_earlier_one_failed_are_kept(
    monkeypatch: pytest.MonkeyPatch, repeats: bool
) -> None:
    """DeepSpeed's operation runs over them in its one call, and they are put back."""
    stock, ours = pairs(sizes=(1000, 1000), repeats=repeats)
    _, status = attached(ours)
    others, computed = threading.Event(), set()

    def piece_of(*args: Any) -> adam.Piece:
        real = REAL_PIECE_OF(*args)

        def piece(begin: int, end: int, at: int, to: Tensor | None) -> None:
            if at == 1:
                assert others.wait(30)
                raise RuntimeError("late")
            real(begin, end, at, to)
            computed.add(at)
            if computed == {0, 2, 3}:
                others.set()

        return piece

    left = trained(stock, 2)
    monkeypatch.setattr(adam, "piece_of", piece_of)
    assert same(left, trained(ours, 2))
    assert "late" in str(status.why_not) and computed == {0, 2, 3}


@pytest.mark.parametrize("number", [0, 2, 9])
def test_an_interruption_leaves_a_whole_sub_group(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """It goes on to the caller; fp32 memory of the sub-group is as after its step."""
    stock, ours = pairs(sizes=(4096,))
    attached(ours, StepSpec(step="fused", threads=1, piece_elements=256))
    left = trained(stock, 1)
    failing(monkeypatch, number, KeyboardInterrupt(), computed=False)
    with pytest.raises(KeyboardInterrupt):
        trained(ours, 1)
    assert same([left[0][:4]], [ours.leaves()[:4]])
    assert ours.optimizer.ds_opt_adam is ours.operation


class ManyThreads(Shared):
    """A host whose ranks have four threads each."""

    def most_threads(self) -> int:
        """Four."""
        return 4


def test_trials_begin_with_what_was_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decided number of threads and its neighbours, or all where none was; each first makes a step to warm up."""
    used: list[int] = []
    run = Pieces.run

    def noted(self: Pieces, *args: Any) -> None:
        used.append(args[3])
        run(self, *args)

    monkeypatch.setattr(Pieces, "run", noted)
    for begins_with, counts in ((2, {1, 2, 4}), (4, {2, 4}), (None, {1, 2, 4}), (3, {1, 2, 4})):
        used.clear()
        _, ours = pairs(sizes=(4096,))
        device = ManyThreads()
        attached(ours, StepSpec(begins_with=begins_with), device=device)
        trained(ours, len(counts))
        assert len(used) == len(counts) and set(used) == counts, begins_with


def test_no_threads_to_be_had_costs_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's limit of threads is reached."""
    stock, ours = pairs()
    _, status = attached(ours)

    def none_left(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("autotune_offload.paths.pieces.ThreadPoolExecutor", none_left)
    assert same(trained(stock), trained(ours))
    assert "can't start new thread" in str(status.why_not)


# -- to a device ----------------------------------------------------------------------------------


def apart(monkeypatch: pytest.MonkeyPatch, device: Device) -> Device:
    """16-bit weights count as the device's memory."""
    real = step_stage3.target

    def target(*args: Any) -> Target | None:
        found = real(*args)
        return None if found is None else Target(memory=found.memory, on_host=False)

    monkeypatch.setattr(step_stage3, "target", target)
    return device


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("page_lock", [True, False])
def test_weights_are_on_the_device_when_the_step_ends(
    monkeypatch: pytest.MonkeyPatch, threads: int, page_lock: bool
) -> None:
    """A device that runs nothing unless it is waited for: all bits are there before anybody gathers them."""
    stock, ours = pairs()
    device = DeferredDevice()
    apart(monkeypatch, device)
    spec = StepSpec(step="fused", threads=threads, page_lock=page_lock, piece_elements=256)
    engine, status = attached(ours, spec, device=device)
    assert same(trained(stock), trained(ours))
    assert all(
        torch.equal(a, b)
        for x, y in zip(stock.posted, ours.posted, strict=True)
        for a, b in zip(x, y, strict=True)
    )
    assert status.why_not is None
    assert device.most_pinned_bytes == (512 * (threads + 3) if page_lock else 0)
    assert step_pinned_bytes(engine) == sum(device.pinned.values()) == device.most_pinned_bytes
    assert detach_step(engine) and device.pinned == {} and step_pinned_bytes(engine) == 0


def test_memory_that_cannot_be_locked_costs_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ring is pageable then."""
    stock, ours = pairs()
    device = DeferredDevice()
    device.largest_pin_bytes = 0
    apart(monkeypatch, device)
    _, status = attached(ours, device=device)
    assert same(trained(stock), trained(ours))
    assert status.why_not is None and device.pinned == {}


def test_copies_are_waited_for_only_when_their_buffer_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that they run beside the computation of later pieces."""
    ours = DeepSpeedZeroOptimizer_Stage3(sizes=(256 * 10,))
    device = DeferredDevice()
    apart(monkeypatch, device)
    attached(ours, StepSpec(step="fused", threads=1, piece_elements=256), device=device)
    trained(ours, 1)
    calls = [entry[0] for entry in device.log if entry[0] in {"h2d", "event.synchronize"}]
    first = calls.index("event.synchronize")
    assert calls.count("h2d") == 10 and first == 3
    assert {entry[2] for entry in device.log if entry[0] == "h2d"} == {"queued"}


@pytest.mark.parametrize("number", range(PIECES))
def test_a_copy_that_fails_costs_no_bit(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """DeepSpeed brings the 16-bit weights there itself."""
    stock, ours = pairs()
    device, sent = DeferredDevice(), []
    apart(monkeypatch, device)
    _, status = attached(ours, device=device)
    real = device.h2d

    def h2d(destination: Tensor, source: Tensor, *, non_blocking: bool = False) -> None:
        sent.append(destination)
        if len(sent) == number + 1:
            raise RuntimeError("the link is down")
        real(destination, source, non_blocking=non_blocking)

    monkeypatch.setattr(device, "h2d", h2d)
    assert same(trained(stock, 3), trained(ours, 3))
    assert "the link is down" in str(status.why_not) and device.pinned == {}


def test_a_wait_that_fails_costs_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of a step, when all sub-groups were thought to be on their way."""
    stock, ours = pairs()
    device = DeferredDevice()
    apart(monkeypatch, device)
    _, status = attached(ours, device=device)

    def drain(self: Any) -> None:
        raise RuntimeError("device lost")

    def lose(step: int) -> None:
        if step == 2:
            monkeypatch.setattr("autotune_offload.paths.pieces.Pieces.drain", drain)

    assert same(trained(stock, 4), trained(ours, 4, lose))
    assert "device lost" in str(status.why_not)


# -- what keeps DeepSpeed's own step --------------------------------------------------------------


def changed(inner: bool = False, **attributes: Any) -> Callable[[Any], None]:
    """Sets attributes of the optimizer, or of the one inside."""

    def change(optimizer: Any) -> None:
        for name, value in attributes.items():
            setattr(optimizer.optimizer if inner else optimizer, name, value)

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (changed(swap_optimizer=True), "NVMe"),
        (changed(torch_autocast_gradscaler=object()), "scaler"),
        (changed(subgroup_to_device={0: "cpu", 1: "cuda"}), "ratio below 1"),
        (changed(use_muon=True), "Muon"),
        (changed(zenflow=True), "ZenFlow"),
        (changed(master_weights_and_grads_dtype=torch.bfloat16), "not fp32"),
        (changed(unscale_and_clip_grads=lambda *_: None), "replaced by somebody else"),
        (changed(inner=True, fp32_optimizer_states=False), "moments"),
        (changed(optimizer=torch.optim.AdamW([torch.zeros(1)])), "inside is AdamW, not exactly"),
    ],
    ids=str,
)
def test_what_would_not_be_exact_is_said(change: Callable[[Any], None], words: str) -> None:
    """And its operation is DeepSpeed's own."""
    optimizer = DeepSpeedZeroOptimizer_Stage3()
    change(optimizer)
    _, status = attached(optimizer)
    assert words in str(status.why_not)
    assert getattr(optimizer.optimizer, "ds_opt_adam", optimizer.operation) is optimizer.operation


def test_without_a_compiler_the_step_is_deepspeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason says what was tried; multiplications by 1 are left out all the same."""
    stock, ours = pairs()
    left = trained(stock)
    monkeypatch.setenv("CC", "/nonexistent/cc")
    compiled.library.cache_clear()
    try:
        _, status = attached(ours)
    finally:
        monkeypatch.undo()
        compiled.library.cache_clear()
    assert "/nonexistent/cc" in str(status.why_not)
    assert same(left, trained(ours)) and status.skipped_scalings == 3 * STEPS // 2


@pytest.mark.parametrize("when", ["pre", "post"])
def test_hooks_of_the_optimizer_see_what_they_always_saw(when: str) -> None:
    """Scaled gradients before, 16-bit weights made of what the hook leaves."""
    stock, ours = pairs()
    _, status = attached(ours)

    def shrink(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                (p.grad if when == "pre" else p.data).mul_(0.5)

    for each in (stock, ours):
        getattr(each.optimizer, f"register_step_{when}_hook")(shrink)
    assert same(trained(stock), trained(ours))
    assert "hooks" in str(status.why_not)


def test_a_schedulers_wrapper_is_no_hindrance() -> None:
    """Torch's schedulers wrap the step to count its calls."""
    stock, ours = pairs()
    for each in (stock, ours):
        each.optimizer.param_groups[0]["params"] = [each.fp32_partitioned_groups_flat[0]]
        torch.optim.lr_scheduler.LambdaLR(each.optimizer, lambda step: 1.0)
        each.optimizer.param_groups[0]["params"] = []
    _, status = attached(ours)
    assert same(trained(stock), trained(ours)) and status.why_not is None


def test_somebody_elses_wrapper_keeps_deepspeeds_step() -> None:
    """It may look at gradients and weights."""
    ours = DeepSpeedZeroOptimizer_Stage3()
    vars(ours.optimizer)["step"] = lambda: type(ours.optimizer).step(ours.optimizer)
    _, status = attached(ours)
    trained(ours, 1)
    assert "replaced by somebody else" in str(status.why_not)


# -- factors of exactly 1, coming and going -------------------------------------------------------


@pytest.mark.parametrize("factor", [1.0, 1 - 2**-24, 1 - 2**-25, 1 + 2**-24, 1 + 2**-23, 0.5, 1 / 3])
@pytest.mark.parametrize(
    "form", [float, lambda x: torch.tensor(x), lambda x: torch.tensor(x, dtype=torch.float64)]
)
def test_a_factor_is_taken_as_the_multiplication_takes_it(
    factor: float, form: Callable[[float], Any]
) -> None:
    """In fp32, whatever its form: what rounds to 1 changes nothing, and nothing else is left out."""
    given, ones = form(factor), torch.ones(300)
    taken = in_fp32(given)
    assert taken == float(ones.mul_(given)[7])


def test_factors_of_other_forms_are_left_to_deepspeed() -> None:
    """A tensor with a dimension may widen what it multiplies."""
    assert in_fp32(torch.ones(1)) is None and in_fp32(torch.tensor(1)) is None


def test_detached_in_the_middle_of_a_sub_group_loses_no_scaling() -> None:
    """The factor was noted and not yet multiplied with."""
    stock, ours = pairs(sizes=(300,))
    engine, _ = attached(ours)
    norm = torch.tensor(7.0)
    for each in (stock, ours):
        assert each.fp32_partitioned_groups_flat[0].grad is not None
        each.fp32_partitioned_groups_flat[0].grad.fill_(3.0)
        each.unscale_and_clip_grads(0, norm)
    assert detach_step(engine) and not detach_step(engine)
    for each in (stock, ours):
        each._optimizer_step(0)
        each._reassign_or_swap_out_partitioned_parameters(0)
    assert same([stock.leaves()], [ours.leaves()])


def test_taken_out_nothing_of_ours_stays() -> None:
    """Methods and operation are DeepSpeed's; destroying does the same."""
    ours = DeepSpeedZeroOptimizer_Stage3()
    before = dict(vars(ours))
    engine, _ = attached(ours)
    assert ours.optimizer.ds_opt_adam is not ours.operation
    ours.destroy()
    assert vars(ours).keys() == before.keys() and ours.destroyed == 1
    assert ours.optimizer.ds_opt_adam is ours.operation and not detach_step(engine)


def test_an_engine_that_goes_takes_the_pass_along() -> None:
    """Nothing keeps it alive."""
    optimizer = DeepSpeedZeroOptimizer_Stage3()
    engine = Engine(optimizer)
    attach_step(engine, FUSED, check=False)
    trained(optimizer, 2)
    known = weakref.ref(optimizer)
    del optimizer, engine
    gc.collect()
    assert known() is None


def test_checkpoint_loading_reassigns_as_deepspeed_does() -> None:
    """Outside a step, DeepSpeed's own casts weights and post-processes."""
    ours = DeepSpeedZeroOptimizer_Stage3()
    attached(ours)
    trained(ours, 1)
    ours.fp32_partitioned_groups_flat[0].data.fill_(2.0)
    ours._reassign_or_swap_out_partitioned_parameters(0)
    ours._post_step(set())
    assert ours.fp16_partitioned_groups_flat[0].eq(2.0).all() and len(ours.posted) == 2


# -- what a trace shows ---------------------------------------------------------------------------


def ranges_of(optimizer: DeepSpeedZeroOptimizer_Stage3) -> list[list[str]]:
    """Ours in one step, each behind those that it lies in, as torch's profiler reads them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        trained(optimizer, 1)
    found = []
    for event in profiler.events():
        chain, at = [], event
        while at is not None:
            chain.append(at.name)
            at = at.cpu_parent
        if event.name.startswith(PREFIX):
            found.append([name.removeprefix(PREFIX) for name in reversed(chain) if name.startswith(PREFIX)])
    return found


@pytest.mark.parametrize("on_device", [False, True])
def test_a_trace_shows_the_pass_its_pieces_and_its_waits(
    monkeypatch: pytest.MonkeyPatch, on_device: bool
) -> None:
    """Pieces of the calling thread on the host; on a device what is sent, and waited for at the end."""
    _, ours = pairs(sizes=(1024,))
    device = apart(monkeypatch, DeferredDevice()) if on_device else Shared()
    attached(ours, structs.replace(FUSED, threads=1), device=device)
    found, the_pass = ranges_of(ours), "the pass, host threads: 1"
    sent = [[the_pass, "wait for a piece of the step"], [the_pass, "16-bit weights to the device"]]
    pieces = 4 * (sent if on_device else [[the_pass, "piece of the step"]])
    assert sorted(each for each in found if each[0] == the_pass) == sorted([[the_pass], *pieces])
    waits = [each for each in found if each[0] == "wait for the step's weights"]
    assert waits[0] == ["wait for the step's weights"] and len(waits) == (5 if on_device else 1)


def test_nothing_is_recorded_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one entry of torch's profiler, whose context costs microseconds."""
    monkeypatch.setattr(torch.profiler, "record_function", None)
    _, ours = pairs()
    attached(ours)
    trained(ours, 2)
