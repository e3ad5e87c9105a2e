"""`autotune-offload probe`: measure this host, choose, save the profile."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import click

from autotune_offload.cli import options, together
from autotune_offload.cli.outcome import SAVED
from autotune_offload.cli.output import console, emit_json, notice, stdout_set_aside
from autotune_offload.cli.progress import Reporter
from autotune_offload.cli.stored import open_store

if TYPE_CHECKING:
    from autotune_offload.profiles.fleet import Survey
    from autotune_offload.profiles.store import Miss, Store
    from autotune_offload.records import Profile, Settings, Workload

PLANS = ("quick", "standard", "thorough")
PathWanted = Literal["auto", "direct", "pinned", "staged", "deepspeed"]
CastWanted = Literal["auto", "device", "host"]
"""As in the ``autotune_offload`` block (`records.Settings`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    workload: Workload | None
    plan: str | None
    budget_seconds: float | None
    max_pinned_bytes: int | None
    path: PathWanted
    cast: CastWanted
    refresh: bool
    save: bool
    collect: Path | None


@click.command("probe", short_help="Measure this host, choose, save the profile.")
@click.option(
    "--budget",
    type=options.budget_seconds,
    metavar="SECONDS",
    help="Time to measure for, imports not counted.",
)
@click.option("--plan", type=click.Choice(PLANS), help="How much to measure [default: standard].")
@options.workload_options("--world-size")
@click.option(
    "--max-pinned",
    type=options.byte_size,
    metavar="SIZE",
    help="Never page-lock more than this: 4GiB, 512MiB.",
)
@click.option(
    "--path",
    type=click.Choice(get_args(PathWanted)),
    default="auto",
    help="Try this path alone [default: all].",
)
@click.option(
    "--cast",
    type=click.Choice(get_args(CastWanted)),
    default="auto",
    help="Cast to fp32 there alone [default: both].",
)
@click.option("--refresh", is_flag=True, help="Measure again, even where a stored profile fits.")
@click.option("--no-save", is_flag=True, help="Do not store what was measured.")
@click.option(
    "--collect",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Under a launcher: put every rank's profile here as well, for `fleet`.",
)
@click.option(
    "--nvme",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Measure this folder's drive the way DeepSpeed swaps, in place of the host.",
)
@options.cache_option
@options.json_option
def command(
    *,
    budget: float | None,
    plan: str | None,
    params: int | None,
    model: Path | None,
    world_size: int | None,
    accumulation_steps: int | None,
    dtype: str | None,
    max_pinned: int | None,
    path: PathWanted,
    cast: CastWanted,
    refresh: bool,
    no_save: bool,
    collect: Path | None,
    nvme: Path | None,
    cache: Path | None,
    as_json: bool,
) -> None:
    """Measure how this host moves offload data, choose, and save the profile.

    Where a stored profile fits this environment and workload it is used; --refresh measures again. Started by a
    launcher (`torchrun --nproc-per-node 8 -m autotune_offload probe`), all ranks of all hosts measure at once, and
    the first one prints a table of all.
    """
    if params is not None and model is not None:
        raise click.UsageError("--params and --model both describe the model; give one of them")
    if nvme is not None:
        described = options.workload(params, model, world_size, accumulation_steps, dtype)
        _nvme(nvme, described, cache, budget, ranks=world_size or 1, save=not no_save, as_json=as_json)
        return
    with stdout_set_aside():
        launched = together.ranks()
        if launched > 1 and world_size is None:
            world_size = launched
        request = _Request(
            workload=options.workload(params, model, world_size, accumulation_steps, dtype),
            plan=plan,
            budget_seconds=budget,
            max_pinned_bytes=max_pinned,
            path=path,
            cast=cast,
            refresh=refresh,
            save=not no_save,
            collect=collect,
        )
        if launched > 1:
            survey = _together(open_store(cache), request)
        else:
            profile, saved = _obtain(open_store(cache), request)
    if launched > 1:
        together.show(survey, as_json=as_json)
    elif as_json:
        from autotune_offload.records import to_plain

        emit_json(to_plain(profile))
    else:
        from autotune_offload.cli.readable import print_profile

        print_profile(console(), profile, saved)


def _nvme(
    folder: Path,
    workload: Workload | None,
    cache: Path | None,
    seconds: float | None,
    *,
    ranks: int,
    save: bool,
    as_json: bool,
) -> None:
    """A drive in place of the host."""
    from autotune_offload.cli import nvme

    with stdout_set_aside():
        drive = nvme.measure(open_store(cache), folder, workload, seconds=seconds, ranks=ranks, save=save)
    if as_json:
        from autotune_offload.records import to_plain

        emit_json({"drive": to_plain(drive), **nvme.section(drive)})
    else:
        nvme.show(drive)


def _obtain(store: Store, request: _Request) -> tuple[Profile, Path | None]:
    """The stored profile that fits, else a new one, and where it is stored."""
    found = None if request.refresh else _stored(store, request)
    if isinstance(found, tuple):
        return found
    why_not_saved = store.why_not_writable() if request.save else None
    if why_not_saved is not None:
        notice(f"measuring without a cache: {why_not_saved}")
    elif found is not None:
        notice(found.reason)
    profile = _measure(request, found)
    return profile, _save(store, profile) if request.save and why_not_saved is None else None


def _stored(store: Store, request: _Request) -> tuple[Profile, Path] | Miss:
    from autotune_offload.profiles.lookup import lookup
    from autotune_offload.records import Profile

    found = lookup(store, request.workload, settings=_settings(request))
    if not isinstance(found, Profile):
        return found
    unused = [name for name, value in _measuring_options(request).items() if value is not None]
    ignored = f"; {' and '.join(unused)} had no effect" if unused else ""
    notice(f"used the profile of {found.created}, plan {found.plan}{ignored}; --refresh measures again")
    return found, store.path_of(found.fingerprint)


def _measuring_options(request: _Request) -> dict[str, object]:
    return {"--plan": request.plan, "--budget": request.budget_seconds}


def _settings(request: _Request) -> Settings:
    """What the options fix, as the ``autotune_offload`` block would."""
    from autotune_offload.records import Settings

    return Settings(
        path=request.path,
        cast=request.cast,
        max_pinned_bytes="auto" if request.max_pinned_bytes is None else request.max_pinned_bytes,
    )


def _together(store: Store, request: _Request) -> Survey | None:
    from autotune_offload.api.probe import load_plan

    found = None if request.refresh else _stored(store, request)
    missed = None if isinstance(found, tuple) else found
    if missed is not None:
        notice(missed.reason)
    plan = load_plan(request.plan or "standard", request.budget_seconds)
    return together.probe_together(
        store,
        found[0] if isinstance(found, tuple) else None,
        lambda ranks_per_host: _measure(request, missed, ranks_per_host),
        measure_seconds=plan.budget_seconds,
        save=request.save,
        collect=request.collect,
    )


def _measure(request: _Request, missed: Miss | None, ranks_per_host: int = 1) -> Profile:
    from autotune_offload.api.probe import probe

    with Reporter("measuring this host") as progress:
        return probe(
            workload=request.workload,
            plan=request.plan or "standard",
            budget_seconds=request.budget_seconds,
            max_pinned_bytes=request.max_pinned_bytes,
            settings=_settings(request),
            progress=progress,
            missed=missed,
            ranks_per_host=ranks_per_host,
        )


def _save(store: Store, profile: Profile) -> Path | None:
    """Where it was saved, or None with a notice: what was measured is shown all the same."""
    from autotune_offload.errors import ProfileError

    try:
        path = store.save(profile)
    except ProfileError as error:
        notice(f"not saved: {error}")
        return None
    click.get_current_context().meta[SAVED] = path
    return path
