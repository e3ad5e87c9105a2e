"""The three readers on damaged and hostile input: configuration, stored profile, machine file.

Each gives a result or one of our own errors, and takes less than a second of processor time.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune_offload import places, records
from autotune_offload.config import block as config_block
from autotune_offload.config import reading
from autotune_offload.described import machine
from autotune_offload.errors import AutotuneError, ConfigError, ProfileError
from autotune_offload.profiles.store import Store
from tests import DATA
from tests.factories import make_profile

CONFIGS = sorted((DATA / "configs").glob("*.json"))


def stored_text() -> str:
    """A profile as its file holds it, small enough to be mutated often."""
    profile = make_profile()
    with tempfile.TemporaryDirectory() as folder:
        small = make_profile(transfers=profile.transfers[:3], candidates=profile.candidates[:3])
        return Store(Path(folder)).save(small).read_text()


PROFILE = stored_text()
MACHINE = places.config_file("machines", "t4_pcie3.yaml").read_text()
CONFIG = CONFIGS[0].read_text()

MARKS = """' " { } [ ] , # &a *a !!int !x << | > null ~ .nan -.inf 1e999 0x 1:2:3 2026-99-99 true = // /*""".split()
junk = st.sampled_from(
    [
        *MARKS,
        "'''",
        "\ufeff",
        "\ud7ff",
        "\\u0000",
        "\0",
        "\n",
        "\t",
        " " * 50,
        "",
        "- ",
        ": ",
        "? ",
        "---\n",
        "...\n",
        "%TAG ! x\n",
        "{" * 2000,
        "[" * 2000,
        "9" * 5000,
    ]
)


@st.composite
def mutated(draw: st.DrawFn, text: str) -> bytes:
    """A valid file in which a few pieces were cut out, doubled, moved or replaced."""
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 60)))
        piece = text[start:end]
        put = draw(
            st.one_of(junk, st.just(piece * 2), st.just(""), st.just(piece[::-1]), st.text(max_size=5))
        )
        text = text[:start] + put + text[end:]
    if draw(st.booleans()) and draw(st.booleans()):
        text = text[: draw(st.integers(0, len(text)))]
    return text.encode("utf-8", "surrogatepass")


def contents(text: str) -> st.SearchStrategy[bytes]:
    """Bytes, text, and mutations of a valid file."""
    return st.binary(max_size=300) | st.text(max_size=300).map(str.encode) | mutated(text) | mutated(text)


def read_within_a_second(read: Callable[[], Any], error: type[AutotuneError]) -> None:
    """Runs a reader that may refuse with this error, and with no other."""
    started = time.process_time()
    with contextlib.suppress(error):
        read()
    assert time.process_time() - started < 1


@given(content=contents(PROFILE))
def test_any_bytes_are_a_profile_or_a_profile_error(content: bytes) -> None:
    """`load` refuses, a lookup misses, the list of entries and pruning go on."""
    with tempfile.TemporaryDirectory() as folder:
        store, asked = Store(Path(folder)), make_profile().fingerprint
        path = store.path_of(asked)
        path.write_bytes(content)
        path.chmod(0o600)
        read_within_a_second(lambda: store.load(path), ProfileError)
        read_within_a_second(lambda: store.lookup(asked), ProfileError)
        read_within_a_second(lambda: store.lookup(asked, frozenset({"workload"})), ProfileError)
        read_within_a_second(lambda: store.entries(), ProfileError)


@given(content=contents(MACHINE))
def test_any_bytes_are_a_machine_or_a_config_error(content: bytes) -> None:
    """Numbers, dates and keys of any type included."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "mine.yaml"
        file.write_bytes(content)
        read_within_a_second(lambda: machine.read(file), ConfigError)


def settings_in(source: object) -> records.Settings:
    """A configuration is read and our block in it checked."""
    return config_block.settings(reading.read(source))


@given(content=contents(CONFIG))
def test_any_bytes_are_a_configuration_or_a_config_error(content: bytes) -> None:
    """As a file, as text, in base64; and our block in what was read is checked."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "ds.json"
        file.write_bytes(content)
        text = content.decode("utf-8", "replace")
        for source in (file, str(file), text, base64.urlsafe_b64encode(content).decode()):
            read_within_a_second(partial(settings_in, source), ConfigError)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("auto"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
keys = st.sampled_from([*config_block._CHECKS, "bufer_bytes", ""])


@given(block=st.dictionaries(keys, values) | values)
def test_any_block_of_ours_is_settings_or_a_config_error(block: Any) -> None:
    """Whatever the values are."""
    read_within_a_second(lambda: config_block.settings({config_block.BLOCK: block}), ConfigError)


LARGE = {
    "a gigabyte": None,
    "deep nesting": '{"a":' * 50_000,
    "deep lists": "{a: " + "[" * 50_000,
    "one text": '{"a": "' + "x" * 1_040_000 + '"}',
    "escapes": '{"a": "' + "\\n" * 520_000 + '"}',
    "one key": "{" + "a" * 1_040_000,
    "digits": '{"a": ' + "1" * 1_000_000 + "}",
    "an exponent": '{"a": 1e' + "9" * 100_000 + "}",
    "many keys": "{" + ",".join(f'"k{n}": 1' for n in range(30_000)) + "}",
    "one key many times": "{" + ",".join(['"k": 1'] * 30_000) + "}",
    "too many keys": "{" + ",".join(f'"k{n}": 1' for n in range(60_000)) + "}",
    "many values": '{"a": [' + "1," * 65_000 + "1]}",
    "many comments": "{" + "#\n" * 65_000 + "}",
    "blanks": "{" + " " * 1_040_000 + "}",
}


@pytest.mark.parametrize("name", LARGE)
def test_a_large_configuration_is_read_or_refused_within_a_second(name: str, tmp_path: Path) -> None:
    """As a file, and as text where it is one."""
    file, text = tmp_path / "ds.json", LARGE[name]
    if text is None:
        file.touch()
        os.truncate(file, 1 << 30)
    else:
        file.write_text(text)
        read_within_a_second(lambda: reading.read(text), ConfigError)
    read_within_a_second(lambda: reading.read(file), ConfigError)


def test_a_configuration_that_holds_itself_is_refused() -> None:
    """A dict can; no file can."""
    config: dict[str, Any] = {"zero_optimization": {}}
    config["zero_optimization"]["again"] = config
    with pytest.raises(ConfigError, match="nested too deeply"):
        reading.read(config)


def test_an_endless_device_is_refused() -> None:
    """What has no end is read up to the limit."""
    read_within_a_second(lambda: reading.read("/dev/zero"), ConfigError)
    with pytest.raises(ConfigError):
        reading.read("/dev/zero")


def test_valid_files_are_still_read() -> None:
    """The fuzzing starts from files that pass."""
    assert reading.read(CONFIGS[0])
    assert machine.parse(machine.plain(machine.load("t4_pcie3"))).name == "t4_pcie3"
    assert json.dumps(reading.read(CONFIG))
