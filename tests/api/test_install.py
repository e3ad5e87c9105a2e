"""`install` and `uninstall`: what is wrapped, when it acts, and that one decision serves both calls."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

import autotune_offload
from autotune_offload import switch
from autotune_offload.api import deciding, install
from autotune_offload.api import initialize as api_initialize
from autotune_offload.api import profile as api_profile
from autotune_offload.machine.accelerator import AcceleratorDevice
from tests.factories import make_choice, make_profile

MODEL = torch.nn.Linear(8, 8)
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu", "pin_memory": True},
    },
}
CHOICE = make_choice(gain=1.0, pin_optimizer=False, pin_parameters=False)
STOCK = inspect.signature(deepspeed.initialize)
STOCK_INIT = inspect.signature(deepspeed.zero.Init.__init__)


class Engine:
    """What a stubbed initialize returns."""

    optimizer = None


class Calls(list[tuple[str, dict[str, Any]]]):
    """What reached DeepSpeed's own functions, in order."""

    def configs(self, name: str) -> list[Any]:
        """The configurations of one of them."""
        keys = ("config", "config_params", "config_dict_or_path")
        given = [call for called, call in self if called == name]
        return [next((call[key] for key in keys if call.get(key) is not None), None) for call in given]


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Calls]:
    """Both stubbed with their own signatures; every decision is `CHOICE`; nothing installed before or after."""
    calls = Calls()

    def initialize(*args: Any, **kwargs: Any) -> Any:
        calls.append(("initialize", dict(STOCK.bind(*args, **kwargs).arguments)))
        return Engine(), None, None, None

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        calls.append(("Init", dict(STOCK_INIT.bind(self, *args, **kwargs).arguments)))

    initialize.__signature__ = STOCK  # type: ignore[attr-defined]  # what inspect.signature reads
    __init__.__signature__ = STOCK_INIT  # type: ignore[attr-defined]  # the same
    monkeypatch.setattr(deepspeed, "initialize", initialize)
    monkeypatch.setattr(deepspeed.zero.Init, "__init__", __init__)
    monkeypatch.setattr(api_profile, "lookup", lambda *args, **kwargs: make_profile(choice=CHOICE))
    monkeypatch.setenv("AUTOTUNE_OFFLOAD_CACHE", str(tmp_path))
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", switch.NAME):
        monkeypatch.delenv(name, raising=False)
    yield calls
    autotune_offload.uninstall()


def is_tuned(config: Any) -> bool:
    """Whether both pins follow the choice."""
    zero = config["zero_optimization"]
    pins = [zero[section].get("pin_memory") for section in ("offload_optimizer", "offload_param")]
    return pins == [False, False]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Messages of our own warnings."""
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


# -- in place, and out again ----------------------------------------------------------------------


def test_both_calls_of_a_framework_are_tuned(calls: Calls) -> None:
    """As accelerate and Lightning make them; the shared dict that they hand over is not changed."""
    autotune_offload.install()
    shared = copy.deepcopy(CONFIG)
    deepspeed.zero.Init(config_dict_or_path=shared, enabled=True)
    engine, *_ = deepspeed.initialize(model=MODEL, config_params=shared)
    assert [name for name, _ in calls] == ["Init", "initialize"]
    assert is_tuned(calls.configs("Init")[0]) and is_tuned(calls.configs("initialize")[0])
    assert shared == CONFIG
    assert autotune_offload.report(engine).profile is not None


def test_installing_twice_wraps_once() -> None:
    """The second call changes the settings only."""
    autotune_offload.install()
    first = (deepspeed.initialize, deepspeed.zero.Init.__init__)
    autotune_offload.install(autotune={"enabled": False})
    assert (deepspeed.initialize, deepspeed.zero.Init.__init__) == first
    assert deepspeed.initialize(model=MODEL, config=CONFIG)[0] is not None


def test_settings_of_install_reach_every_call(calls: Calls) -> None:
    """They go over the block of each configuration."""
    autotune_offload.install(autotune={"keep": ["offload_param"]})
    deepspeed.initialize(model=MODEL, config=CONFIG)
    autotune_offload.install(autotune={"enabled": False})
    deepspeed.initialize(model=MODEL, config=CONFIG)
    kept, off = calls.configs("initialize")
    assert kept["zero_optimization"]["offload_param"]["pin_memory"] is True
    assert kept["zero_optimization"]["offload_optimizer"]["pin_memory"] is False
    assert off is CONFIG


def test_uninstall_gives_deepspeeds_own_back() -> None:
    """The very objects; and it may be called at any time."""
    stock = (deepspeed.initialize, deepspeed.zero.Init.__init__)
    autotune_offload.uninstall()
    autotune_offload.install()
    assert deepspeed.initialize is not stock[0] and deepspeed.zero.Init.__init__ is not stock[1]
    assert inspect.signature(deepspeed.initialize) == STOCK
    autotune_offload.uninstall()
    autotune_offload.uninstall()
    assert (deepspeed.initialize, deepspeed.zero.Init.__init__) == stock


def test_a_name_taken_between_acts_as_long_as_we_are_installed(calls: Calls) -> None:
    """`from deepspeed import initialize` after install() is tuned, and DeepSpeed's own after uninstall()."""
    autotune_offload.install()
    taken = deepspeed.initialize
    taken(model=MODEL, config=CONFIG)
    autotune_offload.uninstall()
    taken(model=MODEL, config=CONFIG)
    first, second = calls.configs("initialize")
    assert is_tuned(first) and second is CONFIG


def test_a_name_taken_before_is_untuned_and_said(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It cannot be reached; the warning names the module, whatever it calls the function."""
    script = types.ModuleType("their_script")
    vars(script)["start"] = deepspeed.initialize
    monkeypatch.setitem(sys.modules, "their_script", script)
    autotune_offload.install()
    (said,) = [text for text in warnings(caplog) if "their_script" in text]
    assert 'module "their_script" took deepspeed.initialize before install()' in said
    vars(script)["start"](model=MODEL, config=CONFIG)
    assert calls.configs("initialize") == [CONFIG]


# -- decided once ---------------------------------------------------------------------------------


def test_a_script_that_calls_us_under_install_is_decided_once(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call below ours goes straight to DeepSpeed, through somebody else's wrapper too."""
    decided = []
    decide = deciding.decided_or_not

    def counted(*args: Any, **kwargs: Any) -> Any:
        decided.append(args)
        return decide(*args, **kwargs)

    monkeypatch.setattr(api_initialize, "decided_or_not", counted)
    autotune_offload.install()
    wrapped = deepspeed.initialize

    def theirs(*args: Any, **kwargs: Any) -> Any:
        return wrapped(*args, **kwargs)

    monkeypatch.setattr(deepspeed, "initialize", theirs)
    autotune_offload.initialize(model=MODEL, config=CONFIG)
    assert len(decided) == 1 and is_tuned(calls.configs("initialize")[0])
    assert len(calls) == 1


def test_a_wrapper_of_somebody_else_is_left_in_place() -> None:
    """Uninstall cannot take ours out from under it; ours does nothing then, and is not wrapped twice."""
    autotune_offload.install()
    ours = deepspeed.initialize

    @functools.wraps(ours)
    def theirs(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    deepspeed.initialize = theirs
    autotune_offload.uninstall()
    assert deepspeed.initialize is theirs


@pytest.mark.parametrize("nested", [True, False])
def test_what_deepspeed_builds_inside_initialize_is_not_decided_again(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, nested: bool
) -> None:
    """The engine converts a model by zero.Init itself, with the configuration it was given."""
    inner = deepspeed.initialize

    def initialize(*args: Any, **kwargs: Any) -> Any:
        if nested:
            deepspeed.zero.Init(module=MODEL, config_dict_or_path=CONFIG)
        return inner(*args, **kwargs)

    initialize.__signature__ = STOCK  # type: ignore[attr-defined]  # what inspect.signature reads
    monkeypatch.setattr(deepspeed, "initialize", initialize)
    autotune_offload.install()
    if not nested:
        deepspeed.zero.Init(module=MODEL, config_dict_or_path=CONFIG)
    deepspeed.initialize(model=MODEL, config=CONFIG)
    assert is_tuned(calls.configs("Init")[0]) is not nested
    autotune_offload.uninstall()


# -- zero.Init --------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["zero_init", "install"])
@pytest.mark.parametrize("name", ["config_dict_or_path", "config"])
def test_zero_init_is_tuned_under_either_name(calls: Calls, way: str, name: str) -> None:
    """The deprecated name becomes the present one; the other arguments pass."""
    if way == "install":
        autotune_offload.install()
        deepspeed.zero.Init(None, None, False, **{name: CONFIG, "remote_device": "cpu"})
    else:
        given: dict[str, Any] = {name: CONFIG, "remote_device": "cpu"}
        autotune_offload.zero_init(None, None, False, **given)
    ((_, call),) = calls
    assert is_tuned(call["config_dict_or_path"]) and call.get("config") is None
    assert (call["mem_efficient_linear"], call["remote_device"]) == (False, "cpu")


@pytest.mark.parametrize("arguments", [{}, {"enabled": False, "config_dict_or_path": CONFIG}])
def test_a_zero_init_that_decides_nothing_passes_through(calls: Calls, arguments: dict[str, Any]) -> None:
    """Without a configuration, or switched off, the arguments arrive as they are."""
    autotune_offload.zero_init(**arguments)
    ((_, call),) = calls
    assert {key: value for key, value in call.items() if key != "self"} == arguments


def test_zero_init_says_nothing_that_initialize_will_say(
    calls: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning for one thing, though it is decided twice."""
    config = {**copy.deepcopy(CONFIG), "train_batch_size": "auto"}
    autotune_offload.zero_init(config_dict_or_path=config)
    assert warnings(caplog) == []
    autotune_offload.initialize(model=MODEL, config=config)
    assert any("train_batch_size" in text for text in warnings(caplog))


@pytest.mark.parametrize("pinned", [True, False])
def test_parameters_laid_out_otherwise_are_told(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, pinned: bool
) -> None:
    """What comes too late is not claimed: the configuration says how they lie, the warning what to do."""
    model = torch.nn.Linear(8, 8)
    for parameter in model.parameters():
        parameter.ds_tensor = torch.empty(4)  # type: ignore[attr-defined]  # as zero.Init leaves it
    monkeypatch.setattr(AcceleratorDevice, "is_pinned", lambda self, tensor: pinned)
    engine, *_ = autotune_offload.initialize(model=model, config=CONFIG)
    (config,) = calls.configs("initialize")
    assert config["zero_optimization"]["offload_param"]["pin_memory"] is pinned
    said = [text for text in warnings(caplog) if "partitioned before this" in text]
    assert len(said) == pinned
    if pinned:
        assert "in page-locked memory and stay there" in said[0] and "zero_init" in said[0]
        assert any("comes too late" in notice for notice in autotune_offload.report(engine).notices)


# -- switched off -------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["0", "off", "OFF", "False", "no"])
def test_the_switch_leaves_everything_alone(calls: Calls, monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    """AUTOTUNE_OFFLOAD=0, or what people write for it: the very objects arrive, from every way in."""
    monkeypatch.setenv(switch.NAME, word)
    autotune_offload.install()
    deepspeed.zero.Init(config_dict_or_path=CONFIG)
    deepspeed.initialize(model=MODEL, config=CONFIG)
    assert calls.configs("Init")[0] is CONFIG and calls.configs("initialize")[0] is CONFIG
    assert autotune_offload.tune_config(CONFIG) == CONFIG


@pytest.mark.parametrize("word", ["", "1", "on", "TRUE", "yes"])
def test_the_switch_can_say_on(calls: Calls, monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    """That is what it does without."""
    monkeypatch.setenv(switch.NAME, word)
    assert autotune_offload.tune_config(CONFIG) != CONFIG


def test_a_switch_that_says_neither_is_refused_in_words(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The run goes on untuned: whoever set it meant something, most likely off."""
    monkeypatch.setenv(switch.NAME, "flase")
    with caplog.at_level(logging.WARNING):
        assert autotune_offload.tune_config(CONFIG) == CONFIG
    (said,) = warnings(caplog)
    assert 'AUTOTUNE_OFFLOAD is "flase": expected 0, off, false or no to switch off' in said
    with pytest.raises(autotune_offload.ConfigError, match="flase"):
        autotune_offload.tune_config(CONFIG, autotune={"strict": True})


def test_a_report_is_logged_for_whoever_listens(calls: Calls, caplog: pytest.LogCaptureFixture) -> None:
    """Code that knows nothing of us cannot ask for it."""
    autotune_offload.install()
    with caplog.at_level(logging.INFO, logger=install.__name__):
        deepspeed.initialize(model=MODEL, config=CONFIG)
    assert any(
        r.name == install.__name__ and "autotune-offload: path" in r.getMessage() for r in caplog.records
    )
