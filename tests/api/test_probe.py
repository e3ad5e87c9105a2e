"""The whole flow on this host: plans, budget, profile, fingerprint, lookup."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from autotune_offload.api import probe
from autotune_offload.config.layout import PLAIN, Layout
from autotune_offload.decide import decide
from autotune_offload.described import machine as described_machine
from autotune_offload.described.simulated import SimulatedDevice
from autotune_offload.errors import BudgetError, ConfigError
from autotune_offload.machine import host
from autotune_offload.machine import limits as machine_limits
from autotune_offload.machine.accelerator import AcceleratorDevice
from autotune_offload.measure import measure
from autotune_offload.profiles import lookup
from autotune_offload.profiles.store import Miss, Store
from autotune_offload.records import SCHEMA, Limits, Profile, Settings, from_plain, to_plain
from tests.factories import make_profile, make_workload

CONTRACT = {
    "transfers": {"kind", "memory", "state", "bytes", "median_seconds", "iqr_seconds", "samples", "gbps"},
    "candidates": {
        "path",
        "cast",
        "buffer_bytes",
        "buffer_count",
        "predicted_seconds",
        "measured_seconds",
        "spread",
        "rejected",
    },
}
"""The documented JSON: what the rows of these lists hold at least."""


class Probed:
    """One probe with a budget of a second, what it reported, and how long it took."""

    def __init__(self) -> None:
        self.progress: list[tuple[str, float]] = []
        device = AcceleratorDevice()
        started = time.perf_counter()
        self.profile = probe.probe(
            workload=make_workload(),
            budget_seconds=1,
            device=device,
            progress=lambda what, done: self.progress.append((what, done)),
        )
        self.seconds = time.perf_counter() - started


@pytest.fixture(scope="module")
def probed() -> Probed:
    """A real probe of this host."""
    return Probed()


# -- the step -------------------------------------------------------------------------------------


class WithoutPass(SimulatedDevice):
    """A described machine on whose host nothing can be compiled."""

    def why_no_pass(self, rounded: torch.dtype | None) -> str:
        """No compiler."""
        del rounded
        return "no C compiler was found"


def stepped(layout: Layout = PLAIN, device: SimulatedDevice | None = None) -> Profile:
    """A short probe of a described machine."""
    device = device or SimulatedDevice(described_machine.load("t4_pcie3"))
    return probe.probe(workload=make_workload(), plan="quick", layout=layout, device=device)


def test_a_probe_decides_how_steps_are_made() -> None:
    """With what was timed for it; through page-locked buffers where weights are on a device."""
    profile = stepped(Layout(parameters=None))
    assert profile.step is not None and profile.step_rates is not None and profile.step_rates.passes
    assert (profile.step.way, profile.step.back) == ("fused", "staged")
    assert profile.measurements.step == profile.step_rates


def test_without_a_compiler_a_probe_keeps_deepspeeds_step_and_says_why() -> None:
    """Everything else is decided as ever."""
    profile = stepped(device=WithoutPass(described_machine.load("t4_pcie3")))
    assert profile.step is not None and (profile.step.way, profile.step.threads) == ("deepspeed", 0)
    assert "no C compiler was found; DeepSpeed's own step is kept" in profile.step.reasons[0]
    assert profile.choice.gain > 1


@pytest.mark.parametrize("layout", [Layout(stage=2), Layout(optimizer=None), Layout(optimizer="nvme")])
def test_no_step_is_looked_at_where_the_pass_makes_none(layout: Layout) -> None:
    """Stages 1 and 2, a step on the device, NVMe: the time goes to the curves."""
    profile = stepped(layout)
    assert profile.step is None and profile.step_rates is None


# -- plans ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["quick", "standard", "thorough"])
def test_shipped_plans_load_and_are_sane(name: str) -> None:
    """Sizes grow, samples have room, and the trials get a part of the budget."""
    plan = probe.load_plan(name)
    assert plan.name == name
    assert 0 < plan.measure_share < 1
    assert 0 < plan.smallest_bytes < plan.largest_bytes
    assert plan.growth >= 2
    assert 3 <= plan.min_samples <= plan.max_samples
    assert plan.finalists >= 2
    assert plan.warmup_seconds < plan.budget_seconds / 50
    assert plan.trial_bytes >= 1 << 20
    assert plan.pin_cap_bytes >= 1 << 20


def test_longer_plans_measure_more() -> None:
    """Quick, standard, thorough: budget, samples and finalists never fall."""
    plans = [probe.load_plan(name) for name in ("quick", "standard", "thorough")]
    for field in ("budget_seconds", "max_samples", "finalists", "trial_bytes", "largest_bytes"):
        values = [getattr(plan, field) for plan in plans]
        assert values == sorted(values), field
    assert plans[1].budget_seconds == 5


def test_a_budget_replaces_the_plans_own() -> None:
    """Nothing else of the plan changes."""
    plan = probe.load_plan("quick", 0.5)
    assert plan == structs.replace(probe.load_plan("quick"), budget_seconds=0.5)


@pytest.mark.parametrize("budget", [0.0, -1.0, 0.19, float("inf"), float("nan")])
def test_a_budget_that_measures_nothing_is_refused(budget: float) -> None:
    """The error says what was given and what is the least."""
    with pytest.raises(BudgetError, match=r"a budget of .* s; expected at least 0.2 s"):
        probe.load_plan("standard", budget)


def test_an_unknown_plan_is_refused() -> None:
    """The error lists those that are shipped."""
    with pytest.raises(ConfigError, match=r"no shipped file 'probe_plans/fast.yaml'.*standard.yaml"):
        probe.load_plan("fast")


def test_a_broken_plan_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the file and what is wrong in it."""
    file = tmp_path / "plan.yaml"
    file.write_text("name: broken\nbudget_seconds: soon\n")
    monkeypatch.setattr(probe, "config_file", lambda *parts: file)
    with pytest.raises(ConfigError, match=r'probe plan ".*plan.yaml" cannot be used: .*budget_seconds'):
        probe.load_plan("broken")


# -- the whole probe ------------------------------------------------------------------------------


def test_a_probe_round_trips_through_plain_data(probed: Probed) -> None:
    """What it returns is what a stored profile gives back."""
    assert from_plain(to_plain(probed.profile), Profile) == probed.profile


def test_a_probe_round_trips_through_the_store(probed: Probed, tmp_path: Path) -> None:
    """A saved one is found again for the same environment, its decision unchanged."""
    store = Store(tmp_path)
    store.save(probed.profile)
    found = lookup.lookup(store, make_workload())
    assert isinstance(found, Profile)
    assert found.choice == probed.profile.choice
    assert [c.rejected for c in found.candidates] == [c.rejected for c in probed.profile.candidates]


def test_a_probe_keeps_its_budget(probed: Probed) -> None:
    """A second; on a busy machine it may wait for the processor. Its own figure is the clock's."""
    assert probed.seconds < 10.0
    assert 0.2 < probed.profile.elapsed_seconds <= probed.seconds


def test_progress_rises_from_0_to_1(probed: Probed) -> None:
    """It never falls, and says in words what is done."""
    fractions = [done for _, done in probed.progress]
    assert fractions == sorted(fractions)
    assert fractions[0] == 0.0 and fractions[-1] == 1.0
    assert all(what for what, _ in probed.progress)
    assert {"searching paths and buffers", "final rounds", "done"} <= {what for what, _ in probed.progress}


def test_a_profile_holds_every_field_of_the_contract(probed: Probed) -> None:
    """The JSON document that docs/cli.md describes."""
    plain = to_plain(probed.profile)
    assert plain["schema"] == SCHEMA == 1
    assert {"host", "device", "software", "limits", "warnings", "zero_optimization"} <= set(plain)
    assert {"kind", "name", "count"} <= set(plain["device"])
    for name, fields in CONTRACT.items():
        assert plain[name] and all(fields <= set(row) for row in plain[name]), name
    assert set(plain["sync"]) == {"device_seconds", "stream_seconds", "event_seconds"}
    assert {"seconds_per_gib", "largest_bytes"} <= set(plain["pin"])
    assert {"path", "cast", "buffer_bytes", "buffer_count", "reasons"} <= set(plain["choice"])
    assert plain["choice"]["reasons"] and plain["elapsed_seconds"] > 0


def test_every_candidate_of_a_real_probe_has_a_time_or_a_reason(probed: Probed) -> None:
    """And something was timed, DeepSpeed's own sequence included."""
    for candidate in probed.profile.candidates:
        assert (candidate.measured_seconds is None) is (candidate.rejected is not None)
    assert any(c.measured_seconds for c in probed.profile.candidates)
    assert [b.installed for b in probed.profile.baselines].count(True) == 1
    assert all(b.measured_seconds for b in probed.profile.baselines if b.installed)


def test_on_the_cpu_direct_is_chosen_and_the_reason_for_no_pinning_given(probed: Probed) -> None:
    """Both keys are written as false."""
    if probed.profile.device.kind != "cpu":
        pytest.skip("DeepSpeed's accelerator here is not the CPU")
    choice = probed.profile.choice
    assert choice.path == "direct"
    sections = probed.profile.zero_optimization
    assert sections["offload_optimizer"] == sections["offload_param"] == {"pin_memory": False}
    assert sum("pin_memory returned pageable memory" in reason for reason in choice.reasons) == 1


class Selected(AcceleratorDevice):
    """Counts how often it became the current device and stopped being it."""

    entered = left = 0

    def selected(self) -> Any:
        """Itself, as a context."""
        return self

    def __enter__(self) -> Selected:
        self.entered += 1
        return self

    def __exit__(self, *exception: object) -> None:
        self.left += 1


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("lost")])
@pytest.mark.parametrize("stage", ["measure", "decide"])
@pytest.mark.parametrize("collecting", [True, False])
def test_an_interrupt_leaves_device_and_collector_as_they_were(
    monkeypatch: pytest.MonkeyPatch, stage: str, error: BaseException, collecting: bool
) -> None:
    """In the middle of either half, with the garbage collector on or off before."""
    seen = []

    def fail(*args: object, **kwargs: object) -> None:
        seen.append(gc.isenabled())
        raise error

    if stage == "decide":
        monkeypatch.setattr(measure, "measure", lambda *args, **kwargs: None)
    monkeypatch.setattr({"measure": measure, "decide": decide}[stage], stage, fail)
    device = Selected()
    before = gc.isenabled()
    try:
        (gc.enable if collecting else gc.disable)()
        with pytest.raises(type(error)):
            probe.probe(workload=make_workload(), device=device)
        assert gc.isenabled() is collecting
    finally:
        (gc.enable if before else gc.disable)()
    assert seen == [False]
    assert (device.entered, device.left) == (1, 1)


@pytest.mark.parametrize(
    ("argument", "setting", "expected"),
    [(None, "auto", None), (7, "auto", 7), (None, 9, 9), (7, 9, 7), (9, 7, 7), (None, 0, 0)],
)
def test_the_smaller_bound_on_pinned_memory_counts(
    monkeypatch: pytest.MonkeyPatch, argument: int | None, setting: Any, expected: int | None
) -> None:
    """The argument's and the block's, whichever are given."""
    asked = []

    def limits(*, max_pinned_bytes: int | None, **others: object) -> Limits:
        asked.append(max_pinned_bytes)
        raise KeyboardInterrupt

    monkeypatch.setattr(machine_limits, "limits", limits)
    with pytest.raises(KeyboardInterrupt):
        probe.probe(
            workload=make_workload(), max_pinned_bytes=argument, settings=Settings(max_pinned_bytes=setting)
        )
    assert asked == [expected]


# -- lookup ---------------------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path: Path) -> Store:
    """A store with a profile of this environment, for a workload of its own."""
    device, workload = AcceleratorDevice(), make_workload(dtype="float16")
    present = lookup.present_fingerprint(device, workload, Settings())
    store = Store(tmp_path)
    store.save(make_profile(fingerprint=present, workload=workload, transfers=()))
    return store


def test_lookup_without_a_workload_takes_any(stored: Store) -> None:
    """The newest that was decided for any model on this host."""
    assert isinstance(lookup.lookup(stored, None), Profile)


def test_lookup_with_a_workload_wants_its_class(stored: Store) -> None:
    """Another model's profile is a miss that names the field; the same class is a hit."""
    miss = lookup.lookup(stored, make_workload())
    assert isinstance(miss, Miss) and miss.differs == ("workload",)
    assert isinstance(lookup.lookup(stored, make_workload(dtype="float16")), Profile)


def test_lookup_without_a_workload_still_wants_this_host(
    stored: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the workload may differ."""
    facts = structs.replace(host.facts(), cpu_model="another")
    monkeypatch.setattr(host, "facts", lambda: facts)
    miss = lookup.lookup(stored, None)
    assert isinstance(miss, Miss) and miss.differs == ("host.cpu_model",)
