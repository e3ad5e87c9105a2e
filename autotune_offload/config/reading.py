"""Reading a DeepSpeed configuration in each form that `deepspeed.initialize` takes, and our block in it.

Text is parsed by hjson, as DeepSpeed does, so comments, trailing commas and a byte order mark pass and
a key that a file holds twice is refused. What the caller handed in is never changed.
"""

from __future__ import annotations

import base64
import difflib
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import hjson

from autotune_offload.config import foreign, texts
from autotune_offload.errors import ConfigError

MAX_CHARACTERS = 1 << 20
"""A longer configuration is refused unparsed: hjson takes a second for as many. DeepSpeed's longest keys and a
thousand of them make 100 KB."""

MAX_PARTS = 1 << 16
"""Commas, colons and lines at most, which is what hjson's time follows."""

_MOST_STEPS = 4
"""Files that name one another; more are a circle."""

_UNREADABLE = (ValueError, OverflowError, IndexError)
"""What hjson raises besides its own error, a ValueError: for numbers too large, and a comment without an end."""

_FORMS = "a dict, a path to a JSON or hjson file, urlsafe base64 of its text, or the JSON text itself"


# -- the forms ------------------------------------------------------------------------------------


def read(source: object) -> dict[str, Any]:
    """The configuration that `source` stands for, as a new plain dict.

    Args:
        source: A dict or other mapping, a path (str or `os.PathLike`) to a JSON or hjson file, urlsafe
            base64 of such a text, or the text itself.

    Raises:
        ConfigError: saying what was found, where, and what is accepted.
    """
    try:
        if isinstance(source, Mapping):
            return _plain_dict(source)
        if isinstance(source, os.PathLike):
            return _read_file(os.fsdecode(source))
        if isinstance(source, str):
            return _read_str(source)
    except RecursionError:
        raise ConfigError(
            "the configuration is nested too deeply to be read; DeepSpeed's has 4 levels"
        ) from None
    raise ConfigError(f"a DeepSpeed configuration cannot be a {type(source).__name__}; pass {_FORMS}")


def followed(path: Path) -> tuple[Path, tuple[str, ...]]:
    """The ds_config that `path` is or leads to, with a sentence for each file on the way that is something else.

    Where a file of another kind names none that is there, it is `path` itself, which `read` refuses in words.
    """
    said: list[str] = []
    while len(said) < _MOST_STEPS:
        found = _foreign_file(path)
        target = foreign.beside(found.named, path) if found is not None and found.named else None
        if found is None or target is None:
            break
        said.append(f"{path} is {found.what} and names {target}, which is taken")
        path = target
    return path, tuple(said)


def _foreign_file(path: Path) -> foreign.Foreign | None:
    with suppress(ConfigError, *_UNREADABLE, RecursionError):
        text = _text_of(os.fspath(path))
        _refuse_large(text, "it")
        found = foreign.foreign(text)
        return found if found is not None else foreign.foreign(text, hjson.loads(text))
    return None


def accepted(source: object) -> object:
    """`source` itself where DeepSpeed takes its form, else what it stands for as a plain dict.

    What cannot be read is `source` itself too, so that DeepSpeed's own error reaches the user.
    """
    text = isinstance(source, str) and not source.lstrip("\ufeff \t\r\n").startswith("{")
    if text or isinstance(source, dict):
        return source
    try:
        return read(source)
    except ConfigError:
        return source


def plain(value: Any) -> Any:
    """A deep copy with every mapping as a dict, and every sequence that is no tuple as a list.

    So a library's own containers, OmegaConf's for one, come out as what a JSON file holds. Leaves, an infinity
    included, stay the objects they are.
    """
    if isinstance(value, Mapping):
        return _plain_dict(value)
    if type(value) is tuple:
        return tuple(plain(item) for item in value)
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, memoryview, tuple)):
        return [plain(item) for item in value]
    return value


class Written(float):
    """Stands for a number with a point or an exponent, as it is spelt: hjson makes 5e8 and 1.0 whole numbers.

    As a float it is a fraction, which hjson leaves alone.
    """

    text: str

    def __new__(cls, text: str) -> Written:  # noqa: D102
        written = super().__new__(cls, 0.5)
        written.text = text
        return written


def spelt(text: str) -> dict[str, Any]:
    """What a readable configuration text holds, with each such number as a `Written`."""
    parsed = hjson.loads(text, parse_float=Written)
    return _plain_dict(parsed) if isinstance(parsed, Mapping) else {}


def _plain_dict(mapping: Mapping[Any, Any]) -> dict[str, Any]:
    return {key: plain(value) for key, value in mapping.items()}


def _read_str(text: str) -> dict[str, Any]:
    if os.path.exists(text):
        return _read_file(text)
    if text.lstrip("\ufeff \t\r\n").startswith("{") or "\n" in text.strip():
        return _from_text(text)
    decoded = _from_base64(text)
    if decoded is None:
        raise _missing(text)
    return decoded


def _read_file(path: str) -> dict[str, Any]:
    return _parse(_text_of(path), f'"{path}"')


def _text_of(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read(MAX_CHARACTERS + 1)  # a bound of its own: a pipe or a device tells no size
    except FileNotFoundError:
        raise _missing(path) from None
    except IsADirectoryError:
        raise ConfigError(f'"{path}" is a folder; name the configuration file in it') from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f'"{path}" is not UTF-8 text (byte {error.start}); expected JSON or hjson'
        ) from None
    except OSError as error:
        raise ConfigError(f'"{path}" cannot be read: {error.strerror}') from error
    except ValueError:
        raise ConfigError(f"{path!r} is no name that a file can have; expected {_FORMS}") from None


def _from_text(text: str) -> dict[str, Any]:
    where = "the configuration text"
    _refuse_large(text, where)
    if "Infinity" in text:
        # What `json.dumps` makes of an infinity; hjson would take it, and the comma after it, for a text.
        with suppress(ValueError):
            return _object(json.loads(text, object_pairs_hook=_unique(where)), where)
    return _parse(text, where)


def _from_base64(text: str) -> dict[str, Any] | None:
    """The configuration in urlsafe base64, or None where `text` is not that."""
    _refuse_large(text, "the configuration in base64")
    try:
        decoded = base64.urlsafe_b64decode(text).decode("utf-8")
        # DeepSpeed lets the last of two equal keys win here, and reads nothing as {}.
        parsed = hjson.loads(decoded) if decoded.strip() else None
    except _UNREADABLE:
        whole = text[: len(text) // 4 * 4]
        if re.fullmatch(r"[\w+/=-]{8,}", text, re.ASCII) and _opens_object(whole):
            raise ConfigError(
                f"the base64 text of {len(text)} characters opens a configuration but is damaged or cut "
                f"short; encode the whole file again with base64.urlsafe_b64encode, or pass its path"
            ) from None
        return None
    return _plain_dict(parsed) if isinstance(parsed, Mapping) else None


def _opens_object(text: str) -> bool:
    try:
        return base64.urlsafe_b64decode(text)[:8].lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{")
    except ValueError:
        return False


def _parse(text: str, where: str) -> dict[str, Any]:
    if not text.strip("\ufeff \t\r\n"):
        raise ConfigError(f"{where} is empty; expected a DeepSpeed configuration")
    _refuse_large(text, where)
    _refuse_foreign(foreign.foreign(text), where)
    try:
        parsed = hjson.loads(text, object_pairs_hook=_unique(where))
    except hjson.HjsonDecodeError as error:
        raise ConfigError(_syntax(text, where, error)) from None
    except _UNREADABLE as error:
        raise ConfigError(f"{where} is not valid JSON or hjson: {error}") from None
    _refuse_foreign(foreign.foreign(text, parsed), where)
    return _object(parsed, where)


def _refuse_foreign(found: foreign.Foreign | None, where: str) -> None:
    if found is not None:
        raise ConfigError(f"{where} is {found.what} and no DeepSpeed configuration; {foreign.way_out(found)}")


def _refuse_large(text: str, where: str) -> None:
    """Before parsing, which would take minutes for the largest."""
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(
            f"{where} has more than {MAX_CHARACTERS:,} characters; expected a DeepSpeed configuration"
        )
    parts = sum(text.count(mark) for mark in (",", ":", "\n"))
    if parts > MAX_PARTS:
        raise ConfigError(
            f"{where} has {parts:,} lines and values, and {MAX_PARTS:,} are the most that is read; "
            "expected a DeepSpeed configuration"
        )


def _syntax(text: str, where: str, error: hjson.HjsonDecodeError) -> str:
    at = f"line {error.lineno}, column {error.colno}"
    lines = text.splitlines()
    unfilled = next(
        filter(None, map(texts.placeholder, lines[max(error.lineno - 2, 0) : error.lineno])), None
    )
    if unfilled is not None:
        return f"{where} is a template that nobody filled in: {unfilled} at {at}; put the value there first"
    if error.msg.startswith("Unterminated"):
        return f"{where} looks cut short: the string that starts at {at} never ends; restore the rest"
    if error.pos >= len(text.rstrip()):
        return (
            f"{where} looks cut short: it ends at {at} before all that it opened is closed; restore the rest"
        )
    return f"{where} is not valid JSON or hjson at {at}: {error.msg}"


def _object(parsed: object, where: str) -> dict[str, Any]:
    if not isinstance(parsed, Mapping):
        raise ConfigError(f"{where} holds a {type(parsed).__name__}; expected an object of keys: {{...}}")
    return _plain_dict(parsed)


def _unique(where: str) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice = sorted(name for name, count in Counter(names).items() if count > 1)
        if twice:
            raise ConfigError(f"{where} holds a key twice: {', '.join(twice)}; keep one of them")
        return dict(pairs)

    return build


def _missing(path: str) -> ConfigError:
    folder, name = os.path.split(os.path.abspath(path))
    shown = path if len(path) <= 120 else f"{path[:80]}... ({len(path)} characters)"
    message = f'no such file "{shown}"; looked in {folder if len(folder) <= 200 else os.getcwd()}'
    near = difflib.get_close_matches(name[:255], _neighbours(folder), n=1)
    message += f'; did you mean "{near[0]}"?' if near else ""
    if os.sep not in path and not Path(name).suffix:
        message += f"; expected {_FORMS}"
    return ConfigError(message)


def _neighbours(folder: str) -> list[str]:
    """Names in a folder, the first of them where there are very many."""
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in itertools.islice(entries, 1000)]
    except (OSError, ValueError):
        return []
