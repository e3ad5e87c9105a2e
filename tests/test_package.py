"""What is shipped: the wheel's contents, and finding shipped files wherever the package lies."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from autotune_offload import places
from autotune_offload.errors import ConfigError
from tests import CHECKOUT
from tests.built import built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built here by the backend itself: no isolated environment, so no network."""
    return zipfile.ZipFile(built("wheel", tmp_path_factory.mktemp("wheel")))


def _files_below(folder: Path) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_is_pure_unless_it_is_asked_for_otherwise(wheel: zipfile.ZipFile) -> None:
    """It runs everywhere, and compiles on first use."""
    assert str(wheel.filename).endswith("-py3-none-any.whl")
    assert not [name for name in wheel.namelist() if name.endswith(".so")]


def test_the_wheel_holds_every_config(wheel: zipfile.ZipFile) -> None:
    """Each file of configs/ is in the wheel, inside the package."""
    configs = _files_below(CHECKOUT / "configs")
    assert configs
    assert {f"autotune_offload/configs/{name}" for name in configs} <= set(wheel.namelist())


def test_the_wheel_holds_every_module_and_the_type_marker(wheel: zipfile.ZipFile) -> None:
    """Nothing of the package is left out, py.typed among it."""
    expected = {f"autotune_offload/{name}" for name in _files_below(CHECKOUT / "autotune_offload")}
    assert "autotune_offload/py.typed" in expected
    assert expected <= set(wheel.namelist())


def test_the_wheel_holds_nothing_but_the_package(wheel: zipfile.ZipFile) -> None:
    """No tests, benchmarks or top-level configs/ land in site-packages."""
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"autotune_offload"}


@pytest.mark.slow
@pytest.mark.skipif(
    not (CHECKOUT / ".git").exists(), reason="no checkout: which files are tracked is not known"
)
def test_the_sdist_holds_what_is_tracked_and_builds_the_same_wheel(
    wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    """As `python -m build` does: first the sdist, then the wheel from it."""
    with tarfile.open(built("sdist", tmp_path)) as archive:
        archive.extractall(tmp_path, filter="data")
        (top,) = {name.split("/")[0] for name in archive.getnames()}
        names = {name.removeprefix(f"{top}/") for name in archive.getnames()}
    listed = subprocess.run(["git", "ls-files"], cwd=CHECKOUT, capture_output=True, text=True, check=True)
    tracked = set(listed.stdout.split("\n")) - {""}
    assert tracked - names == set()
    again = zipfile.ZipFile(built("wheel", tmp_path / "again", root=tmp_path / top))
    assert sorted(again.namelist()) == sorted(wheel.namelist())
    assert {name: again.read(name) for name in again.namelist()} == {
        name: wheel.read(name) for name in wheel.namelist()
    }


def test_an_unpacked_wheel_finds_its_own_configs(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """Installed from a wheel, `config_file` gives the copy inside the package."""
    wheel.extractall(tmp_path)
    name = sorted(_files_below(CHECKOUT / "configs"))[0]
    script = f"from autotune_offload.places import config_file; print(config_file({name!r}))"
    found = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert Path(found.stdout.strip()) == tmp_path / "autotune_offload" / "configs" / name


def test_a_checkout_finds_the_configs_beside_the_package() -> None:
    """In a checkout, and so for an editable install, `config_file` gives the file under configs/."""
    for name in _files_below(CHECKOUT / "configs"):
        assert places.config_file(*name.split("/")) == CHECKOUT / "configs" / name


@pytest.mark.parametrize("parts", [("probe_plans", "no_such_plan.yaml"), ("probe_plans",), ("..", "LICENSE")])
def test_a_file_that_is_not_shipped_is_refused_with_those_that_are(parts: tuple[str, ...]) -> None:
    """An unknown name, a folder, or a way out of configs/: ConfigError that lists what exists."""
    with pytest.raises(ConfigError) as caught:
        places.config_file(*parts)
    assert "/".join(parts) in str(caught.value)
    assert all(name in str(caught.value) for name in _files_below(CHECKOUT / "configs"))
