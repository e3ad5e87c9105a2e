"""YAML files from anyone: read as plain data, or refused quickly with the reason."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from autotune_offload import places
from autotune_offload.documents import MAX_BYTES, MAX_PARTS, Refused, parse, read_text

SHIPPED = sorted(places.config_file("machines", "gh200.yaml").parent.glob("*.yaml"))


@pytest.mark.parametrize("file", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_file_is_read_as_yaml_has_it(file: Path) -> None:
    """The limits are far from what is in use."""
    text, _ = read_text(file)
    assert parse(text) == yaml.safe_load(text)
    assert len(text) < MAX_BYTES / 50


HOSTILE = {
    "aliases that explode": "\n".join(
        ["a0: &a0 [1,1,1,1,1,1,1,1,1]"]
        + [f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
    ),
    "a merge of aliases": "a: &a {b: 1}\nc: {<<: [*a, *a]}",
    "an alias of itself": "a: &a [*a]",
    "a tag that calls": "!!python/object/apply:os.system ['true']",
    "a tag of a name": "a: !!python/name:os.system",
    "an unknown tag": "a: !mine 1",
    "deep flow nesting": "[" * 15_000,
    "deep closed nesting": "[" * 10_000 + "]" * 10_000,
    "deep mappings": "{a: " * 8_000,
    "deep block nesting": "- " * 15_000 + "1",
    "deep keys": "? " * 15_000 + "1",
    "deep indents": "\n".join(" " * depth + "a:" for depth in range(1500)),
    "too many values": "[" + "1," * MAX_PARTS + "]",
    "two documents": "--- 1\n--- 2\n",
    "a huge integer": "a: " + "1" * (MAX_BYTES - 3),
    "an unclosed quote": 'a: "' + "x" * (MAX_BYTES - 4),
    "a mapping as a key": "{{a: 1}: 2}",
    "an impossible date": "a: 2026-99-99",
    "control characters": "a: \x00\x01",
    "a tab as indent": "a:\n\t- 1",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_what_no_file_of_ours_has_is_refused_quickly(text: str) -> None:
    """Within a second of processor time, and in words that go on after a file's name."""
    started = time.process_time()
    with pytest.raises(Refused) as raised:
        parse(text)
    assert time.process_time() - started < 1
    assert str(raised.value).split()[0] in {"is", "has", "holds"}
    assert "\n" not in str(raised.value)


LARGEST = {
    "values": "[" + "1," * (MAX_PARTS - 1) + "]",
    "keys": "\n".join(f"k{n}: {n}" for n in range(MAX_PARTS // 2)),
    "pairs": "[" + "a: b," * (MAX_PARTS // 2 - 1) + "]",
    "dates": "[" + "2026-01-01," * (MAX_PARTS - 1) + "]",
    "base 60": "a: 1" + ":1" * (MAX_PARTS - 2),
    "fractions in base 60": "a: 1" + ":1" * (MAX_PARTS - 2) + ".5",
    "one text": "a: " + "x " * (MAX_BYTES // 2 - 2),
    "escapes": 'a: "' + "\\x41" * (MAX_BYTES // 4 - 2) + '"',
    "binary digits": "a: 0b" + "1_" * (MAX_BYTES // 2 - 3),
    "one comment": "#" * MAX_BYTES,
    "nesting": "[a," * 900 + "]" * 900,
    "anchors": "\n".join(f"- &a{n} 1" for n in range(MAX_PARTS // 3)),
}


@pytest.mark.parametrize("text", LARGEST.values(), ids=LARGEST)
def test_what_just_passes_the_limits_is_parsed_within_a_second(text: str) -> None:
    """The limits are such that nothing below them takes long; processor time, as the host is shared."""
    started = time.process_time()
    with contextlib.suppress(Refused):  # for digits too many
        parse(text)
    assert time.process_time() - started < 1


@given(st.text(max_size=300) | st.text(alphabet=" \n-?:,[]{}#&*!|>'\"%@`a1.~=<", max_size=300))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    """No exception but `Refused`, and only plain data comes out."""
    started = time.process_time()
    with contextlib.suppress(Refused):
        yaml.safe_dump(parse(text))
    assert time.process_time() - started < 1


def test_a_gigabyte_is_refused_unread(tmp_path: Path) -> None:
    """By its size alone."""
    file = tmp_path / "large.yaml"
    file.touch()
    os.truncate(file, 1 << 30)
    started = time.process_time()
    with pytest.raises(Refused, match=r"has 1,073\.7 MB, and 4\.2 MB are the most"):
        read_text(file)
    assert time.process_time() - started < 0.1


def test_a_file_that_grows_while_it_is_read_is_refused() -> None:
    """A file of the kernel's tells no size; what is read is bounded all the same."""
    text, status = read_text(Path("/proc/self/status"))
    assert status.st_size == 0 and text
    with pytest.raises(Refused, match="are the most"):
        read_text(Path("/proc/self/status"), most_bytes=10)


def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    """A FIFO without a writer, a socket, a folder and a device."""
    fifo, plug = tmp_path / "fifo", tmp_path / "socket"
    os.mkfifo(fifo)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(plug))
        for path in (fifo, tmp_path, Path("/dev/zero")):
            with pytest.raises(Refused, match="not a regular file"):
                read_text(path)
        with pytest.raises(Refused, match="cannot be read"):
            read_text(plug)


def test_refusing_a_file_leaves_no_descriptor_open(tmp_path: Path) -> None:
    """Neither of a folder nor of bytes that are no text."""
    file = tmp_path / "bytes"
    file.write_bytes(b"\xff")
    before = len(os.listdir("/proc/self/fd"))
    for path in (tmp_path, file):
        with pytest.raises(Refused):
            read_text(path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_path_that_no_file_can_have_is_refused(tmp_path: Path) -> None:
    """A zero byte, and a name that is too long; a missing file stays what it is."""
    for name in ("a\0b", "x" * 300):
        with pytest.raises(Refused, match="cannot be read"):
            read_text(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        read_text(tmp_path / "gone")
