"""What the checks look at."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from autotune_offload import upstream
from autotune_offload.config import block
from autotune_offload.doctor.self_report import Answers
from autotune_offload.errors import AutotuneError
from autotune_offload.machine import host, limits
from autotune_offload.profiles.store import Store
from autotune_offload.records import Limits, Profile, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What the checks look at."""

    answers: Answers
    store: Store
    config: Mapping[str, Any] | None = None
    file: Path | None = None
    """Where the config stands, if it is a file."""
    on_the_way: tuple[str, ...] = ()
    """What was said of files that only named it."""
    unreadable: str | None = None
    """Why the config file that was named cannot be read."""
    root: Path = Path("/")
    """Where /proc and /sys lie."""
    environ: Mapping[str, str]

    @property
    def device(self) -> Mapping[str, Any]:
        """The fields of `DeviceIdentity`; none where the device did not answer."""
        return self.answers.answers.get("device") or {}

    @property
    def ranks(self) -> int:
        """Ranks on this host, as a launcher says; 1 without one."""
        return max(whole(self.environ.get("LOCAL_WORLD_SIZE")) or 1, 1)

    def limits(self, workload: Workload) -> Limits:
        """What one rank of a job may allocate and page-lock, as the probe counts it for this workload."""
        most = block.settings(self.config or {}).max_pinned_bytes
        here = limits.ranks_here(workload.world_size, int(self.device.get("count") or 1), self.environ)
        return limits.limits(
            root=self.root,
            pin_backend="torch",
            ranks_per_host=max(self.ranks, here),
            max_pinned_bytes=None if isinstance(most, str) else most,
        )

    @property
    def version(self) -> str:
        """DeepSpeed's, or the newest known one where none is installed."""
        installed = host.software().deepspeed
        return installed if version(installed) else upstream.NEWEST

    def profile(self) -> Profile | None:
        """The stored profile that fits this host."""
        path = (self.answers.answers.get("profile") or {}).get("path")
        with suppress(AutotuneError):
            return self.store.load(Path(path)) if path else None
        return None


def whole(text: str | None) -> int | None:
    """A number from 1 in an environment variable; None for anything else, as most who read them do."""
    return int(text) if text and text.strip().isdecimal() and int(text) > 0 else None


def version(text: str) -> Version | None:
    """`text` as a version; None where it is none."""
    try:
        return Version(text)
    except InvalidVersion:
        return None
