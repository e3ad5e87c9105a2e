"""Machines that an installed package brings, by its entry points."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune_offload import places
from autotune_offload.described import machine
from autotune_offload.errors import ConfigError

SHIPPED = places.config_file("machines", "gh200.yaml").read_text(encoding="utf-8")


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed packages: `our_cluster.machines` with node_a and a gh200 of its own, and a broken one."""
    monkeypatch.setenv("AUTOTUNE_OFFLOAD_MACHINES", str(tmp_path / "own"))
    installed = tmp_path / "site-packages"
    for package, values in {"our_cluster": "our_cluster.machines", "broken": "broken.machines"}.items():
        info, folder = installed / f"{package}-1.0.dist-info", installed / package / "machines"
        info.mkdir(parents=True)
        folder.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{machine.ENTRY_POINTS}]\nours = {values}\n")
        (installed / package / "__init__.py").touch()
        (folder / "__init__.py").write_text("raise RuntimeError('no driver')" if package == "broken" else "")
    ours = installed / "our_cluster" / "machines"
    (ours / "node_a.yaml").write_text(SHIPPED.replace("name: gh200", "name: node_a"))
    (ours / "gh200.yaml").write_text(SHIPPED.replace("name: gh200", "name: another"))
    monkeypatch.syspath_prepend(str(installed))
    importlib.invalidate_caches()
    yield installed
    for name in [name for name in sys.modules if name.split(".")[0] in ("our_cluster", "broken")]:
        del sys.modules[name]


def test_a_machine_of_a_package_is_known_by_its_name(
    packages: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Listed and loaded; the package that cannot be imported costs a warning."""
    assert packages.is_dir()
    with caplog.at_level(logging.WARNING):
        assert "node_a" in machine.names()
    assert "no machines of broken.machines: RuntimeError: no driver" in caplog.text
    assert machine.load("node_a").name == "node_a"


def test_a_shipped_machine_and_a_users_own_come_first(packages: Path) -> None:
    """No package replaces either; each name is listed once."""
    assert machine.load("gh200").name == "gh200"
    assert machine.names().count("gh200") == 1
    own = packages.parent / "own"
    own.mkdir()
    (own / "node_a.yaml").write_text(SHIPPED.replace("name: gh200", "name: mine"))
    assert machine.load("node_a").name == "mine"


def test_an_unknown_name_is_told_those_of_packages(packages: Path) -> None:
    """With the others, in the refusal."""
    assert packages.is_dir()
    with pytest.raises(ConfigError, match=r"expected one of .*node_a"):
        machine.load("node_b")
