"""What a choice writes into a ZeRO configuration: (config, choice, DeepSpeed version) to (config, changes).

Pure: no I/O, no torch, no deepspeed, and the input stays as it is. `KEYS` is the whole of what may be
written, and when; the rest of the configuration goes through untouched, mistakes included, so that
DeepSpeed's own errors reach the user.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, cast

import msgspec
from packaging.version import InvalidVersion, Version

from autotune_offload.ds_config import BLOCK, plain
from autotune_offload.errors import ConfigError
from autotune_offload.records import Change, Choice, Record, Scalar

Section = Literal["offload_optimizer", "offload_param"]

ZERO = "zero_optimization"
OLDEST = "0.14.5"
"""The oldest DeepSpeed whose parser these keys were tried on."""

NEWEST = "0.19.8"
"""The newest one."""


class Key(Record, frozen=True, kw_only=True):
    """One ZeRO key that follows from a `Choice`, and where it acts."""

    spellings: tuple[str, ...]
    """DeepSpeed takes any one of them; the first is written where none is present."""
    section: Section
    """The offload section whose device decides whether the key acts."""
    nested: bool
    """True where the key lives inside that section, False where it lives beside it."""
    unit: Literal["flag", "elements"]
    stages: frozenset[int]
    devices: frozenset[str]
    field: str
    """The field of `Choice` (flags) or of `ZeroSizes` (elements) that holds the value."""
    defaults: tuple[tuple[str, int], ...]
    """DeepSpeed's own value, by the version it came with, oldest first (`runtime/zero/*config.py`)."""
    least: int = 0
    """The smallest value that DeepSpeed takes and that makes sense."""

    @property
    def overrides(self) -> bool:
        """True for the keys that replace a user's own value; the others fill what is absent or "auto"."""
        return self.unit == "flag"

    def names(self) -> tuple[str, ...]:
        """Its dotted names relative to ``zero_optimization``."""
        return tuple(f"{self.section}.{name}" if self.nested else name for name in self.spellings)

    def default(self, version: Version) -> int:
        """DeepSpeed's own value in `version`."""
        return [value for since, value in self.defaults if Version(since).release <= version.release][-1]


def _pin(section: Section, chosen: str, stages: set[int]) -> Key:
    return Key(
        spellings=("pin_memory",),
        section=section,
        nested=True,
        unit="flag",
        stages=frozenset(stages),
        devices=frozenset({"cpu", "nvme"}),
        field=chosen,
        defaults=((OLDEST, False), ("0.19.5", True)),  # DeepSpeed PR 8207
    )


def _size(section: Section, chosen: str, stages: set[int], default: int, least: int, *spellings: str) -> Key:
    return Key(
        spellings=spellings,
        section=section,
        nested=False,
        unit="elements",
        stages=frozenset(stages),
        devices=frozenset({"cpu"}),  # what was measured is host memory, not a disk
        field=chosen,
        defaults=((OLDEST, default),),
        least=least,
    )


KEYS = (
    _pin("offload_optimizer", "pin_optimizer", {1, 2, 3}),
    _pin("offload_param", "pin_parameters", {3}),
    _size("offload_optimizer", "reduce_bucket_elements", {2, 3}, 500_000_000, 1, "reduce_bucket_size"),
    _size(
        "offload_param",
        "prefetch_bucket_elements",
        {3},
        50_000_000,
        0,
        "stage3_prefetch_bucket_size",
        "prefetch_bucket_size",
    ),
    _size(
        "offload_param",
        "persistence_threshold_elements",
        {3},
        100_000,
        0,
        "stage3_param_persistence_threshold",
        "param_persistence_threshold",
    ),
    _size("offload_optimizer", "sub_group_elements", {3}, 1_000_000_000, 0, "sub_group_size"),
)
"""Every key that `tune` may write."""

SECTION_STAGES: dict[Section, frozenset[int]] = {
    "offload_optimizer": frozenset({1, 2, 3}),
    "offload_param": frozenset({3}),
}
"""The ZeRO stages in which each offload section acts."""

LEGACY: dict[str, Section] = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}
"""Deprecated switches and the sections that replace them."""

LEGACY_PIN = "cpu_offload_use_pin_memory"
"""Deprecated; DeepSpeed reads it and does nothing with it."""

_NOT_WHOLE = frozenset({"ratio", "cpuadam_cores_perc", "nvme_path"})
_INTEGER_TEXT = re.compile(r"\s*[+-]?\d+(_\d+)*(\.0+)?\s*")

KNOWN = frozenset(
    """
    stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce
    allgather_partitions allgather_bucket_size overlap_comm compute_grad_norm load_from_fp32_weights
    elastic_checkpoint offload_param offload_optimizer zenflow sub_group_size cpu_offload_param
    cpu_offload_use_pin_memory cpu_offload prefetch_bucket_size param_persistence_threshold
    model_persistence_threshold max_live_parameters max_reuse_distance gather_16bit_weights_on_model_save
    module_granularity_threshold use_all_reduce_for_fetch_params allgather_sequential
    stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_model_persistence_threshold
    stage3_max_live_parameters stage3_max_reuse_distance stage3_gather_16bit_weights_on_model_save
    stage3_module_granularity_threshold stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential
    stage3_gather_fp16_weights_on_model_save ignore_unused_parameters legacy_stage1 round_robin_gradients
    parameter_alignment zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights
    zero_quantized_gradients memory_efficient_linear pipeline_loading_checkpoint override_module_apply
    log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory leaf_module
    mics_shard_size mics_hierarchical_params_gather zeropp_loco_param
    """.split()
)
"""What some DeepSpeed from 0.14.5 to 0.19.8 takes in ``zero_optimization`` (`runtime/zero/config.py`)."""


KNOWN_IN_SECTIONS = {
    "offload_optimizer": frozenset(
        """
        device nvme_path buffer_count pin_memory pipeline_read pipeline_write fast_init ratio super_offload
        cpuadam_cores_perc
        """.split()
    ),
    "offload_param": frozenset(
        ("device", "nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pin_memory")
    ),
}
"""The same for the two offload sections (`runtime/zero/offload_config.py`)."""


class Tuned(Record, frozen=True, kw_only=True):
    """A configuration after `tune`, what was written into it, and what its owner should know."""

    config: dict[str, Any]
    changes: tuple[Change, ...]
    """In the order of writing. A deprecated key that was taken out has ``after`` None."""
    notices: tuple[str, ...]


def tune(
    config: Mapping[str, Any],
    choice: Choice,
    *,
    version: str,
    keep: Collection[str] = (),
    fill_auto: bool = True,
    filled: Collection[str] = (),
    carried: bool = True,
) -> Tuned:
    """`config` with the ZeRO keys that follow from `choice`.

    Both ``pin_memory`` keys are always made explicit where their section offloads, and replace a
    user's value unless it measured the same. Sizes are filled only where they are absent or "auto".

    Args:
        config: A ds_config as `ds_config.read` gives it. Not changed.
        choice: What was decided for this host.
        version: DeepSpeed's version, which decides what an absent key means.
        keep: Dotted keys that stay as they are, whole (``zero_optimization.sub_group_size``) or relative
            to ``zero_optimization``; the name of a section stands for all in it.
        fill_auto: False leaves a size that is "auto" to somebody else, such as the Hugging Face Trainer.
        filled: Names in ``zero_optimization`` whose "auto" somebody else has made a number already: they
            count as "auto", and keep that number where nothing measured speaks for another.
        carried: False where DeepSpeed's own code will carry the gradients, as it does below stage 3 in
            any case: then its own measured times decide about ``offload_optimizer.pin_memory``.

    Raises:
        ConfigError: if `version` is not a version.
    """
    tuned = plain(config)
    zero = tuned.get(ZERO)
    notices = [f"{mistake.found} and was not tuned; {mistake.fix}" for mistake in _misplaced(tuned)]
    if not isinstance(zero, dict):
        near = _near_section(tuned)
        hint = f'; DeepSpeed ignores "{near}" without a word' if near else ""
        return Tuned(
            config=tuned, changes=(), notices=(*notices, f"no {ZERO} section: nothing was tuned{hint}")
        )
    stage = _stage(zero)
    if not carried or stage < 3:
        choice = replace(choice, pin_optimizer=choice.pin_optimizer_alone)
    work = _Tuning(
        zero=zero,
        choice=choice,
        version=parse_version(version),
        keep=_relative(keep),
        fill_auto=fill_auto,
        filled=frozenset(filled),
        stage=stage,
    )
    work.run()
    notices += [*work.notices, *(mistake.sentence for mistake in (*_refused(zero), *_unknown(zero)))]
    notices += protecting_nothing(work.keep)
    notices += _still_auto(tuned, work.explained)
    return Tuned(config=tuned, changes=tuple(work.changes), notices=tuple(notices))


def offloads(config: Mapping[str, Any]) -> bool:
    """Whether anything is offloaded where `tune` can act: without that, there is nothing to measure."""
    zero = config.get(ZERO)
    if not isinstance(zero, Mapping):
        return False
    switched = (section for flag, section in LEGACY.items() if _as_flag(zero.get(flag)) is True)
    return any(_device(zero, section) for section in SECTION_STAGES) or any(
        _stage(zero) in SECTION_STAGES[section] for section in switched
    )


def offloads_parameters(config: Mapping[str, Any]) -> bool:
    """Whether stage 3 keeps its parameter partitions in host memory."""
    zero = config.get(ZERO)
    if not isinstance(zero, Mapping):
        return False
    switched = _stage(zero) == 3 and _as_flag(zero.get("cpu_offload_param")) is True
    return switched or _device(zero, "offload_param") == "cpu"


def takes_a_path(config: Mapping[str, Any]) -> bool:
    """Whether gradients leave by a path that can be attached: stage 3 with the optimizer on the CPU."""
    zero = config.get(ZERO)
    if not isinstance(zero, Mapping) or _stage(zero) != 3:
        return False
    block = zero.get("offload_optimizer")
    on_cpu = isinstance(block, Mapping) and block.get("device") == "cpu"
    return on_cpu or _as_flag(zero.get("cpu_offload")) is True


def nested(changes: Iterable[Change]) -> dict[str, Any]:
    """What `changes` write, nested as in a ds_config: ``{"zero_optimization": {...}}``."""
    written: dict[str, Any] = {}
    for change in changes:
        if change.after is not None:
            *parents, name = change.key.split(".")
            holder = written
            for parent in parents:
                holder = holder.setdefault(parent, {})
            holder[name] = change.after
    return written


def written_keys(choice: Choice, version: str) -> dict[str, Any]:
    """The contents of ``zero_optimization`` that `choice` writes where both offloads are on the CPU."""
    both: dict[str, Any] = {"stage": 3, **{section: {"device": "cpu"} for section in SECTION_STAGES}}
    return cast(
        "dict[str, Any]",
        nested(tune({ZERO: both}, choice, version=version, carried=choice.beats_deepspeed).changes)[ZERO],
    )


class _Tuning(msgspec.Struct, kw_only=True):
    """One run over one ``zero_optimization`` section, which it changes in place."""

    zero: dict[str, Any]
    choice: Choice
    version: Version
    keep: tuple[str, ...]
    fill_auto: bool
    filled: frozenset[str]
    stage: int
    changes: list[Change] = msgspec.field(default_factory=list)
    notices: list[str] = msgspec.field(default_factory=list)
    explained: set[str] = msgspec.field(default_factory=set)
    """Keys that stay "auto" and whose notice is already there."""
    legacy_pin: bool | None = None

    def run(self) -> None:
        if self.version.release < Version(OLDEST).release:
            self.notices.append(
                f"DeepSpeed {self.version} is older than {OLDEST}, the oldest known here: nothing was tuned"
            )
            return
        self._translate_legacy()
        if not any(_device(self.zero, section) for section in SECTION_STAGES):
            self.notices.append(
                f"no offload_optimizer or offload_param on cpu or nvme that acts at stage {self.stage}: "
                f"nothing was tuned"
            )
        for key in KEYS:
            self._apply(key)
        for section in SECTION_STAGES:
            if _device(self.zero, section) == "nvme":
                self.notices.append(_about_nvme(section))

    def _apply(self, key: Key) -> None:
        holder = self.zero.get(key.section) if key.nested else self.zero
        if not isinstance(holder, dict):
            return
        present = [name for name in key.spellings if name in holder]
        given = [name for name in present if holder[name] != "auto"]  # DeepSpeed drops the others
        if len(given) > 1:
            self.notices.append(_both(*given, fix="keep one of them").sentence)
            return
        name = (given or present or key.spellings)[0]
        if key.nested:
            self._apply_pin(key, holder, name)
        else:
            self._apply_size(key, holder, name)

    # -- page-locking -----------------------------------------------------------------------------

    def _apply_pin(self, key: Key, holder: dict[str, Any], name: str) -> None:
        device = _device(self.zero, key.section)
        given = holder.get(name, "auto")
        wish = self.legacy_pin if given == "auto" else _as_flag(given)
        if device is None or (given != "auto" and wish is None):
            return  # without effect, or a value that DeepSpeed refuses: see `_refused`
        target, reason = self._pin_target(key, device, wish)
        default = json.dumps(bool(key.default(self.version)))
        if self._kept(key):
            self._leave(key, holder, name, target)
        elif holder.get(name) is not target:
            self._write(
                key, holder, name, target, f"{reason}; left out, DeepSpeed {self.version} takes {default}"
            )

    def _pin_target(self, key: Key, device: str, wish: bool | None) -> tuple[bool, str]:
        measured = bool(getattr(self.choice, key.field))
        if device == "nvme":
            whose = "DeepSpeed's own value" if wish is None else "your value"
            stays = bool(key.default(self.version)) if wish is None else wish
            return stays, f"{whose}, since the NVMe swapper page-locks its own buffers and was not measured"
        if wish is not None and wish is not measured and key.field in self.choice.unsettled_pins:
            self.notices.append(
                f"{ZERO}.{key.names()[0]} stays {json.dumps(wish)} as you wrote it: {json.dumps(measured)} was "
                f"chosen, but the two differ by less than the noise of {self.choice.noise:.1%}"
            )
            return wish, "your value; the other one is no faster beyond the noise"
        return measured, _pin_reason(key, self.choice)

    def _leave(self, key: Key, holder: dict[str, Any], name: str, target: bool) -> None:
        if self.legacy_pin is not None and name not in holder:
            self._write(key, holder, name, self.legacy_pin, f"your {LEGACY_PIN}, kept")
        given = holder.get(name)
        means = bool(key.default(self.version)) if given in (None, "auto") else _as_flag(given)
        if means is not target:
            self.notices.append(
                f"{ZERO}.{key.names()[0]} is kept {_shown(given) if name in holder else 'absent'}, which DeepSpeed "
                f"{self.version} takes as {json.dumps(means)}; {json.dumps(target)} was chosen"
            )

    # -- sizes ------------------------------------------------------------------------------------

    def _apply_size(self, key: Key, holder: dict[str, Any], name: str) -> None:
        size: int | None = getattr(self.choice.sizes, key.field)
        acts = self.stage in key.stages and _device(self.zero, key.section) in key.devices
        given = holder.get(name)
        if self._kept(key) or (given == "auto" and not self.fill_auto):
            return
        if name not in holder or given == "auto" or name in self.filled:
            if acts and size is not None:
                self._fill(key, holder, name, max(int(size), key.least))
            elif given == "auto":
                self._note_auto(key, name, acts)
        elif acts and size is not None and _number(given) not in (None, size):
            self.notices.append(
                f'{ZERO}.{name} stays {_shown(given)} as you wrote it; "auto" would make it {size}'
            )

    def _fill(self, key: Key, holder: dict[str, Any], name: str, size: int) -> None:
        reason = self.choice.sizes.reasons.get(key.field, "from this host's measured curves and the workload")
        if name in self.filled:
            reason += f'; you wrote "auto", which the Trainer had made {_shown(holder[name])}'
        if holder.get(name) != size:
            self._write(key, holder, name, size, reason)

    def _note_auto(self, key: Key, name: str, acts: bool) -> None:
        inert = f"it follows from the measurements only at stage 3 with {key.section} on cpu"
        reason = self.choice.sizes.reasons.get(key.field, "nothing measured speaks for another value")
        self.explained.add(f"{ZERO}.{name}")
        self.notices.append(
            f'{ZERO}.{name} stays "auto" ({reason if acts else inert}): DeepSpeed {self.version} makes that '
            f"its default {key.default(self.version)}, the Hugging Face Trainer fills in its own"
        )

    # -- deprecated switches ----------------------------------------------------------------------

    def _translate_legacy(self) -> None:
        """Replace ``cpu_offload*`` by the sections that they stand for.

        DeepSpeed itself drops ``cpu_offload_use_pin_memory`` and refuses a switch beside its section, so
        only the section can carry a pin choice.
        """
        translated = [flag for flag, section in LEGACY.items() if self._stands_for(flag, section)]
        if LEGACY_PIN in self.zero:
            if translated:
                self.legacy_pin = _as_flag(self.zero[LEGACY_PIN])
                self._take_out(
                    LEGACY_PIN, "DeepSpeed ignores it; pin_memory in the sections carries the wish"
                )
            else:
                self.notices.append(
                    f"{ZERO}.{LEGACY_PIN} has no effect in DeepSpeed; set pin_memory in each section"
                )
        for flag in translated:
            section = LEGACY[flag]
            self._take_out(flag, f"deprecated, and refused beside {section}")
            self.zero[section] = {"device": "cpu"}
            self._record(f"{section}.device", None, "cpu", f"what {flag}: true stands for")

    def _stands_for(self, flag: str, section: Section) -> bool:
        if self.zero.get(flag, "auto") == "auto" or flag in self.keep:
            return False
        if self.zero.get(section, "auto") != "auto":
            self.notices.append(_both(flag, section, fix=f"drop {flag}").sentence)
            return False
        return self.stage in SECTION_STAGES[section] and _as_flag(self.zero[flag]) is True

    # -- writing ----------------------------------------------------------------------------------

    def _kept(self, key: Key) -> bool:
        return any(_covers(entry, name) for entry in self.keep for name in key.names())

    def _write(self, key: Key, holder: dict[str, Any], name: str, value: int, reason: str) -> None:
        before = holder.get(name)
        holder[name] = value
        self._record(f"{key.section}.{name}" if key.nested else name, before, value, reason)

    def _take_out(self, name: str, reason: str) -> None:
        self._record(name, self.zero.pop(name), None, reason)

    def _record(self, key: str, before: Scalar, after: Scalar, reason: str) -> None:
        self.changes.append(Change(key=f"{ZERO}.{key}", before=before, after=after, reason=reason))


# -- words ----------------------------------------------------------------------------------------


def _pin_reason(key: Key, choice: Choice) -> str:
    """The sentence of the choice that opens with this key's section, or else what decided the path."""
    own = [reason for reason in choice.reasons if reason.startswith(key.section)]
    if key.section == "offload_optimizer":
        own += [f"the gradient path is {choice.path}, {choice.gain:.2f} times as fast as DeepSpeed's own"]
    memory = "page-locked" if choice.pin_parameters else "pageable"
    return [*own, f"parameters are fetched from {memory} memory"][0]


def _about_nvme(section: str) -> str:
    if section == "offload_param":
        return (
            f"{ZERO}.{section} is on nvme: only pin_memory is made explicit; buffer_count and buffer_size "
            f"stay, and buffer_size, in elements, has to hold the largest partition"
        )
    return (
        f"{ZERO}.{section} is on nvme: only pin_memory is made explicit, sizes were measured for host memory"
    )


# -- what DeepSpeed will make of the rest ---------------------------------------------------------


class Mistake(Record, frozen=True, kw_only=True):
    """A key or value that DeepSpeed refuses, or takes without any effect."""

    found: str
    fix: str
    refused: bool = True

    @property
    def sentence(self) -> str:
        """Both parts."""
        return f"{self.found}; {self.fix}"


def mistakes(config: Mapping[str, Any]) -> Iterator[Mistake]:
    """What is wrong in a ds_config around ``zero_optimization``, as far as its text shows.

    Args:
        config: A ds_config as `ds_config.read` gives it.
    """
    yield from _misplaced(config)
    zero = config.get(ZERO)
    if isinstance(zero, Mapping):
        yield from _doubled(zero)
        yield from _refused(zero)
        yield from _unknown(zero)
    elif ZERO in config and not isinstance(zero, bool):
        found = f"{ZERO} is {_shown(zero)}, which DeepSpeed refuses"
        yield Mistake(found=found, fix='write an object such as {"stage": 3}')
    elif (near := _near_section(config)) is not None:
        found = f'"{near}" at the top level has no effect, and there is no "{ZERO}"'
        yield Mistake(found=found, fix=f'rename it to "{ZERO}"', refused=False)


def page_locks(config: Mapping[str, Any], version: str) -> dict[Section, bool]:
    """The sections that offload to the CPU, each with whether DeepSpeed `version` page-locks for it.

    Raises:
        ConfigError: if `version` is not a version.
    """
    zero = config.get(ZERO)
    if not isinstance(zero, Mapping):
        return {}
    default, locks = pins_by_default(version), dict[Section, bool]()
    for section in SECTION_STAGES:
        if _device(zero, section) == "cpu":
            given = _as_flag(zero[section].get("pin_memory"))
            locks[section] = default if given is None else given
    for flag, section in LEGACY.items():
        if _as_flag(zero.get(flag)) is True and _stage(zero) in SECTION_STAGES[section]:
            locks.setdefault(section, default)
    return locks


def pins_by_default(version: str) -> bool:
    """What DeepSpeed `version` takes an absent ``pin_memory`` as. Raises ConfigError if it is no version."""
    return bool(KEYS[0].default(parse_version(version)))


def still_auto(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The dotted names of all that is "auto", outside our own block."""
    return tuple(name for name in _autos(config) if not _covers(BLOCK, name))


def _both(*names: str, fix: str) -> Mistake:
    return Mistake(found=f"{ZERO} holds both {' and '.join(names)}, which DeepSpeed refuses", fix=fix)


def _doubled(zero: Mapping[str, Any]) -> Iterator[Mistake]:
    for key in KEYS:
        given = [name for name in key.spellings if zero.get(name, "auto") != "auto" and not key.nested]
        if len(given) > 1:
            yield _both(*given, fix="keep one of them")
    for flag, section in LEGACY.items():
        if zero.get(flag, "auto") != "auto" and zero.get(section, "auto") != "auto":
            yield _both(flag, section, fix=f"drop {flag}")


def _near_section(config: Mapping[str, Any]) -> str | None:
    near = difflib.get_close_matches(ZERO, map(str, config), n=1, cutoff=0.8)
    return next((name for name in near if name != ZERO), None)


def _misplaced(config: Mapping[str, Any]) -> Iterator[Mistake]:
    for name in config:
        if name in KNOWN:
            yield Mistake(
                found=f'"{name}" at the top level has no effect', fix=f'move it into "{ZERO}"', refused=False
            )


def _refused(zero: Mapping[str, Any]) -> Iterator[Mistake]:
    """One for each value that DeepSpeed's parser will not take."""
    for prefix, block in (("", zero), *((f"{section}.", zero.get(section)) for section in SECTION_STAGES)):
        for name, value in block.items() if isinstance(block, Mapping) else ():
            wanted = None if name in _NOT_WHOLE else _wanted(f"{prefix}{name}", value)
            if wanted:
                found = f"{ZERO}.{prefix}{name} is {_shown(value)}, which DeepSpeed refuses"
                yield Mistake(found=found, fix=f"write {wanted}")


def _wanted(dotted: str, value: object) -> str | None:
    """What to write instead of a value that DeepSpeed refuses, or None for a value that passes."""
    key = next((key for key in KEYS if dotted in key.names()), None)
    whole = f"a whole number from {key.least if key else 0}"
    number = _number(value)
    if value == "auto" or isinstance(value, bool):
        return None
    if key is not None and key.unit == "flag":
        return "true or false" if _as_flag(value) is None else None
    if number is None or not math.isfinite(number) or abs(number) >= 2**63:
        return whole if key or number is not None else None
    if number != int(number) or (key is not None and number < key.least):
        return whole
    plain_text = isinstance(value, str) and not _INTEGER_TEXT.fullmatch(value)
    return f"{int(number)} without quotes" if plain_text else None


def _unknown(zero: Mapping[str, Any]) -> Iterator[Mistake]:
    """Keys that DeepSpeed refuses, and offload sections and devices that it would not know."""
    yield from _unknown_names(ZERO, zero, KNOWN)
    for section, known in KNOWN_IN_SECTIONS.items():
        block = zero.get(section)
        where = f"{ZERO}.{section}"
        if isinstance(block, Mapping):
            yield from _unknown_names(where, block, known)
            if block.get("device", "cpu") not in ("none", "cpu", "nvme", "auto"):
                found = f"{where}.device is {_shown(block['device'])}"
                yield Mistake(found=found, fix='DeepSpeed takes "none", "cpu" or "nvme"')
        elif block not in (None, "auto"):
            found = f"{where} is {_shown(block)}"
            yield Mistake(found=found, fix='DeepSpeed takes an object such as {"device": "cpu"}')


def _unknown_names(where: str, block: Mapping[str, Any], known: Collection[str]) -> Iterator[Mistake]:
    for name in block:
        if name not in known:
            dropped = block[name] == "auto"  # DeepSpeed takes out every "auto" before it looks at the names
            does = 'drops it with its "auto"' if dropped else "refuses such keys"
            found = f"{where}.{name} is no key of DeepSpeed {OLDEST} to {NEWEST}, which {does}"
            yield Mistake(found=found, fix=_home_of(str(name), known), refused=not dropped)


def _home_of(name: str, known: Collection[str]) -> str:
    """Where a key that is unknown in one place belongs, or which known one is the nearest."""
    if name == BLOCK:
        return "move it to the top level"
    near = difflib.get_close_matches(name, known, n=1)
    homes = [f'"{section}"' for section, keys in KNOWN_IN_SECTIONS.items() if name in keys]
    homes += [f'"{ZERO}"'] * (name in KNOWN)
    if homes:
        return f"take it out; it belongs in {' and '.join(homes)}"
    return f'did you mean "{near[0]}"?' if near else "take it out"


def protecting_nothing(keep: Collection[str]) -> Iterator[str]:
    """A sentence for each entry of `keep` that names no key which is ever written."""
    keep = _relative(keep)
    names = [*(name for key in KEYS for name in key.names()), *LEGACY]
    for entry in keep:
        if not any(_covers(entry, name) for name in names):
            near = difflib.get_close_matches(entry, names, n=1, cutoff=0.0)[0]
            yield f'keep "{entry}" protects nothing, since no such key is ever written; nearest: "{near}"'


def _still_auto(config: Mapping[str, Any], explained: Collection[str]) -> list[str]:
    names = [name for name in _autos(config) if name not in explained and not _covers(BLOCK, name)]
    if not names:
        return []
    return [
        f'still "auto": {", ".join(names)}; the Hugging Face Trainer fills these in, DeepSpeed alone refuses '
        f"some and takes its defaults for those in {ZERO}"
    ]


def _autos(value: object, prefix: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _autos(item, f"{prefix}.{name}" if prefix else str(name))
    elif value == "auto":
        yield prefix


# -- reading single values ------------------------------------------------------------------------


def parse_version(text: str) -> Version:
    """`text` as a version.

    Raises:
        ConfigError: if it is none.
    """
    try:
        return Version(text)
    except InvalidVersion:
        raise ConfigError(
            f'DeepSpeed version "{text}" is not a version; expected one such as 0.19.8'
        ) from None


def _relative(keep: Collection[str]) -> tuple[str, ...]:
    entries = (keep,) if isinstance(keep, str) else keep
    return tuple(entry.removeprefix(ZERO).removeprefix(".") for entry in entries)


def _covers(entry: str, name: str) -> bool:
    return entry in ("", name) or name.startswith(f"{entry}.")


def _device(zero: Mapping[str, Any], section: Section) -> str | None:
    """Where `section` offloads to, or None where it does not or has no effect at this stage."""
    block = zero.get(section)
    device = block.get("device") if isinstance(block, Mapping) else None
    return device if _stage(zero) in SECTION_STAGES[section] and device in ("cpu", "nvme") else None


def _stage(zero: Mapping[str, Any]) -> int:
    number = _number(zero.get("stage", 0))
    return int(number) if number is not None and math.isfinite(number) else 0


def _as_flag(value: object) -> bool | None:
    """`value` as DeepSpeed's parser reads a boolean (pydantic's lax mode), or None where it refuses."""
    text = str(value).lower() if isinstance(value, (bool, int, str)) else ""
    if value == 0.0 or text in ("0", "off", "f", "false", "n", "no"):
        return False
    return True if value == 1.0 or text in ("1", "on", "t", "true", "y", "yes") else None


def _number(value: object) -> float | None:
    """`value` as a number, a text that spells one included; None for all else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def _shown(value: object) -> str:
    return json.dumps(int(value) if isinstance(value, float) and value.is_integer() else value, default=repr)
