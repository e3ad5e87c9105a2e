"""Tests of `autotune_offload.engine.verify` that need no training; `test_training` has those that train."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autotune_offload.engine import trainee as engine_trainee
from autotune_offload.engine import verify as engine_verify
from autotune_offload.engine.clock import OffloadClock
from autotune_offload.engine.toy_model import ModelSpec
from autotune_offload.engine.trainee import (
    METRICS,
    PHASES,
    Metric,
    Timing,
    Variant,
    single_process_environment,
    stock_config,
)
from autotune_offload.engine.verify import CONTROL, Ratio, verify
from autotune_offload.errors import ConfigError, MeasurementError
from autotune_offload.spread import FEWEST

seconds = st.floats(min_value=1e-6, max_value=1e3)
pairs = st.lists(st.tuples(seconds, seconds), min_size=FEWEST, max_size=60)

# -- the interval ---------------------------------------------------------------------------------


# -- ratios and verdicts --------------------------------------------------------------------------


@given(pairs)
def test_ratio_lies_in_its_interval_and_turns_over_with_the_series(times: list[tuple[float, float]]) -> None:
    """Exchanging the two series gives the reciprocal interval."""
    first, other = zip(*times, strict=True)
    there, back = Ratio.of(first, other), Ratio.of(other, first)
    assert there.low <= there.ratio <= there.high
    assert back.low == pytest.approx(1 / there.high)
    assert back.high == pytest.approx(1 / there.low)


@given(st.lists(seconds, min_size=FEWEST, max_size=40))
def test_a_series_is_never_beyond_the_noise_of_itself(times: list[float]) -> None:
    """Equal times give a ratio of exactly 1, which is no difference."""
    ratio = Ratio.of(times, times)
    assert (ratio.low, ratio.ratio, ratio.high) == (1, 1, 1)
    assert not ratio.beyond(ratio)


def test_drift_that_both_series_share_does_not_hide_a_difference() -> None:
    """Pairs are compared, so a machine that gets ten times slower changes nothing."""
    first = [1.0 + number for number in range(10)]
    ratio = Ratio.of(first, [time / 2 for time in first])
    assert [ratio.low, ratio.high] == pytest.approx([2, 2])


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        (Ratio(ratio=1.5, low=1.3, high=1.7, confidence=0.96), True),
        (Ratio(ratio=0.6, low=0.5, high=0.7, confidence=0.96), True),
        (Ratio(ratio=1.5, low=0.9, high=1.7, confidence=0.96), False),  # its own interval holds 1
        (Ratio(ratio=1.1, low=1.05, high=1.15, confidence=0.96), False),  # the control got as far
        (Ratio(ratio=0.9, low=0.85, high=0.95, confidence=0.96), False),
    ],
)
def test_a_difference_must_exceed_its_interval_and_the_control(ratio: Ratio, expected: bool) -> None:
    """Two engines of the same code differ too; less than that is no difference."""
    assert ratio.beyond(Ratio(ratio=0.95, low=0.8, high=1.02, confidence=0.96)) is expected


def ratios(**changed: float) -> dict[Metric, Ratio]:
    """Narrow ratios of 1, except for the metrics given."""
    values = {metric: changed.get(metric, 1.0) for metric in METRICS}
    return {m: Ratio(ratio=v, low=v * 0.99, high=v * 1.01, confidence=0.96) for m, v in values.items()}


def test_verdict_says_so_when_there_is_no_difference() -> None:
    """Nothing beyond the noise is called just that."""
    assert "no difference beyond the noise" in engine_verify._verdict("a", "b", ratios(), control=ratios())


def test_verdict_names_what_differs_which_way_and_how_much() -> None:
    """Faster and slower metrics carry their factors, the others are left out."""
    verdict = engine_verify._verdict(
        "new", "old", ratios(backward=2.0, gradient_offload=0.25), control=ratios()
    )
    assert "backward 2.00x faster" in verdict
    assert "gradient offload 4.00x slower" in verdict
    assert "step" not in verdict
    assert "no difference" not in verdict


def test_verdict_tells_where_losses_part() -> None:
    """Losses are compared bit by bit."""
    assert engine_verify._loss_remark([1.0, 0.5], [1.0, 0.5]) == ""
    assert "from step 2 on" in engine_verify._loss_remark([1.0, 0.5], [1.0, math.nextafter(0.5, 1)])


def test_timing_keeps_the_raw_samples() -> None:
    """Median and interquartile range come with what they are made of."""
    timing = Timing.of([5.0, 1.0, 2.0, 3.0, 4.0])
    assert (timing.median_seconds, timing.iqr_seconds) == (3.0, 2.0)
    assert timing.raw_seconds == (5.0, 1.0, 2.0, 3.0, 4.0)


# -- turns ----------------------------------------------------------------------------------------


@given(st.integers(min_value=1, max_value=6))
def test_every_variant_takes_every_place_equally_often(count: int) -> None:
    """Over a full cycle no variant is always first, or always after the same other one."""
    trainees: list[Any] = list(range(count))
    orders = [tuple(engine_verify._order(trainees, number)) for number in range(2 * count)]
    places = Counter((place, trainee) for order in orders for place, trainee in enumerate(order))
    assert set(places.values()) == {2}
    assert len(places) == count**2


# -- timing ---------------------------------------------------------------------------------------


class FakeAccelerator:
    """Asynchronous, with a clock that stands at 0 for the host: events read `now` as they are recorded."""

    def __init__(self) -> None:
        self.now_milliseconds = 0.0
        self.log: list[str] = []

    def use_host_timers(self) -> bool:
        """False: events are to be used."""
        return False

    def synchronize(self) -> None:
        """Noted."""
        self.log.append("synchronize")

    def Event(self, *, enable_timing: bool) -> Any:
        """An event like torch's."""
        assert enable_timing
        event = SimpleNamespace()
        event.record = lambda: setattr(event, "at", self.now_milliseconds)
        event.elapsed_time = lambda end: end.at - event.at
        return event


class FakeOptimizer:
    """Offloads for 3 ms, and waits for 5 ms at the end."""

    def __init__(self, accelerator: FakeAccelerator) -> None:
        self.accelerator = accelerator

    def partition_grads(self, params: list[int], grads: list[int]) -> str:
        """Takes time and returns something."""
        self.accelerator.now_milliseconds += 3
        self.accelerator.log.append(f"offload {params} {grads}")
        return "buffers"

    def independent_gradient_partition_epilogue(self) -> None:
        """Waits."""
        self.accelerator.now_milliseconds += 5

    def unscale_and_clip_grads(self, sub_group: int, norm: float) -> None:
        """Before the optimizer inside."""
        self.accelerator.log.append(f"unscale {sub_group}")

    def _optimizer_step(self, sub_group: int) -> None:
        self.accelerator.log.append(f"adam {sub_group}")

    def _reassign_or_swap_out_partitioned_parameters(self, sub_group: int) -> None:
        self.accelerator.log.append(f"copy back {sub_group}")


class FakeEngine:
    """Offloads twice in a backward, which takes 10 ms before and 1 ms after each."""

    def __init__(self, accelerator: FakeAccelerator, *, offloads: int = 2) -> None:
        self.accelerator, self.offloads = accelerator, offloads
        self.optimizer = FakeOptimizer(accelerator)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Forward."""
        self.accelerator.log.append("forward")
        return rows.float().mean()

    def backward(self, loss: torch.Tensor) -> None:
        """Backward."""
        self.accelerator.now_milliseconds += 10
        for number in range(self.offloads):
            assert self.optimizer.partition_grads([number], [number]) == "buffers"
            self.accelerator.now_milliseconds += 1
        self.optimizer.independent_gradient_partition_epilogue()

    def step(self) -> None:
        """Optimizer step."""
        self.accelerator.log.append("step")
        for sub_group in range(2):
            self.optimizer.unscale_and_clip_grads(sub_group, 1.0)
            self.optimizer._optimizer_step(sub_group)
            self.optimizer._reassign_or_swap_out_partitioned_parameters(sub_group)


def trainee_on(engine: FakeEngine) -> engine_trainee.Trainee:
    """What trains that engine."""
    accelerator = engine.accelerator
    return engine_trainee.Trainee(
        name="fake",
        engine=engine,
        clock=engine_trainee.Clock(accelerator),
        offload=OffloadClock(lambda: accelerator.now_milliseconds / 1e3),
    )


def test_an_asynchronous_device_is_timed_by_events_and_only_waited_for_around_the_step() -> None:
    """Sums over accumulation steps are right, and nothing synchronizes between forward and the end."""
    accelerator = FakeAccelerator()
    trainee = trainee_on(FakeEngine(accelerator))
    trainee.watch()
    trainee.train(torch.ones(2, 1, 4))
    assert trainee.seconds["backward"] == [pytest.approx(2 * 23e-3)]
    assert trainee.seconds["gradient_offload"] == [pytest.approx(2 * 13e-3)]
    assert trainee.losses == [1.0]
    assert accelerator.log.count("synchronize") == 2
    assert accelerator.log[0] == accelerator.log[-1] == "synchronize"


def test_a_step_is_timed_by_its_phases() -> None:
    """Each sub-group's calls count, anew in every step, and everything is still called in order."""
    accelerator = FakeAccelerator()
    trainee = trainee_on(FakeEngine(accelerator))
    trainee.watch()
    for _ in range(2):
        trainee.train(torch.ones(1, 1, 4))
    assert {phase: len(times) for phase, times in trainee.phases.items()} == dict.fromkeys(PHASES, 2)
    assert {len(spans) for spans in trainee.phase_spans.values()} == {2}
    assert all(seconds >= 0 for times in trainee.phases.values() for seconds in times)
    calls = [each for each in accelerator.log if each[0] in "uac"]
    assert calls == ["unscale 0", "adam 0", "copy back 0", "unscale 1", "adam 1", "copy back 1"] * 2


@pytest.mark.parametrize("own", [True, False])
def test_watching_the_offload_leaves_no_trace(own: bool) -> None:
    """A method of the class and one put on the instance are both as before."""
    optimizer = FakeEngine(FakeAccelerator()).optimizer
    trainee = trainee_on(SimpleNamespace(optimizer=optimizer, accelerator=optimizer.accelerator))  # type: ignore[arg-type]
    if own:
        vars(optimizer)["partition_grads"] = lambda params, grads: "mine"
    before = dict(vars(optimizer))
    undo = trainee.watch()
    assert vars(optimizer) != before
    undo()
    assert vars(optimizer) == before


def test_a_step_without_gradient_offload_is_an_error() -> None:
    """A time of 0 would be a lie."""
    trainee = trainee_on(FakeEngine(FakeAccelerator(), offloads=0))
    with pytest.raises(MeasurementError, match="never called partition_grads"):
        trainee.train(torch.ones(1, 1, 4))


# -- the model and its data -----------------------------------------------------------------------


def test_a_seed_gives_the_same_model_and_keeps_the_random_state() -> None:
    """Variants start from the same weights, and the caller's random numbers go on as they would have."""
    spec = ModelSpec(layers=1, width=64, length=8)
    before = torch.get_rng_state()
    one, two, other = spec.build(), spec.build(), spec.build(seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    weights = [torch.cat([p.flatten() for p in model.parameters()]) for model in (one, two, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_no_token_sees_what_comes_after_it() -> None:
    """The last token of a row changes the logits of the last place alone."""
    model: Any = ModelSpec(layers=2, width=64, length=8).build()
    rows = torch.arange(8)[None]
    changed = rows.clone()
    changed[0, -1] = 99
    hidden, other = (model.blocks(model.tokens(r)) for r in (rows, changed))
    assert torch.allclose(hidden[:, :-1], other[:, :-1], atol=1e-5)
    assert not torch.allclose(hidden[:, -1], other[:, -1], atol=1e-2)


def test_rows_count_up_and_differ_from_step_to_step() -> None:
    """Each token is one more than the token before it, modulo the vocabulary."""
    spec = ModelSpec(layers=1, width=64, length=40, vocabulary=32)
    rows = engine_trainee.counting_rows(spec, (3, 2), step=5)
    assert rows.shape == (3, 2, 41)
    assert torch.equal(rows[..., 1:], (rows[..., :-1] + 1) % 32)
    assert not torch.equal(rows, engine_trainee.counting_rows(spec, (3, 2), step=6))


@pytest.mark.parametrize("field", [{"width": 100}, {"layers": 0}, {"length": 0}, {"vocabulary": 0}])
def test_a_model_that_cannot_be_built_is_refused(field: dict[str, int]) -> None:
    """Heads are 64 wide, and everything is positive."""
    with pytest.raises(ConfigError, match="multiple of 64"):
        ModelSpec(**field)


# -- the environment ------------------------------------------------------------------------------


def test_single_process_environment_is_complete_and_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything `init_distributed` asks for is there inside; afterwards the environment is as before."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "8")
    before = dict(os.environ)

    def interrupted() -> None:
        with single_process_environment():
            inside.update(os.environ)
            raise KeyboardInterrupt

    inside: dict[str, str] = {}
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert dict(os.environ) == before
    expected = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
    }
    assert {name: inside[name] for name in expected} == expected
    assert 1024 <= int(inside["MASTER_PORT"]) < 65536


def test_a_launchers_environment_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where RANK is set, someone else has decided."""
    monkeypatch.setenv("RANK", "0")
    before = dict(os.environ)
    with single_process_environment():
        assert dict(os.environ) == before


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm on this platform")
def test_the_shared_buffer_of_its_own_port_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed leaves it behind; buffers of other ports stay."""
    monkeypatch.delenv("RANK", raising=False)
    with single_process_environment():
        port = os.environ["MASTER_PORT"]
        name = f"deepspeed_allreduce_buffer_{os.getuid()}_127.0.0.1_{{}}_0"
        mine, other = (Path("/dev/shm") / name.format(p) for p in (port, f"other{port}"))
        mine.touch()
        other.touch()
    try:
        assert not mine.exists()
        assert other.exists()
    finally:
        other.unlink()


# -- what is refused ------------------------------------------------------------------------------


def variant(name: str = "stock", **changes: Any) -> Variant:
    """A stock variant with top-level keys changed."""
    return Variant(name=name, config={**stock_config(micro_batch=1), **changes})


@pytest.mark.parametrize(
    ("variants", "steps", "message"),
    [
        ([variant()], FEWEST - 1, "at least 6 steps"),
        ([], 10, "one or more"),
        ([variant(), variant()], 10, "all different"),
        ([variant(CONTROL)], 10, "none 'control'"),
        ([variant(zero_optimization={"stage": 2})], 10, "stage 3"),
        ([variant(zero_optimization={"stage": 3, "offload_optimizer": None})], 10, "offload_optimizer"),
        ([variant(), variant("b", train_micro_batch_size_per_gpu=2)], 10, "same batches"),
        ([variant(), variant("b", gradient_accumulation_steps=2)], 10, "same batches"),
    ],
)
def test_what_cannot_be_compared_is_refused(variants: list[Variant], steps: int, message: str) -> None:
    """The error says what was found and what is expected, before anything is built."""
    with pytest.raises(ConfigError, match=message):
        verify(variants, model=ModelSpec(), steps=steps, warmup=0)


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks would each train on their own."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="WORLD_SIZE=4"):
        verify([variant()], model=ModelSpec(), steps=10, warmup=0)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: stock_config(micro_batch=2), {"bf16": {"enabled": True}}),
        (lambda: stock_config(micro_batch=2, dtype="fp16"), {"fp16": {"enabled": True}}),
        (lambda: stock_config(micro_batch=2, dtype="fp32"), {}),
    ],
)
def test_stock_config_says_nothing_that_deepspeed_would_decide(
    call: Callable[[], dict[str, Any]], expected: dict[str, Any]
) -> None:
    """Stage, devices and precision; no pin_memory and no sizes."""
    config = call()
    assert config["zero_optimization"] == {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
    }
    assert {key: config[key] for key in ("bf16", "fp16") if key in config} == expected
