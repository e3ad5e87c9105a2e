"""Paths that take turns in one optimizer: on a device that is late, when one fails, and what is told of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from autotune_offload.engine import attach as engine_attach
from autotune_offload.engine.attachment import Attachment
from autotune_offload.engine.contest import Contest
from autotune_offload.engine.entrants import Confirm, Told
from autotune_offload.engine.status import Status
from autotune_offload.engine.visible import GAIN, SECONDS, SWITCHES
from autotune_offload.machine.accelerator import AcceleratorDevice
from autotune_offload.paths.destination import DestinationPath
from autotune_offload.records import Candidate
from tests.engine.test_attach import (
    Engine,
    Streamed,
    assert_same,
    candidate,
    gradients,
    warnings_of,
)
from tests.fakes import DeferredDevice, FakeAccelerator

STAGED = candidate(path="staged", host_threads=1, buffer_bytes=2048, buffer_count=4)
THREADS = candidate(host_threads=2)
DEVICE = candidate(cast="device")
ENTRANTS = (candidate(), STAGED, THREADS)


@pytest.fixture(autouse=True)
def detached() -> Iterator[None]:
    """Threads of paths end with their test; others count them."""
    yield
    for engine in list(engine_attach._entries):
        engine_attach.detach(engine)


def attachment_of(engine: Engine) -> Attachment:
    """What is attached."""
    found = engine_attach._entries[engine].attachment()
    assert found is not None
    return found


def confirming(
    engine: Engine,
    device: Any,
    costs: tuple[float, ...],
    paths: tuple[Candidate, ...] = ENTRANTS,
    *,
    check: bool = True,
    told: list[Told] | None = None,
    **confirm: Any,
) -> Status:
    """Attached, on a clock on which a micro-step takes the cost of its carrier: DeepSpeed's own first."""
    seconds = 0.0

    def now() -> float:
        nonlocal seconds
        contest = attachment_of(engine)._contest
        seconds += costs[contest.entrants.index(contest.present)]
        return seconds

    device.now = now
    wanted = Confirm(others=paths[1:], seed="agreed", **confirm)
    tell = None if told is None else told.append
    status = engine_attach.attach(engine, paths[0], device, check=check, confirm=wanted, tell=tell)
    assert status.why_not is None
    return status


def host() -> AcceleratorDevice:
    """The CPU."""
    return AcceleratorDevice(FakeAccelerator("cpu"))


def step_of(engine: Engine, number: int, accumulation: int = 1) -> None:
    """Micro-steps and the optimizer's step."""
    for micro_step in range(accumulation):
        engine.backward(gradients(10 * number + micro_step), micro_step == accumulation - 1)
    engine.optimizer.step()


# -- on a device that is late ---------------------------------------------------------------------


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_gradients_are_the_same_while_paths_take_turns(accumulation: int, check: bool) -> None:
    """Copies run late, and each turn begins with all of the one before in its place."""
    engine, stock = Streamed(DeferredDevice(), accumulation), Engine(accumulation)
    status = confirming(engine, engine.device, (2.0, 3.0, 1.0, 1.5), check=check)
    seen = set()
    for number in range(30):
        seen.add(attachment_of(engine)._contest.present.name)
        for micro_step in range(accumulation):
            engine.backward(gradients(10 * number + micro_step), micro_step == accumulation - 1)
            stock.backward(gradients(10 * number + micro_step), micro_step == accumulation - 1)
        engine.settled()
        assert_same(engine, stock)
        engine.optimizer.step()
        stock.optimizer.step()
    assert len(seen) == 4 and status.left_to_deepspeed == 0 and status.why_not is None
    assert status.confirmed is not None and status.confirmed.conclusion.winner == 2
    assert (status.check is not None and status.check.mismatch is None) == check


def a_pass_that_never_ended(engine: Engine) -> None:
    """Gradients leave, the epilogue is not reached, and the optimizer takes its step."""
    z = engine.optimizer
    z.is_gradient_accumulation_boundary = True
    z.partition_grads(z.parameters, gradients(77))
    z.step()


@pytest.mark.parametrize("drains", [True, False])
def test_a_turn_begins_with_a_drain(monkeypatch: pytest.MonkeyPatch, drains: bool) -> None:
    """Without it the copies of the path before would land on the gradients of the next: this test sees that."""
    engine, stock = Streamed(DeferredDevice(), pinned=True), Engine()
    late = candidate(path="pinned", host_threads=0)
    confirming(
        engine, engine.device, (1.0, 1.0, 1.0), (late, candidate(path="pinned", host_threads=1)), check=False
    )
    if not drains:
        monkeypatch.setattr(Attachment, "drain", lambda attachment: None)
    wrong = 0
    for number in range(12):
        for one in (engine, stock):
            one.backward(gradients(number))
            a_pass_that_never_ended(one)
        fp32 = engine.optimizer.fp32_partitioned_groups_flat[0].grad
        wrong += not torch.equal(fp32, stock.optimizer.fp32_partitioned_groups_flat[0].grad)
    assert (wrong == 0) == drains


def test_buffers_exist_before_the_first_round_and_are_given_back_after_the_last() -> None:
    """Those of who is far behind sooner; of the winner they stay."""
    engine = Streamed(DeferredDevice())
    other = candidate(path="staged", buffer_bytes=4096)
    status = confirming(engine, engine.device, (2.0, 1.0, 1.5, 5.0), (STAGED, other, THREADS))
    both = sorted([STAGED.buffer_bytes * 4, other.buffer_bytes * 2])
    assert (
        sorted(engine.device.pinned.values()) == [each // 2 for each in both]
        or len(engine.device.pinned) == 2
    )
    number = 0
    while status.confirmed is None:
        step_of(engine, number)
        number += 1
    assert len(engine.device.pinned) == 1
    assert status.carriers == (attachment_of(engine)._contest.present.name,)
    engine_attach.detach(engine)
    assert engine.device.pinned == {}


# -- when one fails -------------------------------------------------------------------------------


def spoiled(monkeypatch: pytest.MonkeyPatch, of: Candidate, change: Callable[[Tensor], None]) -> None:
    """One path alone does `change` to what it has delivered."""
    right, built = DestinationPath.offload_with_norm, DestinationPath.__init__

    def remembers(path: Any, device: Any, spec: Any, dtype: Any) -> None:
        path.mine = spec is of
        built(path, device, spec, dtype)

    def wrong(path: Any, source: Tensor, destination: Tensor, low: Tensor) -> Tensor:
        norm = right(path, source, destination, low)
        if path.mine:
            change(destination)
        return norm

    monkeypatch.setattr(DestinationPath, "__init__", remembers)
    monkeypatch.setattr(DestinationPath, "offload_with_norm", wrong)


def one_bit(destination: Tensor) -> None:
    """Changed."""
    destination.view(torch.int32)[-1] ^= 1


def raises(destination: Tensor) -> None:
    """After the work."""
    raise RuntimeError("bus error")


@pytest.mark.parametrize("of", [0, 1])
@pytest.mark.parametrize("change", [one_bit, raises])
def test_one_that_is_wrong_leaves_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[Tensor], None],
    of: int,
) -> None:
    """With one warning and the same bits, be it the stored choice or another; wrong bits are told."""
    paths, told = (candidate(), THREADS), list[Told]()
    spoiled(monkeypatch, paths[of], change)
    engine, stock = Engine(2), Engine(2)
    status = confirming(engine, host(), (2.0, 1.0, 1.0), paths, told=told)
    with warnings_of(caplog) as warned:
        for number in range(30):
            for one in (engine, stock):
                step_of(one, number, 2)
            assert_same(engine, stock)
    assert status.why_not is None and [name for name, _ in status.left_out] == [
        attachment_of(engine)._contest.entrants[1 + of].name
    ]
    assert len([line for line in warned if "others go on" in line]) == 1
    assert status.confirmed is not None and status.confirmed.conclusion.winner == 2 - of
    assert [each.kind for each in told[-1].wrong] == ["differs"] * (change is one_bit)


def test_when_the_last_path_is_wrong_deepspeeds_own_code_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For good, with its own methods."""
    right = DestinationPath.offload_with_norm

    def wrong(path: Any, source: Tensor, destination: Tensor, low: Tensor) -> Tensor:
        norm = right(path, source, destination, low)
        one_bit(destination)
        return norm

    monkeypatch.setattr(DestinationPath, "offload_with_norm", wrong)
    engine, stock, told = Engine(), Engine(), list[Told]()
    status = confirming(engine, host(), (2.0, 1.0, 1.0), (candidate(), THREADS), told=told)
    with warnings_of(caplog) as warned:
        for number in range(6):
            for one in (engine, stock):
                step_of(one, number)
            assert_same(engine, stock)
    assert "self-check failed" in str(status.why_not) and len(warned) == 2
    assert "partition_grads" not in vars(engine.optimizer)
    assert len(told[-1].wrong) == 2


def test_a_winner_that_fails_later_leaves_deepspeeds_own_code(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The losers' buffers are gone by then."""
    engine, stock = Engine(), Engine()
    status = confirming(engine, host(), (2.0, 1.0, 1.5), (candidate(), THREADS))
    for number in range(20):
        for one in (engine, stock):
            step_of(one, number)
    assert status.confirmed is not None
    monkeypatch.setattr(DestinationPath, "offload_with_norm", lambda *given: raises(given[1]))
    with warnings_of(caplog) as warned:
        for one in (engine, stock):
            step_of(one, 99)
    assert_same(engine, stock)
    assert len(warned) == 1 and "bus error" in str(status.why_not)


def test_one_that_cannot_be_built_takes_no_part() -> None:
    """The others do; the stored choice has to be."""
    engine, locks_nothing = Engine(), AcceleratorDevice(FakeAccelerator("cpu", pinning="same object"))
    status = confirming(engine, locks_nothing, (2.0, 1.0, 1.0, 1.0), (candidate(), STAGED, THREADS))
    assert len(status.carriers) == 3 and "PinError" in str(status.left_out)
    for number in range(30):
        step_of(engine, number)
    assert status.confirmed is not None and status.confirmed.conclusion.seconds[2] is None
    refused = engine_attach.attach(
        engine, STAGED, locks_nothing, confirm=Confirm(others=(THREADS,), seed="agreed")
    )
    assert "PinError" in str(refused.why_not)


def test_a_mistake_of_ours_in_that_costs_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And training goes on with DeepSpeed's own code."""
    engine, stock = Engine(), Engine()
    status = confirming(engine, host(), (2.0, 1.0, 1.0), (candidate(), THREADS))
    monkeypatch.setattr(Contest, "turn", lambda *given: 1 / 0)
    with warnings_of(caplog) as warned:
        for number in range(3):
            for one in (engine, stock):
                step_of(one, number)
            assert_same(engine, stock)
    assert "the confirmation failed (ZeroDivisionError" in str(status.why_not) and len(warned) == 1


def test_what_cannot_be_kept_does_no_harm() -> None:
    """The next start finds it out again."""
    engine = Engine()

    def tell(told: Told) -> None:
        raise OSError("disk full")

    engine_attach.attach(
        engine, candidate(), host(), confirm=Confirm(seed="agreed", most_rounds=1), tell=tell
    )
    for number in range(6):
        step_of(engine, number)
    status = engine_attach.status(engine)
    assert status is not None and status.confirmed is not None and status.why_not is None


# -- where users look -----------------------------------------------------------------------------


class Monitor:
    """DeepSpeed's, as far as it is called."""

    def __init__(self, *, enabled: bool = True, broken: bool = False) -> None:
        self.enabled, self.broken = enabled, broken
        self.events: list[tuple[str, float, int]] = []
        self.calls = 0

    def write_events(self, events: list[tuple[str, float, int]]) -> None:
        """Keep them."""
        self.calls += 1
        if self.broken:
            raise OSError("disk full")
        self.events += events


def test_events_go_to_an_enabled_monitor_alone_and_a_broken_one_is_asked_once() -> None:
    """Seconds where they were measured, the gain from a conclusion on."""
    monitors = [Monitor(), Monitor(enabled=False), Monitor(broken=True)]
    for monitor in monitors:
        engine: Any = Engine()
        engine.monitor, engine.global_samples = monitor, 8
        confirming(engine, host(), (2.0, 1.0), (candidate(),), most_rounds=1)
        for number in range(4):
            step_of(engine, number)
    labels = [label for label, _, _ in monitors[0].events]
    assert (labels.count(SECONDS), labels.count(GAIN), labels.count(SWITCHES)) == (3, 2, 4)
    assert (GAIN, 2.0, 8) in monitors[0].events
    assert (monitors[1].calls, monitors[2].calls) == (0, 1)


def test_ranges_end_whatever_is_raised_in_them() -> None:
    """Through the accelerator, in order."""
    accelerator = FakeAccelerator("cpu")
    engine = Engine()
    engine_attach.attach(engine, candidate(), AcceleratorDevice(accelerator), check=False)
    accelerator.calls.clear()
    engine.backward(gradients(1), calls=1)
    name = "direct with the cast on the host"
    pushed = [call[1] for call in accelerator.calls if call[0] == "range_push"]
    assert pushed == [f"autotune-offload: {each}" for each in (name, "epilogue", f"wait for {name}")]
    with pytest.raises(AttributeError):
        engine.optimizer.partition_grads([SimpleNamespace()], [gradients(1)[0]])  # type: ignore[list-item]
    kinds = "".join("(" if call[0] == "range_push" else ")" for call in accelerator.calls)
    assert kinds == "()(())()"
