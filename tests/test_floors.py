"""The floors of the design: a module imports only from lower floors, and heavy libraries only when used."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import autotune_offload

PACKAGE = Path(autotune_offload.__file__).parent
NAME = "autotune_offload"
FLOORS = {
    "errors": 0,
    "records": 0,
    "shipped": 0,
    "documents": 0,
    "folders": 0,
    "units": 0,
    "kernel": 0,
    "interruption": 0,
    "host": 1,
    "device": 1,
    "store": 1,
    "alternatives": 1,
    "ds_config": 1,
    "machines": 1,
    "simulated": 1,
    "workload": 1,
    "rehearsal": 2,
    "testing": 2,
    "measure": 2,
    "paths": 2,
    "accumulation": 2,
    "trials": 2,
    "cost_model": 2,
    "candidates": 3,
    "contest": 3,
    "described": 3,
    "zero_sizes": 3,
    "verdict": 3,
    "accumulation_contest": 3,
    "decide": 3,
    "zero3": 3,
    "ballots": 3,
    "equal_keys": 3,
    "timeline": 3,
    "environment": 4,
    "recheck": 4,
    "probing": 4,
    "agree": 4,
    "stage3": 4,
    "selfcheck": 4,
    "fleet": 5,
    "charts": 4,
    "explanation": 4,
    "page": 5,
    "attach": 5,
    "self_report": 5,
    "checks": 6,
    "api": 6,
    "wrapping": 6,
    "verify": 6,
    "doctor": 6,
    "hook": 7,
    "cli": 7,
    "__main__": 7,
}
NEIGHBOURS = {
    "records": {"errors"},
    "shipped": {"errors"},
    "kernel": {"folders"},
    "simulated": {"device", "host", "machines"},
    "accumulation": {"paths"},
    "trials": {"accumulation", "paths"},
    "measure": {"rehearsal"},
    "contest": {"candidates"},
    "zero_sizes": {"candidates"},
    "verdict": {"candidates", "contest"},
    "accumulation_contest": {"candidates", "contest", "verdict"},
    "decide": {"accumulation_contest", "candidates", "contest", "verdict", "zero_sizes"},
    "checks": {"checks"},
    "doctor": {"checks"},
    "probing": {"environment", "recheck"},
    "selfcheck": {"stage3"},
    "equal_keys": {"zero3"},
    "wrapping": {"api"},
    "cli": {"cli"},
    "__main__": {"cli"},
}
"""Imports allowed within a floor: the ground floor raises our errors, the verbs of the CLI share code, and
the decision is spread over modules."""
HEAVY = {"torch", "deepspeed", "optuna"}
HEAVY_AT_TOP = {
    module: {"torch"}
    for module in (
        "kernel",
        "accumulation",
        "stage3",
        "selfcheck",
        "attach",
        "verify",
        "device",
        "measure",
        "paths",
        "rehearsal",
        "simulated",
        "testing",
        "trials",
        "recheck",
    )
}
"""The modules that cannot work without a heavy library, and which one each of them may load at once."""

FACE = PACKAGE / "__init__.py"
SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if path != FACE)
Function = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def _module(path: Path) -> str:
    """Name in the floor table: the first part below the package."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def _face_homes() -> dict[str, str]:
    """Name that the package itself exports, to the module which defines it."""
    return {
        alias.name: node.module.split(".")[1]
        for node in ast.walk(_tree(FACE))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(f"{NAME}.")
        for alias in node.names
    }


def own_imports(tree: ast.AST) -> Iterator[str]:
    """Modules of this package that are imported anywhere in the tree, inside functions too."""
    homes = _face_homes()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (parts[1] for a in node.names if (parts := a.name.split("."))[0] == NAME and parts[1:])
        elif isinstance(node, ast.ImportFrom) and node.module == NAME:
            names = [alias.name for alias in node.names if alias.name != "__version__"]
            yield from (homes.get(name, name) for name in names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(f"{NAME}."):
            yield node.module.split(".")[1]


def relative_imports(tree: ast.AST) -> list[int]:
    """Lines with an import relative to the module: those would escape `own_imports`."""
    return [node.lineno for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level > 0]


def not_below(module: str, tree: ast.AST) -> set[str]:
    """Imports of a module that are neither from a lower floor nor allowed as neighbours."""
    above = {name for name in own_imports(tree) if FLOORS.get(name, 99) >= FLOORS[module]}
    return above - NEIGHBOURS.get(module, set())


def heavy_at_top(tree: ast.AST) -> set[str]:
    """Heavy libraries that importing the module would load: not in functions, not for types only."""
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function) or (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        ):
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names} & HEAVY
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found |= {node.module.split(".")[0]} & HEAVY
        else:
            found |= heavy_at_top(node)
    return found


def prints(tree: ast.AST) -> list[int]:
    """Lines that call print()."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]


each_source = pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(PACKAGE).as_posix())


@each_source
def test_every_module_has_a_floor(path: Path) -> None:
    """A new module is placed in the table before it is used."""
    assert _module(path) in FLOORS, f"{path.name} has no floor: add it to FLOORS in {Path(__file__).name}"


@each_source
def test_imports_come_from_lower_floors(path: Path) -> None:
    """No module imports from its own floor or from above."""
    tree = _tree(path)
    assert not_below(_module(path), tree) == set()
    assert relative_imports(tree) == []


@each_source
def test_heavy_libraries_are_loaded_when_used(path: Path) -> None:
    """torch, DeepSpeed and Optuna are imported inside functions, but for torch in the modules named above."""
    assert heavy_at_top(_tree(path)) - HEAVY_AT_TOP.get(_module(path), set()) == set()


@each_source
def test_only_the_cli_prints(path: Path) -> None:
    """Library code logs; printing is for the command line."""
    assert _module(path) == "cli" or prints(_tree(path)) == []


def test_the_documentation_shows_the_same_floors() -> None:
    """docs/architecture.md names every module on its floor."""
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d) \| ([^|]+) \|", page, re.MULTILINE)
    shown = {name: int(floor) for floor, names in rows for name in re.findall(r"`(\w+)`", names)}
    assert shown == FLOORS


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("measure", "from autotune_offload.device import Device", set()),
        ("measure", "from autotune_offload.paths import direct", {"paths"}),
        ("device", "def f():\n    from autotune_offload.api import probe", {"api"}),
        ("device", "import autotune_offload.decide as decide", {"decide"}),
        ("device", "from autotune_offload import decide, errors", {"decide"}),
        ("device", "from autotune_offload import ProfileError, initialize, __version__", {"api"}),
        ("device", "from autotune_offload.unheard_of import x", {"unheard_of"}),
        ("cli", "from autotune_offload.cli.output import table", set()),
        ("api", "from autotune_offload.cli import main", {"cli"}),
        ("shipped", "from autotune_offload.errors import ConfigError", set()),
        ("errors", "from autotune_offload.records import Profile", {"records"}),
    ],
)
def test_an_import_from_above_is_seen(module: str, source: str, expected: set[str]) -> None:
    """The check finds imports in every spelling, and lets lower floors pass."""
    assert not_below(module, ast.parse(source)) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch.nn as nn", {"torch"}),
        ("try:\n    from deepspeed import zero\nexcept ImportError:\n    pass", {"deepspeed"}),
        ("class A:\n    import optuna", {"optuna"}),
        ("def f():\n    import torch", set()),
        ("class A:\n    def f(self):\n        import torch", set()),
        ("if TYPE_CHECKING:\n    import torch", set()),
    ],
)
def test_a_heavy_import_at_the_top_is_seen(source: str, expected: set[str]) -> None:
    """Only what runs when the module is imported counts."""
    assert heavy_at_top(ast.parse(source)) == expected


def test_a_call_of_print_is_seen() -> None:
    """A call counts wherever it stands; the mere name does not."""
    assert prints(ast.parse("x = print\ndef f():\n    print(1)")) == [3]
