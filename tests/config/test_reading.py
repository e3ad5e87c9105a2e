"""Reading a ds_config in each of its forms, and our block in it."""

from __future__ import annotations

import base64
import copy
import json
import math
import os
from collections import OrderedDict, UserDict, UserList, deque
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from autotune_offload.config import block as config_block
from autotune_offload.config.reading import read
from autotune_offload.errors import ConfigError
from autotune_offload.records import Settings
from tests import CHECKOUT, DATA

CASES = sorted((DATA / "configs").glob("*.json"))
PLAIN = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, "overlap_comm": False}}

leaves = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)
objects = st.dictionaries(
    st.text(min_size=1),
    st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8),
    min_size=1,
)


def encoded(text: str) -> str:
    """Urlsafe base64, as `deepspeed.initialize` takes it."""
    return base64.urlsafe_b64encode(text.encode()).decode()


def message_of(source: object) -> str:
    """The sentence of the ConfigError that `read` raises."""
    with pytest.raises(ConfigError) as caught:
        read(source)
    return str(caught.value)


# -- the forms ------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.stem)
def test_a_file_is_read_as_deepspeed_reads_it(case: Path) -> None:
    """A path, as str or as Path, gives what DeepSpeed's parser gives."""
    from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config

    assert read(str(case)) == read(case) == load_ds_config(str(case))


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.stem)
def test_text_and_base64_give_what_the_file_gives(case: Path) -> None:
    """The same configuration in another form is the same configuration."""
    from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config

    text = case.read_text()
    assert read(text) == read(encoded(text)) == load_ds_config(encoded(text)) == read(case)


@pytest.mark.parametrize("wrap", [dict, OrderedDict, UserDict, MappingProxyType])
def test_every_mapping_becomes_a_plain_dict(wrap: Any) -> None:
    """Mappings that DeepSpeed refuses come back as the dict that it takes, at every depth."""
    config = read(wrap({"zero_optimization": wrap({"stage": 3}), "list": [wrap({"a": 1})], "pair": (1, 2)}))
    assert config == {"zero_optimization": {"stage": 3}, "list": [{"a": 1}], "pair": (1, 2)}
    assert type(config) is type(config["zero_optimization"]) is type(config["list"][0]) is dict


@pytest.mark.parametrize("wrap", [list, UserList, deque])
def test_every_sequence_becomes_a_plain_list(wrap: Any) -> None:
    """A library's own list, as OmegaConf has one, is what `json` writes as a list; a text stays a text."""
    config = read({"optimizer": {"params": {"betas": wrap([0.9, wrap([1])])}}, "name": "abc", "raw": b"abc"})
    assert config == {"optimizer": {"params": {"betas": [0.9, [1]]}}, "name": "abc", "raw": b"abc"}
    assert type(config["optimizer"]["params"]["betas"][1]) is list


def test_a_sequence_of_another_kind_is_heard_in_our_block() -> None:
    """What it names is kept."""
    given = {"autotune_offload": UserDict(keep=UserList(["offload_param.pin_memory"]))}
    assert config_block.settings(read(given)).keep == ("offload_param.pin_memory",)


@given(config=objects)
def test_the_input_is_copied_and_never_changed(config: dict[str, Any]) -> None:
    """Writing into what `read` returns leaves the caller's dict alone."""
    before = copy.deepcopy(config)
    result = read(config)
    assert result == before
    for value in result.values():
        if isinstance(value, (dict, list)):
            value.clear()
    result.clear()
    assert config == before


@given(config=objects)
def test_json_text_and_base64_come_back_as_they_went_in(config: dict[str, Any]) -> None:
    """Whatever `json.dumps` writes is read back, raw or in base64, of what is known for a ds_config by a key."""
    config = {"zero_optimization": {}, **config}
    text = json.dumps(config)
    assert read(text) == config
    assert read(encoded(text)) == config


def test_an_infinity_stays_an_infinity() -> None:
    """`steps_per_print: inf`, which accelerate sets, survives as a dict and as the text that json writes."""
    config = {"steps_per_print": math.inf, "zero_optimization": {"stage": 3}}
    assert read(config) == config
    assert read(json.dumps(config)) == config
    assert read(json.dumps(config, indent=2)) == config


def test_a_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    """A file saved by an editor that marks UTF-8 reads like any other."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(PLAIN), encoding="utf-8-sig")
    assert read(path) == PLAIN


# -- what is refused ------------------------------------------------------------------------------


def test_a_mistyped_path_says_where_it_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No base64 or unicode error for a file that is not there."""
    monkeypatch.chdir(tmp_path)
    assert message_of("x.json") == f'no such file "x.json"; looked in {tmp_path}'
    assert message_of(Path("sub/x.json")) == f'no such file "sub/x.json"; looked in {tmp_path / "sub"}'


def test_a_mistyped_path_names_the_nearest_file(tmp_path: Path) -> None:
    """A file with nearly that name is offered."""
    (tmp_path / "ds_config.json").write_text("{}")
    assert message_of(str(tmp_path / "ds_confg.json")).endswith('did you mean "ds_config.json"?')


@given(text=st.text(max_size=300).filter(lambda text: "\n" not in text and "{" not in text))
def test_any_text_that_is_no_configuration_is_a_config_error(text: str) -> None:
    """Nothing but ConfigError leaves `read`, whatever the text."""
    if not os.path.exists(text):
        assert "no such file" in message_of(text) or "base64" in message_of(text)


@pytest.mark.parametrize("twice", ['{"a": 1, "a": 2}', '{"zero": {"a": 1,\n "a": 1}}'])
def test_a_key_that_stands_twice_is_refused(twice: str, tmp_path: Path) -> None:
    """As in DeepSpeed, at every depth, and the key is named."""
    path = tmp_path / "ds.json"
    path.write_text(twice)
    assert message_of(path) == f'"{path}" holds a key twice: a; keep one of them'
    assert "holds a key twice: a" in message_of(twice)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('{\n "a": {\n  "b": 1\n', "line 4, column 1"),
        ('{\n "a": 1,\n "b": "half', "line 3, column 7"),
        ('{"a": [1, 2', "line 1, column"),
    ],
)
def test_a_file_cut_short_says_where(text: str, where: str, tmp_path: Path) -> None:
    """The message holds the file, the place and the likely cause."""
    path = tmp_path / "ds.json"
    path.write_text(text)
    message = message_of(path)
    assert str(path) in message
    assert "cut short" in message
    assert where in message


@given(cut=st.integers(1, len(encoded(json.dumps(PLAIN))) - 4))
def test_base64_cut_short_is_never_taken_for_a_path(cut: int) -> None:
    """From a few characters on, damaged base64 is called that."""
    text = encoded(json.dumps(PLAIN))[:-cut]
    assert ("cut short" in message_of(text)) == (len(text) >= 8)


def test_a_syntax_error_inside_says_what_and_where(tmp_path: Path) -> None:
    """A mistake in the middle is not called a file cut short."""
    path = tmp_path / "ds.json"
    path.write_text('{\n "a" 1,\n "b": 2\n}\n')
    message = message_of(path)
    assert "is not valid JSON or hjson at line 2" in message
    assert "cut short" not in message


@pytest.mark.parametrize("source", [None, 3, b"{}", ["a"]])
def test_a_wrong_type_says_what_is_accepted(source: object) -> None:
    """The type that was found and the forms that pass are in the message."""
    message = message_of(source)
    assert type(source).__name__ in message
    assert "a dict, a path" in message


def test_other_things_that_are_not_configurations(tmp_path: Path) -> None:
    """A folder, an empty file, a file of bytes and a list each get their own words."""
    empty, binary, items = tmp_path / "empty.json", tmp_path / "binary.json", tmp_path / "list.json"
    empty.write_text(" \n")
    binary.write_bytes(b"{\xff\xfe}")
    items.write_text("[1, 2]")
    assert "is a folder" in message_of(tmp_path)
    assert "is empty" in message_of(empty)
    assert "not UTF-8 text (byte 1)" in message_of(binary)
    assert "holds a list" in message_of(items)


# -- our block ------------------------------------------------------------------------------------


def block(**keys: Any) -> Settings:
    """The settings of a configuration whose block holds `keys`."""
    return config_block.settings({"autotune_offload": keys})


def test_defaults_without_a_block_and_with_auto_everywhere() -> None:
    """An absent block, an empty one and one of "auto" only mean the same."""
    names = [field.name for field in structs.fields(Settings)]
    assert config_block.settings({}) == block() == block(**dict.fromkeys(names, "auto")) == Settings()


def test_every_key_is_read() -> None:
    """Each key of the block reaches its field."""
    written: dict[str, Any] = {
        "enabled": False,
        "path": "staged",
        "cast": "host",
        "buffer_bytes": "4MiB",
        "buffer_count": 3,
        "host_threads": 0,
        "accumulate": "host",
        "step": "fused",
        "confirm": False,
        "confirm_rounds": 7,
        "keep": ["offload_param.pin_memory"],
        "budget_seconds": 2,
        "max_pinned_bytes": 1e9,
        "wait_seconds": 60,
        "strict": True,
    }
    expected = written | {
        "buffer_bytes": 4 << 20,
        "keep": ("offload_param.pin_memory",),
        "max_pinned_bytes": 10**9,
    }
    assert structs.asdict(block(**written)) == expected


def test_the_documentation_has_a_row_for_every_key() -> None:
    """The page of keys lists the fields of the block, in their order."""
    page = (CHECKOUT / "docs" / "config-keys.md").read_text().splitlines()
    first = next(number for number, line in enumerate(page) if line.startswith("| `enabled`"))
    rows = [line.split("`")[1] for line in page[first : page.index("", first)]]
    assert rows == [field.name for field in structs.fields(Settings)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("64B", 64),
        ("4 KiB", 4096),
        ("1.5MiB", 3 << 19),
        ("2gib", 2 << 30),
        ("3MB", 3_000_000),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes_with_a_unit(text: str, expected: int) -> None:
    """Binary and decimal units are told apart, in any case and with or without a space."""
    assert block(max_pinned_bytes=text).max_pinned_bytes == expected


@pytest.mark.parametrize(
    "value", ["4M", "4", "MiB", "-4MiB", "0.3B", -1, 1.5, True, math.inf, math.nan, None, [4]]
)
def test_a_size_that_is_none_is_refused(value: object) -> None:
    """Ambiguous, fractional, negative and infinite sizes are errors, not guesses."""
    with pytest.raises(ConfigError, match="max_pinned_bytes is"):
        block(max_pinned_bytes=value)


def test_an_unknown_key_names_the_nearest_known_one() -> None:
    """A misspelt key is refused, so that a wish is never silently lost."""
    with pytest.raises(
        ConfigError, match='unknown key "bufer_bytes", the nearest known key is "buffer_bytes"'
    ):
        block(bufer_bytes=4096)


def test_all_problems_come_in_one_error() -> None:
    """One look at the message is enough to mend the block."""
    with pytest.raises(ConfigError) as caught:
        block(
            enabled="yes",
            path="fast",
            cast=1,
            buffer_count=0,
            keep="a",
            budget_seconds=0,
            confirm=1,
            confirm_rounds=0,
            stric=True,
        )
    message = str(caught.value)
    keys = ("enabled", "path", "cast", "buffer_count", "keep", "budget_seconds", "confirm", "confirm_rounds")
    for key in (*keys, "stric"):
        assert key in message
    assert "expected one of auto, direct, pinned, staged, deepspeed" in message


def test_only_what_a_choice_depends_on_is_fixed() -> None:
    """Fixing the path or a limit asks for a choice of its own; the rest of the block does not."""
    assert block(enabled=True, keep=["sub_group_size"], budget_seconds=1, strict=True).fixed is None
    assert block(path="direct").fixed == "path=direct"
    assert block(max_pinned_bytes=0, cast="host").fixed == "cast=host, max_pinned_bytes=0"
    assert block(path="deepspeed").fixed is None


@pytest.mark.parametrize("value", [None, False, "direct", []])
def test_a_block_that_is_no_object_is_refused(value: object) -> None:
    """A bare value in place of the block is a mistake with an example of the right form."""
    with pytest.raises(ConfigError, match=r'expected an object such as \{"enabled": false\}'):
        config_block.settings({"autotune_offload": value})
