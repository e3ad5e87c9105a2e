"""Every form in which a configuration is handed over: what DeepSpeed says of it, and what comes out here.

DeepSpeed's own `initialize` runs for real up to the point where it has its configuration.
"""

from __future__ import annotations

import argparse
import base64
import copy
import json
import math
import sys
import types
from collections import OrderedDict, UserDict
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import deepspeed
import pytest
import torch

import autotune_offload
from autotune_offload import switch
from autotune_offload.api import profile as api_profile
from autotune_offload.config import reading
from autotune_offload.errors import ConfigError
from autotune_offload.records import ZeroSizes
from tests import DATA
from tests.factories import make_choice, make_profile

MODEL = torch.nn.Linear(8, 8)
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu"},
        "sub_group_size": 111,
    },
}
OTHER: dict[str, Any] = {
    **CONFIG,
    "zero_optimization": {**CONFIG["zero_optimization"], "sub_group_size": 222},
}
TEXT = json.dumps(CONFIG)
HJSON = """\ufeff{
  // a comment
  # another
  /* and one
     more */
  train_micro_batch_size_per_gpu: 1,
  "zero_optimization": {
    "stage": 3, "sub_group_size": 111,
    "offload_optimizer": {"device": "cpu", "pin_memory": true,},
    "offload_param": {"device": "cpu"},
  },
}
"""


class Given(BaseException):
    """Carries the configuration that DeepSpeed has settled on; a stop, and no failure that is made good."""


@pytest.fixture(autouse=True)
def _stop_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def settled(config: Any, *args: Any, **kwargs: Any) -> None:
        raise Given(config)

    monkeypatch.setattr(deepspeed, "DeepSpeedConfig", settled)
    monkeypatch.setattr("deepspeed.comm.init_distributed", lambda *args, **kwargs: None)
    choice = make_choice(gain=1.0, pin_optimizer=False, pin_parameters=False, sizes=ZeroSizes())
    monkeypatch.setattr(api_profile, "lookup", lambda *args, **kwargs: make_profile(choice=choice))
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", switch.NAME):
        monkeypatch.delenv(name, raising=False)


def settled_on(initialize: Callable[..., Any], **call: Any) -> Any:
    """The configuration of a call, or the error that ends it."""
    try:
        initialize(model=MODEL, **call)
    except Given as given:
        return given.args[0]
    except Exception as error:
        return error
    raise AssertionError("nothing was settled")


def written(folder: Path, text: str) -> str:
    """The path of a file with that text."""
    path = folder / "ds_config.json"
    path.write_text(text, encoding="utf-8")
    return str(path)


def encoded(text: str) -> str:
    """Urlsafe base64."""
    return base64.urlsafe_b64encode(text.encode()).decode()


TUNED = copy.deepcopy(CONFIG)
TUNED["zero_optimization"]["offload_optimizer"]["pin_memory"] = False
TUNED["zero_optimization"]["offload_param"]["pin_memory"] = False

FORMS: dict[str, tuple[bool, Callable[[Path], Any]]] = {
    "dict": (True, lambda folder: copy.deepcopy(CONFIG)),
    "OrderedDict": (True, lambda folder: OrderedDict(copy.deepcopy(CONFIG))),
    "path": (True, lambda folder: written(folder, TEXT)),
    "path of hjson": (True, lambda folder: written(folder, HJSON)),
    "base64": (True, lambda folder: encoded(TEXT)),
    "Path": (False, lambda folder: Path(written(folder, TEXT))),
    "JSON text": (False, lambda folder: TEXT),
    "UserDict": (False, lambda folder: UserDict(copy.deepcopy(CONFIG))),
    "MappingProxyType": (False, lambda folder: MappingProxyType(copy.deepcopy(CONFIG))),
}
"""Form to whether DeepSpeed takes it."""


@pytest.mark.parametrize("way", ["config", "config_params"])
@pytest.mark.parametrize("form", FORMS)
def test_each_form_comes_out_tuned_in_each_keyword(tmp_path: Path, form: str, way: str) -> None:
    """As a plain dict of real booleans; the form that DeepSpeed refuses is one that it never sees."""
    takes, make = FORMS[form]
    given = make(tmp_path)
    plain = settled_on(deepspeed.initialize, **{way: given})
    assert (plain == CONFIG) if takes else isinstance(plain, ValueError)
    result = settled_on(autotune_offload.initialize, **{way: given})
    assert result == TUNED and type(result) is type(result["zero_optimization"]) is dict
    assert given == make(tmp_path)


@pytest.mark.parametrize("form", FORMS)
def test_tune_config_gives_a_plain_dict_from_each_form(tmp_path: Path, form: str) -> None:
    """Accelerate ignores a Path without a word, and the Trainer's own reader fails at a comment."""
    given = FORMS[form][1](tmp_path)
    result = autotune_offload.tune_config(given)
    assert result == TUNED and type(result) is dict
    assert given == FORMS[form][1](tmp_path)


@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_accepted_whether_or_not_anything_is_tuned(tmp_path: Path, form: str) -> None:
    """Switched off, DeepSpeed still gets what it can read."""
    takes, make = FORMS[form]
    given = make(tmp_path)
    result = settled_on(autotune_offload.initialize, config=given, autotune=False)
    assert result == CONFIG
    assert (result is given) == (takes and isinstance(given, dict))


@pytest.mark.parametrize("name", ["deepspeed_config", "deepscale_config"])
@pytest.mark.parametrize("form", ["dict", "path", "base64", "Path"])
def test_a_configuration_in_args_is_tuned_and_args_stay(tmp_path: Path, name: str, form: str) -> None:
    """On a copy: DeepSpeed refuses a configuration in two places."""
    args = argparse.Namespace(**{name: FORMS[form][1](tmp_path), "seed": 7})
    before = copy.copy(vars(args))
    assert settled_on(autotune_offload.initialize, args=args) == TUNED
    assert vars(args) == before


def _both_in_args() -> Any:
    return {
        "args": argparse.Namespace(deepspeed_config=copy.deepcopy(CONFIG)),
        "config": copy.deepcopy(OTHER),
    }


CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "args without a value beside config": lambda: {
        "args": argparse.Namespace(deepspeed_config=None),
        "config": copy.deepcopy(CONFIG),
    },
    "config beside config_params": lambda: {
        "config": copy.deepcopy(CONFIG),
        "config_params": copy.deepcopy(OTHER),
    },
}


@pytest.mark.parametrize("name", CALLS)
def test_of_two_places_the_one_that_deepspeed_reads_wins(name: str) -> None:
    """`config` is read before `config_params`."""
    assert settled_on(deepspeed.initialize, **CALLS[name]()) == CONFIG
    assert settled_on(autotune_offload.initialize, **CALLS[name]()) == TUNED


REFUSED: dict[str, Callable[[Path], dict[str, Any]]] = {
    "args beside config": lambda folder: _both_in_args(),
    "args that are a dict": lambda folder: {"args": {"deepspeed_config": copy.deepcopy(CONFIG)}},
    "nothing": lambda folder: {},
    "a missing path": lambda folder: {"config": str(folder / "absent.json")},
    "an object": lambda folder: {"config": object()},
    "a key twice": lambda folder: {"config": written(folder, '{"a": 1, "b": {"c": 1, "c": 2}}')},
    "bytes": lambda folder: {"config": TEXT.encode()},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_deepspeed_refuses_it_refuses_through_us_too(tmp_path: Path, name: str) -> None:
    """The same error in the same words: it is never hidden and never ours."""
    plain = settled_on(deepspeed.initialize, **REFUSED[name](tmp_path))
    ours = settled_on(autotune_offload.initialize, **REFUSED[name](tmp_path))
    assert isinstance(plain, Exception)
    assert type(ours) is type(plain)
    assert str(ours).partition(" object at 0x")[0] == str(plain).partition(" object at 0x")[0]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: str(folder / "ds_confg.json"), 'no such file "{0}/ds_confg.json"; looked in {0}'),
        (lambda folder: folder / "absent.json", 'no such file "{0}/absent.json"; looked in {0}'),
        (lambda folder: object(), "a DeepSpeed configuration cannot be a object; pass a dict, a path"),
        (lambda folder: folder, "is a folder; name the configuration file in it"),
        (lambda folder: written(folder, ""), "is empty; expected a DeepSpeed configuration"),
        (lambda folder: written(folder, '{"a": 1, "a": 2}'), "holds a key twice: a; keep one of them"),
        (lambda folder: written(folder, "[1]"), "holds a list; expected an object of keys"),
        (lambda folder: written(folder, TEXT[:60]), "looks cut short"),
        (lambda folder: encoded(TEXT)[:-6], "is damaged or cut short"),
    ],
)
def test_tune_config_says_what_is_wrong(tmp_path: Path, make: Callable[[Path], Any], said: str) -> None:
    """There is no run that could go on, so it raises, with what was found and what to do."""
    with pytest.raises(ConfigError) as caught:
        autotune_offload.tune_config(make(tmp_path))
    assert said.format(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("reduce_bucket_size", 5e8, None),
        ("reduce_bucket_size", "500000000", None),
        ("reduce_bucket_size", "5e8", "write 500000000 without quotes"),
        ("reduce_bucket_size", 500000000.5, "write a whole number from 1"),
        ("reduce_bucket_size", 0, "write a whole number from 1"),
        ("reduce_bucket_size", -1, "write a whole number from 1"),
        ("stage3_prefetch_bucket_size", 0, None),
        ("prefetch_bucket_size", 7, None),
        ("sub_group_size", "auto", None),
        ("stage3_max_live_parametres", 1, 'did you mean "stage3_max_live_parameters"?'),
    ],
)
def test_numbers_and_names_pass_as_the_user_wrote_them(
    caplog: pytest.LogCaptureFixture, key: str, value: object, said: str | None
) -> None:
    """What DeepSpeed refuses is named beforehand and left for it to refuse; nothing is mended in silence."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    config = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, key: value}}
    result = autotune_offload.tune_config(config)
    assert result["zero_optimization"][key] is value
    parsed = {name: each for name, each in result["zero_optimization"].items() if each != "auto"}
    if said is None:
        DeepSpeedZeroConfig(**parsed)
        assert "refuses" not in caplog.text
    else:
        with pytest.raises(ValueError, match=key):
            DeepSpeedZeroConfig(**parsed)
        assert said in caplog.text


@pytest.mark.parametrize("value", ["true", 0, 1, "auto", True])
def test_a_pin_becomes_a_boolean(value: object) -> None:
    """Accelerate raises at an "auto" there, and takes a text as it is."""
    config = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": value}}}
    assert (
        autotune_offload.tune_config(config)["zero_optimization"]["offload_optimizer"]["pin_memory"] is False
    )


def test_what_a_framework_fills_in_stays_auto_or_infinite() -> None:
    """Batch sizes and learning rates are its own; an infinity passes as the object that it is."""
    config = {**CONFIG, "train_batch_size": "auto", "steps_per_print": math.inf, "bf16": {"enabled": "auto"}}
    result = autotune_offload.tune_config(config)
    assert {**result, "zero_optimization": 0} == {**config, "zero_optimization": 0}


CASES = sorted((DATA / "configs").glob("*.json"))


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.stem)
def test_a_case_comes_out_the_same_in_every_form(case: Path) -> None:
    """A path, its text, base64 and the dict: one result; `tests/config/test_tune.py` says which."""
    text = case.read_text()
    given = autotune_offload.tune_config(str(case))
    for form in (case, text, encoded(text), MappingProxyType(reading.read(case))):
        assert autotune_offload.tune_config(form) == given


# -- "auto" that the Trainer has made a number ------------------------------------------------------


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The configuration that transformers holds while its Trainer lives."""
    zero = {**CONFIG["zero_optimization"], "reduce_bucket_size": "auto"}
    config = {**CONFIG, "zero_optimization": zero}
    integration = types.ModuleType("transformers.integrations.deepspeed")
    vars(integration)["deepspeed_config"] = lambda: config
    monkeypatch.setitem(sys.modules, integration.__name__, integration)
    choice = make_choice(gain=1.0, sizes=ZeroSizes(reduce_bucket_elements=5_000))
    monkeypatch.setattr(api_profile, "lookup", lambda *args, **kwargs: make_profile(choice=choice))
    return config


def filled(value: int) -> dict[str, Any]:
    """`CONFIG` with a number of the Trainer's own."""
    return {**CONFIG, "zero_optimization": {**CONFIG["zero_optimization"], "reduce_bucket_size": value}}


def test_a_number_of_the_trainers_own_gives_way(held: dict[str, Any]) -> None:
    """The user wrote "auto"; the change is listed with the number that it replaces."""
    result = settled_on(autotune_offload.initialize, config_params=filled(4096))
    assert result["zero_optimization"]["reduce_bucket_size"] == 5_000
    assert result["zero_optimization"]["sub_group_size"] == 111


def test_a_number_of_the_users_own_stays(held: dict[str, Any]) -> None:
    """Where the held configuration has it too, or is about something else, it counts as the user's."""
    held["zero_optimization"]["reduce_bucket_size"] = 4096
    result = settled_on(autotune_offload.initialize, config_params=filled(4096))
    assert result["zero_optimization"]["reduce_bucket_size"] == 4096
    held["zero_optimization"].update({"reduce_bucket_size": "auto", "sub_group_size": 222})
    result = settled_on(autotune_offload.initialize, config_params=filled(4096))
    assert result["zero_optimization"]["reduce_bucket_size"] == 4096


def test_without_a_value_of_ours_the_trainers_number_stays(
    held: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no worse than DeepSpeed's default."""
    choice = make_choice(gain=1.0, sizes=ZeroSizes())
    monkeypatch.setattr(api_profile, "lookup", lambda *args, **kwargs: make_profile(choice=choice))
    result = settled_on(autotune_offload.initialize, config_params=filled(4096))
    assert result["zero_optimization"]["reduce_bucket_size"] == 4096
