"""`autotune-offload run`: a script or a launcher as it is, with DeepSpeed tuned in every process below it."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

import click

from autotune_offload import switch
from autotune_offload.cli import options, parent
from autotune_offload.cli.output import emit_json

HOOK = Path(__file__).resolve().parents[1] / "api" / "hook"
"""The folder whose `sitecustomize` Python runs at its start where it is on PYTHONPATH."""

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""torch asks the kernel for huge pages behind its host memory where this is 1 when a process starts."""


@click.command(
    "run",
    short_help="Run a script that calls DeepSpeed itself, tuned and unchanged.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option(
    "--environment",
    is_flag=True,
    help="Only print the environment, for a job whose command line cannot change.",
)
@options.json_option
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[--] COMMAND [ARGUMENTS]...")
def command(*, environment: bool, as_json: bool, command: tuple[str, ...]) -> None:
    """Run COMMAND with every deepspeed.initialize and zero.Init below it tuned.

    COMMAND is a Python script, -m and a module, or a launcher such as deepspeed, torchrun or accelerate with its
    own arguments. Arguments, exit status, signals and output are its own. What was chosen goes to stderr, and at
    the end in which processes. AUTOTUNE_OFFLOAD=0 in the environment runs it untuned.

    --json goes with --environment alone, since stdout is COMMAND's.
    """
    variables = {
        "PYTHONPATH": _with_hook(os.environ.get("PYTHONPATH", "")),
        HUGE_PAGES: os.environ.get(HUGE_PAGES, "1"),
    }
    if environment:
        if command:
            raise click.UsageError("--environment runs nothing; leave the command out")
        _show(variables, as_json=as_json)
        return
    if as_json:
        raise click.UsageError(
            "stdout is the command's own, so --json goes with --environment only; options of the command "
            "come after its name"
        )
    if not command:
        raise click.UsageError("no command; expected a script, -m MODULE, or a launcher and its arguments")
    resolved = _resolved(command)
    if _switched_off():
        _become(resolved, dict(os.environ))
    its_environment = {**os.environ, **variables}
    if not parent.possible():
        _become(resolved, its_environment)
    _watched(resolved, its_environment)


def _switched_off() -> bool:
    with contextlib.suppress(ValueError):  # refused below, where it can be told in words
        return switch.is_off()
    return False


def _with_hook(path: str) -> str:
    others = [entry for entry in path.split(os.pathsep) if entry and Path(entry) != HOOK]
    return os.pathsep.join([str(HOOK), *others])


def _show(variables: dict[str, str], *, as_json: bool) -> None:
    if as_json:
        emit_json({"environment": variables})
        return
    for name, value in variables.items():
        click.echo(f"export {name}={shlex.quote(value)}")


def _resolved(command: tuple[str, ...]) -> list[str]:
    """The command with its program in full: this Python for a script or module, else what PATH gives."""
    first = Path(command[0])
    python = [sys.executable, *["-u"] * bool(getattr(sys.stdout, "write_through", False))]
    if command[0] == "-m":
        if len(command) < 2:
            raise click.UsageError("-m needs the name of a module")
        return [*python, *command]
    if (first.is_file() and not os.access(first, os.X_OK)) or first.suffix in (".py", ".pyz"):
        if not first.exists():
            raise click.UsageError(f'no such file "{first}"; looked in {first.absolute().parent}')
        return [*python, *command]
    # The launchers are installed beside this Python, whose folder need not be on PATH.
    beside = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])
    found = shutil.which(command[0], path=beside)
    if found is None:
        raise click.UsageError(f'no script and no program "{command[0]}"; looked in {Path.cwd()} and on PATH')
    return [found, *command[1:]]


def _watched(command: list[str], environment: dict[str, str]) -> NoReturn:
    """Run the command, end as it ends, and say before in which processes DeepSpeed was tuned."""
    from autotune_offload.api import reached

    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with tempfile.TemporaryDirectory(prefix="autotune-offload-run-", ignore_cleanup_errors=True) as folder:
        try:
            status = parent.run(command, {**environment, reached.VARIABLE: folder})
        except OSError as error:
            raise click.UsageError(f'"{command[0]}" cannot be run: {error.strerror}') from error
        with contextlib.suppress(OSError):
            click.echo(f"autotune-offload run: {reached.read(Path(folder)).sentence()}", err=True)
    parent.end_as(status)


def _become(command: list[str], environment: dict[str, str]) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores them, and what it ignores is inherited
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execve(command[0], command, environment)
    except OSError as error:
        raise click.UsageError(f'"{command[0]}" cannot be run: {error.strerror}') from error
