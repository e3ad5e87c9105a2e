"""Which ranks there are, and the store through which they speak."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from typing import Any, Protocol

from autotune_offload.errors import AgreementError, ConfigError
from autotune_offload.machine import host
from autotune_offload.ranks.patience import bounded

WAIT_SECONDS = 300.0
"""For ranks that come late, after reading a checkpoint for example, unless the user sets another time."""

PREFIX = "ato"
"""Of every key of ours in the store; short, since each request carries it."""

ANNOUNCED = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
"""Where launchers say how many processes they started: torchrun and DeepSpeed, the MPIs, srun."""


_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
"""Where launchers put a process's rank: torchrun and DeepSpeed, Open MPI, MVAPICH2, Hydra, srun."""


class Store(Protocol):
    """What is used of `torch.distributed.Store`."""

    def set(self, key: str, value: Any, /) -> None:
        """Write text or bytes."""

    def get(self, key: str, /) -> bytes:
        """Read a key that is there."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter, and give its new value."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """With `expected` empty: write where nothing is yet. Gives what is there afterwards."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys are there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The ranks of a job as one of them sees them."""

    store: Store
    rank: int
    world_size: int
    host: str
    """The same on all ranks that share a host, another one elsewhere."""


def present_group() -> Group | None:
    """The initialized process group; None where there is none, or only of one rank.

    Raises:
        AgreementError: a group without a store, as one of torch's MPI backend.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    try:
        store = dist.distributed_c10d._get_default_store()
    except (AttributeError, KeyError, ValueError, RuntimeError) as error:
        raise AgreementError(f"the process group has no store to agree through: {error}") from error
    if store is None:
        raise AgreementError(f"a process group of backend {dist.get_backend()} has no store to agree through")
    return Group(store=store, rank=dist.get_rank(), world_size=dist.get_world_size(), host=host.identity())


def launched_group(seconds: float = WAIT_SECONDS) -> Group:
    """The ranks that a launcher started, by its environment alone: no process group, no device.

    Signals are heard while it waits for them.

    Raises:
        AgreementError: no RANK, WORLD_SIZE, MASTER_ADDR or MASTER_PORT, or nobody at that address.
    """
    from torch.distributed.rendezvous import rendezvous

    def met() -> Any:
        try:
            return next(iter(rendezvous("env://", timeout=datetime.timedelta(seconds=seconds))))
        except (ValueError, RuntimeError) as error:
            raise AgreementError(
                f"{told()}, and they cannot find each other: {error}; start them with deepspeed or torchrun, or set "
                f"RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; {alone()}"
            ) from error

    store, rank, world_size = bounded(met, seconds)
    return Group(store=store, rank=rank, world_size=world_size, host=host.identity())


def announced_ranks() -> int:
    """How many ranks the job has: those of the process group, else what a launcher says, else 1.

    Raises:
        ConfigError: the launcher's word is not a number.
    """
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return max((count for _, count in _announced()), default=1)


def told() -> str:
    """Who says how many ranks there are, in words: ``WORLD_SIZE=2 says that 2 ranks were started``."""
    name, count = max(_announced(), key=lambda each: each[1])
    return f"{name}={count} says that {count} ranks were started"


def alone() -> str:
    """How to have this process taken for the only one, where its variables are left over from elsewhere."""
    names = [name for name, count in _announced() if count > 1]
    return f"without a launcher, unset {' and '.join(names)} to probe this host alone"


def _announced() -> list[tuple[str, int]]:
    """What each variable of a launcher says, where it is set."""
    found = []
    for name in ANNOUNCED:
        text = os.environ.get(name, "").strip() or "1"
        if not text.isdecimal() or int(text) < 1:
            raise ConfigError(f'{name} is "{text}"; expected the number of ranks, or no such variable')
        found.append((name, int(text)))
    return found


def present_rank() -> int:
    """Of this process in the group, else as the launcher says, else 0."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    said = (os.environ.get(name, "").strip() for name in _RANKS)
    return next((int(text) for text in said if text.isdecimal()), 0)
