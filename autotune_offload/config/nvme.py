"""What a ds_config says about NVMe: the keys that follow from a measured drive, a model and this host's memory.

Sources: `runtime/swap_tensor/` of DeepSpeed 0.14.5 to 0.19.8. `aio.block_size` is also the smallest tensor that is
swapped (`optimizer_utils.py`, min_aio_bytes): gradients below it stay on the device, in fp32, until the step.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from msgspec import structs

from autotune_offload import units
from autotune_offload.config.reading import plain
from autotune_offload.config.sections import (
    as_flag,
    as_number,
    covers,
    device_of,
    relative,
    section,
    stage_of,
)
from autotune_offload.records import AioSetting, Change, Drive, Limits, Record, Workload
from autotune_offload.upstream import (
    AIO,
    AIO_THREADS_RENAMED_SINCE,
    OPTIMIZER_BUFFER_COUNT,
    PARAM_BUFFER_ELEMENTS,
    SUB_GROUP_ELEMENTS,
    SWAP_BUFFERS,
    SWAPPED_FROM_BYTES,
    ZERO,
    parse_version,
)

LEFT_SHARE = 0.05
"""Of all gradients, what may stay on the device at most for a block to be larger than DeepSpeed's own."""

MEMORY_SHARE = 0.5
"""Of the memory that is free, what locked buffers may take."""

_SUB_GROUPS = (SUB_GROUP_ELEMENTS, 500_000_000, 200_000_000, 100_000_000, 50_000_000, 20_000_000, 10_000_000)
_FP32 = 4


class Fitted(Record, frozen=True, kw_only=True):
    """A configuration with what follows about NVMe, and what its owner should know."""

    config: dict[str, Any]
    changes: tuple[Change, ...]
    notices: tuple[str, ...]


def on_nvme(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The offload sections that name NVMe and act."""
    zero = section(config, ZERO)
    names = ("offload_optimizer", "offload_param")
    return tuple(name for name in names if device_of(zero, name) == "nvme")  # type: ignore[arg-type]


def folders(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Where they swap to, each once."""
    paths = [section(config, ZERO, name).get("nvme_path") for name in on_nvme(config)]
    return tuple(dict.fromkeys(path for path in paths if isinstance(path, str) and path.strip()))


def threads_key(version: str) -> str:
    """What DeepSpeed `version` calls the threads of an aio handle. Raises ConfigError if it is no version."""
    return (
        "intra_op_parallelism"
        if parse_version(version).release >= AIO_THREADS_RENAMED_SINCE.release
        else "thread_count"
    )


def as_keys(setting: AioSetting, version: str) -> dict[str, int | bool]:
    """The ``aio`` section of a setting: numbers and booleans, in the version's own names."""
    return {
        "block_size": setting.block_bytes,
        "queue_depth": setting.queue_depth,
        threads_key(version): setting.threads,
        "single_submit": setting.single_submit,
        "overlap_events": setting.overlap_events,
    }


def most_block_bytes(workload: Workload) -> int:
    """The largest block, a power of two, below which no more than `LEFT_SHARE` of the gradients would stay.

    Up to `SWAPPED_FROM_BYTES` a block changes nothing: DeepSpeed swaps nothing smaller in any case.
    """
    block = SWAPPED_FROM_BYTES
    while block < 1 << 30 and left_elements(workload, 2 * block) <= LEFT_SHARE * workload.elements:
        block *= 2
    return block


def left_elements(workload: Workload, block_bytes: int) -> int:
    """Elements of gradients that are too small to be swapped with such a block."""
    least = max(SWAPPED_FROM_BYTES, block_bytes)
    return sum(size * count for size, count in workload.partitions if size * _FP32 < least)


def buffers_needed(section_: Mapping[str, Any]) -> int:
    """`buffer_count` of ``offload_optimizer`` by its pipeline flags: four for each sub-group that is resident."""
    flags = sum(as_flag(section_.get(name)) is True for name in ("pipeline_read", "pipeline_write"))
    return SWAP_BUFFERS[flags]


def fitted(
    config: Mapping[str, Any],
    drive: Drive | None,
    workload: Workload,
    limits: Limits,
    *,
    version: str,
    keep: Collection[str] = (),
) -> Fitted:
    """`config` with the keys for NVMe; unchanged where nothing is offloaded there.

    A value that the user wrote stays; where it cannot work, a notice says so.

    Args:
        config: A ds_config as `reading.read` gives it. Not changed.
        drive: what was measured of the folder; None leaves the ``aio`` section alone.
        workload: of one rank.
        limits: of one rank's memory.
        version: DeepSpeed's.
        keep: as in `tune.tune`.

    Raises:
        ConfigError: if `version` is not a version.
    """
    names = on_nvme(config)
    work = _Fitting(plain(config), workload, limits, version, relative(keep))
    if names:
        work.aio(drive)
    if "offload_optimizer" in names:
        work.optimizer()
    if "offload_param" in names:
        work.parameters()
    return Fitted(config=work.config, changes=tuple(work.changes), notices=tuple(work.notices))


class _Fitting:
    """One run over one configuration, which it changes in place."""

    def __init__(
        self, config: dict[str, Any], workload: Workload, limits: Limits, version: str, keep: tuple[str, ...]
    ) -> None:
        self.config, self.workload, self.limits = config, workload, limits
        self.version, self.keep = version, keep
        self.changes: list[Change] = []
        self.notices: list[str] = []

    @property
    def may_lock(self) -> int:
        """Bytes of locked buffers."""
        free = self.limits.available_bytes
        return int(MEMORY_SHARE * free)

    def aio(self, drive: Drive | None) -> None:
        if drive is None:
            path = next(iter(folders(self.config)), "FOLDER")
            self.notices.append(
                f"{AIO} was left alone: this drive was not measured; `autotune-offload probe --nvme {path}` does"
            )
            return
        cap, setting = most_block_bytes(self.workload), drive.chosen
        reason = drive.reasons[0]
        if setting.block_bytes > cap:
            setting = structs.replace(setting, block_bytes=cap)
            left = left_elements(self.workload, drive.chosen.block_bytes) * _FP32
            reason = f"{units.size(left)} of gradients would stay on the device with larger blocks; {reason}"
        given = self.config.get(AIO)
        holder = given if isinstance(given, dict) else {}
        for name, value in as_keys(setting, self.version).items():
            self._set(holder, AIO, name, value, reason)
        if holder:
            self.config[AIO] = holder

    def optimizer(self) -> None:
        zero = self.config[ZERO]
        holder, name = zero["offload_optimizer"], "offload_optimizer"
        elements = self._sub_group(zero)
        flags = ("pipeline_read", "pipeline_write")
        if all(holder.get(flag, "auto") == "auto" for flag in flags):
            both = SWAP_BUFFERS[2] * elements * _FP32
            if both <= self.may_lock:
                for flag in flags:
                    self._set(
                        holder, f"{ZERO}.{name}", flag, True, f"its buffers fit: {units.size(both)} locked"
                    )
        needed = buffers_needed(holder)
        locked = needed * elements * _FP32
        count = as_number(holder.get("buffer_count"))
        reason = (
            f"{needed} buffers of the largest sub-group, {elements:,} elements: {units.size(locked)} locked; left out, "
            f"DeepSpeed takes {OPTIMIZER_BUFFER_COUNT}"
        )
        self._set(holder, f"{ZERO}.{name}", "buffer_count", needed, reason)
        if count is not None and count < needed:
            self.notices.append(
                f"{ZERO}.{name}.buffer_count stays {count:g} as you wrote it, and the step needs {needed}: it "
                "will stop with no buffer left"
            )
        if locked > self.may_lock:
            self.notices.append(
                f"{ZERO}.{name}: {units.size(locked)} are locked for swapping, and "
                f"{units.size(self.limits.available_bytes)} of memory are free for a rank"
            )

    def _sub_group(self, zero: dict[str, Any]) -> int:
        """Elements of the largest sub-group; its size is filled in where it is open and buffers would not fit."""
        given = as_number(zero.get("sub_group_size"))
        sizes = [given] if given is not None and given >= 1 else list(map(float, _SUB_GROUPS))
        for size in sizes:
            elements = self._largest(int(size))
            if OPTIMIZER_BUFFER_COUNT * elements * _FP32 <= self.may_lock:
                break
        if given is None and int(size) != SUB_GROUP_ELEMENTS:
            locked = units.size(OPTIMIZER_BUFFER_COUNT * self._largest(SUB_GROUP_ELEMENTS) * _FP32)
            self._set(
                zero, ZERO, "sub_group_size", int(size), f"DeepSpeed's own would lock {locked} for swapping"
            )
        return elements

    def _largest(self, sub_group_elements: int) -> int:
        """A parameter is never divided between sub-groups."""
        whole = min(sub_group_elements, self.workload.elements)
        return max(whole, self.workload.largest_elements)

    def parameters(self) -> None:
        zero = self.config[ZERO]
        holder, largest = zero["offload_param"], self.workload.largest_elements
        given = as_number(holder.get("buffer_size"))
        if given is None and largest > PARAM_BUFFER_ELEMENTS:
            size = -(-largest // 1024) * 1024
            self._set(
                holder,
                f"{ZERO}.offload_param",
                "buffer_size",
                size,
                f"in elements: the largest partition has {largest:,}; DeepSpeed's own is {PARAM_BUFFER_ELEMENTS:,}",
            )
        elif given is not None and given < largest:
            self.notices.append(
                f"{ZERO}.offload_param.buffer_size stays {given:g} elements as you wrote it, and the largest partition "
                f"has {largest:,}: DeepSpeed will stop"
            )

    def _set(self, holder: dict[str, Any], where: str, name: str, value: int | bool, reason: str) -> None:
        """Where it is absent or "auto"; what the user wrote stays."""
        key = f"{where}.{name}"
        before = holder.get(name)
        if any(covers(entry, key.removeprefix(f"{ZERO}.")) for entry in self.keep):
            return
        if before not in (None, "auto"):
            if before is not value and before != value:
                self.notices.append(
                    f"{key} stays {json.dumps(before)} as you wrote it; {json.dumps(value)} follows here"
                )
            return
        holder[name] = value
        self.changes.append(Change(key=key, before=before, after=value, reason=reason))


def mistakes(config: Mapping[str, Any], version: str) -> Iterator[tuple[str, str, bool]]:
    """What DeepSpeed `version` will not take or not read of the ``aio`` section: found, fix, whether it stops there."""
    given, threads = section(config, AIO), threads_key(version)
    for name in ("num_threads", "thread_count", "intra_op_parallelism"):
        if name in given and name != threads:
            yield (
                f"{AIO}.{name} is a key that DeepSpeed {version} does not read",
                f'call it "{threads}"; ds_nvme_tune prints "num_threads", which no version reads',
                False,
            )
    for name in ("single_submit", "overlap_events", "use_gds"):
        if isinstance(given.get(name), str):
            yield (
                f"{AIO}.{name} is {json.dumps(given[name])}, a text, which DeepSpeed's aio handle refuses at start-up",
                f"write {str(given[name]).strip().lower()} without quotes; ds_nvme_tune prints it with them",
                True,
            )
    for name in ("block_size", "queue_depth", threads):
        if name in given and (isinstance(given[name], (str, bool)) or as_number(given[name]) is None):
            yield (
                f"{AIO}.{name} is {json.dumps(given[name], default=repr)}, and the aio handle wants a whole number",
                "write a number without quotes",
                True,
            )
    if section(config, ZERO) and stage_of(section(config, ZERO)) == 3:
        holder = section(config, ZERO, "offload_optimizer")
        count, needed = as_number(holder.get("buffer_count")), buffers_needed(holder)
        count = OPTIMIZER_BUFFER_COUNT if count is None else count
        if "offload_optimizer" in on_nvme(config) and count < needed:
            yield (
                f"{ZERO}.offload_optimizer.buffer_count is {count:g}, and with these pipeline flags the step holds "
                f"{needed} buffers",
                f'write "buffer_count": {needed}',
                True,
            )
