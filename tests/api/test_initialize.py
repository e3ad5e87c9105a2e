"""The public face on a stubbed `deepspeed.initialize`: what reaches it, and what a failure of ours costs."""

from __future__ import annotations

import argparse
import base64
import contextlib
import copy
import functools
import inspect
import json
import logging
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from msgspec import structs

from autotune_offload.api import carrying, voice
from autotune_offload.api import initialize as api_initialize
from autotune_offload.api import profile as api_profile
from autotune_offload.api import report as api_report
from autotune_offload.api.given import Asked, workload_of
from autotune_offload.engine.status import Status
from autotune_offload.errors import BudgetError, ConfigError, MeasurementError
from autotune_offload.machine import host
from autotune_offload.machine.accelerator import AcceleratorDevice
from autotune_offload.profiles import lookup
from autotune_offload.profiles.store import Miss
from autotune_offload.records import Profile, Settings, Workload
from autotune_offload.workload import default_workload
from tests.factories import make_choice, make_profile

MODEL = torch.nn.Linear(8, 8)
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu"},
        "sub_group_size": 1234,
    },
}
SIGNATURE = inspect.signature(deepspeed.initialize)


class Engine:
    """What a stubbed initialize returns."""

    optimizer = None


class Calls(list[dict[str, Any]]):
    """The arguments of each `deepspeed.initialize`, by name."""

    def stub(self, *args: Any, **kwargs: Any) -> tuple[Engine, None, None, None]:
        """Stands in for `deepspeed.initialize`."""
        self.append(dict(SIGNATURE.bind(*args, **kwargs).arguments))
        return Engine(), None, None, None


class Probes(list[dict[str, Any]]):
    """The arguments of each probe; it chooses the same every time, or fails."""

    error: BaseException | None = None
    choice = make_choice(gain=1.0)

    def stub(self, *, workload: Workload | None, device: AcceleratorDevice, **kwargs: Any) -> Profile:
        """Stands in for `probe`."""
        self.append({"workload": workload, **kwargs})
        if self.error is not None:
            raise self.error
        workload = workload or default_workload()
        present = lookup.present_fingerprint(device, workload, kwargs["settings"])
        # with no copy to be timed again: these are another machine's
        return make_profile(fingerprint=present, workload=workload, choice=self.choice, transfers=())


class DataParallel:
    """A model-parallel unit: so many ranks share a parameter."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def get_data_parallel_world_size(self) -> int:
        """How many."""
        return self.ranks


class SequenceParallel:
    """One that knows of sequences alone: so many ranks share one."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def get_sequence_parallel_world_size(self) -> int:
        """How many."""
        return self.ranks


def untouchable(touched: list[str]) -> Any:
    """An object whose every attribute raises; which were asked for is written down."""

    class Untouchable:
        def __getattribute__(self, name: str) -> Any:
            touched.append(name)
            raise RuntimeError(f"{name} was touched")

    return Untouchable()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """A stubbed `deepspeed.initialize` with the real one's signature."""
    calls = Calls()

    def initialize(*args: Any, **kwargs: Any) -> Any:
        return calls.stub(*args, **kwargs)

    initialize.__signature__ = SIGNATURE  # type: ignore[attr-defined]  # what inspect.signature reads
    monkeypatch.setattr(deepspeed, "initialize", initialize)
    return calls


@contextlib.contextmanager
def nobody_set_up_logging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a script; in the body of a test, since pytest sets logging up after the fixtures."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(voice, "_said", set())
    monkeypatch.setattr(voice, "_refused", set())
    log, job = logging.getLogger("autotune_offload"), logging.getLogger("autotune_offload.job")
    before = list(log.handlers), log.level, job.level
    yield
    log.handlers[:] = before[0]
    log.setLevel(before[1])
    job.setLevel(before[2])


@pytest.fixture(autouse=True)
def probes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Probes:
    """A stubbed probe and an empty store; one rank."""
    probes = Probes()
    monkeypatch.setattr(api_profile, "probe", probes.stub)
    monkeypatch.setenv("AUTOTUNE_OFFLOAD_CACHE", str(tmp_path / "profiles"))
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return probes


def with_block(**block: Any) -> dict[str, Any]:
    """The configuration with our block in it."""
    return {**copy.deepcopy(CONFIG), "autotune_offload": block}


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Messages of our own warnings."""
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def is_tuned(config: Any) -> bool:
    """Whether both keys follow the stubbed choice, and the user's number stayed."""
    zero = config["zero_optimization"]
    return (
        zero["offload_optimizer"]["pin_memory"] is False
        and zero["offload_param"]["pin_memory"] is True
        and zero["sub_group_size"] == 1234
        and zero["reduce_bucket_size"] == 15_099_494
    )


# -- every way in ---------------------------------------------------------------------------------


def _file(tmp_path: Path) -> Path:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(CONFIG))
    return file


FORMS: dict[str, Callable[[Path], Any]] = {
    "dict": lambda folder: copy.deepcopy(CONFIG),
    "path": lambda folder: str(_file(folder)),
    "base64": lambda folder: base64.urlsafe_b64encode(json.dumps(CONFIG).encode()).decode(),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", ["config", "config_params", "args", "positional"])
def test_every_way_of_passing_a_configuration_is_tuned(
    calls: Calls, tmp_path: Path, form: str, way: str
) -> None:
    """It reaches DeepSpeed as one tuned dict; what the user handed in is unchanged."""
    given = FORMS[form](tmp_path)
    before = copy.deepcopy(given)
    args = argparse.Namespace(deepspeed_config=given if way == "args" else None, other=1)
    if way == "positional":
        positional: list[Any] = [None] * list(SIGNATURE.parameters).index("config")
        positional[1], positional[6] = MODEL, 29500
        api_initialize.initialize(*positional, given)
    elif way == "args":
        api_initialize.initialize(args, MODEL)
    else:
        api_initialize.initialize(args=args, model=MODEL, **{way: given})
    (call,) = calls
    assert call["model"] is MODEL
    assert is_tuned(call["config"])
    assert call.get("config_params") is None
    if way != "positional":
        assert call["args"].deepspeed_config is None and call["args"].other == 1
    assert given == before
    assert args.deepspeed_config is (given if way == "args" else None)
    if form == "path":
        assert json.loads(Path(given).read_text()) == CONFIG


def test_the_models_own_partitions_are_measured(calls: Calls, probes: Probes) -> None:
    """With the dtype and accumulation steps of the configuration."""
    api_initialize.initialize(model=MODEL, config={**CONFIG, "gradient_accumulation_steps": 4})
    workload = probes[0]["workload"]
    assert workload.partitions == ((64, 1), (8, 1))
    assert (workload.dtype, workload.accumulation_steps) == ("bfloat16", 4)


def test_accumulation_that_deepspeed_derives_is_measured(calls: Calls, probes: Probes) -> None:
    """From batch and micro-batch, where the steps themselves are not written."""
    batch = {"train_batch_size": 64.0, "train_micro_batch_size_per_gpu": 4}
    api_initialize.initialize(model=MODEL, config={**CONFIG, **batch})
    assert probes[0]["workload"].accumulation_steps == 16


@pytest.mark.parametrize(
    ("given", "partition_ranks", "steps"),
    [
        ({}, 8, 2),
        ({"mpu": DataParallel(4)}, 4, 4),
        ({"mpu": SequenceParallel(2)}, 8, 4),
        ({"mesh": (2, 4)}, 8, 8),
        ({"config": {"sequence_parallel_size": 4}}, 8, 8),
    ],
)
def test_ranks_of_a_batch_and_of_a_parameter_are_deepspeeds(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], partition_ranks: int, steps: int
) -> None:
    """Ranks of one sequence share a parameter and not a batch; those of a model share neither."""
    monkeypatch.setenv("WORLD_SIZE", "8")
    config = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, **given.pop("config", {})}
    found = workload_of(config, Asked(model=MODEL, **given))
    assert found is not None
    assert (found.world_size, found.accumulation_steps) == (partition_ranks, steps)


@pytest.mark.parametrize(
    "name", ["args", "model", "mpu", "config", "optimizer", "mesh_param", "config_params"]
)
@pytest.mark.parametrize("off", [True, False])
def test_an_argument_that_cannot_be_touched_reaches_deepspeed(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, off: bool
) -> None:
    """Whose every attribute raises: the very object arrives, and only DeepSpeed may look at it.

    Switched off, nothing of ours looks at all; else a look costs one warning at most.
    """
    touched: list[str] = []
    given = untouchable(touched)
    monkeypatch.setenv("AUTOTUNE_OFFLOAD", "0" if off else "1")
    config = {} if name == "config_params" else {"config": copy.deepcopy(CONFIG)}
    api_initialize.initialize(**{"model": MODEL, **config, name: given})
    assert calls[0][name] is given
    assert not (off and touched)
    assert len(warnings(caplog)) <= (0 if off else 1)


@pytest.mark.parametrize("name", ["module", "config_dict_or_path", "config", "mpu", "remote_device"])
@pytest.mark.parametrize("off", [True, False])
def test_zero_init_gets_an_untouchable_argument_too(
    monkeypatch: pytest.MonkeyPatch, name: str, off: bool
) -> None:
    """The same for the parameters' own context."""
    touched: list[str] = []
    given = untouchable(touched)
    monkeypatch.setenv("AUTOTUNE_OFFLOAD", "0" if off else "1")
    got: dict[str, Any] = {}
    monkeypatch.setattr(deepspeed.zero, "Init", lambda *args, **kwargs: got.update(kwargs))
    api_initialize.zero_init(**{name: given})
    assert got[name] is given
    assert not (off and touched)


def test_a_unit_that_needs_a_process_group_is_not_asked_on_one_rank(calls: Calls, probes: Probes) -> None:
    """As Megatron's: its groups exist once `deepspeed.initialize` has made the process group."""
    api_initialize.initialize(model=MODEL, config=copy.deepcopy(CONFIG), mpu=untouchable([]))
    assert probes[0]["workload"].world_size == 1 and is_tuned(calls[0]["config"])


def test_strict_raises_what_an_argument_raises(calls: Calls) -> None:
    """Before anything is decided, too."""
    with pytest.raises(RuntimeError, match="was touched"):
        api_initialize.initialize(untouchable([]), MODEL, autotune={"strict": True})
    assert not calls


def test_without_a_configuration_deepspeed_says_what_is_wrong(calls: Calls, probes: Probes) -> None:
    """The call goes through as it is, and nothing is measured."""
    api_initialize.initialize(model=MODEL)
    assert calls == [{"model": MODEL}] and not probes


def test_both_ways_at_once_stay_deepspeeds_to_refuse(calls: Calls) -> None:
    """DeepSpeed asserts that args and config are not both given; we do not hide that."""
    args = argparse.Namespace(deepspeed_config=copy.deepcopy(CONFIG))
    api_initialize.initialize(args=args, model=MODEL, config=copy.deepcopy(CONFIG))
    assert calls[0]["args"].deepspeed_config is not None and calls[0]["config"] is not None


def test_settings_of_the_call_go_over_the_block(calls: Calls, probes: Probes) -> None:
    """And both reach the probe."""
    api_initialize.initialize(
        model=MODEL,
        config=with_block(cast="host", budget_seconds=3),
        autotune={"cast": "device", "path": "staged"},
    )
    assert probes[0]["settings"] == Settings(cast="device", path="staged", budget_seconds=3.0)
    assert probes[0]["budget_seconds"] == 3.0


def test_tune_config_gives_a_new_dict(tmp_path: Path) -> None:
    """From every form, before DeepSpeed is initialized; the input is unchanged."""
    given = copy.deepcopy(CONFIG)
    assert is_tuned(api_initialize.tune_config(given, model=MODEL))
    assert given == CONFIG
    assert is_tuned(api_initialize.tune_config(_file(tmp_path)))


def test_tune_config_refuses_what_it_cannot_read() -> None:
    """There is no run that could go on."""
    with pytest.raises(ConfigError, match="no such file"):
        api_initialize.tune_config("absent.json")


# -- gradients that DeepSpeed loses ---------------------------------------------------------------


class Stage2Engine(Engine):
    """One that accumulates on the host."""

    def __init__(self, steps: int, stage: int = 2) -> None:
        self._steps, self._stage = steps, stage
        self.optimizer = types.SimpleNamespace(cpu_offload=True)  # type: ignore[assignment]

    def zero_optimization_stage(self) -> int:
        """As DeepSpeed's."""
        return self._stage

    def gradient_accumulation_steps(self) -> int:
        """As DeepSpeed's."""
        return self._steps


@pytest.mark.parametrize(
    ("version", "engine", "autotune", "told"),
    [
        ("0.18.9", Stage2Engine(3), None, True),
        ("0.18.9", Stage2Engine(2), None, False),
        ("0.18.9", Stage2Engine(3, stage=1), None, False),
        ("0.19.8", Stage2Engine(3), None, False),
        ("0.18.9", Stage2Engine(3), False, False),
    ],
)
def test_lost_gradients_are_told_by_the_engine_itself(
    calls: Calls,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    version: str,
    engine: Stage2Engine,
    autotune: bool | None,
    told: bool,
) -> None:
    """Once, on the log and in the report; a call that is switched off says nothing."""
    software = structs.replace(host.software(), deepspeed=version)
    monkeypatch.setattr(host, "software", lambda: software)
    monkeypatch.setattr(calls, "stub", lambda *args, **kwargs: (engine, None, None, None))
    made, *_ = api_initialize.initialize(model=MODEL, config=copy.deepcopy(CONFIG), autotune=autotune)
    assert sum("loses gradients" in warning for warning in warnings(caplog)) == told
    assert sum("loses gradients" in notice for notice in api_report.report(made).notices) == told


def test_tune_config_tells_of_lost_gradients_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """There is no engine yet: what the file says counts."""
    software = structs.replace(host.software(), deepspeed="0.18.9")
    monkeypatch.setattr(host, "software", lambda: software)
    config = {**copy.deepcopy(CONFIG), "gradient_accumulation_steps": 4}
    config["zero_optimization"] = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    api_initialize.tune_config(config, model=MODEL)
    assert sum("loses gradients" in warning for warning in warnings(caplog)) == 1


# -- fail open ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [MeasurementError("wrong bytes"), BudgetError("too little time"), ValueError("a bug of ours")]
)
def test_a_failure_in_the_probe_costs_one_warning(
    calls: Calls, probes: Probes, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """DeepSpeed is called with exactly what the user gave, and the report says why."""
    probes.error = error
    config = copy.deepcopy(CONFIG)
    engine, *_ = api_initialize.initialize(model=MODEL, config=config)
    assert calls == [{"model": MODEL, "config": config}]
    assert calls[0]["config"] is config and config == CONFIG
    (warning,) = warnings(caplog)
    assert str(error) in warning and "the run goes on with your own configuration" in warning
    assert api_report.report(engine).profile is None
    assert str(error) in api_report.report(engine).text()


@pytest.mark.parametrize(
    "given",
    [
        "absent.json",
        "{",
        7,
        with_block(path="fastest"),
        with_block(pth="direct"),
        with_block(budget_seconds=0),
    ],
)
def test_what_cannot_be_used_goes_through_unchanged(
    calls: Calls, probes: Probes, caplog: pytest.LogCaptureFixture, given: Any
) -> None:
    """An unreadable configuration or a bad block: DeepSpeed's own errors reach the user."""
    before = copy.deepcopy(given)
    api_initialize.initialize(model=MODEL, config=given)
    assert calls[0]["config"] is given and given == before
    assert len(warnings(caplog)) == 1
    assert not probes


def test_only_the_first_rank_warns(
    calls: Calls, probes: Probes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One warning a job."""
    monkeypatch.setenv("RANK", "1")
    probes.error = MeasurementError("wrong bytes")
    api_initialize.initialize(model=MODEL, config=copy.deepcopy(CONFIG))
    assert len(calls) == 1 and warnings(caplog) == []


@pytest.mark.parametrize("where", ["block", "call"])
def test_strict_raises(calls: Calls, probes: Probes, where: str) -> None:
    """Asked for in the block or in the call, the failure ends the start."""
    probes.error = MeasurementError("wrong bytes")
    config = with_block(strict=True) if where == "block" else copy.deepcopy(CONFIG)
    with pytest.raises(MeasurementError, match="wrong bytes"):
        api_initialize.initialize(
            model=MODEL, config=config, autotune={"strict": True} if where == "call" else None
        )
    assert not calls


def test_strict_raises_for_a_bad_block(calls: Calls) -> None:
    """It counts even where the rest of the block is wrong."""
    with pytest.raises(ConfigError, match="path"):
        api_initialize.initialize(model=MODEL, config=with_block(strict=True, path="fastest"))
    assert not calls


def test_an_interrupt_is_not_swallowed(calls: Calls, probes: Probes) -> None:
    """Ctrl-C in the probe ends the program."""
    probes.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        api_initialize.initialize(model=MODEL, config=copy.deepcopy(CONFIG))
    assert not calls


def refusing(calls: Calls, monkeypatch: pytest.MonkeyPatch, refuses: Callable[[Any], bool]) -> None:
    """DeepSpeed fails where a configuration is one of those."""
    take = calls.stub

    def stub(*args: Any, **kwargs: Any) -> Any:
        result = take(*args, **kwargs)
        if refuses(kwargs["config"]):
            raise AssertionError("no optimizer")
        return result

    monkeypatch.setattr(calls, "stub", stub)


def test_an_error_of_deepspeeds_own_is_the_users(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It reaches the user as it was; that the user's own configuration fails too shows that it is none of ours."""
    refusing(calls, monkeypatch, lambda config: True)
    with pytest.raises(AssertionError, match="no optimizer"):
        api_initialize.initialize(model=MODEL, config=copy.deepcopy(CONFIG))
    assert warnings(caplog) == []


def test_a_failure_with_our_keys_starts_with_the_users_own(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One process, no engine begun: called again with the very object; one warning names every key."""
    config = copy.deepcopy(CONFIG)
    refusing(calls, monkeypatch, lambda given: given is not config)
    engine, *_ = api_initialize.initialize(model=MODEL, config=config)
    assert [call["config"] is config for call in calls] == [False, True]
    (said,) = warnings(caplog)
    assert "no optimizer" in said and "offload_optimizer.pin_memory true -> false" in said
    assert api_report.report(engine).profile is None and config == CONFIG


@pytest.mark.parametrize("why", ["engine begun", "several ranks", "strict"])
def test_where_it_is_not_safe_the_failure_names_keys_and_switch(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, why: str
) -> None:
    """Once an engine was begun the model is changed; other ranks would wait; strict wants to see it."""
    config = copy.deepcopy(CONFIG)
    refusing(calls, monkeypatch, lambda given: given is not config)
    if why == "engine begun":
        code = compile("def begun(work, *args, **kwargs): return work(*args, **kwargs)", "engine.py", "exec")
        within: dict[str, Any] = {"__name__": "deepspeed.runtime.engine"}
        exec(code, within)
        monkeypatch.setattr(calls, "stub", functools.partial(within["begun"], calls.stub))
    if why == "several ranks":
        take = calls.stub

        def one_of_two(*args: Any, **kwargs: Any) -> Any:
            monkeypatch.setenv("WORLD_SIZE", "2")
            return take(*args, **kwargs)

        monkeypatch.setattr(calls, "stub", one_of_two)
    autotune = {"strict": True} if why == "strict" else None
    with pytest.raises(AssertionError, match="no optimizer"):
        api_initialize.initialize(model=MODEL, config=config, autotune=autotune)
    assert len(calls) == 1
    said = warnings(caplog)[-1]
    assert "offload_optimizer.pin_memory" in said and "AUTOTUNE_OFFLOAD=0" in said and "keep" in said


# -- nothing to do --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "autotune"),
    [(CONFIG, False), (with_block(enabled=False), None), ("absent.json", False), (with_block(pth=1), False)],
)
def test_switched_off_passes_everything_through(
    calls: Calls, probes: Probes, caplog: pytest.LogCaptureFixture, config: Any, autotune: Any
) -> None:
    """Nothing is measured, and the very object arrives; not even its mistakes are looked at."""
    engine, *_ = api_initialize.initialize(model=MODEL, config=config, autotune=autotune)
    assert calls[0]["config"] is config and not probes
    assert api_report.report(engine).notices == ("switched off",)
    assert warnings(caplog) == []


def test_tune_config_switched_off_changes_nothing(probes: Probes) -> None:
    """What was read comes back."""
    assert api_initialize.tune_config(CONFIG, autotune=False) == CONFIG and not probes


@pytest.mark.parametrize(
    "zero", [{}, {"zero_optimization": {"stage": 3}}, {"zero_optimization": {"stage": 0}}]
)
def test_without_offload_nothing_is_measured(calls: Calls, probes: Probes, zero: dict[str, Any]) -> None:
    """There is nothing to tune."""
    engine, *_ = api_initialize.initialize(model=MODEL, config=zero)
    assert calls[0]["config"] is zero and not probes
    assert "nothing is offloaded" in api_report.report(engine).notices[0]


@pytest.mark.parametrize("launcher", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"])
def test_several_ranks_that_cannot_agree_are_left_alone(
    calls: Calls,
    probes: Probes,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    launcher: str,
) -> None:
    """Without RANK no process group is made, and nobody assumes to be alone."""
    monkeypatch.setenv(launcher, "2")
    config = copy.deepcopy(CONFIG)
    engine, *_ = api_initialize.initialize(model=MODEL, config=config)
    assert calls[0]["config"] is config and config == CONFIG and not probes
    assert "2 ranks were started without RANK" in api_report.report(engine).notices[0]
    assert len(warnings(caplog)) == 1


def test_tune_config_of_several_ranks_leaves_the_sizes(
    probes: Probes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank of a host measures, the next ones take its profile; other hosts may find other sizes."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        tuned = api_initialize.tune_config(copy.deepcopy(CONFIG), model=MODEL)["zero_optimization"]
        assert tuned["offload_param"]["pin_memory"] is True
        assert "reduce_bucket_size" not in tuned and tuned["sub_group_size"] == 1234
    assert len(probes) == 1 and probes[0]["workload"].world_size == 2


# -- stored profiles ------------------------------------------------------------------------------


def test_a_second_start_uses_the_stored_profile(calls: Calls, probes: Probes) -> None:
    """It is not measured again, and what reaches DeepSpeed is the same."""
    first, *_ = api_initialize.initialize(model=MODEL, config=copy.deepcopy(CONFIG))
    second, *_ = api_initialize.initialize(model=MODEL, config=copy.deepcopy(CONFIG))
    assert len(probes) == 1
    assert calls[0]["config"] == calls[1]["config"]
    assert "measured now, stored in" in api_report.report(first).source
    assert api_report.report(second).source == "stored profile of 2026-05-04T09:30:00+00:00"


def test_another_model_is_measured_again(calls: Calls, probes: Probes) -> None:
    """Its partitions are of another class."""
    api_initialize.initialize(model=MODEL, config=copy.deepcopy(CONFIG))
    api_initialize.initialize(model=torch.nn.Linear(64, 64), config=copy.deepcopy(CONFIG))
    assert len(probes) == 2


def test_what_a_user_fixed_has_a_profile_of_its_own(calls: Calls, probes: Probes) -> None:
    """A fixed path must not decide for the next run, and is not measured anew at each start."""
    fixed = {"path": "direct"}
    for autotune in (None, fixed, fixed):
        engine, *_ = api_initialize.initialize(model=MODEL, config=copy.deepcopy(CONFIG), autotune=autotune)
    assert [probe["settings"].path for probe in probes] == ["auto", "direct"]
    assert api_report.report(engine).source.startswith("stored profile of")


def test_a_store_that_cannot_be_written_is_one_line_before_measuring(
    calls: Calls,
    probes: Probes,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The run is tuned all the same, and the report says it too."""
    said: list[list[str]] = []
    measure = probes.stub

    def stub(**kwargs: Any) -> Profile:
        said.append(warnings(caplog))
        return measure(**kwargs)

    monkeypatch.setattr(api_profile, "probe", stub)
    (tmp_path / "occupied").write_text("")
    monkeypatch.setenv("AUTOTUNE_OFFLOAD_CACHE", str(tmp_path / "occupied" / "profiles"))
    engine, *_ = api_initialize.initialize(model=MODEL, config=copy.deepcopy(CONFIG))
    assert is_tuned(calls[0]["config"])
    assert (
        api_report.report(engine)
        .notices[0]
        .startswith("the profile was not stored: no profile can be saved in")
    )
    assert "the profile was not stored" in api_report.report(engine).text()
    ((line,),) = said
    assert warnings(caplog) == [line]
    assert "without a cache" in line and "Not a directory" in line and "\n" not in line


def test_a_disk_that_fills_up_while_measuring_is_one_line(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It could be written before; the run is tuned all the same."""

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    api_initialize.initialize(model=MODEL, config=copy.deepcopy(CONFIG))
    assert is_tuned(calls[0]["config"])
    (line,) = warnings(caplog)
    assert "not stored" in line and "No space left" in line


def test_a_stored_profile_that_is_doubted_is_measured_again_and_replaced(
    probes: Probes, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the re-check saw is handed on, so that the next start allows for it."""
    api_initialize.initialize(model=MODEL, config=copy.deepcopy(CONFIG))
    miss = Miss(reason="changed", rechecked_seconds=0.5)
    monkeypatch.setattr(lookup, "doubt", lambda *args: miss)
    api_initialize.initialize(model=MODEL, config=copy.deepcopy(CONFIG))
    assert [probe["missed"] for probe in probes][1] == miss


def test_load_profile_gives_the_newest_or_the_named_one(calls: Calls, tmp_path: Path) -> None:
    """What a start stored can be read back."""
    api_initialize.initialize(model=MODEL, config=copy.deepcopy(CONFIG))
    loaded = api_initialize.load_profile()
    (file,) = (tmp_path / "profiles").glob("*.yaml")
    assert api_initialize.load_profile(file) == loaded
    assert loaded.choice == Probes.choice


# -- report, and who carries the gradients --------------------------------------------------------


def test_a_report_says_what_was_chosen_changed_and_noticed(calls: Calls) -> None:
    """In lines that stand by themselves."""
    engine, *_ = api_initialize.initialize(model=MODEL, config=copy.deepcopy(CONFIG))
    report = api_report.report(engine)
    assert report.profile is not None and report.profile.choice == Probes.choice
    assert {change.key for change in report.changes} >= {
        "zero_optimization.offload_optimizer.pin_memory",
        "zero_optimization.offload_param.pin_memory",
        "zero_optimization.reduce_bucket_size",
    }
    lines = report.text().splitlines()
    assert lines[0].startswith("autotune-offload: path staged, cast on the device (measured now")
    assert "  zero_optimization.offload_optimizer.pin_memory: true -> false" in lines
    assert "  zero_optimization.reduce_bucket_size: absent -> 15099494" in lines
    assert all(f"  - {reason}" in lines for reason in Probes.choice.reasons)
    assert all(f"  - {notice}" in lines for notice in report.notices) and report.notices


class PageLocked(torch.Tensor):
    """A host tensor that says it is page-locked, which one can be only beside a device."""

    def is_pinned(self, *args: Any, **kwargs: Any) -> bool:
        """It is."""
        return True


def test_a_report_counts_what_stage_2_page_locks() -> None:
    """Weights, their 16-bit copy, gradients, the sums of micro-steps, and the buffer for one gradient."""

    def locked(elements: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(elements, dtype=dtype).as_subclass(PageLocked)

    weights = locked(100)
    weights.grad = locked(100)
    optimizer = types.SimpleNamespace(
        single_partition_of_fp32_groups=[weights],
        param_buffer_of_bit16_for_cpu_offload_groups=[locked(100, torch.bfloat16)],
        accumulated_grads_in_cpu={0: locked(60, torch.bfloat16), 1: locked(40, torch.bfloat16)},
        temp_grad_buffer_for_cpu_offload=locked(60, torch.bfloat16),
    )
    engine = Engine()
    engine.optimizer = optimizer  # type: ignore[assignment]  # a stand-in
    assert api_report.report(engine).pinned_bytes == {
        "gradient accumulation": 200,
        "fp32 gradients": 400,
        "16-bit parameters": 200,
        "fp32 weights": 400,
        "one gradient": 120,
    }


def test_a_report_of_a_foreign_engine_says_so() -> None:
    """Nothing is known of it."""
    report = api_report.report(Engine())
    assert report.notices == ("this engine was not made by autotune_offload.initialize",)
    assert "the configuration is unchanged" in report.text()


@pytest.mark.parametrize(
    ("stock", "words"),
    [
        ([], "; 2 ms an accumulation"),
        ([0.009], "; 2 ms an accumulation, 9 ms without it (in the one that DeepSpeed's own code carried)"),
        ([0.001, 0.007], ", 4 ms without it (in 2 that DeepSpeed's own code carried)"),
    ],
)
def test_the_report_tells_an_accumulation_with_and_without_the_path(stock: list[float], words: str) -> None:
    """Medians of what was measured; nothing where nothing was."""
    path = Status(accumulation_seconds=(0.001, 0.003), stock_accumulation_seconds=tuple(stock))
    assert words in api_report.Report(profile=None, path=path).carrier()
    assert ("without" in api_report.Report(profile=None, path=path).carrier()) is bool(stock)
    assert "accumulation" not in api_report.Report(profile=None, path=Status()).carrier()


def test_a_path_that_beats_deepspeed_is_attached(
    calls: Calls, probes: Probes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine gets the choice, and the report its status."""
    attached = []

    def put_in(engine: Any, profile: Profile, *more: Any) -> Status:
        attached.append((engine, profile.choice))
        return Status(why_not="a stub")

    monkeypatch.setattr(carrying, "put_in", put_in)
    probes.choice = make_choice()
    engine, *_ = api_initialize.initialize(model=MODEL, config=copy.deepcopy(CONFIG))
    assert attached == [(engine, make_choice())]
    assert "by DeepSpeed's own code, with the keys below: a stub" in api_report.report(engine).text()


def test_a_frozen_model_is_tuned_and_gets_no_path(
    calls: Calls, probes: Probes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For inference its parameters are laid out and fetched as chosen; there is no gradient to carry."""
    monkeypatch.setattr(carrying, "put_in", lambda *arguments: pytest.fail("attached"))
    probes.choice = make_choice()
    frozen = torch.nn.Linear(8, 8).requires_grad_(False)
    api_initialize.initialize(model=frozen, config=copy.deepcopy(CONFIG))
    assert is_tuned(calls[0]["config"])
    assert warnings(caplog) == []


@pytest.mark.parametrize("strict", [False, True])
def test_a_path_that_cannot_be_attached_costs_one_warning(
    calls: Calls,
    probes: Probes,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    strict: bool,
) -> None:
    """The engine runs DeepSpeed's own code; strict raises."""

    def put_in(*arguments: Any) -> Status:
        raise RuntimeError("no such hook")

    monkeypatch.setattr(carrying, "put_in", put_in)
    probes.choice = make_choice()
    config = with_block(strict=strict)
    if strict:
        with pytest.raises(RuntimeError, match="no such hook"):
            api_initialize.initialize(model=MODEL, config=config)
        return
    engine, *_ = api_initialize.initialize(model=MODEL, config=config)
    (warning,) = warnings(caplog)
    assert "the staged path was not attached: RuntimeError: no such hook" in warning
    assert "no such hook" in api_report.report(engine).text()


@pytest.mark.parametrize("steer", [None, {"path": "deepspeed"}])
def test_deepspeeds_own_code_stays_where_it_is_not_beaten(
    calls: Calls, probes: Probes, monkeypatch: pytest.MonkeyPatch, steer: Any
) -> None:
    """Or where the user asked for it: nothing is attached."""
    monkeypatch.setattr(carrying, "put_in", lambda *arguments: pytest.fail("attached"))
    probes.choice = make_choice(gain=1.0) if steer is None else make_choice()
    engine, *_ = api_initialize.initialize(model=MODEL, config=copy.deepcopy(CONFIG), autotune=steer)
    assert api_report.report(engine).path is None
    assert "carried out by DeepSpeed's own code, with the keys below" in api_report.report(engine).text()


def test_a_path_that_will_be_refused_writes_no_key(calls: Calls, probes: Probes) -> None:
    """With SuperOffload, `initialize` and `tune_config` give the same keys, and the report says who carries."""
    probes.choice = make_choice(path="pinned", gain=2.0, pin_optimizer=True, pin_optimizer_alone=False)
    config = copy.deepcopy(CONFIG)
    config["zero_optimization"]["offload_optimizer"]["super_offload"] = True
    engine, *_ = api_initialize.initialize(model=MODEL, config=config)
    assert calls[0]["config"] == api_initialize.tune_config(config, model=MODEL)
    assert calls[0]["config"]["zero_optimization"]["offload_optimizer"]["pin_memory"] is False
    assert "SuperOffload" in api_report.report(engine).carrier()


def test_an_engine_that_cannot_be_remembered_is_returned_all_the_same(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report is lost then, and not the run."""
    monkeypatch.setattr(calls, "stub", lambda *args, **kwargs: (7, None, None, None))
    assert api_initialize.initialize(model=MODEL, config=copy.deepcopy(CONFIG))[0] == 7


def test_a_call_that_deepspeed_does_not_know_is_deepspeeds_to_refuse(calls: Calls) -> None:
    """Its own TypeError comes, as without us."""
    with pytest.raises(TypeError, match="modle"):
        api_initialize.initialize(modle=MODEL, config=copy.deepcopy(CONFIG))


def test_settings_cover_every_argument_of_the_block() -> None:
    """A field that is added is looked at here: does it steer the choice?"""
    assert {field.name for field in structs.fields(Settings)} == {
        *("enabled", "path", "cast", "buffer_bytes", "buffer_count", "host_threads", "accumulate", "step"),
        *(
            "confirm",
            "confirm_rounds",
            "keep",
            "budget_seconds",
            "max_pinned_bytes",
            "wait_seconds",
            "strict",
        ),
    }


def test_a_job_says_one_line_by_default_and_another_rank_nothing(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where nobody set up logging: what carries the gradients, and whence the choice; a second engine adds nothing."""
    with nobody_set_up_logging(monkeypatch):
        for _ in range(2):
            api_initialize.initialize(config=copy.deepcopy(CONFIG))
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("autotune-offload: gradients go by DeepSpeed's own code; 5 keys")
        voice._said.clear()
        monkeypatch.setenv("RANK", "1")
        api_initialize.initialize(config=copy.deepcopy(CONFIG))
        assert len(calls) == 3 and capsys.readouterr().err == ""


def test_the_variable_says_how_much_is_said(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`warning` drops the one line, `info` adds the keys and their reasons; another word is refused and said once."""
    said: list[list[str]] = []
    for word in ("warning", "info", "loud"):
        monkeypatch.setenv("AUTOTUNE_OFFLOAD_LOG", word)
        with nobody_set_up_logging(monkeypatch):
            for _ in range(2):
                api_initialize.initialize(config=copy.deepcopy(CONFIG))
        said.append(capsys.readouterr().err.splitlines())
    silent, told, refused = said
    assert silent == []
    assert [line for line in told if "pin_memory: True -> False" in line]
    first, *others = refused
    assert first == (
        'autotune-offload: AUTOTUNE_OFFLOAD_LOG is "loud": expected one of debug, info, warning; the default stays'
    )
    assert len(calls) == 6 and not [line for line in others if "loud" in line]


def test_who_set_up_logging_hears_it_as_he_did(
    calls: Calls, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing of ours is added to handlers that are there, and the one line obeys their level."""
    voice._said.clear()
    api_initialize.initialize(config=copy.deepcopy(CONFIG))
    assert calls and not logging.getLogger("autotune_offload").handlers
    assert caplog.records == [] and capsys.readouterr().err == ""
    voice._said.clear()
    with caplog.at_level(logging.INFO):
        api_initialize.initialize(config=copy.deepcopy(CONFIG))
    assert len([r for r in caplog.records if r.name == "autotune_offload.job"]) == 1
