"""The surface of the command line: every verb, argument, option, default and help text, in one file.

`surface.txt` beside this module is what scripts and people rely on. It changes on purpose only: after a
change of the command line, write it anew with ``python -m tests.cli.test_surface`` and read the difference.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from autotune_offload.cli import cli, options, probe
from autotune_offload.records import PATHS
from autotune_offload.units import significant

FILE = Path(__file__).with_name("surface.txt")


def verbs(command: click.Command, name: str = "") -> Iterator[tuple[str, click.Command]]:
    """Every command with its full name, groups before what is in them."""
    yield name, command
    if isinstance(command, click.Group):
        for part, below in sorted(command.commands.items()):
            yield from verbs(below, f"{name} {part}".strip())


def surface() -> str:
    """All of it as text, independent of the terminal and of how click lays out its help."""
    lines = (line.rstrip() for name, command in verbs(cli) for line in _described(name, command))
    return "\n".join(lines).strip() + "\n"


def _described(name: str, command: click.Command) -> Iterator[str]:
    yield f"autotune-offload {name}".strip()
    yield from textwrap.wrap(
        " ".join((command.help or "").replace("\b", "").split()),
        100,
        initial_indent="    ",
        subsequent_indent="    ",
    )
    if command.short_help:
        yield f"    in the list of verbs: {command.short_help}"
    for each in command.params:
        yield f"    {_parameter(each)}"
    yield ""


def _parameter(each: click.Parameter) -> str:
    if isinstance(each, click.Argument):
        wanted = "required" if each.required else "optional"
        return f"{(each.name or '').upper()}: {wanted}{', any number' if each.nargs == -1 else ''}"
    assert isinstance(each, click.Option)
    spelled = ", ".join([*each.opts, *each.secondary_opts])
    value = "" if each.is_flag else f" {each.metavar or _kind(each.type)}"
    default = (
        "" if each.is_flag or not isinstance(each.default, (str, int, float, Path)) else f" ({each.default})"
    )
    return f"{spelled}{value}{default}: {each.help}"


def _kind(kind: click.ParamType[Any]) -> str:
    return "|".join(map(str, kind.choices)) if isinstance(kind, click.Choice) else kind.name


def test_every_path_can_be_asked_for() -> None:
    """The command line has a list of its own, so that `--help` loads no records."""
    (path,) = (each for each in probe.command.params if each.name == "path")
    assert isinstance(path.type, click.Choice)
    assert path.type.choices == ("auto", *PATHS, "deepspeed")


def test_the_surface_is_the_one_that_was_agreed() -> None:
    """A new verb, option or wording shows here; write the file anew where it is meant."""
    agreed = FILE.read_text(encoding="utf-8")
    assert surface().splitlines() == agreed.splitlines(), (
        "the command line has changed: python -m tests.cli.test_surface"
    )


@pytest.mark.parametrize("name", [name for name, _ in verbs(cli)])
def test_help_fits_80_columns_and_names_every_option(name: str) -> None:
    """Each verb explains itself and each of its options, and exits with 0."""
    result = CliRunner().invoke(cli, [*name.split(), "--help"], prog_name="autotune-offload")
    assert result.exit_code == 0
    assert max(map(len, result.output.splitlines())) <= 80
    for each in _shown(dict(verbs(cli))[name]):
        assert any(text in result.output for text in _spellings(each)), each.name


def _shown(command: click.Command) -> list[click.Parameter]:
    """All but what launchers pass and people do not."""
    return [each for each in command.params if not getattr(each, "hidden", False)]


def _spellings(each: click.Parameter) -> list[str]:
    return [each.metavar or (each.name or "").upper()] if isinstance(each, click.Argument) else each.opts


def test_every_verb_and_option_is_explained_in_one_voice() -> None:
    """A sentence that begins with a capital and ends in a full stop, a bracket or an example."""
    for name, command in verbs(cli):
        assert command.help and command.help.strip()[0].isupper(), name
        for each in _shown(command):
            if isinstance(each, click.Option):
                assert each.help, (name, each.name)
                assert each.help[0].isupper() and each.help[-1] in ".]", (name, each.name, each.help)


@pytest.mark.parametrize(
    "name", [name for name, command in verbs(cli) if not isinstance(command, click.Group)]
)
def test_every_verb_has_json(name: str) -> None:
    """Whatever a verb says it can say as one JSON document."""
    assert "--json" in {spelled for each in dict(verbs(cli))[name].params for spelled in each.opts}


def test_the_least_budget_is_the_probes() -> None:
    """What the option refuses is what the probe would refuse."""
    from autotune_offload.api import probe
    from autotune_offload.errors import BudgetError

    least = options.LEAST_BUDGET_SECONDS
    assert probe.load_plan("quick", least).budget_seconds == least
    with pytest.raises(BudgetError, match=f"at least {significant(least, 1)} s"):
        probe.load_plan("quick", least * 0.99)


if __name__ == "__main__":
    FILE.write_text(surface(), encoding="utf-8")
