"""The house: what import-linter cannot see of it. Heavy libraries load when used, and only the CLI prints."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import grimp
import pytest
from importlinter.api import read_configuration

import autotune_offload
from tests import CHECKOUT

PACKAGE = Path(autotune_offload.__file__).parent
NAME = "autotune_offload"
MOST_LINES = 350
PLAIN_DATA = {"records.py"}
HEAVY = {"torch", "deepspeed", "optuna"}
HEAVY_AT_TOP = {
    room: {"torch"}
    for room in ("testing", "machine", "described", "paths", "measure", "engine", "profiles/recheck.py")
}
"""The rooms, and the one file, that cannot work without a heavy library, and which one they may load at once."""

SOURCES = sorted(PACKAGE.rglob("*.py"))
ROOMS = sorted(file.parent.name for file in PACKAGE.glob("*/__init__.py") if file.parent.name != "cli")
Function = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)

each_source = pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(PACKAGE).as_posix())


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@functools.cache
def _graph() -> grimp.ImportGraph:
    return grimp.build_graph(NAME, exclude_type_checking_imports=True, cache_dir=None)


def _listed(room: str) -> list[str]:
    """The modules of a room as its docstring lists them, from below."""
    text = ast.get_docstring(_tree(PACKAGE / room / "__init__.py")) or ""
    return re.findall(r"\w+", text.partition("From below:")[2])


def out_of_order(order: list[str], imports: dict[str, set[str]]) -> list[str]:
    """Imports of a module from one that is not listed before it."""
    return [
        f"{name} imports {other}"
        for name in order
        for other in imports[name]
        if other not in order[: order.index(name)]
    ]


def heavy_at_top(tree: ast.AST) -> set[str]:
    """Heavy libraries that importing the module would load: not in functions, not for types only."""
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        if isinstance(node, Function) or typing:
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


def test_the_floors_hold() -> None:
    """What `pyproject.toml` says of floors and rooms is true of every import, within functions too."""
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_lists_its_modules_from_below(room: str) -> None:
    """The docstring names every module of the room, and each imports only from those before it."""
    home, graph = f"{NAME}.{room}", _graph()
    modules = {name.rpartition(".")[2] for name in graph.find_children(home)}
    imports: dict[str, set[str]] = {
        module: {
            other.removeprefix(f"{home}.").split(".")[0]
            for importer in {f"{home}.{module}"} | graph.find_descendants(f"{home}.{module}")
            for other in graph.find_modules_directly_imported_by(importer)
            if other.startswith(f"{home}.") and not f"{other}.".startswith(f"{home}.{module}.")
        }
        for module in modules
    }
    assert sorted(_listed(room)) == sorted(modules)
    assert out_of_order(_listed(room), imports) == []


def test_an_import_from_above_is_seen() -> None:
    """The order within a room is no decoration."""
    assert out_of_order(["one", "two"], {"one": set(), "two": {"one"}}) == []
    assert out_of_order(["one", "two"], {"one": {"two"}, "two": set()}) == ["one imports two"]


@each_source
def test_heavy_libraries_are_loaded_when_used(path: Path) -> None:
    """torch, DeepSpeed and Optuna are imported inside functions, but for torch in the rooms named above."""
    place = path.relative_to(PACKAGE)
    allowed = HEAVY_AT_TOP.get(place.parts[0].removesuffix(".py"), HEAVY_AT_TOP.get(place.as_posix(), set()))
    assert heavy_at_top(_tree(path)) - allowed == set()


@each_source
def test_only_the_cli_prints(path: Path) -> None:
    """Library code logs; printing is for the command line."""
    assert path.relative_to(PACKAGE).parts[0] == "cli" or prints(_tree(path)) == []


@each_source
def test_no_import_is_relative(path: Path) -> None:
    """Every import says where from."""
    assert not [node for node in ast.walk(_tree(path)) if isinstance(node, ast.ImportFrom) and node.level]


@each_source
def test_no_file_is_too_long_to_read(path: Path) -> None:
    """But for plain data."""
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MOST_LINES or path.relative_to(PACKAGE).as_posix() in PLAIN_DATA


def test_the_documentation_shows_the_same_floors() -> None:
    """docs/architecture.md has a row for each layer of the contract, with the rooms on it."""
    contracts = read_configuration(str(CHECKOUT / "pyproject.toml"))["contracts_options"]
    layers = contracts[0]["layers"]
    page = (CHECKOUT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \d+ \| ([^|]+) \|", page, re.MULTILINE)
    assert [set(re.findall(r"`(\w+)`", row)) for row in rows] == [
        set(re.findall(r"\w+", layer)) for layer in layers
    ]


def test_the_picture_shows_the_house_as_it_is() -> None:
    """docs/pictures/house.svg is what `python docs/house.py` draws."""
    found = subprocess.run(
        [sys.executable, "-c", "import house; print(house.PICTURE.read_text() == house.drawn())"],
        cwd=CHECKOUT / "docs",
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout == "True\n", "the house has changed: python docs/house.py"


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
