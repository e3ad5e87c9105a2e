"""`autotune-offload run`: real processes, each a script that knows nothing of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from autotune_offload.cli.run import HOOK
from tests import CHECKOUT

RUN = (sys.executable, "-m", "autotune_offload", "run")
RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


def environment(**changes: str) -> dict[str, str]:
    """A user's: this checkout installed, no launcher's variables."""
    kept = {name: value for name, value in os.environ.items() if name not in {*RANK, "AUTOTUNE_OFFLOAD"}}
    return {**kept, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1", **changes}


def done(*command: str | Path, cwd: Path | None = None, **changes: str) -> subprocess.CompletedProcess[str]:
    """A command that has ended, however it did."""
    return subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=cwd,
        env=environment(**changes),
    )


ECHO = """
import json, os, signal, sys
print(json.dumps({"argv": sys.argv, "name": __name__, "path": sys.path[0], "main": sys.modules["__main__"].__name__,
                  "pipe": signal.getsignal(signal.SIGPIPE).name, "in": sys.stdin.read()}))
sys.exit(7)
"""


# -- the script's own world -----------------------------------------------------------------------


@pytest.mark.parametrize("separator", [[], ["--"]])
def test_a_script_sees_what_it_sees_without_us(tmp_path: Path, separator: list[str]) -> None:
    """Its arguments, its name, its folder, its standard input, and its exit code comes back."""
    (tmp_path / "echo.py").write_text(ECHO)
    arguments = ["echo.py", "--json", "-m", "x", "--", "--environment"]
    ours = done(*RUN, *separator, *arguments, cwd=tmp_path)
    plain = done(sys.executable, *arguments, cwd=tmp_path)
    assert ours.returncode == plain.returncode == 7
    assert (ours.stdout, ours.stderr) == (plain.stdout, "")
    assert json.loads(ours.stdout)["argv"] == arguments


def test_a_module_runs_as_python_runs_it(tmp_path: Path) -> None:
    """-m goes to Python with all that follows it."""
    (tmp_path / "echo.py").write_text(ECHO)
    ours = done(*RUN, "-m", "echo", "--json", cwd=tmp_path, PYTHONPATH=f"{CHECKOUT}:{tmp_path}")
    assert ours.returncode == 7
    assert json.loads(ours.stdout)["argv"] == [str(tmp_path / "echo.py"), "--json"]


def test_a_program_is_found_on_path_or_beside_python(tmp_path: Path) -> None:
    """A launcher is run as it is, though its folder is not on PATH."""
    (tmp_path / "job.sh").write_text("#!/bin/sh\necho job $1; exit 3\n")
    (tmp_path / "job.sh").chmod(0o755)
    ours = done(*RUN, "--", "./job.sh", "one", cwd=tmp_path)
    assert (ours.returncode, ours.stdout) == (3, "job one\n")
    assert done(*RUN, "--", Path(sys.executable).name, "-c", "print(5)", PATH="/nowhere").stdout == "5\n"


def test_a_signal_reaches_the_script(tmp_path: Path) -> None:
    """It is the process itself: it handles the signal, or dies of it."""
    script = tmp_path / "wait.py"
    script.write_text("import time\nprint('up', flush=True)\ntime.sleep(60)\n")
    with subprocess.Popen([*RUN, "--", str(script)], stdout=subprocess.PIPE, env=environment()) as child:
        assert child.stdout is not None and child.stdout.readline() == b"up\n"
        child.send_signal(signal.SIGTERM)
        assert child.wait(20) == -signal.SIGTERM


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no command; expected a script"),
        (["-m"], "-m needs the name of a module"),
        (["--", "absent.py", "--lr", "1"], 'no such file "absent.py"; looked in'),
        (["--", "no-such-launcher"], 'no script and no program "no-such-launcher"; looked in'),
        (["--json", "train.py"], "stdout is the command's own"),
        (["--environment", "train.py"], "--environment runs nothing"),
    ],
)
def test_what_cannot_be_run_is_bad_usage(words: list[str], said: str) -> None:
    """Exit 2 and a sentence, nothing on stdout."""
    ended = done(*RUN, *words)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert said in " ".join(ended.stderr.split())


# -- the environment for jobs whose command line cannot change --------------------------------------


def test_the_environment_alone_does_the_same(tmp_path: Path) -> None:
    """What --environment prints can be evaluated by a shell, keeps PYTHONPATH, and is there as JSON."""
    printed = done(*RUN, "--environment", PYTHONPATH=f"{CHECKOUT}:{tmp_path}/a b")
    found = done("/bin/sh", "-c", f'{printed.stdout} printf %s "$PYTHONPATH"').stdout
    assert found == f"{HOOK}:{CHECKOUT}:{tmp_path}/a b"
    document = json.loads(done(*RUN, "--environment", "--json").stdout)
    assert document == {"environment": {"PYTHONPATH": f"{HOOK}:{CHECKOUT}"}}
    assert done(*RUN, "--environment", PYTHONPATH=found).stdout == printed.stdout


def test_a_sitecustomize_that_ours_hides_runs_too(tmp_path: Path) -> None:
    """A site's own start-up code is not lost."""
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.theirs = 1\n")
    source = "import sys; print(sys.theirs, type(sys.meta_path[0]).__name__)"
    ours = done(*RUN, "--", sys.executable, "-c", source, PYTHONPATH=f"{CHECKOUT}:{tmp_path}")
    assert ours.stdout == "1 WhenImported\n", ours.stderr


@pytest.mark.parametrize(("word", "there"), [("0", False), ("Off", False), ("on", True), ("flase", True)])
def test_switched_off_nothing_is_put_in_place(word: str, there: bool) -> None:
    """AUTOTUNE_OFFLOAD=0 leaves Python's imports alone; a word that nobody knows is refused later, in words."""
    source = "import sys; print([type(each).__name__ for each in sys.meta_path])"
    found = done(*RUN, "--", sys.executable, "-c", source, AUTOTUNE_OFFLOAD=word)
    assert found.returncode == 0 and ("WhenImported" in found.stdout) is there


FAKE_DEEPSPEED = {
    "deepspeed/__init__.py": "def initialize():\n    return 'stock'\n",
    "ask.py": (
        "import importlib.util\nassert importlib.util.find_spec('deepspeed')\nimport deepspeed\n"
        "print(deepspeed.initialize())\n"
    ),
}


def test_where_our_package_is_missing_the_script_runs_with_a_warning(tmp_path: Path) -> None:
    """Another environment's Python, started below `run`, loses nothing; asking for DeepSpeed does not count."""
    for name, text in FAKE_DEEPSPEED.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    ended = done(
        sys.executable,
        "-S",
        "-c",
        (
            f"import sys; sys.path[:0] = [{str(HOOK)!r}, {str(tmp_path)!r}]; sys.path.remove({str(CHECKOUT)!r})\n"
            "import sitecustomize, ask"
        ),
    )
    assert ended.stdout == "stock\n", ended.stderr
    assert "autotune-offload: not tuned, ModuleNotFoundError" in ended.stderr
    assert f"is it installed for {sys.executable}?" in ended.stderr
