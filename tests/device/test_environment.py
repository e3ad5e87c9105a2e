"""Which Python `make device` runs in, and what is set up for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.device import environment
from benchmarks.device.environment import commands, driven, main
from tests import CHECKOUT


def _seen(
    monkeypatch: pytest.MonkeyPatch, *, sees: set[Path], has: set[Path], device: bool
) -> list[list[str]]:
    """What each interpreter can, and whether there is a device; gives the list that commands are written to."""
    done: list[list[str]] = []
    can = {environment.SEES: sees, environment.HAS: has}
    monkeypatch.setattr(environment, "_works", lambda python, script: python in can[script])
    monkeypatch.setattr(environment, "driven", lambda devices: device)
    monkeypatch.setattr(environment, "_do", lambda command: done.append(list(command)))
    monkeypatch.setattr(environment, "_lie_on_top", lambda mine, folder: done.append(["on top", str(mine)]))
    return done


MINE = Path(sys.executable)


def test_an_environment_with_all_there_is_used_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing is installed anywhere."""
    done = _seen(monkeypatch, sees={MINE}, has={MINE}, device=True)
    assert main(tmp_path) == MINE and done == []


def test_what_an_environment_lacks_lies_on_top_of_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its torch stays; no other one is asked for."""
    done = _seen(monkeypatch, sees={MINE}, has=set(), device=True)
    assert main(tmp_path) == tmp_path / "bin" / "python"
    assert ["on top", str(MINE)] in done and not any("torch" in command for command in done)


def test_with_a_device_and_no_torch_the_index_gives_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without our constraints, but with the DeepSpeed that they name."""
    done = _seen(monkeypatch, sees=set(), has=set(), device=True)
    assert main(tmp_path) == tmp_path / "bin" / "python"
    assert any("torch" in command for command in done)
    assert not any("-c" in command or "constraints.txt" in command for command in done)
    assert any(word.startswith("deepspeed==") for command in done for word in command)


def test_an_environment_that_was_set_up_is_used_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The second time nothing is installed."""
    python = tmp_path / "bin" / "python"
    done = _seen(monkeypatch, sees={python}, has={python}, device=True)
    assert main(tmp_path) == python and done == []


def test_without_a_device_it_is_the_tests_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Gigabytes of CUDA libraries are of no use there."""
    done = _seen(monkeypatch, sees=set(), has=set(), device=False)
    assert main(tmp_path) == CHECKOUT / ".venv" / "bin" / "python"
    assert [command[1:] for command in done] == [[".venv/.installed"]]


def test_a_device_is_what_a_driver_has_made(tmp_path: Path) -> None:
    """In /dev; other files there are none."""
    for name in ("null", "nvidiactl", "sda"):
        (tmp_path / name).touch()
    assert not driven(tmp_path)
    (tmp_path / "nvidia0").touch()
    assert driven(tmp_path)
    (tmp_path / "accel").mkdir()
    (tmp_path / "nvidia0").unlink()
    (tmp_path / "accel" / "accel0").touch()
    assert driven(tmp_path)


@pytest.mark.slow
def test_one_environment_really_lies_on_another(tmp_path: Path) -> None:
    """What this interpreter has can be imported in a new one, which has nothing of its own."""
    folder = tmp_path / "on-top"
    first = commands(MINE, folder, with_torch=True)[0]
    subprocess.run([*first, "--without-pip"], check=True)
    python = str(folder / "bin" / "python")
    script = [python, "-c", "import msgspec; print(msgspec.__file__)"]
    assert subprocess.run(script, cwd=tmp_path, capture_output=True, check=False).returncode != 0
    environment._lie_on_top(MINE, folder)
    done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, check=True, env={})
    assert "site-packages" in done.stdout
