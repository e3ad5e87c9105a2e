"""Files that are no ds_config, and would be read as one: what they are, and the ds_config that they name.

hjson needs neither braces nor quotes, so that most of YAML parses, into something else than was meant.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autotune_offload.documents import Refused, parse
from autotune_offload.records import Record
from autotune_offload.upstream import TOP_LEVEL

_POINTERS = (
    "deepspeed_config_file",
    "deepspeed_config",
    "deepspeed_config_path",
    "deepspeed_config_name_or_path",
    "ds_config",
    "ds_config_path",
    "ds_config_file",
    "deepspeed",
    "hf_ds_config",
)
"""Keys under which launchers, frameworks and recipes name a ds_config, or hold one."""

_MARKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("accelerate's own configuration", ("compute_environment", "distributed_type", "fsdp_config")),
    ("a model's config.json, which `probe --model` takes", ("architectures", "model_type")),
    ("a stored profile of this package", ("fingerprint", "candidates")),
)
"""What a file is by any of these top-level keys."""

_BLOCK_BELOW = re.compile(
    r"""
    ^[ \t]*["']?[\w.-]+["']?[ \t]*:[ \t]*(\#.*)?\n
    ([ \t]*(\#.*)?\n)*
    [ \t]*(-[ ]|[\w."'-]+[ \t]*:)
    """,
    re.MULTILINE | re.VERBOSE,
)
"""A key with nothing behind it, and on the next line an entry of a list or another key: YAML's nesting."""

_DEEPEST = 4


class Foreign(Record, frozen=True, kw_only=True):
    """A file that is something else."""

    what: str
    named: str | None = None
    """The path of a ds_config that it names."""
    held: str | None = None
    """The key under which it holds one itself."""
    yaml: bool = False


def foreign(text: str, parsed: Any = None) -> Foreign | None:
    """What a file is that is no ds_config; None for one that may be.

    Args:
        text: of the file.
        parsed: what hjson made of it, where it did.
    """
    yaml = _is_yaml(text)
    document = _document(text) if yaml else parsed
    if not isinstance(document, Mapping):
        return Foreign(what="YAML", yaml=True) if yaml else None
    if not yaml and (TOP_LEVEL & set(document) or not document):
        return None
    pointers = list(_pointed(document))
    named = next((value for _, value in pointers if isinstance(value, str)), None)
    held = next(
        (name for name, value in pointers if isinstance(value, Mapping) and TOP_LEVEL & set(value)), None
    )
    what = next((words for words, keys in _MARKS if any(key in document for key in keys)), None)
    if what is None and (pointers or yaml):
        what = (
            "YAML" if yaml and TOP_LEVEL & set(document) else "the configuration of a framework or a recipe"
        )
    return None if what is None else Foreign(what=what, named=named, held=held, yaml=yaml)


def way_out(found: Foreign) -> str:
    """What to do instead, where no file that it names can be read."""
    if found.named is not None:
        return f'the ds_config that it names is "{found.named}": give that file'
    if found.held is not None:
        return f'it holds a ds_config under "{found.held}": put that part into a JSON file of its own'
    if found.what.startswith("accelerate"):
        return (
            "accelerate makes a ds_config from its fields when it launches: write one to a JSON file and name it in "
            "deepspeed_config_file, or start the job with `autotune-offload run -- accelerate launch`"
        )
    if found.what == "YAML":
        return "write it as JSON: DeepSpeed reads JSON and hjson, and makes texts of YAML's nested blocks"
    return "name the ds_config itself, a JSON file with zero_optimization in it"


def beside(named: str, file: Path) -> Path | None:
    """The file of that name, looked for where a job would start: here, beside `file`, and above that."""
    folders = (Path.cwd(), file.parent, *list(file.absolute().parents)[1:_DEEPEST])
    found = (folder / Path(named).expanduser() for folder in folders)
    return next((path for path in found if path.is_file()), None)


def _is_yaml(text: str) -> bool:
    opening = text.lstrip("\ufeff \t\r\n")
    return not opening.startswith(("{", "[")) and (
        opening.startswith("---\n") or bool(_BLOCK_BELOW.search(text))
    )


def _document(text: str) -> Any:
    try:
        return parse(text.lstrip("\ufeff"))
    except Refused:
        return None


def _pointed(value: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Each key that stands for a ds_config with its value, the outer ones first."""
    if not isinstance(value, Mapping) or depth == _DEEPEST:
        return
    for name in _POINTERS:
        given = value.get(name)
        if isinstance(given, Mapping) or (
            isinstance(given, str) and given.strip().endswith((".json", ".hjson"))
        ):
            yield name, given
    for item in value.values():
        yield from _pointed(item, depth + 1)
