"""What a choice writes into a ZeRO configuration, and what DeepSpeed's own parser makes of it."""

from __future__ import annotations

import copy
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from autotune_offload import upstream
from autotune_offload.config import sections as config_sections
from autotune_offload.config.keys import KEYS
from autotune_offload.config.reading import read
from autotune_offload.config.sections import nested, offloads
from autotune_offload.config.tune import Tuned, tune, written_keys
from autotune_offload.errors import ConfigError
from autotune_offload.records import Choice, ZeroSizes
from autotune_offload.upstream import KNOWN
from tests import CHECKOUT, DATA
from tests.factories import make_choice

CASES = DATA / "configs"
EXAMPLES = sorted((CHECKOUT / "configs" / "zero3").glob("*.json"))
VERSION = "0.19.8"
OPT, PARAM = "zero_optimization.offload_optimizer.pin_memory", "zero_optimization.offload_param.pin_memory"
REDUCE, SUB_GROUP = "zero_optimization.reduce_bucket_size", "zero_optimization.sub_group_size"
PREFETCH = "zero_optimization.stage3_prefetch_bucket_size"
PERSIST = "zero_optimization.stage3_param_persistence_threshold"

SIZES = ZeroSizes(
    reduce_bucket_elements=20_000_000,
    prefetch_bucket_elements=8_000_000,
    sub_group_elements=200_000_000,
    reasons={
        "reduce_bucket_elements": "gradients leave 8 times a pass",
        "persistence_threshold_elements": "every fetch is hidden already",
    },
)


def a_choice(**changes: Any) -> Choice:
    """`direct` with an unpinned optimizer and pinned parameters, well beyond the noise."""
    wanted: dict[str, Any] = {
        "path": "direct",
        "sizes": SIZES,
        "gain": 1.4,
        "noise": 0.03,
        "reasons": (
            "direct takes 12 ms",
            "offload_optimizer: 12 against 17 ms",
            "offload_param: 2 against 5 ms",
        ),
    }
    return make_choice(**(wanted | changes))


def case(name: str) -> dict[str, Any]:
    """One of the small configurations."""
    return read(CASES / f"{name}.json")


def stage3(**zero: Any) -> dict[str, Any]:
    """A stage-3 configuration with both offloads on the CPU."""
    both = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    return {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, **both, **zero}}


def written(tuned: Tuned) -> dict[str, Any]:
    """Key to value of every change."""
    return {change.key: change.after for change in tuned.changes}


def reason(tuned: Tuned, key: str) -> str:
    """The reason of one change."""
    return next(change.reason for change in tuned.changes if change.key == key)


def notice(tuned: Tuned, start: str) -> str:
    """The one notice that opens with `start`."""
    (found,) = [text for text in tuned.notices if text.startswith(start)]
    return found


def parsed(config: dict[str, Any]) -> dict[str, Any]:
    """The zero section as DeepSpeed's own parser understands it, flat, under DeepSpeed's names."""
    from deepspeed.runtime.config import DeepSpeedConfig

    zero = DeepSpeedConfig(config).zero_config
    return dict(_flat({name: getattr(zero, name, None) for name in type(zero).model_fields}))


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    fields = value if isinstance(value, dict) else getattr(value, "__dict__", None)
    if not isinstance(fields, dict):
        yield prefix, value
        return
    for name, item in fields.items():
        yield from _flat(item, f"{prefix}.{name}".lstrip("."))


# -- every case configuration ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected", "notices"),
    [
        (
            "hf_auto",
            {OPT: False, REDUCE: 20_000_000, PREFETCH: 8_000_000},
            [
                f'{PERSIST} stays "auto" (every fetch',
                'still "auto": train_batch_size',
            ],
        ),
        (
            "float_sizes",
            {OPT: False, PARAM: True, REDUCE: 20_000_000},
            [
                f"{PREFETCH} stays 500000000 as you wrote it",
            ],
        ),
        ("optimizer_only_unpinned", {REDUCE: 20_000_000}, []),
        (
            "legacy_switches",
            {
                "zero_optimization.cpu_offload_use_pin_memory": None,
                "zero_optimization.cpu_offload": None,
                "zero_optimization.cpu_offload_param": None,
                "zero_optimization.offload_optimizer.device": "cpu",
                "zero_optimization.offload_param.device": "cpu",
                OPT: False,
                PARAM: True,
                PREFETCH: 8_000_000,
            },
            [f"{REDUCE} stays 3000000"],
        ),
        ("comments_and_commas", {PREFETCH: 8_000_000}, []),
        (
            "nvme",
            {},
            ["zero_optimization.offload_optimizer is on nvme", "zero_optimization.offload_param is on nvme"],
        ),
        ("stage2", {OPT: False}, [f"{REDUCE} stays 50000000"]),
        ("no_offload", {}, ["no offload_optimizer or offload_param on cpu or nvme that acts at stage 3"]),
        (
            "misplaced_section",
            {},
            ['"offload_optimizer" at the top level has no effect', "no offload_optimizer or offload_param"],
        ),
        (
            "fractional_size",
            {PARAM: True},
            [f"{PREFETCH} stays 943718.4", f"{PREFETCH} is 943718.4, which DeepSpeed refuses"],
        ),
        (
            "string_numbers",
            {PARAM: True, PREFETCH: 8_000_000},
            [f'{REDUCE} is "5e8", which DeepSpeed refuses; write 500000000 without quotes'],
        ),
    ],
)
def test_what_comes_out_of_each_case(name: str, expected: dict[str, Any], notices: list[str]) -> None:
    """Exactly these keys are written and exactly these things are said."""
    tuned = tune(case(name), a_choice(), version=VERSION)
    assert written(tuned) == expected
    assert len(tuned.notices) == len(notices)
    for start in notices:
        notice(tuned, start)


@pytest.mark.parametrize("name", sorted(path.stem for path in CASES.glob("*.json")))
def test_deepspeed_understands_what_was_written_and_the_rest_as_before(name: str) -> None:
    """Through DeepSpeed's parser, the written keys have the written values and no other value moved."""
    config = case(name)
    if name == "hf_auto":
        config = {**config, "train_batch_size": 1, "train_micro_batch_size_per_gpu": 1, "optimizer": None}
        config |= {"gradient_accumulation_steps": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
    tuned = tune(config, a_choice(), version=VERSION)
    if name in ("fractional_size", "string_numbers"):
        assert _refusal(tuned.config) == _refusal(config)
        return
    before, after = parsed(config), parsed(tuned.config)
    ours = {key.removeprefix("zero_optimization.").replace("stage3_", "") for key in written(tuned)}
    for key, value in written(tuned).items():
        if value is not None:
            assert after[key.removeprefix("zero_optimization.").replace("stage3_", "")] == value
    assert {k: v for k, v in after.items() if k not in ours} == {
        k: v for k, v in before.items() if k not in ours
    }


def _refusal(config: dict[str, Any]) -> str:
    """The key that DeepSpeed's parser complains about."""
    with pytest.raises(ValueError, match="1 validation error") as caught:
        parsed(config)
    return str(caught.value).splitlines()[1].strip()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_plain_json_that_deepspeed_takes_before_and_after(path: Path) -> None:
    """An example works without this package, and tuning it leaves nothing to notice or to refuse."""
    config = json.loads(path.read_text())
    assert parsed(config)["stage"] == 3
    tuned = tune(config, a_choice(), version=VERSION)
    after = parsed(tuned.config)
    for section in ("offload_optimizer", "offload_param"):
        if section in config["zero_optimization"]:
            assert after[f"{section}.pin_memory"] is tuned.config["zero_optimization"][section]["pin_memory"]
    assert not [
        text for text in tuned.notices if not any(key in text for key in ("nvme", PERSIST, SUB_GROUP))
    ]


def test_there_are_three_examples() -> None:
    """The folder of examples is where it is looked for."""
    assert [path.stem for path in EXAMPLES] == ["7b_24gb_offload_both", "nvme", "optimizer_only"]


@pytest.mark.parametrize(
    ("pins", "keep"), [(True, ()), (False, ()), (True, ("offload_optimizer.pin_memory",))]
)
def test_a_sub_group_size_is_written_where_its_blocks_are_page_locked(
    pins: bool, keep: tuple[str, ...]
) -> None:
    """It is chosen so that they can be: without them it does nothing but cut the step into pieces."""
    config = stage3(offload_optimizer={"device": "cpu", "pin_memory": False})
    tuned = tune(config, a_choice(pin_optimizer=pins), version=VERSION, keep=keep)
    assert written(tuned).get(SUB_GROUP) == (200_000_000 if pins and not keep else None)


# -- page-locking ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "default"), [("0.14.5", "false"), ("0.19.4", "false"), ("0.19.5", "true")]
)
def test_an_absent_pin_is_made_explicit_with_the_default_of_this_version(version: str, default: str) -> None:
    """Every version gets the same booleans; the reason says what leaving them out would have meant."""
    tuned = tune(stage3(), a_choice(), version=version)
    assert written(tuned)[OPT] is False
    assert written(tuned)[PARAM] is True
    for key in (OPT, PARAM):
        assert f"left out, DeepSpeed {version} takes {default}" in reason(tuned, key)


def test_each_pin_carries_its_own_reason() -> None:
    """The sentence of the choice about that section; the path and its gain where there is none."""
    tuned = tune(stage3(), a_choice(), version=VERSION)
    assert reason(tuned, OPT).startswith("offload_optimizer: 12 against 17 ms; left out")
    assert reason(tuned, PARAM).startswith("offload_param: 2 against 5 ms; left out")
    tuned = tune(stage3(), a_choice(reasons=()), version=VERSION)
    assert reason(tuned, OPT).startswith("the gradient path is direct, 1.40 times as fast as DeepSpeed's own")
    assert reason(tuned, PARAM).startswith("parameters are fetched from page-locked memory")


def test_an_equal_pin_is_no_change() -> None:
    """A boolean that already says so stays explicit and is not reported."""
    config = stage3(offload_optimizer={"device": "cpu", "pin_memory": False})
    tuned = tune(config, a_choice(), version=VERSION)
    assert OPT not in written(tuned)
    assert tuned.config["zero_optimization"]["offload_optimizer"]["pin_memory"] is False


@pytest.mark.parametrize("section", ["offload_optimizer", "offload_param"])
@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("settled", [False, True])
def test_a_users_pin_gives_way_only_beyond_the_noise(section: str, measured: bool, settled: bool) -> None:
    """Where both values measured the same the user's stays, and that is said; otherwise the choice is written."""
    pin = {"offload_optimizer": "pin_optimizer", "offload_param": "pin_parameters"}[section]
    key = f"zero_optimization.{section}.pin_memory"
    config = stage3(**{section: {"device": "cpu", "pin_memory": not measured}})
    choice = a_choice(**{pin: measured, "unsettled_pins": () if settled else (pin,)})
    tuned = tune(config, choice, version=VERSION)
    assert tuned.config["zero_optimization"][section]["pin_memory"] is (measured if settled else not measured)
    assert (key in written(tuned)) is settled
    assert any(text.startswith(f"{key} stays") for text in tuned.notices) is not settled
    assert written(tune(stage3(), choice, version=VERSION))[key] is measured, "absent: nobody's wish to keep"


@pytest.mark.parametrize(
    ("value", "expected"), [("true", True), (1, True), ("off", False), (0, False), ("auto", True)]
)
def test_other_spellings_of_a_boolean_become_booleans(value: object, expected: bool) -> None:
    """What DeepSpeed would read as a boolean is written as one, "auto" included."""
    config = stage3(offload_param={"device": "cpu", "pin_memory": value})
    tuned = tune(config, a_choice(pin_parameters=expected), version=VERSION, fill_auto=False)
    assert tuned.config["zero_optimization"]["offload_param"]["pin_memory"] is expected
    assert written(tuned)[PARAM] is expected


@pytest.mark.parametrize(("version", "default"), [("0.19.4", False), ("0.19.8", True)])
def test_on_nvme_the_pin_is_explicit_but_not_ours(version: str, default: bool) -> None:
    """The swapper was not measured: DeepSpeed's default or the user's value is what is written."""
    sections = {
        "offload_optimizer": {"device": "nvme"},
        "offload_param": {"device": "nvme", "pin_memory": False},
    }
    tuned = tune(stage3(**sections), a_choice(), version=version)
    assert written(tuned) == {OPT: default}
    assert "NVMe swapper" in reason(tuned, OPT)


# -- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spelling", "absent"),
    [
        ("prefetch_bucket_size", "stage3_prefetch_bucket_size"),
        ("stage3_prefetch_bucket_size", "prefetch_bucket_size"),
    ],
)
def test_the_users_spelling_is_kept(spelling: str, absent: str) -> None:
    """An "auto" is filled under the name that the user gave it."""
    zero = tune(stage3(**{spelling: "auto"}), a_choice(), version=VERSION).config["zero_optimization"]
    assert zero[spelling] == 8_000_000
    assert absent not in zero


def test_both_spellings_are_left_for_deepspeed_to_refuse() -> None:
    """Neither is touched, and the notice names both."""
    config = stage3(prefetch_bucket_size=1, stage3_prefetch_bucket_size=2)
    tuned = tune(config, a_choice(), version=VERSION)
    assert not any("prefetch" in key for key in written(tuned))
    notice(tuned, "zero_optimization holds both stage3_prefetch_bucket_size and prefetch_bucket_size")
    assert _refusal(tuned.config) == _refusal(config)


def test_a_size_without_a_value_is_not_written() -> None:
    """Where nothing speaks for another value, an absent key stays absent."""
    tuned = tune(stage3(), a_choice(sizes=ZeroSizes()), version=VERSION)
    assert set(written(tuned)) == {OPT, PARAM}


@pytest.mark.parametrize(
    "key", [key for key in KEYS if key.unit == "elements"], ids=lambda key: key.spellings[0]
)
def test_an_auto_without_a_value_says_what_deepspeed_makes_of_it(key: Any) -> None:
    """The notice holds the default that DeepSpeed's own parser puts there."""
    config = stage3(**{key.spellings[0]: "auto"})
    tuned = tune(config, a_choice(sizes=ZeroSizes()), version=VERSION)
    default = parsed(tuned.config)[key.spellings[0].removeprefix("stage3_")]
    assert tuned.config["zero_optimization"][key.spellings[0]] == "auto"
    assert f"makes that its default {default}," in notice(
        tuned, f"zero_optimization.{key.spellings[0]} stays"
    )


def test_auto_can_be_left_to_the_trainer() -> None:
    """With fill_auto off, sizes that are "auto" stay, absent ones are still filled."""
    tuned = tune(case("hf_auto"), a_choice(), version=VERSION, fill_auto=False)
    assert written(tuned) == {OPT: False}
    assert f"{REDUCE}, {PREFETCH}, {PERSIST}" in notice(tuned, 'still "auto"')
    assert REDUCE in written(tune(stage3(), a_choice(), version=VERSION, fill_auto=False))


def test_only_keys_that_act_are_written() -> None:
    """Stage 2 gets no stage-3 key, and what follows from fetching parameters needs their offload."""
    config = case("stage2")
    del config["zero_optimization"]["reduce_bucket_size"]
    assert set(written(tune(config, a_choice(), version=VERSION))) == {OPT, REDUCE}
    optimizer_only = stage3()
    del optimizer_only["zero_optimization"]["offload_param"]
    assert set(written(tune(optimizer_only, a_choice(), version=VERSION))) == {OPT, REDUCE}


# -- keep, deprecated switches, mistakes ----------------------------------------------------------


@pytest.mark.parametrize("entry", [OPT, "offload_optimizer.pin_memory", "offload_optimizer"])
def test_keep_protects_a_key_in_each_of_its_forms(entry: str) -> None:
    """The kept key is untouched, and the notice says what was chosen instead."""
    config = stage3(offload_optimizer={"device": "cpu", "pin_memory": True})
    tuned = tune(config, a_choice(), version=VERSION, keep=[entry])
    assert OPT not in written(tuned)
    assert "false was chosen" in notice(tuned, f"{OPT} is kept true")


def test_keep_of_a_key_that_is_never_written_is_told() -> None:
    """A misspelt keep would otherwise protect nothing in silence."""
    tuned = tune(stage3(), a_choice(), version=VERSION, keep=["ofload_param.pin_memory"])
    assert 'nearest: "offload_param.pin_memory"' in notice(tuned, 'keep "ofload_param.pin_memory"')


@pytest.mark.parametrize("wish", [None, False, True])
def test_deprecated_switches_mean_the_same_afterwards(wish: bool | None) -> None:
    """For DeepSpeed's parser the offload is where it was; only pin_memory may differ."""
    config = case("legacy_switches")
    zero = config["zero_optimization"]
    del zero["cpu_offload_use_pin_memory"]
    if wish is not None:
        zero["cpu_offload_use_pin_memory"] = wish
    keep = ["offload_optimizer.pin_memory", "offload_param.pin_memory"]
    before, after = parsed(config), parsed(tune(config, a_choice(), version=VERSION, keep=keep).config)
    pins = {"offload_optimizer.pin_memory", "offload_param.pin_memory", "cpu_offload_use_pin_memory"}
    sizes = {"prefetch_bucket_size", "sub_group_size"}
    assert {k: v for k, v in after.items() if k not in pins | sizes} == {
        k: v for k, v in before.items() if k not in pins | sizes
    }
    assert after["offload_optimizer.pin_memory"] is (
        before["offload_optimizer.pin_memory"] if wish is None else wish
    )


def test_a_deprecated_false_is_a_wish_like_any_other() -> None:
    """`cpu_offload_use_pin_memory: false`, which DeepSpeed ignores, holds against a choice within the noise."""
    choice = a_choice(pin_optimizer=True, unsettled_pins=("pin_optimizer",))
    tuned = tune(case("legacy_switches"), choice, version=VERSION)
    assert parsed(case("legacy_switches"))["offload_optimizer.pin_memory"] is True
    assert parsed(tuned.config)["offload_optimizer.pin_memory"] is False


def test_a_kept_switch_stays() -> None:
    """`keep` with the name of a deprecated switch leaves that one to DeepSpeed, and only that one."""
    zero = tune(case("legacy_switches"), a_choice(), version=VERSION, keep=["cpu_offload"]).config[
        "zero_optimization"
    ]
    assert zero["cpu_offload"] is True
    assert "offload_optimizer" not in zero
    assert zero["offload_param"] == {"device": "cpu", "pin_memory": True}


def test_a_switch_beside_its_section_is_left_for_deepspeed_to_refuse() -> None:
    """Nothing is translated, the notice names both, and DeepSpeed's assertion gets through."""
    tuned = tune(stage3(cpu_offload=True), a_choice(), version=VERSION)
    notice(tuned, "zero_optimization holds both cpu_offload and offload_optimizer")
    with pytest.raises(AssertionError, match="cpu_offload"):
        parsed(tuned.config)


def test_a_misspelt_key_is_named_and_passed_on() -> None:
    """DeepSpeed refuses it by its name; ours are not in that error."""
    tuned = tune(stage3(reduce_bucket_sise=4096), a_choice(), version=VERSION)
    assert 'did you mean "reduce_bucket_size"?' in notice(
        tuned, "zero_optimization.reduce_bucket_sise is no key"
    )
    assert _refusal(tuned.config) == "reduce_bucket_sise"


def test_deepspeed_knows_no_key_that_is_missing_here() -> None:
    """Every field and alias of the installed DeepSpeed passes without a notice."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    fields = DeepSpeedZeroConfig.model_fields
    assert {name for field, info in fields.items() for name in (field, info.alias) if name} <= KNOWN


@pytest.mark.parametrize(
    "value", ["5e8", "5.", "abc", 1.5, float("inf"), 0, -1, None, 1, 1e30, "5", " 5.00 ", "5_000", 5e8, True]
)
def test_a_value_is_called_refused_exactly_where_deepspeed_refuses_it(value: object) -> None:
    """The notice and DeepSpeed's parser agree on every kind of number."""
    config = stage3(reduce_bucket_size=value)
    tuned = tune(config, a_choice(sizes=ZeroSizes()), version=VERSION)
    said = any(text.startswith(f"{REDUCE} is ") and "refuses" in text for text in tuned.notices)
    try:
        parsed(tuned.config)
    except ValueError:
        assert said
    else:
        assert not said


@pytest.mark.parametrize("value", [None, 2, "maybe", [], 0.5])
def test_a_pin_that_deepspeed_refuses_is_passed_on(value: object) -> None:
    """A mistake of the user's is not papered over."""
    config = stage3(offload_param={"device": "cpu", "pin_memory": value})
    tuned = tune(config, a_choice(), version=VERSION)
    assert PARAM not in written(tuned)
    assert notice(tuned, f"{PARAM} is ").endswith("write true or false")
    assert _refusal(tuned.config) == "offload_param.pin_memory"


@pytest.mark.parametrize(
    "zero", [None, True, "auto", [], {}, {"stage": 0, "offload_optimizer": {"device": "cpu"}}]
)
def test_without_a_section_that_offloads_nothing_is_written(zero: object) -> None:
    """The configuration comes back as it was, and that is said."""
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    tuned = tune(config, a_choice(), version=VERSION)
    assert (tuned.config, tuned.changes) == (config, ())
    assert any("nothing was tuned" in text for text in tuned.notices)


@pytest.mark.parametrize("name", sorted(path.stem for path in CASES.glob("*.json")))
def test_offloads_says_beforehand_whether_anything_can_be_tuned(name: str) -> None:
    """It is true exactly where `tune` finds a section that acts, deprecated switches included."""
    nothing = any(
        "nothing was tuned" in text for text in tune(case(name), a_choice(), version=VERSION).notices
    )
    assert offloads(case(name)) is not nothing


def test_an_unknown_deepspeed_is_left_alone() -> None:
    """Releases older than those that were read get nothing written; nonsense is refused."""
    assert tune(stage3(), a_choice(), version="0.12.0").changes == ()
    assert tune(stage3(), a_choice(), version="0.19.8+git.1a2b3c").changes
    with pytest.raises(ConfigError, match='"newest" is not a version'):
        tune(stage3(), a_choice(), version="newest")


# -- the forms for a profile ----------------------------------------------------------------------


def test_written_keys_are_those_of_a_plain_stage_3_config() -> None:
    """The contents of zero_optimization, nested, values only."""
    assert written_keys(a_choice(), VERSION) == {
        "offload_optimizer": {"pin_memory": False},
        "offload_param": {"pin_memory": True},
        "reduce_bucket_size": 20_000_000,
        "stage3_prefetch_bucket_size": 8_000_000,
    }


def test_nested_holds_what_is_written_and_not_what_is_taken_out() -> None:
    """Keys nest as in a ds_config; a deprecated switch that was removed is not in it."""
    zero = nested(tune(case("legacy_switches"), a_choice(), version=VERSION).changes)["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": False}
    assert "cpu_offload" not in zero
    assert nested(()) == {}


# -- rules that hold for every input --------------------------------------------------------------

flags = st.sampled_from([True, False, "auto", "true", 0])
numbers = st.sampled_from([0, 1, 4096, 5e8, "auto", "5e8", "4096", 1.5, None])
good_numbers = st.sampled_from([1, 4096, 5e8, "auto", "4096"])


def sections(devices: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    """An offload section."""
    pin = st.fixed_dictionaries({"device": st.sampled_from(devices)}, optional={"pin_memory": flags})
    return pin.map(lambda section: section | ({"nvme_path": "/swap"} if section["device"] == "nvme" else {}))


def configs(
    sizes: st.SearchStrategy[Any], **more: st.SearchStrategy[Any]
) -> st.SearchStrategy[dict[str, Any]]:
    """Configurations around every key of the table."""
    offload = sections(["cpu", "nvme", "none"])
    optional: dict[str, Any] = {
        "offload_optimizer": offload,
        "offload_param": offload,
        "overlap_comm": st.booleans(),
    }
    optional |= {name: sizes for key in KEYS if not key.nested for name in key.spellings[:1]} | more
    zero = st.fixed_dictionaries({"stage": st.sampled_from([3, 3, 3, 2, 1, 0])}, optional=optional)
    return zero.map(lambda section: {"train_micro_batch_size_per_gpu": 1, "zero_optimization": section})


wild = configs(
    numbers,
    prefetch_bucket_size=numbers,
    cpu_offload=flags,
    cpu_offload_param=flags,
    cpu_offload_use_pin_memory=flags,
    reduce_bucket_sise=numbers,
)
maybe = st.none() | st.integers(1, 10**12)
choices = st.builds(
    a_choice,
    path=st.sampled_from(["direct", "pinned", "staged"]),
    pin_optimizer=st.booleans(),
    pin_parameters=st.booleans(),
    unsettled_pins=st.sampled_from([(), ("pin_optimizer",), ("pin_optimizer", "pin_parameters")]),
    reasons=st.sampled_from([(), ("one",), ("one", "offload_param: two")]),
    sizes=st.builds(
        ZeroSizes,
        reduce_bucket_elements=maybe,
        prefetch_bucket_elements=maybe,
        persistence_threshold_elements=maybe,
        sub_group_elements=maybe,
    ),
)
versions = st.sampled_from(["0.14.5", "0.18.9", "0.19.4", "0.19.5", "0.19.8", "0.21.0rc1"])
KEEPABLE = [name for key in KEYS for name in key.names()]
keeps = st.lists(st.sampled_from([*KEEPABLE, "offload_param", "cpu_offload"]), max_size=3)


@given(config=wild, choice=choices, version=versions, keep=keeps, fill_auto=st.booleans())
def test_rules_for_every_config(
    config: dict[str, Any], choice: Choice, version: str, keep: list[str], fill_auto: bool
) -> None:
    """The input stays, a second pass changes nothing, keep holds, and only plain values are written."""
    before = copy.deepcopy(config)
    tuned = tune(config, choice, version=version, keep=keep, fill_auto=fill_auto)
    assert config == before

    again = tune(tuned.config, choice, version=version, keep=keep, fill_auto=fill_auto)
    assert (again.config, again.changes) == (tuned.config, ())

    for change in tuned.changes:
        key = change.key.removeprefix("zero_optimization.")
        if key.endswith(".device"):
            assert (change.before, change.after) == (None, "cpu")
        elif key.startswith("cpu_offload"):
            assert change.after is None
        else:
            assert type(change.after) is (bool if key.endswith("pin_memory") else int)
        assert change.reason
        carried_over = key.endswith("pin_memory") and "cpu_offload_use_pin_memory, kept" in change.reason
        assert carried_over or not any(key == name or key.startswith(f"{name}.pin") for name in keep)


@given(config=wild, choice=choices, version=versions)
def test_what_is_written_is_all_that_changed(config: dict[str, Any], choice: Choice, version: str) -> None:
    """The changes, applied by hand, turn the input into the output; a number of the user's never moves."""
    tuned = tune(config, choice, version=version)
    expected = copy.deepcopy(config)
    for change in tuned.changes:
        *parents, name = change.key.split(".")
        holder = expected
        for parent in parents:
            holder = holder.setdefault(parent, {})
        assert holder.get(name) == change.before
        if change.after is None:
            del holder[name]
        else:
            assert name in ("pin_memory", "device") or holder.get(name) in (None, "auto")
            holder[name] = change.after
    assert tuned.config == expected


@given(config=configs(good_numbers), choice=choices)
def test_deepspeed_takes_every_config_that_it_took_before(config: dict[str, Any], choice: Choice) -> None:
    """A valid configuration stays valid, and its pins are what the configuration says."""
    import deepspeed

    parsed(config)
    tuned = tune(config, choice, version=deepspeed.__version__)
    after, zero = parsed(tuned.config), tuned.config["zero_optimization"]
    for section in ("offload_optimizer", "offload_param"):
        acts = zero["stage"] == 3 or (section == "offload_optimizer" and zero["stage"] > 0)
        if acts and zero.get(section, {}).get("device") in ("cpu", "nvme"):
            assert after[f"{section}.pin_memory"] is zero[section]["pin_memory"]


@pytest.mark.parametrize("key", KEYS, ids=lambda key: ".".join((key.section, key.spellings[0])))
def test_the_table_holds_the_defaults_of_the_installed_deepspeed(key: Any) -> None:
    """What the table says about an absent key is what DeepSpeed's parser does with it."""
    import deepspeed

    name = f"{key.section}.{key.spellings[0]}" if key.nested else key.spellings[0].removeprefix("stage3_")
    assert parsed(stage3())[name] == key.default(Version(deepspeed.__version__))
    assert key.overrides == (key.spellings == ("pin_memory",))


def test_the_documentation_has_a_row_for_every_key_with_its_default() -> None:
    """The page of keys and the table in the code do not drift apart."""
    page = (CHECKOUT / "docs" / "config-keys.md").read_text()
    for key in KEYS:
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{key.names()[0]}` |")]
        stages = ", ".join(str(stage) for stage in sorted(key.stages))
        last = f"`false`; `true` from {key.defaults[-1][0]}" if key.overrides else f"{key.defaults[0][1]:,}"
        assert f"| {stages} |" in row
        assert row.endswith(f"| {last} |")


@pytest.mark.parametrize(
    ("section", "block", "said"),
    [
        (
            "offload_param",
            {"device": "cpu", "pin_memry": True},
            'pin_memry is no key .* did you mean "pin_memory"',
        ),
        ("offload_optimizer", {"devise": "cpu"}, 'devise is no key .* did you mean "device"'),
        ("offload_optimizer", {"device": "gpu"}, 'offload_optimizer.device is "gpu"; DeepSpeed takes'),
        ("offload_optimizer", "cpu", 'offload_optimizer is "cpu"; DeepSpeed takes an object'),
    ],
)
def test_mistakes_inside_the_offload_sections_are_named(section: str, block: object, said: str) -> None:
    """DeepSpeed refuses them; a notice says what to write instead."""
    config = {"zero_optimization": {"stage": 3, section: block}}
    notices = tune(config, make_choice(), version="0.19.8").notices
    assert any(re.search(said, notice) for notice in notices)


def test_a_misspelt_zero_section_is_named() -> None:
    """DeepSpeed would train without ZeRO, and say nothing."""
    config = {"zero_optimisation": {"stage": 3}}
    assert (
        'DeepSpeed ignores "zero_optimisation"' in tune(config, make_choice(), version="0.19.8").notices[-1]
    )


@pytest.mark.parametrize("section", ["offload_optimizer", "offload_param"])
def test_the_known_keys_of_the_sections_hold_the_parsers(section: str) -> None:
    """Every key that the installed DeepSpeed takes is known here."""
    module = importlib.import_module("deepspeed.runtime.zero.offload_config")
    name = {"offload_optimizer": "Optimizer", "offload_param": "Param"}[section]
    fields = getattr(module, f"DeepSpeedZeroOffload{name}Config").model_fields
    assert set(fields) <= upstream.KNOWN_IN_SECTIONS[section]


@pytest.mark.parametrize(
    ("zero", "takes"),
    [
        ({"stage": 3, "offload_optimizer": {"device": "cpu"}}, True),
        ({"stage": 3, "cpu_offload": True}, True),
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, False),
        ({"stage": 3, "offload_param": {"device": "cpu"}}, False),
        ({"stage": 3, "offload_optimizer": {"device": "nvme"}}, False),
    ],
)
def test_a_path_needs_stage_3_and_an_optimizer_on_the_cpu(zero: dict[str, Any], takes: bool) -> None:
    """Elsewhere DeepSpeed's own code carries the gradients."""
    assert (config_sections.why_no_path({"zero_optimization": zero}) is None) is takes


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu", "super_offload": True}}},
            "SuperOffload",
        ),
        ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, "ZenFlow"),
        ({"zero_optimization": {"mics_shard_size": 8}}, "MiCS"),
        ({"optimizer": {"type": "Muon"}}, "Muon"),
        ({"compile": {"deepcompile": True}}, "DeepCompile"),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "16 bits"),
        ({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}, "16 bits"),
    ],
)
def test_what_a_live_engine_would_be_refused_for_is_read_beforehand(
    changes: dict[str, Any], why: str
) -> None:
    """So that no key is written for a path that nobody will carry."""
    plain = stage3(mics_shard_size=-1, offload_optimizer={"device": "cpu", "super_offload": False})
    plain |= {"optimizer": {"type": "AdamW"}, "compile": {"deepcompile": False}, "bf16": {"enabled": True}}
    assert config_sections.why_no_path(plain) is None
    zero = {**plain["zero_optimization"], **changes.get("zero_optimization", {})}
    assert why in str(config_sections.why_no_path({**plain, **changes, "zero_optimization": zero}))


HF_STAGE_2: dict[str, Any] = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": "auto",
        "contiguous_gradients": True,
        "sub_group_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
"""Of the shape that Hugging Face's documentation has for stage 2, with what people copy from stage 3."""


@pytest.mark.parametrize("fill_auto", [True, False])
def test_a_stage_2_file_of_hugging_faces_gets_what_acts_and_nothing_else(fill_auto: bool) -> None:
    """pin_memory, and the bucket where it is left open; every other key and "auto" is as it was."""
    choice = a_choice(pin_optimizer=True, pin_optimizer_alone=False)
    tuned = tune(HF_STAGE_2, choice, version="0.19.8", fill_auto=fill_auto)
    written = {change.key.partition(".")[2]: change.after for change in tuned.changes}
    assert set(written) == {"offload_optimizer.pin_memory"} | ({"reduce_bucket_size"} if fill_auto else set())
    assert written["offload_optimizer.pin_memory"] is False
    before, after = copy.deepcopy(HF_STAGE_2), copy.deepcopy(tuned.config)
    for config in (before, after):
        config["zero_optimization"]["offload_optimizer"].pop("pin_memory")
        config["zero_optimization"].pop("reduce_bucket_size")
    assert after == before


def test_below_stage_3_no_path_is_given_as_the_reason() -> None:
    """DeepSpeed's own code carries the gradients there, and its own times decide."""
    choice = a_choice(pin_optimizer=True, pin_optimizer_alone=False, reasons=("staged was fastest",))
    (change, *_) = tune(HF_STAGE_2, choice, version="0.19.8").changes
    assert "the gradient path is" not in change.reason
    assert "DeepSpeed's own code carries the gradients here" in change.reason and "pageable" in change.reason
