"""What is measured and decided, as plain data.

Frozen records, converted to and from built-in types by `to_plain` and `from_plain`. Units are in
the field names: ``_bytes``, ``_seconds``, ``_elements``, ``_gbps`` (1e9 bytes a second). No torch and
no I/O here. A probe's JSON document is `to_plain(Profile)`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec

from autotune_offload import markup
from autotune_offload.errors import ProfileError

if TYPE_CHECKING:
    pass


SCHEMA = 1
"""Version of the stored form. A profile with another number is a miss (see `store`)."""

Kind = Literal["d2h", "h2d", "h2h"]
Memory = Literal["pageable", "pinned"]
State = Literal["cold", "warm"]
Path = Annotated[str, msgspec.Meta(pattern="^[a-z][_a-z0-9]*$")]
"""One of PATHS, or of an installed package (see `packaged`)."""
PATHS: tuple[Path, ...] = ("direct", "pinned", "staged")
Cast = Literal["device", "host"]
Accumulate = Literal["device", "host"]
Scalar = str | int | float | bool | None

T = TypeVar("T")


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base of plain data: made in C, 20 times as fast as a dataclass, of which each costs a start 1 ms.

    Equality, hash, repr and the constructor are a frozen dataclass's; `msgspec.structs` has `replace`, `fields` and
    `asdict` for it.
    """


# -- where it was measured ------------------------------------------------------------------------


class HostFacts(Record, frozen=True, kw_only=True):
    """One host as this process may use it. The name is a label, never a key."""

    name: str
    platform: str
    cpu_model: str
    cpu_count: int
    affinity_cpus: int
    ram_bytes: int
    swap_bytes: int
    numa_nodes: int
    numa_bound: bool
    last_level_cache_bytes: int
    page_bytes: int
    wsl: bool


class DeviceIdentity(Record, frozen=True, kw_only=True):
    """The accelerator that DeepSpeed uses. Fields that nothing on this machine reports are None."""

    kind: str
    name: str
    count: int
    index: int
    memory_bytes: int | None = None
    capability: str | None = None
    driver: str | None = None
    link_generation: int | None = None
    link_width: int | None = None
    mig_slice: str | None = None
    pin_backend: str = "none"
    """How page-locked memory is made: "torch", "native" (DeepSpeed's own), or "none"."""
    settings: str = ""
    """What the environment sets of page-locking and copying, as `machine.allocator` reads it."""


class Software(Record, frozen=True, kw_only=True):
    """Versions of what takes part. `autotune_offload` is this package."""

    python: str
    torch: str
    deepspeed: str
    autotune_offload: str


class Limit(Record, frozen=True, kw_only=True):
    """One bound on host memory: how much, who says so, and how to raise it."""

    name: Literal["ram", "cgroup", "memlock", "numa", "max_pinned_bytes"]
    bytes: int
    source: str
    raise_by: str


class Limits(Record, frozen=True, kw_only=True):
    """What this process may allocate and page-lock.

    `bounds` holds the ones that exist; `pinnable_bytes` is the smallest that counts for pinned
    memory, after the margin that is left for everything else on the host.
    """

    available_bytes: int
    pinnable_bytes: int
    bounds: tuple[Limit, ...] = ()

    @property
    def measuring_bytes(self) -> int:
        """What the buffers for measuring may take, and those of the trials: an eighth of what is free."""
        return self.available_bytes // 8


# -- what was measured ----------------------------------------------------------------------------


class Transfer(Record, frozen=True, kw_only=True):
    """One point of a bandwidth curve: medians over `samples` copies of `bytes` bytes.

    `duplex` marks a copy timed while the opposite direction was busy too. `threads` is how many host
    threads shared the copy: 0 is torch's own intra-op pool.
    """

    kind: Kind
    memory: Memory
    state: State
    bytes: int
    median_seconds: float
    iqr_seconds: float
    samples: int
    gbps: float
    duplex: bool = False
    threads: int = 0
    raw_seconds: tuple[float, ...] = ()


class CastRate(Record, frozen=True, kw_only=True):
    """Low precision to fp32 on the device or on the host; `bytes` and `gbps` count fp32 produced."""

    where: Cast
    dtype: str
    bytes: int
    median_seconds: float
    iqr_seconds: float
    samples: int
    gbps: float
    threads: int = 0
    raw_seconds: tuple[float, ...] = ()


class Narrowing(Record, frozen=True, kw_only=True):
    """fp32 to 16 bits, as the step makes 16-bit weights; `bytes` and `gbps` count fp32 read.

    `state` is that of the memory written to: DeepSpeed writes weights for a device into a fresh temporary.
    """

    where: Cast
    state: State
    dtype: str
    bytes: int
    median_seconds: float
    iqr_seconds: float
    samples: int
    gbps: float
    threads: int = 0
    raw_seconds: tuple[float, ...] = ()


class PassRate(Record, frozen=True, kw_only=True):
    """The optimizer's compiled pass by so many host threads: Adam, and weights of `dtype` into host memory.

    Over made-up data of `elements` weights, without a scaling of the gradients.
    """

    threads: int
    dtype: str
    elements: int
    median_seconds: float
    iqr_seconds: float
    samples: int
    raw_seconds: tuple[float, ...] = ()


class StepRates(Record, frozen=True, kw_only=True):
    """What the optimizer's step goes through. `why_no_pass` says why the compiled pass was not timed, if so."""

    narrowings: tuple[Narrowing, ...] = ()
    passes: tuple[PassRate, ...] = ()
    threads: int = 1
    """Host threads that one torch operation of a rank used, as DeepSpeed's own Adam does."""
    why_no_pass: str | None = None


class SyncCost(Record, frozen=True, kw_only=True):
    """What one synchronize costs with almost nothing queued, by scope."""

    device_seconds: float
    stream_seconds: float
    event_seconds: float


class PinCost(Record, frozen=True, kw_only=True):
    """What page-locking costs and how far it goes.

    `seconds_per_gib` is None and `largest_bytes` 0 where nothing pins; `capped` says that the search
    for the largest block stopped at its own cap and not at a failure. `tried_bytes` is the largest block that
    was locked in a child process, where blocks of the model's own size were tried.
    """

    seconds_per_gib: float | None
    largest_bytes: int
    capped: bool
    reason: str | None = None
    tried_bytes: int = 0

    @property
    def proven_bytes(self) -> int:
        """The largest block that was really locked here."""
        return max(self.largest_bytes, self.tried_bytes)


class Measurements(Record, frozen=True, kw_only=True):
    """Everything that was timed on one device and host."""

    transfers: tuple[Transfer, ...]
    casts: tuple[CastRate, ...]
    sync: SyncCost
    pin: PinCost
    stability: tuple[str, ...]
    seconds: float
    step: StepRates | None = None
    """None where only gradients were looked at."""


# -- how it is measured ---------------------------------------------------------------------------


class Plan(Record, frozen=True, kw_only=True):
    """How much to measure. Shipped as ``configs/probe_plans/*.yaml``."""

    name: str
    budget_seconds: float
    """For the whole probe, imports excluded."""
    measure_share: float
    """Of the budget for curves and costs; the trials of the paths get the rest."""
    smallest_bytes: int
    largest_bytes: int
    growth: int
    """Each size of a curve over the one before."""
    warmup_seconds: float
    """Of copies before the first sample of a curve."""
    min_samples: int
    max_samples: int
    target_spread: float
    """IQR over median at which a point is good enough."""
    pin_cap_bytes: int
    """Never more page-locked memory at once than this."""
    trial_bytes: int
    """fp32 bytes of the sampled workload that each trial offloads, unless the caches ask for more."""
    finalists: int
    """Candidates that are timed again, interleaved, before the choice."""


# -- what is to be moved --------------------------------------------------------------------------


class Workload(Record, frozen=True, kw_only=True):
    """The gradient partitions that one rank offloads in a step.

    `partitions` maps a partition's size in elements to how many there are, as (elements, count),
    largest first. `parameters` holds whole parameters in the same form: those are what is fetched.
    `dtype` is the gradients' dtype on the device ("bfloat16", "float16" or "float32").
    """

    partitions: tuple[tuple[int, int], ...]
    parameters: tuple[tuple[int, int], ...]
    dtype: str
    world_size: int
    accumulation_steps: int
    source: str

    @property
    def elements(self) -> int:
        """Elements of this rank's gradients."""
        return sum(size * count for size, count in self.partitions)

    @property
    def parameter_elements(self) -> int:
        """Elements of the whole model."""
        return sum(size * count for size, count in self.parameters)

    @property
    def largest_elements(self) -> int:
        """The largest single partition."""
        return max(size for size, _ in self.partitions)


# -- what was decided -----------------------------------------------------------------------------


class Candidate(Record, frozen=True, kw_only=True):
    """One way to offload the workload's gradients, with what it costs a backward pass.

    `predicted_seconds` comes from the cost model, `measured_seconds` from trials of the path itself,
    both for the whole workload. `spread` is the IQR over the median of the trials. `rejected` holds
    the limit or rule that put it aside, in words. `host_threads` 0 is torch's own intra-op pool.
    """

    path: Path
    cast: Cast
    buffer_bytes: int
    buffer_count: int
    host_threads: int = 0
    predicted_seconds: float | None = None
    measured_seconds: float | None = None
    spread: float | None = None
    samples: int = 0
    rejected: str | None = None
    raw_seconds: tuple[float, ...] = ()


class Baseline(Record, frozen=True, kw_only=True):
    """One of DeepSpeed's own gradient sequences, timed on the same workload in the same rounds."""

    name: str
    versions: str
    memory: Memory
    installed: bool
    """True for the sequence that the installed DeepSpeed runs by default."""
    predicted_seconds: float | None = None
    measured_seconds: float | None = None
    spread: float | None = None
    samples: int = 0
    raw_seconds: tuple[float, ...] = ()


class Accumulated(Record, frozen=True, kw_only=True):
    """What took the gradients of a whole accumulation, and what that cost; faster is better.

    `way` is in words; `place` is where micro-steps were added up. `micro_steps` says of how many backward passes
    the seconds are, for the whole workload.
    """

    way: str
    place: Accumulate
    stock: bool
    """Whether it is DeepSpeed's own sequence, `installed` by default into that memory."""
    installed: bool
    chosen: bool
    micro_steps: int
    measured_seconds: float
    spread: float
    samples: int
    raw_seconds: tuple[float, ...] = ()


class ZeroSizes(Record, frozen=True, kw_only=True):
    """ZeRO-3 sizes that follow from the curves, in elements. None leaves DeepSpeed's own value."""

    reduce_bucket_elements: int | None = None
    prefetch_bucket_elements: int | None = None
    persistence_threshold_elements: int | None = None
    sub_group_elements: int | None = None
    reasons: dict[str, str] = msgspec.field(default_factory=dict)
    """Field name to the sentence that explains the value, for None too."""


class Choice(Record, frozen=True, kw_only=True):
    """The decision: path, parameters, pinning, sizes, and why.

    `pin_optimizer` and `pin_parameters` become the two `pin_memory` keys. `gain` is DeepSpeed's own
    time over the chosen time (above 1 is faster); `noise` the relative difference that these trials
    could not tell apart; `tie` says that another path was within it.
    """

    path: Path
    cast: Cast
    buffer_bytes: int
    buffer_count: int
    host_threads: int
    pin_optimizer: bool
    pin_parameters: bool
    sizes: ZeroSizes
    gain: float
    noise: float
    tie: bool
    reasons: tuple[str, ...]
    unsettled_pins: tuple[str, ...] = ()
    """Those of the two pin fields whose other value measured the same within the noise: a user's own stays."""
    pin_optimizer_alone: bool = False
    """`pin_optimizer` where DeepSpeed's own code carries the gradients, by its own two measured times."""
    untried_pins: tuple[str, ...] = ()
    """Those of the two pin fields that need a larger block than any that was locked here: what a run has stays."""
    accumulate: Accumulate = "device"
    """Where micro-steps are added up; no choice, and in place, where device memory is host memory."""

    @property
    def beats_deepspeed(self) -> bool:
        """Whether the path is faster than DeepSpeed's own code beyond the noise; else that code stays."""
        return self.gain > 1 + self.noise

    def _repr_html_(self) -> str:
        """For a notebook: what was decided, and why."""
        return markup.table("Choice", self.in_rows(), self.reasons)

    def in_rows(self) -> list[tuple[str, str]]:
        """What was decided, a name and a value each."""
        who = (
            "this path"
            if self.beats_deepspeed
            else "DeepSpeed's own code, as nothing beats it beyond the noise"
        )
        pins = (("optimizer state", self.pin_optimizer), ("parameters", self.pin_parameters))
        return [
            ("gradients go by", who),
            ("path", f"{self.path}, cast on the {self.cast}"),
            ("against DeepSpeed's own code", f"{self.gain:.2f} times as fast, noise {self.noise:.1%}"),
            ("page-locked", ", ".join(name for name, pinned in pins if pinned) or "nothing"),
        ]


Back = Literal["in place", "staged", "direct"]
"""How 16-bit weights get where they belong: written there, through page-locked buffers, or through pageable ones."""


class StepCandidate(Record, frozen=True, kw_only=True):
    """One way to make the optimizer's step. `threads` 0 is DeepSpeed's own step; else the fused pass has as many.

    `predicted_seconds` is of one step over this rank's weights, without norms and overflow check.
    """

    threads: int
    back: Back
    piece_elements: int = 0
    pinned_bytes: int = 0
    """Of its ring."""
    predicted_seconds: float | None = None
    rejected: str | None = None


class StepDecision(Record, frozen=True, kw_only=True):
    """How the optimizer's step is to be made, what it should take, and what that was compared with.

    What is confirmed on real steps has the last word; that begins with this.
    """

    way: Literal["deepspeed", "fused"]
    threads: int
    """0 for DeepSpeed's own."""
    back: Back
    reasons: tuple[str, ...]
    candidates: tuple[StepCandidate, ...]
    """DeepSpeed's own first, then the fastest first."""

    @property
    def own(self) -> StepCandidate:
        """DeepSpeed's own."""
        return self.candidates[0]

    @property
    def chosen(self) -> StepCandidate:
        """What was decided for."""
        wanted = self.threads, self.back
        return next(c for c in self.candidates if (c.threads, c.back) == wanted)

    @property
    def gain(self) -> float | None:
        """DeepSpeed's own predicted time over the chosen one's."""
        own, chosen = self.own.predicted_seconds, self.chosen.predicted_seconds
        return own / chosen if own and chosen else None


class Change(Record, frozen=True, kw_only=True):
    """One key that is written into a ds_config. `before` is None where the key was absent."""

    key: str
    """Dotted, in the user's spelling: ``zero_optimization.offload_optimizer.pin_memory``."""
    before: Scalar
    after: Scalar
    reason: str


class Profile(Record, frozen=True, kw_only=True):
    """One host's environment, limits, measurements and choice. The JSON of `autotune-offload probe`."""

    schema: int
    created: str
    """UTC, ISO 8601."""
    fingerprint: dict[str, Scalar]
    """What identifies the environment; the key of the stored profile is its hash."""
    host: HostFacts
    device: DeviceIdentity
    software: Software
    limits: Limits
    workload: Workload
    transfers: tuple[Transfer, ...]
    casts: tuple[CastRate, ...]
    sync: SyncCost
    pin: PinCost
    baselines: tuple[Baseline, ...]
    candidates: tuple[Candidate, ...]
    choice: Choice
    zero_optimization: dict[str, Any]
    """The keys it would write, nested as in a ds_config."""
    plan: str
    stability: tuple[str, ...]
    elapsed_seconds: float
    warnings: tuple[str, ...] = ()
    rechecked_seconds: float | None = None
    """What a copy took at a start that led to this measurement (see `recheck`); later starts allow for it."""
    ranks_copying: int = 1
    """How many ranks of this host measured at the same time, each with its own device."""
    accumulations: tuple[Accumulated, ...] = ()
    """What was decided by where micro-steps are added up, the fastest first; else `candidates` and `baselines`."""
    step_rates: StepRates | None = None
    step: StepDecision | None = None
    """How the optimizer's step is made; None where nothing of it was measured, as in older profiles."""

    def _repr_html_(self) -> str:
        """For a notebook: where it was measured, what was decided, and why."""
        device, software = self.device, self.software
        where = [
            ("host", f"{self.host.name}: {self.host.cpu_model}"),
            ("device", f"{device.kind} {device.name}"),
            ("software", f"DeepSpeed {software.deepspeed}, torch {software.torch}"),
            ("measured", f"{self.created}, plan {self.plan}"),
            ("workload", self.workload.source),
        ]
        return markup.table("Profile", [*where, *self.choice.in_rows()], self.choice.reasons)

    @property
    def measurements(self) -> Measurements:
        """What was timed; its seconds are those of the whole probe."""
        return Measurements(
            transfers=self.transfers,
            casts=self.casts,
            sync=self.sync,
            pin=self.pin,
            stability=self.stability,
            seconds=self.elapsed_seconds,
            step=self.step_rates,
        )


# -- what stands in the way -----------------------------------------------------------------------

Severity = Literal["will break", "costs", "notice"]


class Finding(Record, frozen=True, kw_only=True):
    """One thing between a host, or a ds_config, and its best. `id` names the check that found it."""

    id: str
    severity: Severity
    found: str
    costs: str | None = None
    """What follows from it, with a number where one is known; None where `found` says it all."""
    fix: str


def path_in_words(path: Any) -> str:
    """A path with its parameters, of a choice or a candidate, as people are told of it."""
    ring = f", {path.buffer_count} buffers of {path.buffer_bytes:,} bytes" * (path.path == "staged")
    threads = f", {path.host_threads} host thread{'s' * (path.host_threads > 1)}" * (path.host_threads > 0)
    return f"{path.path} with the cast on the {path.cast}{ring}{threads}"


def fingerprint_key(fingerprint: dict[str, Scalar]) -> str:
    """Hash of a fingerprint: 16 hexadecimal digits, independent of the order of its fields."""
    canonical = json.dumps(fingerprint, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def to_plain(record: object) -> Any:
    """A record as built-in types only (dict, list, str, int, float, bool, None)."""
    return msgspec.to_builtins(record)


def from_plain(plain: object, record_type: type[T]) -> T:
    """The record that `to_plain` gave `plain` for.

    Raises:
        ProfileError: naming the field that is missing or of the wrong type.
    """
    try:
        return msgspec.convert(plain, record_type, strict=True)
    except msgspec.ValidationError as error:
        raise ProfileError(
            f"not a valid {record_type.__name__}: {error}; measure again with `autotune-offload probe --refresh`"
        ) from error


def histogram(sizes: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Sizes in elements as (elements, count), largest first; sizes of 0 are dropped."""
    counts: dict[int, int] = {}
    for size in sizes:
        if size > 0:
            counts[size] = counts.get(size, 0) + 1
    return tuple(sorted(counts.items(), reverse=True))


Auto = Literal["auto"]


# -- our block ------------------------------------------------------------------------------------


class Settings(Record, frozen=True, kw_only=True):
    """The ``autotune_offload`` block of a ds_config. "auto" leaves the value to the measurement."""

    enabled: bool = True
    """False returns the configuration untouched and measures nothing."""
    path: str = "auto"
    """The gradient path, one of ours or of an installed package; "deepspeed" keeps DeepSpeed's own code."""
    cast: Literal["auto", "device", "host"] = "auto"
    """Where 16-bit gradients become fp32."""
    buffer_bytes: int | Auto = "auto"
    """Bytes of one page-locked buffer of the staged ring."""
    buffer_count: int | Auto = "auto"
    """How many buffers that ring has."""
    host_threads: int | Auto = "auto"
    """Threads that share a host copy; 0 is torch's own pool."""
    accumulate: Literal["auto", "device", "host"] = "auto"
    """Where the gradients of an accumulation's micro-steps are added up."""
    step: Literal["auto", "deepspeed", "fused"] = "auto"
    """How DeepSpeed's CPU Adam makes a step; "deepspeed" keeps its own code, "fused" is one compiled pass."""
    confirm: bool = True
    """Whether a path that is carried out takes turns with others and with DeepSpeed's own code on real steps."""
    confirm_rounds: int | Auto = "auto"
    """Rounds of that at most."""
    keep: tuple[str, ...] = ()
    """Dotted keys that are never written, whole or relative to ``zero_optimization``."""
    budget_seconds: float | Auto = "auto"
    """How long measuring may take; "auto" is the probe plan's own budget."""
    max_pinned_bytes: int | Auto = "auto"
    """Bytes that this process may page-lock at most; 0 page-locks nothing."""
    wait_seconds: float | Auto = "auto"
    """How long a rank waits for the others before it decides; "auto" is 300."""
    strict: bool = False
    """True raises where a failure of ours would otherwise cost one warning."""

    @property
    def fixed(self) -> str | None:
        """What is fixed here that a choice depends on, as one string; None where nothing is.

        The path "deepspeed" is not: the choice is made as always, and only not carried out.
        """
        names = (
            "path",
            "cast",
            "buffer_bytes",
            "buffer_count",
            "host_threads",
            "accumulate",
            "max_pinned_bytes",
        )
        values = {name: getattr(self, name) for name in names}
        if values["path"] == "deepspeed":
            values["path"] = "auto"
        return ", ".join(f"{name}={value}" for name, value in values.items() if value != "auto") or None


Progress = Callable[[str, float], None]
"""Called with what is being measured and how much of the whole is done, 0 to 1."""


# -- a drive --------------------------------------------------------------------------------------


class AioSetting(Record, frozen=True, kw_only=True):
    """How DeepSpeed's aio handle is made: the keys of the ``aio`` section. As it stands: DeepSpeed's own."""

    block_bytes: int = 1 << 20
    queue_depth: int = 8
    threads: int = 1
    single_submit: bool = False
    overlap_events: bool = True


class DriveTimes(Record, frozen=True, kw_only=True):
    """What one setting took, by rounds: all files of all ranks written, read, and both at once."""

    setting: AioSetting
    write_seconds: tuple[float, ...] = ()
    read_seconds: tuple[float, ...] = ()
    both_seconds: tuple[float, ...] = ()


class Drive(Record, frozen=True, kw_only=True):
    """What was measured of a folder that DeepSpeed is to swap into, and what follows."""

    folder: str
    device: str
    """Major and minor number of the file system's device, as in /proc/partitions."""
    host: str
    created: str
    ranks: int
    """That wrote and read at once."""
    files: int
    """Of one rank that were submitted together, as the swapper does with a sub-group."""
    file_bytes: int
    written_bytes: int
    elapsed_seconds: float
    deepspeed: str
    times: tuple[DriveTimes, ...]
    """DeepSpeed's own setting first."""
    chosen: AioSetting
    gain: float
    """DeepSpeed's own time over the chosen one's in the same rounds; 1 where its own stays."""
    noise: float
    reasons: tuple[str, ...]

    @property
    def round_bytes(self) -> int:
        """That are written, read, or each of both, in a round."""
        return self.ranks * self.files * self.file_bytes

    def of(self, setting: AioSetting) -> DriveTimes:
        """What that setting took."""
        return next(each for each in self.times if each.setting == setting)


def backward_seconds(profile: Profile) -> float | None:
    """What the choice was measured to add to a backward pass: the path, or DeepSpeed's own code if that stays."""
    choice = profile.choice
    if not choice.beats_deepspeed:
        own = [b.measured_seconds for b in profile.baselines if b.installed]
        if own and own[0] is not None:
            return own[0]
    names = ("path", "cast", "buffer_bytes", "buffer_count", "host_threads")
    for candidate in profile.candidates:
        if all(getattr(candidate, name) == getattr(choice, name) for name in names):
            return candidate.measured_seconds
    return None
