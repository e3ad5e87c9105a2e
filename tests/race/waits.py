"""Every wait in the code that moves gradients and weights, found in its source, and each taken out by its name.

A wait is a call by which one thing comes before another: of a device's (`synchronize`, `record_event`, `record_stream`
and so on), of a host thread's (`result`, `wait`), or of our own that lead to them (`drain`, `settle`). Its name is the
module, the function and the call as it is written, with a number where the function has it more than once; lines may
move, and functions too, within their module.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import autotune_offload
from autotune_offload.machine.device import Completed

ROOMS = ("paths", "engine")
CALLS = frozenset(
    {
        "synchronize", "synchronize_stream", "record_event", "record_stream", "record", "order_after", "on",
        "wait_event", "wait_stream", "query", "wait", "result", "drain", "settle", "abandon",
    }
)  # fmt: skip
"""What such a call is named."""

_PACKAGE = Path(autotune_offload.__file__).parent


class Wait:
    """One such call in one function."""

    def __init__(self, module: str, function: str, call: str, number: int) -> None:
        self.module, self.function, self.call, self.number = module, function, call, number

    @property
    def name(self) -> str:
        """Stable as long as the function and the call are."""
        again = f" #{self.number}" if self.number > 1 else ""
        return f"{self.module}: {self.function}: {self.call}{again}"

    @contextlib.contextmanager
    def taken_out(self) -> Iterator[None]:
        """The function does everything else inside."""
        module = importlib.import_module(f"autotune_offload.{self.module}")
        owner_name, _, own_name = self.function.rpartition(".")
        owner = functools.reduce(getattr, owner_name.split("."), module) if owner_name else module
        changed = _compiled(_without(self), vars(module), owner if owner_name else None, own_name)
        with mock.patch.object(owner, own_name, changed):
            yield


def waits() -> dict[str, Wait]:
    """All of them by name."""
    found: dict[str, Wait] = {}
    for room in ROOMS:
        for path in sorted((_PACKAGE / room).rglob("*.py")):
            module = ".".join(path.relative_to(_PACKAGE).with_suffix("").parts)
            for function, node in _functions(ast.parse(path.read_text())):
                numbers: Counter[str] = Counter()
                for call in _calls(node):
                    text = ast.unparse(call.func)
                    numbers[text] += 1
                    wait = Wait(module, function, text, numbers[text])
                    found[wait.name] = wait
    return found


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Of a module and its classes; what is defined within a function is part of it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node


def _calls(function: ast.FunctionDef) -> list[ast.Call]:
    """In the order of the source; of `record_event().synchronize()`, the whole."""
    inner: set[int] = set()
    found = []
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and id(node) not in inner and _name(node) in CALLS:
            found.append(node)
            inner |= {id(below) for below in ast.walk(node.func)}
    return sorted(found, key=lambda call: (call.lineno, call.col_offset))


def _name(call: ast.Call) -> str | None:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else None


# -- one of them taken out ------------------------------------------------------------------------

_INSTEAD = {
    "record_event": "_race_reached()",
    "on": "_race_nothing()",
    "abandon": "[]",
    "_accumulation.drain": "{}",
}
"""What stands in its place, by the last words of the call; None for the others."""

_STANDS_IN: dict[str, Any] = {"_race_reached": Completed, "_race_nothing": contextlib.nullcontext}


def _without(wait: Wait) -> ast.FunctionDef:
    path = _PACKAGE.joinpath(*wait.module.split(".")).with_suffix(".py")
    function = dict(_functions(ast.parse(path.read_text())))[wait.function]
    same = [call for call in _calls(function) if ast.unparse(call.func) == wait.call]
    target = same[wait.number - 1]
    instead = ast.parse(
        next((code for end, code in _INSTEAD.items() if f".{wait.call}".endswith(f".{end}")), "None"),
        mode="eval",
    ).body

    class Replaced(ast.NodeTransformer):
        def visit_Call(self, node: ast.Call) -> ast.AST:
            return instead if node is target else self.generic_visit(node)

    changed = ast.fix_missing_locations(Replaced().visit(function))
    assert isinstance(changed, ast.FunctionDef)
    return changed


def _compiled(function: ast.FunctionDef, names: dict[str, Any], owner: Any, name: str) -> Any:
    """With the globals of its module, and `super()` as in its class."""
    maker = ast.parse(f"def made(__class__, {', '.join(_STANDS_IN)}):\n    pass").body[0]
    assert isinstance(maker, ast.FunctionDef)
    maker.body = [function, ast.Return(ast.Name(name, ast.Load()))]
    tree = ast.fix_missing_locations(ast.Module([maker], type_ignores=[]))
    made: dict[str, Any] = {}
    exec(compile(tree, f"<{name} without a wait>", "exec"), names, made)  # with annotations as text, as here
    return made["made"](owner, **_STANDS_IN)
