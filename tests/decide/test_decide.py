"""The decision, on scripted trials: each candidate's time is known, and the clock is the script's."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import optuna
import pytest
from msgspec import structs

from autotune_offload import records
from autotune_offload.config.keys import NAMES
from autotune_offload.config.layout import Layout
from autotune_offload.decide import decide
from autotune_offload.decide import trial as decide_trial
from autotune_offload.decide.candidates import PARAMETERS, grid, key, kind
from autotune_offload.decide.decision import Decision
from autotune_offload.errors import ConfigError, MeasurementError, PinError
from autotune_offload.machine.device import Device
from autotune_offload.measure.bench import Window
from autotune_offload.paths.accumulation import Moment
from autotune_offload.paths.page_locking import PinRules
from autotune_offload.paths.pinned_blocks import flat_blocks, optimizer_blocks, parameter_blocks, sub_groups
from autotune_offload.records import (
    Baseline,
    Candidate,
    DeviceIdentity,
    Limit,
    Limits,
    Measurements,
    PinCost,
    Settings,
)
from tests.decide.test_cost_model import measurements
from tests.factories import make_workload

NO_PIN = PinCost(seconds_per_gib=None, largest_bytes=0, capped=False, reason="nothing here can pin")
ROOMY = Limits(available_bytes=1 << 40, pinnable_bytes=1 << 39)
VERSION = (0, 19, 8)
PLAN = records.Plan(
    name="test",
    budget_seconds=5,
    measure_share=0.4,
    smallest_bytes=4096,
    largest_bytes=1 << 24,
    growth=4,
    warmup_seconds=0.0,
    min_samples=3,
    max_samples=10,
    target_spread=0.03,
    pin_cap_bytes=1 << 28,
    trial_bytes=1 << 26,
    finalists=3,
)

Record = Candidate | Baseline
Script = Callable[[Record], float]


@dataclass
class ScriptedDevice:
    """A clock that only the trials move."""

    synchronous: bool = False
    shares_host_memory: bool = False
    memory_bytes: int | None = 80 << 30
    clock: float = 100.0

    @property
    def identity(self) -> DeviceIdentity:
        """An accelerator."""
        return DeviceIdentity(kind="cuda", name="scripted", count=1, index=0, memory_bytes=self.memory_bytes)

    def now(self) -> float:
        """The script's time."""
        return self.clock

    def intraop_threads(self) -> int:
        """More than one."""
        return 4

    @contextlib.contextmanager
    def keeping_pinned(self) -> Iterator[None]:
        """Nothing is page-locked here."""
        yield


@dataclass
class ScriptedPath:
    """What a trial runs: it knows its record, and whether it was closed."""

    record: Record
    closed: bool = False

    def close(self) -> None:
        """Once."""
        assert not self.closed, "closed twice"
        self.closed = True


@dataclass
class Stage:
    """Everything that is scripted, and what was asked of it."""

    monkeypatch: pytest.MonkeyPatch
    device: ScriptedDevice = field(default_factory=ScriptedDevice)
    script: Script = lambda record: 1.0
    check: Callable[[Record], None] = lambda record: None
    pass_seconds: float = 1e-2
    """On the clock, for a pass over the sample."""
    jitter: tuple[float, ...] = (1.0, 1.001, 0.999)
    paths: list[ScriptedPath] = field(default_factory=list)
    timed: list[Record] = field(default_factory=list)
    accumulated: Callable[[Record, str], float] = lambda record, place: 1.0
    """Seconds of a whole accumulation that adds up there; all of it is taken by the last micro-step."""
    micro_steps: list[tuple[Record, str, Moment]] = field(default_factory=list)
    """Every micro-step that was timed."""
    check_accumulation: Callable[[Record, str], None] = lambda record, place: None
    cuts: bool = False
    """Whether partitions of a million elements are cut ones."""
    closed: int = 0
    sampled: int = 0

    def run(self, *, seconds: float = 5.0, **changes: Any) -> Decision:
        """`decide` with so many seconds left."""
        self.monkeypatch.setattr(decide, "Bench", lambda *args, **parts: _Bench(self, args[2]))
        self.monkeypatch.setattr(
            decide_trial.Trial, "built", lambda trial, entrant: self._built(entrant.record)
        )
        self.monkeypatch.setattr(decide_trial, "build", lambda device, record, dtype: self._built(record))
        arguments: dict[str, Any] = {
            "measurements": fast_pinned(),
            "workload": make_workload(),
            "limits": ROOMY,
            "deepspeed_version": VERSION,
            "steer": Settings(),
            "cache_bytes": 1 << 25,
            "deadline": self.device.clock + seconds,
            "progress": lambda what, done: None,
        }
        arguments.update(changes)
        return decide.decide(cast(Device, self.device), PLAN, **arguments)

    def _built(self, record: Record) -> ScriptedPath:
        self.paths.append(ScriptedPath(record))
        return self.paths[-1]

    def trials_of(self, **wanted: object) -> int:
        """How many trials ran of candidates with these values."""
        return sum(
            all(getattr(record, name, None) == value for name, value in wanted.items())
            for record in self.timed
        )


class _Bench:
    dtype = None
    largest_elements = 1 << 20
    compute_seconds = 0.05

    def __init__(self, stage: Stage, elements: int) -> None:
        self.stage = stage
        self.jitter = itertools.cycle(stage.jitter)
        self.cuts = stage.cuts
        stage.sampled = elements

    def check(self, path: ScriptedPath, memory: str) -> None:
        self.stage.device.clock += self.stage.pass_seconds
        self.stage.check(path.record)

    def time(self, path: ScriptedPath, memory: str) -> float:
        assert not path.closed
        self.stage.timed.append(path.record)
        self.stage.device.clock += self.stage.pass_seconds
        return self.stage.script(path.record) * next(self.jitter)

    def check_accumulation(self, window: Window, memory: str) -> None:
        self.stage.device.clock += window.micro_steps * self.stage.pass_seconds
        self.stage.check_accumulation(*_who(window))

    def warm_up_accumulation(self, window: Window, memory: str) -> None:
        self.stage.device.clock += self.stage.pass_seconds

    def time_micro_step(self, window: Window, moment: Moment, memory: str) -> float:
        self.stage.device.clock += self.stage.pass_seconds
        self.stage.micro_steps.append((*_who(window), moment))
        return self.stage.accumulated(*_who(window)) * next(self.jitter) if moment.boundary else 0.0

    def close(self) -> None:
        self.stage.closed += 1


def _who(window: Window) -> tuple[Record, str]:
    path = cast(ScriptedPath, window.path)
    assert not path.closed
    return path.record, window.accumulation.place


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    """A scripted device and bench on which everything takes one second."""
    return Stage(monkeypatch)


def fast_pinned(**changes: Any) -> Measurements:
    """Curves of a host whose page-locked memory is three times as fast."""
    gbps = [10.0, 5.0, 30.0, 10.0, 30.0, 12.0, 6.0, 5.0, 500.0, 12.0, 6.0]
    return structs.replace(measurements(gbps), **changes)


def by_path(
    *,
    direct: float = 1.0,
    pinned: float = 1.0,
    staged: float = 1.0,
    own: float = 1.0,
    own_pinned: float | None = None,
) -> Script:
    """Seconds by path; `own` is DeepSpeed's, in pageable memory and, unless given, in pinned memory too."""
    seconds = {"direct": direct, "pinned": pinned, "staged": staged}
    stock = {"pageable": own, "pinned": own if own_pinned is None else own_pinned}
    return lambda record: stock[record.memory] if isinstance(record, Baseline) else seconds[record.path]


def failing(path: str, error: BaseException) -> Callable[[Record], None]:
    """A check in which every candidate of `path` ends in `error`."""

    def check(record: Record) -> None:
        if isinstance(record, Candidate) and record.path == path:
            raise error

    return check


def reasons(decision: Decision) -> str:
    """All reasons, one a line."""
    return "\n".join(decision.choice.reasons)


# -- who wins -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["direct", "pinned", "staged"])
def test_the_fastest_beyond_the_noise_wins(stage: Stage, path: str) -> None:
    """Whichever path it is, with the gain over DeepSpeed's own and the slower paths in words."""
    stage.script = by_path(**{"own": 2.0, path: 0.5})
    decision = stage.run()
    choice = decision.choice
    assert choice.path == path
    assert choice.gain == pytest.approx(4.0, rel=0.01)
    assert not choice.tie
    assert choice.reasons[0].startswith(f"{path} with the cast on the ")
    assert "adds 500 ms to a backward pass; DeepSpeed's own explicit_upcast_non_blocking" in choice.reasons[0]
    assert "4.00x, noise 2.0%" in choice.reasons[0]
    for other in {"direct", "pinned", "staged"} - {path}:
        assert "adds 1.00 s, 2.00 times as much" in reasons(decision), other


def test_the_best_buffers_of_a_path_are_found(stage: Stage) -> None:
    """The search reaches a single fast point in the space, and the choice carries its parameters."""
    found = ("staged", "device", 1 << 21, 3, 4)
    stage.script = lambda record: 0.3 if isinstance(record, Candidate) and key(record) == found else 1.0
    decision = stage.run(seconds=50.0)
    assert tuple(getattr(decision.choice, name) for name in PARAMETERS) == found


def test_a_near_tie_goes_to_what_pins_less(stage: Stage) -> None:
    """1 % is never told apart: direct beats pinned and staged there, and the tie is called one."""
    stage.script = by_path(direct=1.01, pinned=1.0, staged=1.0, own=2.0)
    decision = stage.run()
    assert decision.choice.path == "direct"
    assert decision.choice.tie
    assert "a near tie goes to what pins less, then to the smaller buffers" in reasons(decision)


def test_a_near_tie_within_a_path_goes_to_the_smaller_buffers(stage: Stage) -> None:
    """All rings are equally fast here."""
    stage.script = by_path(staged=0.5)
    decision = stage.run(steer=Settings(path="staged"))
    timed = [c for c in decision.candidates if c.measured_seconds is not None]
    finalists = sorted(timed, key=lambda c: -c.samples)[: PLAN.finalists]
    smallest = min(c.buffer_bytes * c.buffer_count for c in finalists)
    assert decision.choice.buffer_bytes * decision.choice.buffer_count == smallest
    assert not decision.choice.tie


def test_noise_between_paths_costs_nothing_within_one(stage: Stage) -> None:
    """Loud trials let the path that pins less win, but of that path still the fastest."""
    threads = {0: 1.5, 1: 1.0, 4: 1.7}
    stage.script = lambda record: (
        threads[record.host_threads] if isinstance(record, Candidate) and record.path == "direct" else 0.99
    )
    stage.jitter = (1.0, 1.6, 0.7, 1.3, 0.9, 1.2, 0.8)
    choice = stage.run(steer=Settings(cast="host"), seconds=10.0).choice
    assert choice.noise > 0.02
    assert (choice.path, choice.host_threads) == ("direct", 1)


def test_noise_widens_the_tie(stage: Stage) -> None:
    """What differs by 5 % is told apart in quiet trials and not in loud ones; the noise is in the choice."""
    stage.script = by_path(direct=1.05, pinned=1.0, staged=2.0, own=2.0)
    assert stage.run().choice.path == "pinned"
    stage.jitter = (1.0, 1.6, 0.7, 1.3, 0.9)
    loud = stage.run(seconds=1.0).choice
    assert loud.noise > 0.05
    assert loud.path == "direct"


def test_no_gain_beyond_the_noise_keeps_deepspeeds_own_code(stage: Stage) -> None:
    """It is said in words."""
    stage.script = by_path(direct=0.99, own=1.0)
    decision = stage.run()
    assert "no gain beyond the noise over DeepSpeed's own code, which is kept" in reasons(decision)
    assert 1.0 <= decision.choice.gain <= 1 + decision.choice.noise


def test_what_is_slower_than_deepspeed_says_so(stage: Stage) -> None:
    """A gain below 1 is not called a tie with DeepSpeed's own."""
    stage.script = by_path(own=0.5)
    decision = stage.run()
    assert "DeepSpeed's own code is faster, and is kept" in reasons(decision)
    assert decision.choice.gain == pytest.approx(0.5, rel=0.01)


def test_what_hides_behind_compute_is_all_the_same(stage: Stage) -> None:
    """Times below a thousandth of the compute are not compared: they are its own noise."""
    stage.script = lambda record: 1e-9 if getattr(record, "path", "") == "pinned" else 3e-5
    decision = stage.run()
    assert decision.choice.path == "direct"
    assert decision.choice.gain == pytest.approx(1.0)


# -- limits and what a user fixed -----------------------------------------------------------------


def test_a_limit_rejects_pinned_with_its_number_and_source(stage: Stage) -> None:
    """The fast path that does not fit memory is not tried, and both key and candidate say why."""
    stage.script = by_path(pinned=0.1)
    bound = Limit(name="memlock", bytes=1 << 20, source="ulimit -l", raise_by="raise it")
    decision = stage.run(limits=Limits(available_bytes=1 << 40, pinnable_bytes=1 << 20, bounds=(bound,)))
    pinned = [c for c in decision.candidates if c.path == "pinned"]
    assert pinned and all("ulimit -l" in (c.rejected or "") for c in pinned)
    assert all("of page-locked memory" in (c.rejected or "") for c in pinned)
    assert stage.trials_of(path="pinned") == 0
    assert stage.trials_of(memory="pinned") == 0
    assert not decision.choice.pin_optimizer
    sentence = next(r for r in decision.choice.reasons if r.startswith("offload_optimizer"))
    assert "is not pinned: needs" in sentence and "ulimit -l" in sentence


def test_a_block_that_cannot_be_pinned_rejects_pinned(stage: Stage) -> None:
    """The largest block that was ever locked is smaller than DeepSpeed's."""
    pin = PinCost(seconds_per_gib=0.3, largest_bytes=1 << 20, capped=False, reason="out of locked memory")
    decision = stage.run(measurements=fast_pinned(pin=pin))
    rejected = {c.rejected for c in decision.candidates if c.path == "pinned"}
    assert all(
        "the largest that could be locked here is 1,048,576 (out of locked" in str(r) for r in rejected
    )
    assert decision.choice.sizes.sub_group_elements is None  # the sums of all gradients would not pin either


def test_sub_groups_are_made_to_fit_the_largest_block_that_pins(stage: Stage) -> None:
    """Written with the pin that they make possible, with room for one partition beyond the size."""
    workload = make_workload(partitions=((1 << 20, 512),), parameters=((1 << 23, 512),))
    limits = Limits(available_bytes=1 << 50, pinnable_bytes=1 << 49)
    pin = PinCost(seconds_per_gib=0.0, largest_bytes=1 << 30, capped=False, reason="out of locked memory")
    stage.script = by_path(own=0.9, own_pinned=0.5)
    choice = stage.run(measurements=fast_pinned(pin=pin), workload=workload, limits=limits).choice
    assert choice.pin_optimizer
    size = choice.sizes.sub_group_elements
    assert size == (1 << 28) - (1 << 20) + 1
    assert max(4 * each for each in sub_groups(workload, size)) <= 1 << 30
    refused = rules(
        1 << 49, workload=workload, pin=pin, limits=limits, layout=Layout(sub_group_elements=10**12)
    )
    assert f"lower sub_group_size to {size:,}" in str(refused.against_optimizer())
    assert refused.sub_group is None


def test_where_nothing_pins_one_sentence_says_why(stage: Stage) -> None:
    """The cause stands there once; each of the two keys has its own short sentence."""
    stage.device = ScriptedDevice(synchronous=True, shares_host_memory=True)
    decision = stage.run(measurements=fast_pinned(pin=NO_PIN))
    choice = decision.choice
    assert reasons(decision).count("nothing here can pin") == 1
    assert (
        "page-locked memory is not on offer here: nothing here can pin; so the paths pinned and staged were not tried"
        in choice.reasons
    )
    assert "offload_optimizer is not pinned: page-locked memory is not on offer here" in choice.reasons
    assert "offload_param is not pinned: page-locked memory is not on offer here" in choice.reasons
    assert (choice.path, choice.pin_optimizer, choice.pin_parameters) == ("direct", False, False)
    assert choice.unsettled_pins == ()
    assert decision.warnings == ()


@pytest.mark.parametrize("path", ["direct", "pinned", "staged"])
def test_a_fixed_path_is_honoured(stage: Stage, path: Any) -> None:
    """Even the slowest one; nothing else is tried, and the optimizer's key follows it."""
    stage.script = by_path(**{path: 3.0})
    decision = stage.run(steer=Settings(path=path))
    assert decision.choice.path == path
    assert {c.path for c in decision.candidates} == {path}
    assert decision.choice.pin_optimizer is (path == "pinned")
    assert f"you fixed the path {path}" in reasons(decision)
    assert "pin_optimizer" not in decision.choice.unsettled_pins


@pytest.mark.parametrize(("own", "memory", "path"), [(1.0, "pinned", "pinned")])
def test_the_path_deepspeed_keeps_its_own_code(stage: Stage, own: float, memory: str, path: str) -> None:
    """Our path that is most like it is timed beside it; the gain is that of keeping it."""
    stage.script = by_path(pinned=0.2, own=own)
    decision = stage.run(steer=Settings(path="deepspeed"))
    assert decision.choice.path == path
    assert decision.choice.gain == 1.0
    assert "you fixed the path deepspeed, so DeepSpeed's own code is kept" in decision.choice.reasons[0]


def test_fixed_parameters_are_honoured(stage: Stage) -> None:
    """Buffers, threads and the place of the cast."""
    steer = Settings(path="staged", cast="host", buffer_bytes=3 << 20, buffer_count=5, host_threads=2)
    choice = stage.run(steer=steer).choice
    assert tuple(getattr(choice, name) for name in PARAMETERS) == ("staged", "host", 3 << 20, 5, 2)


@pytest.mark.parametrize("path", ["pinned", "staged"])
def test_a_fixed_path_that_cannot_run_is_refused_in_words(stage: Stage, path: Any) -> None:
    """The error holds what was fixed, the cause and the way out."""
    with pytest.raises(ConfigError, match=f'path {path} cannot run here: .*nothing here can pin.*"auto"'):
        stage.run(measurements=fast_pinned(pin=NO_PIN), steer=Settings(path=path))
    assert stage.closed == 1


def test_a_ring_beyond_the_limit_is_refused_in_words(stage: Stage) -> None:
    """A user's own buffers count against what may be locked."""
    with pytest.raises(ConfigError, match=r"path staged, buffer_bytes 1073741824.*needs .* of page-locked"):
        stage.run(
            limits=Limits(available_bytes=1 << 40, pinnable_bytes=1 << 30),
            steer=Settings(path="staged", buffer_bytes=1 << 30),
        )


def test_scratch_beyond_the_device_is_refused_in_words(stage: Stage) -> None:
    """A user's own buffers count against what a path may take of the device's memory."""
    with pytest.raises(
        ConfigError, match=r"path direct, cast device, buffer_bytes 4294967296.*device memory"
    ):
        stage.run(steer=Settings(path="direct", cast="device", buffer_bytes=1 << 32))


def test_buffers_without_room_for_an_element_are_refused(stage: Stage) -> None:
    """3 bytes hold no fp32 value."""
    with pytest.raises(ConfigError, match="buffer_bytes is 3; expected at least 4"):
        stage.run(steer=Settings(buffer_bytes=3))


# -- the two keys ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "own_pinned", "pinned", "unsettled"),
    [(1.0, 0.5, True, False), (0.5, 1.0, False, False), (1.0, 1.005, False, True), (1.005, 1.0, False, True)],
)
def test_where_deepspeeds_own_code_stays_its_own_two_times_decide(
    stage: Stage, own: float, own_pinned: float, pinned: bool, unsettled: bool
) -> None:
    """Not ours: DeepSpeed's code carries the gradients. What measured the same is unsettled."""
    stage.script = by_path(direct=3.0, pinned=2.0, staged=3.0, own=own, own_pinned=own_pinned)
    choice = stage.run().choice
    assert not choice.beats_deepspeed
    assert choice.pin_optimizer is choice.pin_optimizer_alone is pinned
    assert ("pin_optimizer" in choice.unsettled_pins) is unsettled
    sentence = next(r for r in choice.reasons if r.startswith("offload_optimizer"))
    assert ("within the noise" in sentence) is unsettled


@pytest.mark.parametrize("path", ["direct", "pinned", "staged"])
@pytest.mark.parametrize("own_pinned", [3.0, 12.0])
def test_where_our_path_is_faster_its_destination_decides(stage: Stage, path: str, own_pinned: float) -> None:
    """DeepSpeed's own times then only count for whoever runs its code; one sentence says both."""
    stage.script = by_path(**{path: 0.2}, own=6.0, own_pinned=own_pinned)
    choice = stage.run().choice
    assert choice.beats_deepspeed and choice.path == path
    assert choice.pin_optimizer is (path == "pinned")
    assert choice.pin_optimizer_alone is (own_pinned < 6.0)
    assert "pin_optimizer" not in choice.unsettled_pins
    (sentence,) = (r for r in choice.reasons if r.startswith("offload_optimizer"))
    assert ("for DeepSpeed's own code it is" in sentence) is (
        choice.pin_optimizer is not choice.pin_optimizer_alone
    )


def test_a_near_tie_between_destinations_leaves_the_optimizers_key_open(stage: Stage) -> None:
    """Direct was taken for pinning less, but pinned measured the same: a user's own value stays."""
    stage.script = by_path(direct=0.505, pinned=0.5, own=6.0)
    choice = stage.run().choice
    assert (choice.path, choice.pin_optimizer) == ("direct", False)
    assert "pin_optimizer" in choice.unsettled_pins


def test_the_parameters_key_follows_the_h2d_curves(stage: Stage) -> None:
    """Faster from pinned memory: on; the same: off and unsettled."""
    assert stage.run().choice.pin_parameters
    equal = stage.run(measurements=measurements([10.0] * 11)).choice
    assert not equal.pin_parameters
    assert "pin_parameters" in equal.unsettled_pins
    assert next(r for r in equal.reasons if r.startswith("offload_param")).count("within the noise") == 1


def test_parameters_must_fit_beside_the_optimizers_blocks(stage: Stage) -> None:
    """Both keys lock memory at once."""
    workload = make_workload()
    room = sum(1 << (size - 1).bit_length() for size in [*flat_blocks(workload), *optimizer_blocks(workload)])
    limits = Limits(available_bytes=1 << 40, pinnable_bytes=room)
    stage.script = by_path(own=0.9, own_pinned=0.5)
    both = stage.run(limits=limits).choice
    assert both.pin_optimizer and not both.pin_parameters
    assert not both.unsettled_pins
    stage.script = by_path(own=0.5, own_pinned=1.0)
    assert stage.run(limits=limits).choice.pin_parameters


# -- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        MeasurementError("3 of 9 gradients arrived with wrong bits"),
        PinError("page-locking 4,096 bytes failed"),
        RuntimeError("CUDA out of memory"),
        MemoryError(),
    ],
)
def test_a_path_that_fails_is_put_aside_with_the_reason(stage: Stage, error: Exception) -> None:
    """The others go on, every candidate of it says what happened, and nothing stays open."""
    stage.script = by_path(pinned=0.1, direct=0.5, own=2.0)
    stage.check = failing("pinned", error)
    decision = stage.run(seconds=20.0)
    assert decision.choice.path == "direct"
    tried = [
        c for c in decision.candidates if c.path == "pinned" and "failed in a trial" in (c.rejected or "")
    ]
    assert tried and all(str(error) in str(c.rejected) for c in tried)
    assert all(c.measured_seconds is None for c in tried)
    assert "pinned was put aside: failed in a trial: " in reasons(decision)
    assert all(path.closed for path in stage.paths)
    assert stage.closed == 1


def test_a_path_that_fails_late_is_not_chosen(stage: Stage) -> None:
    """It won the search and then failed in the final rounds."""
    runs = itertools.count()

    def script(record: Record) -> float:
        if isinstance(record, Candidate) and record.path == "pinned":
            if next(runs) > 30:
                raise RuntimeError("the device was lost")
            return 0.1
        return 1.0

    stage.script = script
    decision = stage.run()
    assert decision.choice.path != "pinned"
    assert any("the device was lost" in (c.rejected or "") for c in decision.candidates)
    assert all(path.closed for path in stage.paths)


def test_deepspeeds_own_failing_ends_nothing(stage: Stage) -> None:
    """There is nothing to compare with then, which is said; the failure is a warning."""

    def check(record: Record) -> None:
        if isinstance(record, Baseline):
            raise RuntimeError("CUDA out of memory")

    stage.check = check
    decision = stage.run()
    assert decision.choice.gain == 1.0
    assert "so nothing is compared with it" in decision.choice.reasons[0]
    assert "CUDA out of memory" in decision.warnings[0]
    assert not decision.choice.pin_optimizer


def test_an_older_sequence_failing_is_a_warning(stage: Stage) -> None:
    """The comparison with the installed one stands."""

    def check(record: Record) -> None:
        if getattr(record, "name", "") == "bounce_buffer":
            raise PinError("no bounce buffer")

    stage.check = check
    decision = stage.run()
    assert decision.choice.gain == pytest.approx(1.0, rel=0.01)
    assert "nothing is compared" not in reasons(decision)
    assert any("bounce_buffer" in warning and "no bounce buffer" in warning for warning in decision.warnings)


def test_nothing_that_works_is_an_error_with_all_the_reasons(stage: Stage) -> None:
    """And the bench is closed."""

    def check(record: Record) -> None:
        raise MeasurementError("wrong bits")

    stage.check = check
    with pytest.raises(MeasurementError, match=r"not one gradient path could be timed: .*wrong bits"):
        stage.run()
    assert stage.closed == 1 and all(path.closed for path in stage.paths)


def test_an_interrupt_closes_everything_and_goes_on(stage: Stage) -> None:
    """It is not a failure of a path."""
    stage.check = failing("staged", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        stage.run(seconds=50.0)
    assert stage.closed == 1 and all(path.closed for path in stage.paths)


# -- time -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0.0, 0.01, 0.3, 5.0])
def test_every_candidate_is_reported_once_with_a_time_or_a_reason(stage: Stage, seconds: float) -> None:
    """However short the time: none is lost, none is there twice, none stays without a word."""
    decision = stage.run(seconds=seconds)
    keys = [key(c) for c in decision.candidates]
    assert len(keys) == len(set(keys))
    assert len(keys) == len(list(grid(cast(Device, stage.device), make_workload(), Settings())))
    for candidate in decision.candidates:
        assert (candidate.measured_seconds is None) is (candidate.rejected is not None)
        assert candidate.predicted_seconds is not None
    if seconds < 0.1:
        assert any(c.rejected == "not tried: out of time" for c in decision.candidates)


@pytest.mark.parametrize("pass_seconds", [1e-4, 1e-2, 0.5, 3.0])
def test_the_deadline_holds_however_slow_a_trial_is(stage: Stage, pass_seconds: float) -> None:
    """It may be overrun by one pass; if it is too short for anything, by the four passes of the opening."""
    stage.pass_seconds = pass_seconds
    before = stage.device.clock
    stage.run(seconds=2.0)
    assert stage.device.clock - before <= max(2.0, 4 * pass_seconds) + pass_seconds


def test_the_sample_shrinks_with_the_time(stage: Stage) -> None:
    """A short budget still gets its rounds: it times fewer of the partitions."""
    workload = make_workload(partitions=((1 << 26, 16),), parameters=((1 << 26, 16),))
    stage.run(seconds=1e3, workload=workload)
    assert stage.sampled == PLAN.trial_bytes // 4
    stage.run(seconds=0.5, workload=workload)
    assert (1 << 18) <= stage.sampled < PLAN.trial_bytes // 4


@pytest.mark.parametrize("cache_bytes", [1 << 20, 1 << 30])
def test_the_sample_takes_no_more_than_its_share_of_the_memory(stage: Stage, cache_bytes: int) -> None:
    """However large the cache of the machine: 20 bytes a gradient within an eighth of what is free."""
    workload = make_workload(partitions=((1 << 26, 16),), parameters=((1 << 26, 16),))
    limits = structs.replace(ROOMY, available_bytes=8 * 20 * (1 << 20))
    stage.run(seconds=1e3, workload=workload, limits=limits, cache_bytes=cache_bytes)
    assert stage.sampled == min(1 << 20, max(PLAN.trial_bytes, 2 * cache_bytes) // 4)


def test_progress_rises_within_the_trials(stage: Stage) -> None:
    """Fractions of the trials' own time, never falling."""
    seen: list[float] = []
    stage.run(progress=lambda what, done: seen.append(done))
    assert seen == sorted(seen) and seen[0] == 0.0 and 0.4 < seen[-1] < 1.0


def test_what_ran_too_rarely_to_show_its_noise_is_not_told_apart_finely(stage: Stage) -> None:
    """One round each: 15 % between two paths is no difference then, and the noise says so."""
    stage.script = by_path(direct=1.15, pinned=1.0, staged=1.1, own=1.2)
    stage.pass_seconds = 0.5
    choice = stage.run(seconds=4.0).choice
    assert choice.noise == 0.25
    assert not choice.beats_deepspeed


def test_bytes_are_checked_once(stage: Stage) -> None:
    """Later starts of the same candidate only warm up."""
    checked: list[Record] = []
    stage.check = checked.append
    stage.run()
    assert len({str(record) for record in checked}) == len(checked)
    assert len(checked) < len(stage.paths)


# -- the search -----------------------------------------------------------------------------------


def test_the_search_starts_with_the_best_of_every_kind(stage: Stage) -> None:
    """And with DeepSpeed's own way in our terms: they are timed before anything else of their kind."""
    stage.run()
    ours = [record for record in stage.timed if isinstance(record, Candidate)]
    kinds = list(dict.fromkeys(kind(record) for record in ours))
    assert len({(path, cast_) for path, cast_, _ in kinds}) == 6
    distinct = list({key(record): record for record in ours}.values())[: len(kinds) + 1]
    assert {kind(record) for record in distinct} == set(kinds)


def test_a_slow_candidate_is_stopped_after_the_first_round(stage: Stage) -> None:
    """Pruning spares the rounds of what is clearly behind once some are known."""
    stage.script = lambda record: 5.0 if getattr(record, "buffer_count", 0) == 4 else 1.0
    decision = stage.run(seconds=50.0)
    slow = [c for c in decision.candidates if c.buffer_count == 4 and c.measured_seconds is not None]
    assert slow and sum(c.samples == 1 for c in slow) > len(slow) / 2


def test_the_same_trials_give_the_same_search(stage: Stage) -> None:
    """The sampler is seeded."""
    stage.run()
    first, stage.timed = stage.timed, []
    stage.device.clock = 100.0
    stage.run()
    assert stage.timed == first


def test_optuna_is_silent_and_its_verbosity_is_put_back(
    stage: Stage, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is printed, and the process's level is as it was, after a failure too."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.DEBUG)
    try:
        with caplog.at_level(logging.DEBUG):
            stage.run()
        assert optuna.logging.get_verbosity() == optuna.logging.DEBUG
        stage.check = failing("staged", KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            stage.run(seconds=50.0)
        assert optuna.logging.get_verbosity() == optuna.logging.DEBUG
    finally:
        optuna.logging.set_verbosity(before)
    assert capfd.readouterr() == ("", "")


# -- candidates -----------------------------------------------------------------------------------


def test_float32_gradients_are_cast_nowhere(stage: Stage) -> None:
    """There is one place of the cast then, whatever is fixed."""
    workload = make_workload(dtype="float32")
    for steer in (Settings(), Settings(cast="device")):
        assert {c.cast for c in grid(cast(Device, stage.device), workload, steer)} == {"host"}


def test_buffers_are_no_larger_than_the_largest_partition_needs(stage: Stage) -> None:
    """A piece larger than the partition differs in nothing but memory."""
    workload = make_workload(partitions=((100_000, 4),))
    sizes = {c.buffer_bytes for c in grid(cast(Device, stage.device), workload, Settings())}
    assert sizes == {1 << 18, 1 << 19}


def test_what_is_predicted_far_behind_is_not_tried_but_for_the_best_of_its_kind(stage: Stage) -> None:
    """The reason says how far; a wrong model loses no path."""
    slow_link = measurements([0.1, 0.1, 30.0, 10.0, 30.0, 12.0, 6.0, 5.0, 500.0, 12.0, 6.0])
    decision = stage.run(measurements=slow_link, seconds=50.0)
    direct = [c for c in decision.candidates if c.path == "direct"]
    assert any(c.measured_seconds is not None for c in direct)
    assert any("times as long as the best" in (c.rejected or "") for c in direct)


# -- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory_bytes", [None, 1, 1 << 20, 16 << 30, 192 << 30])
@pytest.mark.parametrize("elements", [1, 10_000, 1 << 33])
@pytest.mark.parametrize("world_size", [1, 64])
def test_sizes_are_bounded_by_device_memory(
    stage: Stage, memory_bytes: int | None, elements: int, world_size: int
) -> None:
    """Plain ints from 1, none over its share of the device's memory, a reason for each."""
    stage.device.memory_bytes = memory_bytes
    workload = make_workload(
        partitions=((elements, 2),), parameters=((elements * world_size, 2),), world_size=world_size
    )
    sizes = stage.run(workload=workload, limits=ROOMY).choice.sizes
    assert sizes.sub_group_elements is None
    room = max((memory_bytes or 8 << 30) * 0.02 / 2, 1)
    for name in ("reduce_bucket_elements", "prefetch_bucket_elements", "persistence_threshold_elements"):
        value = getattr(sizes, name)
        assert type(value) is int and 1 <= value <= room
        assert sizes.reasons[name].startswith(f"{NAMES[name]} is {value:,} elements: ")
    assert sizes.reasons["sub_group_elements"].startswith("sub_group_size stays DeepSpeed's own: ")


def test_sizes_follow_the_link(stage: Stage) -> None:
    """A longer latency asks for larger buckets, so that it is hidden."""

    def sizes(latency: float) -> records.ZeroSizes:
        slow = measurements([10.0] * 11, latency=latency)
        return stage.run(measurements=slow).choice.sizes

    short, long = sizes(1e-6), sizes(1e-3)
    assert (long.reduce_bucket_elements or 0) > (short.reduce_bucket_elements or math.inf) / 1.01
    assert (long.prefetch_bucket_elements or 0) > (short.prefetch_bucket_elements or math.inf) / 1.01
    assert (long.persistence_threshold_elements or 0) > (short.persistence_threshold_elements or math.inf)


def test_a_synchronous_device_keeps_deepspeeds_sizes(stage: Stage) -> None:
    """Nothing overlaps there, and each size says so."""
    stage.device = ScriptedDevice(synchronous=True, shares_host_memory=True)
    sizes = stage.run(measurements=fast_pinned(pin=NO_PIN)).choice.sizes
    assert sizes == records.ZeroSizes(reasons=sizes.reasons)
    assert len(sizes.reasons) == 4
    assert all(
        reason.startswith(f"{NAMES[name]} stays DeepSpeed's own") for name, reason in sizes.reasons.items()
    )
    assert "nothing overlaps" in sizes.reasons["reduce_bucket_elements"]


# -- whole accumulations ---------------------------------------------------------------------------

FOUR = make_workload(accumulation_steps=4)


def by_place(*, host: float, device: float = 1.0, own: float = 1.5) -> Callable[[Record, str], float]:
    """Seconds of an accumulation by where it adds up; `own` is DeepSpeed's."""
    seconds = {"device": device, "host": host}
    return lambda record, place: own if isinstance(record, Baseline) else seconds[place]


@pytest.mark.parametrize(
    ("host_seconds", "place"), [(0.5, "host"), (0.97, "host"), (0.99, "device"), (2.0, "device")]
)
def test_the_faster_place_wins_beyond_the_noise(stage: Stage, host_seconds: float, place: str) -> None:
    """DeepSpeed's own is the device; the reason has both times, and the gain is that of the accumulation."""
    stage.accumulated = by_place(host=host_seconds)
    decision = stage.run(workload=FOUR, seconds=50.0)
    assert decision.choice.accumulate == place
    assert f"micro-steps are added up on the {place}: over an accumulation of 4 micro-steps" in reasons(
        decision
    )
    assert f"({1 / host_seconds:.2f}x, noise 2.0%)" in reasons(decision)
    assert decision.choice.gain == pytest.approx(
        1.5 / min(host_seconds if place == "host" else 1.0, 1.0), rel=0.01
    )
    assert "to an accumulation of 4 micro-steps; DeepSpeed's own" in decision.choice.reasons[0]
    assert all(path.closed for path in stage.paths)


def test_the_path_is_the_fastest_over_whole_accumulations(stage: Stage) -> None:
    """Not over single backward passes: those choose who runs; what is reported of them stays theirs."""
    stage.script = by_path(pinned=0.5, direct=0.9, staged=1.0, own=1.0)
    stage.accumulated = lambda record, place: (
        3.0 if isinstance(record, Baseline) else 1.0 if (record.path, place) == ("direct", "host") else 2.0
    )
    decision = stage.run(workload=FOUR)
    choice = decision.choice
    assert (choice.path, choice.accumulate) == ("direct", "host")
    assert choice.gain == pytest.approx(3.0, rel=0.01)
    best = min(c.measured_seconds for c in decision.candidates if c.measured_seconds is not None)
    assert best == pytest.approx(0.5, rel=0.01)
    assert decision.baselines[0].measured_seconds == pytest.approx(1.0, rel=0.01)


def test_a_path_with_threads_of_its_own_gets_its_chance_over_accumulations(stage: Stage) -> None:
    """Its threads work while the sum crosses the link: 1.8 times the fastest in a backward pass may still win."""

    def threaded(record: Record) -> bool:
        return isinstance(record, Candidate) and (record.path, record.host_threads > 0) == ("staged", True)

    stage.script = lambda record: 1.8 if threaded(record) else 1.0
    stage.accumulated = lambda record, place: 1.0 if threaded(record) and place == "device" else 2.0
    choice = stage.run(workload=FOUR).choice
    assert choice.path == "staged" and choice.host_threads > 0


def test_neighbours_of_the_leader_run_over_accumulations_too(stage: Stage) -> None:
    """Though all rings take the same in a backward pass; the one that is chosen has a time of a pass as well."""

    def seconds(record: Record, place: str) -> float:
        if not isinstance(record, Candidate) or place == "host":
            return 3.0
        return {2: 1.2, 3: 1.1, 4: 1.0}[record.buffer_count]

    stage.accumulated = seconds
    decision = stage.run(workload=FOUR, steer=Settings(path="staged", cast="host"), seconds=50.0)
    assert decision.choice.buffer_count == 4
    assert all(c.measured_seconds is not None for c in decision.candidates if key(c) == key(decision.choice))


def test_rings_that_a_cut_partition_cannot_show_stay_out(stage: Stage) -> None:
    """Half a mebibyte is an eighth of the pieces here; where the user fixed a larger one, it runs all the same."""
    stage.cuts = True
    stage.script = by_path(staged=0.5)
    stage.run(workload=FOUR, seconds=50.0)
    ran = [record for record, *_ in stage.micro_steps if isinstance(record, Candidate)]
    rings = {record.buffer_bytes * record.buffer_count for record in ran if record.path == "staged"}
    assert rings == {1 << 19}
    stage.micro_steps.clear()
    stage.accumulated = by_place(host=0.1)
    fixed = stage.run(workload=FOUR, steer=Settings(path="staged", buffer_bytes=1 << 22)).choice
    assert fixed.accumulate == "host"


def test_what_entrants_share_is_timed_once_a_round(stage: Stage) -> None:
    """Until the last micro-step, adding up on the device is the same for all of ours with one kind of host memory."""
    stage.run(workload=FOUR, seconds=50.0)
    ours = [who for who in stage.micro_steps if isinstance(who[0], Candidate)]
    last = [who for who in ours if who[2].boundary]
    on_device = [who for who in ours if who[2].first]
    assert len(on_device) < len(last) / 3
    memories = 2
    rounds = max(sum(who[0] is one[0] and who[1] == one[1] for who in last) for one in last)
    assert len(on_device) <= memories * (rounds + 3)


def test_who_is_clearly_behind_leaves_the_race(stage: Stage) -> None:
    """After one round where it takes over twice the least; DeepSpeed's own stays for the gain."""
    stage.accumulated = by_place(host=9.0, own=1.05)
    stage.run(workload=FOUR, seconds=50.0)
    on_host = [who for who in stage.micro_steps if who[1] == "host" and who[2].boundary]
    assert len(on_host) == len({record.path for record, *_ in on_host if isinstance(record, Candidate)})
    own = [who for who in stage.micro_steps if isinstance(who[0], Baseline) and who[2].boundary]
    assert len(own) > 10


def test_no_gain_over_accumulations_keeps_deepspeeds_own_code(stage: Stage) -> None:
    """Whatever a single backward pass gained."""
    stage.script = by_path(pinned=0.1, direct=0.1, staged=0.1, own=1.0)
    stage.accumulated = by_place(host=1.0, device=1.0, own=1.01)
    decision = stage.run(workload=FOUR)
    assert not decision.choice.beats_deepspeed
    assert "no gain beyond the noise over DeepSpeed's own code, which is kept" in reasons(decision)


def test_of_a_long_accumulation_four_micro_steps_count(stage: Stage) -> None:
    """And it says so; those in the middle are alike, so that one of them is timed."""
    decision = stage.run(workload=make_workload(accumulation_steps=32))
    assert "to an accumulation of 4 micro-steps of 32" in reasons(decision)
    moments = {(moment.first, moment.boundary) for *_, moment in stage.micro_steps}
    assert moments == {(True, False), (False, False), (False, True)}


@pytest.mark.parametrize("cause", ["one micro-step", "shared memory"])
def test_where_nothing_is_added_up_no_time_is_spent_on_it(stage: Stage, cause: str) -> None:
    """With one micro-step, or in place on the CPU: all of the five seconds go to backward passes."""
    changes: dict[str, Any] = {"workload": FOUR}
    if cause == "one micro-step":
        changes["workload"] = make_workload()
    else:
        stage.device.synchronous = stage.device.shares_host_memory = True
    decision = stage.run(**changes)
    assert stage.micro_steps == []
    assert "micro-step" not in reasons(decision)
    assert decision.choice.accumulate == "device"
    assert stage.device.clock > 104.9


@pytest.mark.parametrize("place", ["device", "host"])
def test_a_fixed_place_is_honoured(stage: Stage, place: Any) -> None:
    """However slow: the paths are compared as they would run there."""
    stage.accumulated = by_place(host=9.0 if place == "host" else 0.1, device=0.1 if place == "host" else 9.0)
    decision = stage.run(workload=FOUR, steer=Settings(accumulate=place))
    assert decision.choice.accumulate == place
    ours = {where for record, where, _ in stage.micro_steps if isinstance(record, Candidate)}
    assert ours == {place}
    assert "micro-steps are added up" not in reasons(decision)


def test_a_place_that_fails_is_not_taken(stage: Stage) -> None:
    """Whatever the other would have taken."""
    stage.accumulated = by_place(host=0.1)

    def check(record: Record, place: str) -> None:
        if place == "host":
            raise MeasurementError("7 of 9 gradients arrived with wrong bits")

    stage.check_accumulation = check
    decision = stage.run(workload=FOUR)
    assert decision.choice.accumulate == "device"
    assert "added up on the device, as DeepSpeed does: failed in a trial: 7 of 9" in reasons(decision)


def test_where_no_accumulation_can_be_timed_backward_passes_decide(stage: Stage) -> None:
    """All of ours fail there, none alone: DeepSpeed's place is kept with the path that ran."""
    stage.script = by_path(pinned=0.5)

    def check(record: Record, place: str) -> None:
        if isinstance(record, Candidate):
            raise MeasurementError("no room for the sums")

    stage.check_accumulation = check
    choice = stage.run(workload=FOUR).choice
    assert (choice.path, choice.accumulate) == ("pinned", "device")
    assert choice.gain == pytest.approx(2.0, rel=0.01)


def test_adding_on_the_host_needs_room_beside_the_path(stage: Stage) -> None:
    """Its own buffers are page-locked as well, where the path page-locks; within the same limit."""
    stage.accumulated = by_place(host=0.1)
    stage.script = by_path(staged=0.2, pinned=9.0)
    steer = Settings(path="staged", buffer_bytes=1 << 20, buffer_count=2)
    tight = structs.replace(ROOMY, pinnable_bytes=37 << 20, bounds=(Limit(
        name="memlock", bytes=37 << 20, source="ulimit -l", raise_by="ulimit -l unlimited"),))  # fmt: skip
    decision = stage.run(workload=FOUR, limits=tight, steer=steer)
    assert decision.choice.accumulate == "device"
    assert not [place for _, place, _ in stage.micro_steps if place == "host"]
    assert "ulimit -l" in reasons(decision)
    assert stage.run(workload=FOUR, steer=steer).choice.accumulate == "host"


def test_the_time_for_accumulations_is_part_of_the_budget(stage: Stage) -> None:
    """However slow a pass is, the trials end at the deadline but for what is under way."""
    for pass_seconds in (1e-3, 1e-2, 5e-2):
        stage.pass_seconds, stage.device.clock = pass_seconds, 100.0
        stage.run(workload=FOUR)
        assert stage.device.clock <= 105 + 8 * pass_seconds


# -- what locking takes ---------------------------------------------------------------------------


def slow_lock(seconds: float) -> Measurements:
    """Curves on which pinned is faster, on a host that takes so long to lock what the optimizer needs."""
    gibibytes = sum(1 << (size - 1).bit_length() for size in optimizer_blocks(make_workload())) / 2**30
    pin = PinCost(seconds_per_gib=seconds / gibibytes, largest_bytes=1 << 40, capped=True)
    return fast_pinned(pin=pin)


def test_what_locking_takes_at_each_start_has_to_be_earned_back(stage: Stage) -> None:
    """Over the steps of a short run; the reasons say how long it takes and after how many steps it is paid."""
    stage.script = by_path(direct=0.9, pinned=0.5, staged=0.95, own=0.9, own_pinned=0.5)
    for seconds, steps in ((0.4, "1 step"), (250, "625 steps")):
        choice = stage.run(measurements=slow_lock(seconds)).choice
        assert choice.path == "pinned" and choice.pin_optimizer
        (said,) = [r for r in choice.reasons if r.startswith("offload_optimizer is pinned")]
        assert f"at each start, earned back in {steps} of the 1,000 counted" in said
    stage.script = by_path(direct=0.6, pinned=0.5, staged=0.95, own=0.6, own_pinned=0.5)
    dear = stage.run(measurements=slow_lock(250)).choice
    assert dear.path == "direct" and not dear.pin_optimizer and not dear.pin_optimizer_alone
    assert "locking takes 250 s at each start, earned back in 2,500 steps of the 1,000" in " ".join(
        dear.reasons
    )


def test_a_start_does_not_wait_longer_than_ranks_wait_for_each_other(stage: Stage) -> None:
    """However much faster the copies are."""
    stage.script = by_path(direct=9.0, pinned=0.5, own=9.0, own_pinned=0.5)
    decision = stage.run(measurements=slow_lock(310))
    assert decision.choice.path != "pinned" and not decision.choice.pin_optimizer
    assert "would take 310 s at each start" in reasons(decision)


# -- rules ----------------------------------------------------------------------------------------


def rules(pinnable: int, **changes: Any) -> PinRules:
    """For the factory's workload, on a host with much memory."""
    limits = Limits(available_bytes=1 << 50, pinnable_bytes=pinnable)
    pin = PinCost(seconds_per_gib=0.3, largest_bytes=1 << 40, capped=True)
    return PinRules(**{"workload": make_workload(), "pin": pin, "limits": limits, **changes})


def test_each_parameters_slice_is_a_block_of_its_own() -> None:
    """DeepSpeed pins them one by one, so each is rounded up."""
    workload = make_workload()
    blocks = parameter_blocks(workload)
    assert len(blocks) == sum(count for _, count in workload.parameters)
    assert max(blocks) == 2 * -(-50257 * 768 // 8)


def test_a_deepspeed_that_bounces_pins_one_buffer_more() -> None:
    """0.15.4 to 0.16.2 pin the largest partition in fp32 as well, whatever is chosen."""
    flat = sum(1 << (size - 1).bit_length() for size in flat_blocks(make_workload()))
    assert rules(flat).against_deepspeeds_own() is None
    assert rules(flat, version="0.16.2").against_deepspeeds_own() is not None
    assert rules(0, version="0.16.2", locks=False).against_deepspeeds_own() is None


def test_where_nothing_may_be_locked_the_bound_is_the_reason() -> None:
    """Its name, source and way out, though the device could lock."""
    bound = Limit(name="max_pinned_bytes", bytes=0, source="set by the user", raise_by="a larger one")
    closed = rules(0, limits=Limits(available_bytes=1 << 50, pinnable_bytes=0, bounds=(bound,)))
    why = closed.against_path("staged")
    assert why is not None and all(part in why for part in ("0 bytes", "set by the user", "a larger one"))
    assert closed.against_bounce_buffer() == closed.not_on_offer
