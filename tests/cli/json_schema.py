"""The part of JSON Schema that msgspec writes, checked: what a document has that its schema does not allow."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

KNOWN = frozenset(
    """$schema $defs $ref title description default type properties required additionalProperties propertyNames
    items prefixItems minItems maxItems anyOf enum const minimum exclusiveMinimum pattern""".split()
)
_TYPES: dict[str, Any] = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}


def problems(
    schema: Any, value: Any, root: Any = None, at: str = "$", *, closed: bool = False
) -> Iterator[str]:
    """Every place where `value` is not as the schema says.

    With `closed` a key that the schema does not name is one, too, where the object is not open on purpose.
    """
    root = schema if root is None else root
    assert set(schema) <= KNOWN, set(schema) - KNOWN
    if "$ref" in schema:
        yield from problems(root["$defs"][schema["$ref"].rpartition("/")[2]], value, root, at, closed=closed)
    if "anyOf" in schema:
        tried = [list(problems(each, value, root, at, closed=closed)) for each in schema["anyOf"]]
        if all(tried):
            yield f"{at} is none of the {len(tried)}: {min(tried, key=len)}"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{at} is {value!r}, not one of {schema['enum']}"
    if "const" in schema and value != schema["const"]:
        yield f"{at} is {value!r}, not {schema['const']!r}"
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_is(kind, value) for kind in kinds):
        yield f"{at} is {value!r}, no {' or '.join(kinds)}"
        return
    if isinstance(value, dict):
        yield from _object(schema, value, root, at, closed=closed)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            given = schema.get("prefixItems", [])
            below = given[index] if index < len(given) else schema.get("items", {})
            if isinstance(below, dict):
                yield from problems(below, item, root, f"{at}[{index}]", closed=closed)
    elif isinstance(value, str):
        if "pattern" in schema and not re.search(schema["pattern"], value):
            yield f"{at} is {value!r}, not like {schema['pattern']}"
    elif _is("number", value) and not (
        value >= schema.get("minimum", value) and value > schema.get("exclusiveMinimum", value - 1)
    ):
        yield f"{at} is {value}, too small"


def _object(schema: Any, value: dict[str, Any], root: Any, at: str, *, closed: bool) -> Iterator[str]:
    missing = set(schema.get("required", [])) - set(value)
    if missing:
        yield f"{at} lacks {sorted(missing)}"
    named = schema.get("properties", {})
    other = schema.get("additionalProperties", not (closed and named))
    for key, item in value.items():
        if key in named:
            yield from problems(named[key], item, root, f"{at}.{key}", closed=closed)
        elif other is False:
            yield f"{at} has {key}, which the schema does not name"
        elif isinstance(other, dict):
            yield from problems(other, item, root, f"{at}.{key}", closed=closed)
        if "propertyNames" in schema:
            yield from problems(schema["propertyNames"], key, root, f"{at}: {key}", closed=closed)


def _is(kind: str, value: Any) -> bool:
    if kind in ("number", "integer"):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return number and (kind == "number" or value == value // 1)
    return isinstance(value, _TYPES[kind])
