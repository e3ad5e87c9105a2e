"""What doctor found as one block to paste into an issue: without names of users, of this host, of homes."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from autotune_offload.doctor.examine import Examination
from autotune_offload.records import HostFacts, Software
from autotune_offload.units import size

MARKER = "<!-- autotune-offload doctor -->"
"""The first line: by it whoever reads issues finds the block, and a page shows nothing of it."""

_UNTOLD = frozenset({"", "root", "unknown", "localhost"})
"""Names that say nothing of anybody."""


def block(found: Examination, facts: HostFacts, software: Software) -> str:
    """The marker, then everything in one fence, so that no path or comparison is taken for markup."""
    hidden = Hidden.here()
    lines = [*_facts(found, facts, software, hidden), "", *_findings(found, hidden)]
    text = "\n".join(lines)
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    return f"{MARKER}\n{fence}text\n{text}\n{fence}"


class Hidden:
    """Takes out of a text what says who somebody is: `~`, USER and HOST stand there instead."""

    def __init__(self, homes: frozenset[str], users: frozenset[str], host: str) -> None:
        replaced = [(re.escape(home) + r"(?![\w.-])", "~") for home in sorted(homes, key=len, reverse=True)]
        replaced.append((r"/(home|Users)/(?!USER\b)[\w.@+-]+", r"/\1/USER"))
        # as a part of a path or before an at sign; a user may be called like a word of the text
        replaced += [(rf"(?<=/){re.escape(user)}(?![\w.-])", "USER") for user in sorted(users - _UNTOLD)]
        replaced += [(rf"\b{re.escape(user)}(?=@)", "USER") for user in sorted(users - _UNTOLD)]
        if host not in _UNTOLD:
            replaced.append((rf"(?<![\w.-]){re.escape(host)}(?![\w-])", "HOST"))
        self._replaced = [(re.compile(pattern), by) for pattern, by in replaced]

    @classmethod
    def here(cls) -> Hidden:
        """For this process's user, home and host."""
        homes, users = set[str](), {os.environ.get("USER", ""), os.environ.get("LOGNAME", "")}
        with suppress(RuntimeError):  # no home directory
            home = Path.home()
            homes |= {str(home), str(home.resolve())} - {"/", "/root"}
            users.add("" if str(home) == "/" else home.name)
        with suppress(ImportError, KeyError):  # a user whom no table knows, as in many a container
            import pwd

            users.add(pwd.getpwuid(os.getuid()).pw_name)
        return cls(frozenset(homes), frozenset(users), platform.node())

    def out_of(self, text: str) -> str:
        """`text` on one line without the names."""
        text = " ".join(text.split())
        for pattern, by in self._replaced:
            text = pattern.sub(by, text)
        return text


def _facts(found: Examination, facts: HostFacts, software: Software, hidden: Hidden) -> Iterator[str]:
    yield f"autotune-offload {software.autotune_offload}, DeepSpeed {software.deepspeed}, torch {software.torch}"
    yield f"Python {software.python}, {facts.platform}{', WSL' if facts.wsl else ''}"
    yield f"device: {_device(found, hidden)}"
    bound = ", bound to one" if facts.numa_bound else ""
    yield (
        f"host: {facts.cpu_model}, {facts.affinity_cpus} of {facts.cpu_count} CPUs, {size(facts.ram_bytes)} RAM, "
        f"{size(facts.swap_bytes)} swap, NUMA nodes: {facts.numa_nodes}{bound}"
    )
    for name, origin in found.host_passes.items():
        yield f"pass {name}: {hidden.out_of(origin)}"


def _device(found: Examination, hidden: Hidden) -> str:
    said: Mapping[str, Any] = found.said.answers.get("device") or {}
    if not said:
        return hidden.out_of(
            f"no answer: {found.said.errors.get('device') or found.said.died or 'not asked'}"
        )
    words = [f"{said['kind']} {said['name']}, {said['count']} of them, pins through {said['pin_backend']}"]
    if said.get("memory_bytes"):
        words.append(size(said["memory_bytes"]))
    for name in ("capability", "driver", "link_generation", "link_width", "mig_slice", "settings"):
        if said.get(name):
            words.append(f"{name.replace('_', ' ')} {said[name]}")
    return hidden.out_of(", ".join(words))


def _findings(found: Examination, hidden: Hidden) -> Iterator[str]:
    for finding in found.findings:
        yield f"{finding.severity}: {finding.id}"
        for label, text in (("found", finding.found), ("costs", finding.costs), ("fix", finding.fix)):
            if text:
                yield f"  {label}: {hidden.out_of(text)}"
    seen = {finding.id for finding in found.findings}
    yield f"nothing found by: {', '.join(name for name in found.checks if name not in seen) or 'no check'}"
