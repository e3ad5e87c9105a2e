"""The names that `autotune_offload` exports, and what importing it costs."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import autotune_offload

PUBLIC = {
    "initialize": "autotune_offload.api.initialize",
    "install": "autotune_offload.api.install",
    "load_profile": "autotune_offload.api.initialize",
    "probe": "autotune_offload.api.probe",
    "report": "autotune_offload.api.report",
    "tune_config": "autotune_offload.api.initialize",
    "AgreementError": "autotune_offload.errors",
    "uninstall": "autotune_offload.api.install",
    "zero_init": "autotune_offload.api.initialize",
    "AutotuneError": "autotune_offload.errors",
    "BudgetError": "autotune_offload.errors",
    "ConfigError": "autotune_offload.errors",
    "DeviceError": "autotune_offload.errors",
    "MeasurementError": "autotune_offload.errors",
    "PinError": "autotune_offload.errors",
    "ProfileError": "autotune_offload.errors",
    "UndecidedError": "autotune_offload.errors",
    "Choice": "autotune_offload.records",
    "Profile": "autotune_offload.records",
    "Workload": "autotune_offload.records",
}
HEAVY = {"torch", "deepspeed", "optuna", "msgspec", "numpy", "click", "rich", "yaml", "psutil"}
IMPORT_SECONDS = 0.050
"""The most that `import autotune_offload` may cost."""


def _in_child(script: str) -> object:
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout)


def test_exactly_these_names_are_exported() -> None:
    """A name is added to or taken from the public face on purpose only."""
    assert set(autotune_offload.__all__) == {*PUBLIC, "__version__"}
    assert set(dir(autotune_offload)) == set(autotune_offload.__all__)


@pytest.mark.parametrize(("name", "home"), PUBLIC.items())
def test_a_public_name_is_the_one_of_its_module(name: str, home: str) -> None:
    """Each lazy name resolves to the object that its module defines."""
    assert getattr(autotune_offload, name) is getattr(importlib.import_module(home), name)


def test_type_checkers_see_the_same_names() -> None:
    """The stub is the one list: what it imports from where is what is exported."""
    stub = Path(autotune_offload.__file__).with_suffix(".pyi").read_text(encoding="utf-8")
    listed = {
        alias.name: f"autotune_offload.{node.module}"
        for node in ast.walk(ast.parse(stub))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert listed == PUBLIC


def test_the_version_is_that_of_the_installed_distribution() -> None:
    """`__version__` comes from the metadata, so it is stated in one place only."""
    from importlib.metadata import version

    assert autotune_offload.__version__ == version("autotune-offload")


def test_an_unknown_name_is_an_attribute_error() -> None:
    """A misspelt name fails as it does for any module."""
    with pytest.raises(AttributeError, match="initialise"):
        _ = autotune_offload.initialise  # type: ignore[attr-defined]


def test_no_module_has_the_name_of_a_public_function() -> None:
    """Importing a module never hides a public function: `autotune_offload.probe` stays callable."""
    script = "import json, autotune_offload.api.probe\nprint(json.dumps(callable(autotune_offload.probe)))"
    assert _in_child(script) is True
    modules = {path.stem for path in Path(autotune_offload.__file__).parent.iterdir()}
    assert modules.isdisjoint(set(autotune_offload.__all__) - {"__version__"})


def test_importing_loads_nothing_heavy() -> None:
    """`import autotune_offload` leaves torch, DeepSpeed, Optuna and every other dependency unloaded."""
    loaded = _in_child("import json, sys, autotune_offload; print(json.dumps(sorted(sys.modules)))")
    assert isinstance(loaded, list)
    assert {name.split(".")[0] for name in loaded} & HEAVY == set()


def test_importing_is_quick() -> None:
    """`import autotune_offload` takes at most 50 ms: the best of five, as load only ever adds time."""
    script = (
        "import json, time; start = time.perf_counter(); import autotune_offload\n"
        "print(json.dumps(time.perf_counter() - start))"
    )
    seconds = [_in_child(script) for _ in range(5)]
    assert min(float(str(value)) for value in seconds) <= IMPORT_SECONDS
