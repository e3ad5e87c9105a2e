"""What a choice writes into a ZeRO configuration: (config, choice, DeepSpeed version) to (config, changes).

Pure: no I/O, no torch, no deepspeed, and the input stays as it is. `KEYS` is the whole of what may be
written, and when; the rest of the configuration goes through untouched, mistakes included, so that
DeepSpeed's own errors reach the user.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, cast

import msgspec
from msgspec import structs
from packaging.version import Version

from autotune_offload.config.keys import KEYS, Key
from autotune_offload.config.mistakes import (
    about_still_auto,
    both,
    misplaced,
    near_section,
    protecting_nothing,
    refused,
    unknown,
)
from autotune_offload.config.reading import plain
from autotune_offload.config.sections import (
    as_flag,
    as_number,
    covers,
    device_of,
    nested,
    relative,
    shown,
    stage_of,
)
from autotune_offload.records import Change, Choice, Record, Scalar
from autotune_offload.upstream import (
    LEGACY,
    LEGACY_PIN,
    OLDEST,
    SECTION_STAGES,
    ZERO,
    Section,
    parse_version,
    pins_by_default,
)


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
        config: A ds_config as `reading.read` gives it. Not changed.
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
    notices = [f"{mistake.found} and was not tuned; {mistake.fix}" for mistake in misplaced(tuned)]
    if not isinstance(zero, dict):
        near = near_section(tuned)
        hint = f'; DeepSpeed ignores "{near}" without a word' if near else ""
        return Tuned(
            config=tuned, changes=(), notices=(*notices, f"no {ZERO} section: nothing was tuned{hint}")
        )
    stage = stage_of(zero)
    carried = carried and stage == 3
    if not carried:
        choice = structs.replace(choice, pin_optimizer=choice.pin_optimizer_alone)
    work = _Tuning(
        zero=zero,
        choice=choice,
        version=parse_version(version),
        keep=relative(keep),
        fill_auto=fill_auto,
        filled=frozenset(filled),
        stage=stage,
        carried=carried,
    )
    work.run()
    notices += [*work.notices, *(mistake.sentence for mistake in (*refused(zero), *unknown(zero)))]
    notices += protecting_nothing(work.keep)
    notices += about_still_auto(tuned, work.explained)
    return Tuned(config=tuned, changes=tuple(work.changes), notices=tuple(notices))


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
    carried: bool
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
        if not any(device_of(self.zero, section) for section in SECTION_STAGES):
            self.notices.append(
                f"no offload_optimizer or offload_param on cpu or nvme that acts at stage {self.stage}: "
                f"nothing was tuned"
            )
        for key in KEYS:
            self._apply(key)
        for section in SECTION_STAGES:
            if device_of(self.zero, section) == "nvme":
                self.notices.append(_about_nvme(section))

    def _apply(self, key: Key) -> None:
        holder = self.zero.get(key.section) if key.nested else self.zero
        if not isinstance(holder, dict):
            return
        present = [name for name in key.spellings if name in holder]
        given = [name for name in present if holder[name] != "auto"]  # DeepSpeed drops the others
        if len(given) > 1:
            self.notices.append(both(*given, fix="keep one of them").sentence)
            return
        name = (given or present or key.spellings)[0]
        if key.nested:
            self._apply_pin(key, holder, name)
        else:
            self._apply_size(key, holder, name)

    # -- page-locking -----------------------------------------------------------------------------

    def _apply_pin(self, key: Key, holder: dict[str, Any], name: str) -> None:
        device = device_of(self.zero, key.section)
        given = holder.get(name, "auto")
        wish = self.legacy_pin if given == "auto" else as_flag(given)
        if device is None or (given != "auto" and wish is None):
            return  # without effect, or a value that DeepSpeed refuses: see `refused`
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
        untried = measured and key.field in self.choice.untried_pins
        if untried and not (bool(key.default(self.version)) if wish is None else wish):
            self.notices.append(
                f"{ZERO}.{key.names()[0]} stays false: true was chosen, but a page-locked block as large as this model "
                "needs was not tried here"
            )
            whose = "DeepSpeed's own value" if wish is None else "your value"
            return False, f"{whose}; blocks as large as this model needs were not tried"
        if wish is not None and wish is not measured and key.field in self.choice.unsettled_pins:
            self.notices.append(
                f"{ZERO}.{key.names()[0]} stays {json.dumps(wish)} as you wrote it: {json.dumps(measured)} was "
                f"chosen, but the two differ by less than the noise of {self.choice.noise:.1%}"
            )
            return wish, "your value; the other one is no faster beyond the noise"
        return measured, _pin_reason(key, self.choice, carried=self.carried)

    def _leave(self, key: Key, holder: dict[str, Any], name: str, target: bool) -> None:
        if self.legacy_pin is not None and name not in holder:
            self._write(key, holder, name, self.legacy_pin, f"your {LEGACY_PIN}, kept")
        given = holder.get(name)
        means = bool(key.default(self.version)) if given in (None, "auto") else as_flag(given)
        if means is not target:
            self.notices.append(
                f"{ZERO}.{key.names()[0]} is kept {shown(given) if name in holder else 'absent'}, which DeepSpeed "
                f"{self.version} takes as {json.dumps(means)}; {json.dumps(target)} was chosen"
            )

    # -- sizes ------------------------------------------------------------------------------------

    def _apply_size(self, key: Key, holder: dict[str, Any], name: str) -> None:
        size: int | None = getattr(self.choice.sizes, key.field)
        acts = self.stage in key.stages and device_of(self.zero, key.section) in key.devices
        if key.field == "sub_group_elements" and not self._pins(key.section):
            size = None  # it is chosen so that its blocks can be page-locked
        given = holder.get(name)
        if self._kept(key) or (given == "auto" and not self.fill_auto):
            return
        if name not in holder or given == "auto" or name in self.filled:
            if acts and size is not None:
                self._fill(key, holder, name, max(int(size), key.least))
            elif given == "auto":
                self._note_auto(key, name, acts)
        elif acts and size is not None and as_number(given) not in (None, size):
            self.notices.append(
                f'{ZERO}.{name} stays {shown(given)} as you wrote it; "auto" would make it {size}'
            )

    def _fill(self, key: Key, holder: dict[str, Any], name: str, size: int) -> None:
        reason = self.choice.sizes.reasons.get(key.field, "from this host's measured curves and the workload")
        if name in self.filled:
            reason += f'; you wrote "auto", which the Trainer had made {shown(holder[name])}'
        if holder.get(name) != size:
            self._write(key, holder, name, size, reason)

    def _pins(self, section: Section) -> bool:
        """Whether this section page-locks, now that its own key is written."""
        block = self.zero.get(section)
        given = as_flag(block.get("pin_memory")) if isinstance(block, dict) else None
        return pins_by_default(str(self.version)) if given is None else given

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
                self.legacy_pin = as_flag(self.zero[LEGACY_PIN])
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
            self.notices.append(both(flag, section, fix=f"drop {flag}").sentence)
            return False
        return self.stage in SECTION_STAGES[section] and as_flag(self.zero[flag]) is True

    # -- writing ----------------------------------------------------------------------------------

    def _kept(self, key: Key) -> bool:
        return any(covers(entry, name) for entry in self.keep for name in key.names())

    def _write(self, key: Key, holder: dict[str, Any], name: str, value: int, reason: str) -> None:
        before = holder.get(name)
        holder[name] = value
        self._record(f"{key.section}.{name}" if key.nested else name, before, value, reason)

    def _take_out(self, name: str, reason: str) -> None:
        self._record(name, self.zero.pop(name), None, reason)

    def _record(self, key: str, before: Scalar, after: Scalar, reason: str) -> None:
        self.changes.append(Change(key=f"{ZERO}.{key}", before=before, after=after, reason=reason))


# -- words ----------------------------------------------------------------------------------------


def _pin_reason(key: Key, choice: Choice, *, carried: bool) -> str:
    """The sentence of the choice that opens with this key's section, or else what decided the path."""
    own = [reason for reason in choice.reasons if reason.startswith(key.section)]
    if key.section == "offload_optimizer" and not carried:
        into = "page-locked" if choice.pin_optimizer else "pageable"
        own += [f"DeepSpeed's own code carries the gradients here, and is no slower into {into} memory"]
    elif key.section == "offload_optimizer":
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
