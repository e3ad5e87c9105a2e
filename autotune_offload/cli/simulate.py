"""`autotune-offload simulate`: the same decision on a described machine, no device needed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autotune_offload import units
from autotune_offload.cli import options
from autotune_offload.cli.output import console, emit_json, notice, stdout_set_aside
from autotune_offload.cli.probe import PLANS
from autotune_offload.cli.progress import Reporter
from autotune_offload.cli.trace import trace_option, write_trace

if TYPE_CHECKING:
    from rich.console import Console

    from autotune_offload.described.machine import Machine
    from autotune_offload.records import Accumulated, Baseline, Profile, Workload


_PINS = {(True, True): "both", (True, False): "state", (False, True): "params", (False, False): "none"}


@click.command("simulate", short_help="The same decision on a described machine.")
@click.argument("machine", required=False)
@click.option("--all", "every", is_flag=True, help="All machines that are known by name, as one table.")
@click.option(
    "--from-profile",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The machine that a stored profile was measured on.",
)
@click.option(
    "--write",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Save the machine's description as YAML; existing files stay.",
)
@trace_option
@click.option("--list", "listing", is_flag=True, help="List the machines and end.")
@options.workload_options("--ranks")
@click.option("--plan", type=click.Choice(PLANS), default="standard", help="How much to measure.")
@click.option("--budget", type=options.budget_seconds, metavar="SECONDS", help="Virtual time to measure for.")
@click.option(
    "--max-pinned",
    type=options.byte_size,
    metavar="SIZE",
    help="Never page-lock more than this: 4GiB, 512MiB, 0B.",
)
@click.option("--noise", type=click.FloatRange(min=0), default=0.0, help="Relative spread of all times.")
@click.option("--seed", type=int, default=0, help="Of the noise.")
@options.json_option
def command(
    *,
    machine: str | None,
    every: bool,
    from_profile: Path | None,
    write: Path | None,
    trace: Path | None,
    listing: bool,
    params: int | None,
    model: Path | None,
    ranks: int | None,
    accumulation_steps: int | None,
    dtype: str | None,
    plan: str,
    budget: float | None,
    max_pinned: int | None,
    noise: float,
    seed: int,
    as_json: bool,
) -> None:
    """Probe a described machine on a virtual clock, and choose.

    MACHINE is a name (--list shows them) or a YAML file. Times are virtual seconds.
    """
    if sum((machine is not None, every, from_profile is not None, listing)) != 1:
        raise click.UsageError("give one of MACHINE, --all, --from-profile FILE or --list")
    if params is not None and model is not None:
        raise click.UsageError("--params and --model both describe the model; give one of them")
    if write is not None and (every or listing):
        raise click.UsageError("--write saves one machine; give MACHINE or --from-profile")
    if listing:
        _list(as_json)
        return
    with stdout_set_aside():
        found = _machines(machine, from_profile)
        if write is not None:
            _write(found[0], write)
        workload = options.workload(params, model, ranks, accumulation_steps, dtype)
        run = _Run(workload, plan, budget, max_pinned, noise, seed)
        profiles = run.all(found)
    write_trace(trace, [(machine.name, each) for machine, each in zip(found, profiles, strict=True)])
    _print(found, profiles, every=every, as_json=as_json)


class _Run:
    """One set of options for any number of machines."""

    def __init__(
        self,
        workload: Workload | None,
        plan: str,
        budget_seconds: float | None,
        max_pinned_bytes: int | None,
        noise: float,
        seed: int,
    ) -> None:
        self.workload, self.plan, self.budget_seconds = workload, plan, budget_seconds
        self.max_pinned_bytes, self.noise, self.seed = max_pinned_bytes, noise, seed

    def all(self, machines: list[Machine]) -> list[Profile]:
        with Reporter("simulating") as progress:
            return [
                self._one(
                    machine,
                    lambda _, share, m=machine, i=index: progress(m.name, (i + share) / len(machines)),
                )
                for index, machine in enumerate(machines)
            ]

    def _one(self, machine: Machine, progress: Any) -> Profile:
        from autotune_offload.api.probe import probe
        from autotune_offload.described.simulated import SimulatedDevice

        ranks = self.workload.world_size if self.workload else 1
        return probe(
            workload=self.workload,
            plan=self.plan,
            budget_seconds=self.budget_seconds,
            max_pinned_bytes=self.max_pinned_bytes,
            device=SimulatedDevice(machine, ranks=ranks, noise=self.noise, seed=self.seed),
            progress=progress,
        )


def _machines(name: str | None, profile: Path | None) -> list[Machine]:
    """What was asked for; all that are known by name where nothing was."""
    from autotune_offload.described import machine as described_machine

    if profile is not None:
        from autotune_offload.described.from_profile import machine_from
        from autotune_offload.profiles.store import Store

        return [machine_from(Store().load(profile), profile.stem)]
    return [
        described_machine.load(each) for each in ([name] if name is not None else described_machine.names())
    ]


def _write(machine: Machine, file: Path) -> None:
    import yaml

    from autotune_offload.described import machine as described_machine
    from autotune_offload.errors import ConfigError

    text = yaml.safe_dump(described_machine.plain(machine), sort_keys=False, width=100)
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(text)
    except FileExistsError:
        raise ConfigError(f'"{file}" exists already; name another file') from None
    except OSError as error:
        raise ConfigError(f'"{file}" cannot be written: {error.strerror}; name another file') from error
    notice(f"saved {file}")


def _list(as_json: bool) -> None:
    from autotune_offload.described import machine as described_machine

    known = [described_machine.load(name) for name in described_machine.names()]
    if as_json:
        emit_json({"machines": [{"name": m.name, "kind": m.kind, "title": m.title} for m in known]})
        return
    for machine in known:
        click.echo(f"{machine.name:18} {machine.title}")


# -- output ---------------------------------------------------------------------------------------


def _print(machines: list[Machine], profiles: list[Profile], *, every: bool, as_json: bool) -> None:
    pairs = list(zip(machines, profiles, strict=True))
    if as_json:
        documents = [_document(*pair) for pair in pairs]
        emit_json({"machines": documents} if every else documents[0])
    elif every:
        _print_table(console(), pairs)
    else:
        _print_one(console(), *pairs[0])


def _document(machine: Machine, profile: Profile) -> dict[str, Any]:
    """The document of a probe, and what it was simulated from."""
    from autotune_offload.records import to_plain

    calibrated = list(machine.sourced("calibrated"))
    described = {"name": machine.name, "title": machine.title, "calibrated": calibrated}
    document: dict[str, Any] = to_plain(profile)
    return {**document, "machine": described, "virtual_seconds": profile.elapsed_seconds}


def _print_one(out: Console, machine: Machine, profile: Profile) -> None:
    from autotune_offload.cli.readable import print_profile

    out.print(f"simulated: {machine.name}, {machine.title}; all times are virtual", style="bold")
    kinds = {source.kind for source in machine.sources}
    counts = [f"{len(machine.sourced(kind))} {kind}" for kind in sorted(kinds)]
    out.print(f"its numbers: {', '.join(counts)}")
    if machine.compute is None:
        out.print("it tells no compute.tflops, so copies have nothing to hide behind")
    out.print()
    print_profile(out, profile, None)


def _print_table(out: Console, pairs: list[tuple[Machine, Profile]]) -> None:
    from autotune_offload.cli.readable import table

    grid = table("machine", "choice", "pins", right=("adds", "own", "gain", "best", "virtual"))
    for machine, profile in pairs:
        grid.add_row(machine.name, *_row(profile))
    out.print(grid)
    several = any(profile.accumulations for _, profile in pairs)
    over = "an accumulation (of four micro-steps where there are more)" if several else "a backward pass"
    legend = f"Time added to {over} by the choice, by the installed DeepSpeed's own code, and by the best of "
    versions = "its two memories" if several else "any version's"
    adds = " ^: micro-steps are added up on the host." if several else ""
    out.print(f"{legend}{versions}. =: DeepSpeed's own code is kept.{adds} All times are virtual.")
    _print_steps(out, pairs)


def _print_steps(out: Console, pairs: list[tuple[Machine, Profile]]) -> None:
    """The optimizer step of each, as predicted."""
    from autotune_offload.cli.readable import heading, table

    heading(out, "Optimizer step: the compiled pass against DeepSpeed's own")
    grid = table("machine", "weights go", right=("threads", "step", "threads", "own", "gain"))
    for machine, profile in pairs:
        decided, rates = profile.step, profile.step_rates
        if decided is not None and rates is not None:
            grid.add_row(
                machine.name,
                decided.back,
                str(decided.threads or units.MISSING),
                units.duration(decided.chosen.predicted_seconds),
                str(rates.threads),
                units.duration(decided.own.predicted_seconds),
                units.times(decided.gain),
            )
    out.print(grid)
    out.print(
        "Predicted from what was timed; threads: host threads of each. With several ranks DeepSpeed's own has one, "
        "as launchers set it."
    )


def _row(profile: Profile) -> list[str]:
    from autotune_offload.reports.alternatives import deciding

    choice, found = profile.choice, deciding(profile)
    rows: Sequence[Baseline | Accumulated] = [row for row in profile.accumulations if row.stock]
    stock = [each.measured_seconds for each in rows or profile.baselines if each.measured_seconds is not None]
    on_host = " ^" if choice.accumulate == "host" else ""
    return [
        f"{choice.path} {choice.cast}{on_host}{'' if choice.beats_deepspeed else ' ='}",
        _PINS[choice.pin_optimizer, choice.pin_parameters],
        units.duration(found.chosen_seconds),
        units.duration(found.own_seconds),
        units.times(choice.gain),
        units.duration(min(stock, default=None)),
        units.duration(profile.elapsed_seconds),
    ]
