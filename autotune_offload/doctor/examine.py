"""What stands between this host, or a ds_config, and its best: every check, and what it found.

A check that fails itself becomes a finding that says so, and the others go on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune_offload.config import reading
from autotune_offload.doctor.checks import builds, host_memory, machine, nvme, pinning, profiles, software
from autotune_offload.doctor.checks import config as config_checks
from autotune_offload.doctor.checks.case import Case
from autotune_offload.doctor.self_report import Answers, ask
from autotune_offload.errors import ConfigError
from autotune_offload.profiles.store import Store
from autotune_offload.records import Finding

_ORDER = ("will break", "costs", "notice")


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """All findings, the worst first, and the names of the checks that were made."""

    findings: tuple[Finding, ...]
    checks: tuple[str, ...]
    said: Answers = field(default_factory=Answers)
    """What torch, DeepSpeed and the device said of themselves."""

    @property
    def host_passes(self) -> Mapping[str, str]:
        """Where each compiled pass comes from, or why there is none; empty where that was not answered."""
        found: Mapping[str, str] = self.said.answers.get("host_passes") or {}
        return found

    @property
    def will_break(self) -> bool:
        """Whether a run will fail as things are."""
        return any(finding.severity == "will break" for finding in self.findings)


def examine(config: Path | None = None, *, cache: Path | None = None) -> Examination:
    """Make every check on this host, and those of a ds_config where a file is named.

    What torch, DeepSpeed and the device say is asked in a child process, which takes their import.

    Args:
        config: a JSON or hjson file. One that cannot be read is a finding.
        cache: the folder of the profiles; None is the default one.
    """
    read, unreadable, on_the_way = None, None, tuple[str, ...]()
    if config is not None:
        config, on_the_way = reading.followed(config)
        try:
            read = reading.read(config)
        except ConfigError as error:
            unreadable = str(error)
    case = Case(
        answers=ask(config=read, cache=cache),
        store=Store(cache),
        config=read,
        file=config,
        on_the_way=on_the_way,
        unreadable=unreadable,
        environ=os.environ,
    )
    return run_checks(case)


def run_checks(case: Case) -> Examination:
    """Make every check that the case allows; those of the config only where one was named."""
    checks = dict(HOST_CHECKS)
    if case.config is not None or case.unreadable is not None:
        checks |= CONFIG_CHECKS
    findings = [finding for name, check in checks.items() for finding in _made(name, check, case)]
    findings.sort(key=lambda finding: _ORDER.index(finding.severity))
    return Examination(findings=tuple(findings), checks=tuple(checks), said=case.answers)


def _made(name: str, check: Check, case: Case) -> list[Finding]:
    found: list[Finding] = []
    try:
        found.extend(check(case))
    except Exception as error:  # whatever it is, the other checks are made
        words = " ".join(str(error).split())[:300]
        found.append(
            Finding(
                id=name,
                severity="notice",
                found=f"this check failed itself: {type(error).__name__}: {words}",
                costs="what it looks at is not known",
                fix="report it as a bug of autotune-offload, with this line; all other checks were made",
            )
        )
    return found


# -- the config -----------------------------------------------------------------------------------


def _config(case: Case) -> Iterator[Finding]:
    if case.unreadable is not None:
        yield Finding(
            id="config",
            severity="will break",
            found=case.unreadable,
            fix="correct the file, or name the ds_config; it is read as DeepSpeed reads it, as JSON or hjson",
        )
    for sentence in case.on_the_way:
        yield Finding(
            id="config",
            severity="notice",
            found=sentence,
            fix="none needed; name the ds_config itself to look at it alone",
        )


def _strict_json(case: Case) -> Iterator[Finding]:
    if case.file is not None and case.config is not None:
        yield from config_checks.strict_json(case.file.read_text("utf-8"))


def _parser(case: Case, config: Mapping[str, Any]) -> Iterator[Finding]:
    refusals = case.answers.answers.get("config")
    if refusals is not None:
        yield from config_checks.refused(config, refusals, case.version)
    else:
        why = case.answers.errors.get("config") or case.answers.died or "it was not asked"
        yield Finding(
            id="config-parser",
            severity="notice",
            found=f"DeepSpeed's own parser did not judge this file: {why}",
            fix="mend DeepSpeed's import first; the other checks of the file were made without it",
        )


def _of_config(check: Callable[[Case, Mapping[str, Any]], Iterable[Finding]]) -> Check:
    """A check that has nothing to look at where the file could not be read."""
    return lambda case: check(case, case.config) if case.config is not None else ()


Check = Callable[[Case], Iterable[Finding]]

HOST_CHECKS: dict[str, Check] = {
    "versions": software.versions,
    "libraries": software.libraries,
    "torch-build": software.torch_build,
    "build-lock": builds.build_lock,
    "pin-backend": pinning.pin_backend,
    "memlock": pinning.memlock,
    "cgroup": pinning.cgroup,
    "memory": host_memory.memory,
    "unified-memory": host_memory.unified_memory,
    "link": machine.link,
    "numa": machine.numa,
    "threads": machine.threads,
    "compiler": software.compiler,
    "libyaml": software.libyaml,
    "profiles": profiles.profiles,
}
"""Every check of the host, by the id of its findings."""

CONFIG_CHECKS: dict[str, Check] = {
    "config": _config,
    "strict-json": _strict_json,
    "config-keys": _of_config(lambda case, config: config_checks.keys(config)),
    "config-parser": _of_config(_parser),
    "config-auto": _of_config(lambda case, config: config_checks.autos(config, case.version)),
    "config-offload": _of_config(lambda case, config: config_checks.offload(config, case.version)),
    "super-offload": _of_config(lambda case, config: config_checks.super_offload(config, case.version)),
    "lost-gradients": _of_config(lambda case, config: config_checks.lost(config, case.version)),
    "config-legacy": _of_config(lambda case, config: config_checks.legacy(config, case.version)),
    "nvme": _of_config(nvme.nvme),
    "config-block": _of_config(lambda case, config: config_checks.block(config)),
    "zero-init": _of_config(
        lambda case, config: config_checks.zero_init(config, case.version, case.profile())
    ),
}
"""Every check of a ds_config."""
