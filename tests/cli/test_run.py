"""`autotune-offload run`: real processes, each a script that knows nothing of it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
from pathlib import Path

import psutil
import pytest

from autotune_offload.cli.run import HOOK, HUGE_PAGES
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
    assert ours.stdout == plain.stdout
    assert ours.stderr.startswith("autotune-offload run: nothing was tuned") and ours.stderr.count("\n") == 1
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
    """It handles the signal, or dies of it; either way `run` ends as it ends."""
    for source, code in (("", -signal.SIGTERM), ("signal.signal(15, lambda *a: sys.exit(9))", 9)):
        script = tmp_path / "wait.py"
        script.write_text(f"import signal, sys, time\n{source}\nprint('up', flush=True)\ntime.sleep(60)\n")
        with subprocess.Popen([*RUN, "--", str(script)], stdout=subprocess.PIPE, env=environment()) as child:
            assert child.stdout is not None and child.stdout.readline() == b"up\n"
            child.send_signal(signal.SIGTERM)
            assert child.wait(20) == code


def test_a_parent_that_ignores_its_children_takes_nothing_away(tmp_path: Path) -> None:
    """SIGCHLD that is ignored is inherited, and would leave no status to read."""
    (tmp_path / "seven.py").write_text("raise SystemExit(7)\n")
    ended = subprocess.run(
        [*RUN, "--", "seven.py"],
        cwd=tmp_path,
        env=environment(),
        preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN),
        timeout=60,
        check=False,
    )
    assert ended.returncode == 7


def test_what_ends_run_ends_the_script(tmp_path: Path) -> None:
    """SIGKILL to the process that was started is meant for what it runs."""
    script = tmp_path / "wait.py"
    script.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)\n")
    with subprocess.Popen([*RUN, "--", str(script)], stdout=subprocess.PIPE, env=environment()) as child:
        assert child.stdout is not None
        below = psutil.Process(int(child.stdout.readline()))
        child.kill()
        assert not psutil.wait_procs([below], timeout=20)[1]


def test_what_the_terminal_sends_arrives_once(tmp_path: Path) -> None:
    """Ctrl-C goes to all processes of a terminal; `run` does not send it again."""
    script = tmp_path / "count.py"
    script.write_text(
        "import signal, sys, time\nheard = []\nsignal.signal(2, lambda *a: heard.append(1))\n"
        "print('up', flush=True)\ntime.sleep(2)\nprint('heard', len(heard), flush=True)\n"
    )
    leader, end = pty.openpty()
    with subprocess.Popen(
        [*RUN, "--", str(script)],
        stdin=end,
        stdout=end,
        stderr=end,
        env=environment(),
        preexec_fn=_own_terminal,
    ) as child:
        os.close(end)
        with open(leader, "rb", buffering=0) as terminal:
            said = b""
            while b"up" not in said:
                said += terminal.read(1000)
            os.write(leader, b"\x03")
            with contextlib.suppress(OSError):  # EIO: the last process has closed it
                while chunk := terminal.read(1000):
                    said += chunk
        assert child.wait(20) == 0
    assert b"heard 1" in said


def _own_terminal() -> None:
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


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


# -- what is said at the end ------------------------------------------------------------------------

SAYS = "from autotune_offload.api import reached; import os; reached.say(os.environ.get('WHY'))"


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ('python -c "$SAYS"', "tuned in 1 process (rank 0)"),
        (
            'for RANK in 0 1 2; do RANK=$RANK LOCAL_WORLD_SIZE=3 python -c "$SAYS"; done',
            "tuned in 3 processes (ranks 0, 1, 2)",
        ),
        (
            'RANK=1 LOCAL_WORLD_SIZE=2 python -c "$SAYS"',
            "tuned in 1 process (rank 1); 1 of the 2 ranks of this host did not report",
        ),
        ('WHY="no room" python -c "$SAYS"', "nothing was tuned; left untuned in 1 call: no room"),
        (
            "PYTHONPATH=/nowhere python -c 1; python -I -c 1",
            "seen to return below the command (0 Python processes ran with this package in place",
        ),
        (
            "python -c 1; python -c 1",
            "(2 Python processes ran with this package in place, 0 of them imported",
        ),
    ],
)
def test_run_says_at_the_end_which_processes_reported(tmp_path: Path, script: str, said: str) -> None:
    """One line, also where nothing could be reached: untuned is never without a word."""
    python = str(Path(sys.executable).parent)
    ended = done(*RUN, "--", "/bin/sh", "-c", script, SAYS=SAYS, PATH=f"{python}:{os.environ['PATH']}")
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("autotune-offload run: ")]
    assert said in line
    assert ended.returncode == 0


def test_a_real_engine_reports_itself(tmp_path: Path) -> None:
    """DeepSpeed imported, wrapped, and called: what `initialize` decided is what is said."""
    (tmp_path / "train.py").write_text(
        "import torch, deepspeed\n"
        "model = torch.nn.Linear(8, 8)\n"
        "deepspeed.initialize(model=model, model_parameters=model.parameters(), config={\n"
        "  'train_micro_batch_size_per_gpu': 1, 'zero_optimization': {'stage': 0},\n"
        "  'optimizer': {'type': 'SGD', 'params': {'lr': 0.1}}})\n"
    )
    ended = done(*RUN, "--", "train.py", cwd=tmp_path, DS_ACCELERATOR="cpu", MASTER_PORT="29741", **RANK)
    line = ended.stderr.splitlines()[-1]
    assert line.startswith("autotune-offload run: nothing was tuned; left untuned in 1 call: "), ended.stderr
    assert "nothing is offloaded" in line


# -- the environment for jobs whose command line cannot change --------------------------------------


def test_the_environment_alone_does_the_same(tmp_path: Path) -> None:
    """What --environment prints can be evaluated by a shell, keeps PYTHONPATH, and is there as JSON."""
    printed = done(*RUN, "--environment", PYTHONPATH=f"{CHECKOUT}:{tmp_path}/a b")
    found = done("/bin/sh", "-c", f'{printed.stdout} printf %s "$PYTHONPATH"').stdout
    assert found == f"{HOOK}:{CHECKOUT}:{tmp_path}/a b"
    document = json.loads(done(*RUN, "--environment", "--json").stdout)
    assert document == {"environment": {"PYTHONPATH": f"{HOOK}:{CHECKOUT}", HUGE_PAGES: "1"}}
    kept = json.loads(done(*RUN, "--environment", "--json", THP_MEM_ALLOC_ENABLE="0").stdout)
    assert kept["environment"][HUGE_PAGES] == "0"
    assert done(*RUN, "--environment", PYTHONPATH=found).stdout == printed.stdout


def test_a_sitecustomize_that_ours_hides_runs_too(tmp_path: Path) -> None:
    """A site's own start-up code is not lost."""
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.theirs = 1\n")
    source = "import sys; print(sys.theirs, type(sys.meta_path[0]).__name__)"
    ours = done(*RUN, "--", sys.executable, "-c", source, PYTHONPATH=f"{CHECKOUT}:{tmp_path}")
    assert ours.stdout == "1 WhenImported\n", ours.stderr


@pytest.mark.parametrize(("word", "there"), [("0", False), ("Off", False), ("on", True), ("flase", True)])
def test_switched_off_nothing_is_put_in_place(word: str, there: bool) -> None:
    """Off leaves Python's imports and memory alone and says nothing; a word that nobody knows is refused later."""
    source = f"import os, sys; print([type(e).__name__ for e in sys.meta_path], os.getenv({HUGE_PAGES!r}))"
    found = done(*RUN, "--", sys.executable, "-c", source, AUTOTUNE_OFFLOAD=word)
    assert found.returncode == 0 and ("WhenImported" in found.stdout) is there
    assert found.stdout.endswith("1\n" if there else "None\n")
    assert ("autotune-offload run:" in found.stderr) is there


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
