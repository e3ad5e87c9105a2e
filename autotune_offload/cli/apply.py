"""`autotune-offload apply`: a ds_config in, the tuned one out, with every change and its reason."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec import structs

from autotune_offload.cli import options
from autotune_offload.cli.outcome import SAVED
from autotune_offload.cli.output import emit_json, notice, stdout_set_aside
from autotune_offload.cli.stored import find_profile, fitting_profile, open_store
from autotune_offload.errors import ConfigError

if TYPE_CHECKING:
    from autotune_offload.config.tune import Tuned
    from autotune_offload.profiles.store import Store
    from autotune_offload.records import Change, Choice, Drive, Profile, Settings


@click.command("apply", short_help="Write the choice into a ds_config: the tuned config and a diff.")
@click.argument("config", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write there."
)
@click.option("--profile", metavar="PROFILE", help="A file or the start of a key [default: this host's].")
@click.option("--diff", "as_diff", is_flag=True, help="Show a unified diff on stderr too.")
@options.cache_option
@options.json_option
def command(
    *,
    config: Path,
    output: Path | None,
    profile: str | None,
    as_diff: bool,
    cache: Path | None,
    as_json: bool,
) -> None:
    """Write the stored choice into CONFIG: the tuned config to stdout, or to FILE with -o.

    CONFIG itself is never changed. What changed and why goes to stderr. --json gives the tuned config
    together with the list of changes as one document.
    """
    from autotune_offload.config import reading

    config, on_the_way = reading.followed(config)
    for sentence in on_the_way:
        notice(sentence)
    _refuse_the_input(config, output)
    with stdout_set_aside():
        store = open_store(cache)
        found, path = find_profile(store, profile) if profile else fitting_profile(store)
        before, tuned = _tune(config, found, store)
        text = config.read_text(encoding="utf-8-sig")
    _explain_changes(config, before, tuned, text=text, as_diff=as_diff)
    if output is not None:
        _write(output, _dump(tuned.config, text))
    if as_json:
        emit_json(_document(tuned, path, output))
    elif output is None:
        click.echo(_dump(tuned.config, text), nl=False)


def _refuse_the_input(config: Path, output: Path | None) -> None:
    if output is not None and output.exists() and output.samefile(config):
        raise click.UsageError(f"-o {output} is CONFIG itself, which is never rewritten; name another file")


def _tune(config: Path, profile: Profile, store: Store | None = None) -> tuple[dict[str, Any], Tuned]:
    from autotune_offload.config import block, lost_gradients, nvme, reading, tune
    from autotune_offload.machine import host

    before = reading.read(config)
    settings = block.settings(before)
    if not settings.enabled:
        off = f'"{block.BLOCK}": {{"enabled": false}} in {config}: nothing was tuned'
        return before, tune.Tuned(config=before, changes=(), notices=(off,))
    version = host.software().deepspeed
    lost = lost_gradients.lost_by(before, version)
    # whoever takes the file to plain DeepSpeed has DeepSpeed's own code carry the gradients
    tuned = tune.tune(before, profile.choice, version=version, keep=settings.keep, carried=False)
    swaps = nvme.fitted(
        tuned.config,
        _drive(before, store),
        profile.workload,
        profile.limits,
        version=version,
        keep=settings.keep,
    )
    notices = (
        *((lost.sentence,) if lost is not None else ()),
        *_disagreements(settings, profile.choice),
        *tuned.notices,
        *swaps.notices,
    )
    changes = (*tuned.changes, *swaps.changes)
    return before, structs.replace(tuned, config=swaps.config, changes=changes, notices=notices)


def _drive(config: dict[str, Any], store: Store | None) -> Drive | None:
    """What was measured of the first folder that this configuration swaps to."""
    from autotune_offload.config import nvme
    from autotune_offload.machine import host
    from autotune_offload.profiles import drives

    folders = nvme.folders(config)
    if store is None or not folders:
        return None
    return drives.measured(store, host.facts().name, Path(folders[0]))


def _disagreements(settings: Settings, choice: Choice) -> Iterator[str]:
    """What the config's own block fixes and the stored choice has otherwise."""
    for name in ("path", "cast", "buffer_bytes", "buffer_count", "host_threads"):
        fixed, chosen = getattr(settings, name), getattr(choice, name)
        if fixed not in ("auto", chosen):
            yield f"the config fixes {name} {fixed!r}; the stored choice, whose keys these are, has {chosen!r}"


def _explain_changes(config: Path, before: dict[str, Any], tuned: Tuned, *, text: str, as_diff: bool) -> None:
    for each in tuned.notices:
        notice(f"note: {each}")
    if as_diff:
        notice(_unified_diff(config, _dump(before, text), _dump(tuned.config, text)))
    if not tuned.changes:
        notice("no key was changed")
    for change in tuned.changes:
        notice(f"{written(change)}\n    {change.reason}")


def written(change: Change) -> str:
    """``key: before -> after``, values as in JSON."""
    before = "absent" if change.before is None else json.dumps(change.before)
    after = "removed" if change.after is None else json.dumps(change.after)
    return f"{change.key}: {before} -> {after}"


def _unified_diff(config: Path, before: str, after: str) -> str:
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), str(config), f"{config} (tuned)", lineterm=""
    )
    return "\n".join(lines)


def _dump(config: dict[str, Any], text: str) -> str:
    """`config` as JSON in the user's own manner: indentation and spelling of numbers as in `text`.

    The two then compare line by line.
    """
    from autotune_offload.config import reading

    spellings: list[str] = []
    spelt = _as_spelt(config, reading.spelt(text), spellings)
    found = re.search(r"^([ \t]+)\S", text, re.MULTILINE)
    try:
        dumped = (
            json.dumps(spelt, indent=found[1] if found else 2, ensure_ascii=False, allow_nan=False) + "\n"
        )
    except ValueError as error:
        raise ConfigError(f"the config cannot be written as JSON: {error}; write a finite number") from error
    return re.sub(rf'"{_MARK}(\d+)"', lambda mark: spellings[int(mark[1])], dumped)


_MARK = "\ufdd0number "
"""Opens the place of a number in its own spelling; a noncharacter of Unicode, which no config holds."""


def _as_spelt(value: Any, source: Any, spellings: list[str]) -> Any:
    """`value` with a mark for every number that `source` has, the same, in another spelling."""
    if isinstance(value, dict) and isinstance(source, dict):
        return {key: _as_spelt(item, source.get(key), spellings) for key, item in value.items()}
    if isinstance(value, list) and isinstance(source, list) and len(value) == len(source):
        return [_as_spelt(*pair, spellings) for pair in zip(value, source, strict=True)]
    text = getattr(source, "text", None)
    if text is None or isinstance(value, bool) or value != float(text):
        return value
    spellings.append(text)
    return f"{_MARK}{len(spellings) - 1}"


def _write(output: Path, text: str) -> None:
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {error.strerror}; name another file with -o") from error
    click.get_current_context().meta[SAVED] = output
    notice(f"written: {output}")


def _document(tuned: Tuned, profile: Path | None, output: Path | None) -> dict[str, Any]:
    from autotune_offload.records import to_plain

    return {
        "config": tuned.config,
        "changes": to_plain(tuned.changes),
        "notices": list(tuned.notices),
        "profile": str(profile) if profile else None,
        "output": str(output) if output else None,
    }
