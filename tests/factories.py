"""Realistic records for tests: a GPU host on which `staged` won, with raw samples as a probe keeps them.

Every function takes the record's own fields as keyword arguments and changes just those.
"""

from __future__ import annotations

import random
from typing import Any

from msgspec import structs

from autotune_offload.records import (
    SCHEMA,
    Baseline,
    Candidate,
    Cast,
    CastRate,
    Choice,
    DeviceIdentity,
    HostFacts,
    Kind,
    Limit,
    Limits,
    Memory,
    Narrowing,
    PassRate,
    PinCost,
    Profile,
    Software,
    State,
    StepCandidate,
    StepDecision,
    StepRates,
    SyncCost,
    Transfer,
    Workload,
    ZeroSizes,
    histogram,
)

SAMPLES = 20
_CURVES: tuple[tuple[Kind, Memory, State, float], ...] = (
    ("d2h", "pageable", "cold", 2.1),
    ("d2h", "pageable", "warm", 9.5),
    ("d2h", "pinned", "warm", 53.0),
    ("h2d", "pageable", "warm", 11.0),
    ("h2d", "pinned", "warm", 54.5),
    ("h2h", "pageable", "warm", 12.2),
)


def _raw(median_seconds: float, seed: object) -> tuple[float, ...]:
    """Twenty samples around a median, with four significant digits as the store keeps them."""
    source = random.Random(str(seed))
    return tuple(float(f"{median_seconds * source.uniform(0.97, 1.05):.4g}") for _ in range(SAMPLES))


def _transfer(kind: Kind, memory: Memory, state: State, gbps: float, size: int) -> Transfer:
    seconds = 8e-6 + size / (gbps * 1e9)
    return Transfer(
        kind=kind,
        memory=memory,
        state=state,
        bytes=size,
        median_seconds=seconds,
        iqr_seconds=seconds * 0.03,
        samples=SAMPLES,
        gbps=size / seconds / 1e9,
        raw_seconds=_raw(seconds, (kind, memory, state, size)),
    )


def _cast_rate(where: Cast, seconds: float) -> CastRate:
    return CastRate(
        where=where,
        dtype="bfloat16",
        bytes=1 << 26,
        median_seconds=seconds,
        iqr_seconds=seconds * 0.02,
        samples=SAMPLES,
        gbps=(1 << 26) / seconds / 1e9,
        raw_seconds=_raw(seconds, where),
    )


def _candidates() -> tuple[Candidate, ...]:
    direct = Candidate(
        path="direct",
        cast="host",
        buffer_bytes=0,
        buffer_count=0,
        predicted_seconds=0.41,
        measured_seconds=0.402,
        spread=0.02,
        samples=SAMPLES,
        raw_seconds=_raw(0.402, "direct"),
    )
    pinned = structs.replace(
        direct,
        path="pinned",
        measured_seconds=None,
        spread=None,
        samples=0,
        raw_seconds=(),
        rejected="needs 34.4 GB of page-locked memory; the cgroup leaves 24.7 GB",
    )
    staged = tuple(
        structs.replace(
            direct,
            path="staged",
            cast="device",
            buffer_bytes=1 << power,
            buffer_count=count,
            predicted_seconds=0.1 + 0.8 / power,
            measured_seconds=0.11 + 0.8 / power,
            raw_seconds=_raw(0.11 + 0.8 / power, (power, count)),
        )
        for power in range(16, 29)
        for count in (2, 3, 4)
    )
    return (direct, pinned, *staged)


def make_workload(**changes: Any) -> Workload:
    """One rank's share of a 124M-parameter GPT on eight ranks, bf16 gradients."""
    whole = [50257 * 768, 1024 * 768, *([2304 * 768, 768 * 768, 3072 * 768, 3072 * 768, 768, 768] * 12)]
    workload = Workload(
        partitions=histogram(-(-size // 8) for size in whole),
        parameters=histogram(whole),
        dtype="bfloat16",
        world_size=8,
        accumulation_steps=1,
        source="module",
    )
    return structs.replace(workload, **changes)


def make_choice(**changes: Any) -> Choice:
    """`staged` through three 16 MiB buffers, cast on the device, the destination unpinned."""
    choice = Choice(
        path="staged",
        cast="device",
        buffer_bytes=1 << 24,
        buffer_count=3,
        host_threads=0,
        pin_optimizer=False,
        pin_parameters=True,
        sizes=ZeroSizes(
            reduce_bucket_elements=15_099_494,
            prefetch_bucket_elements=13_589_544,
            persistence_threshold_elements=100_000,
            reasons={
                "reduce_bucket_elements": "gradients leave 8 times a pass, so copies overlap compute",
                "sub_group_elements": "DeepSpeed's own 1e9: the whole step is one tile",
            },
        ),
        gain=2.75,
        noise=0.02,
        tie=False,
        reasons=(
            "staged takes 0.146 s a backward pass where DeepSpeed's own path takes 0.402 s (2.75x)",
            "pinned would need 34.4 GB of page-locked memory; the cgroup leaves 24.7 GB",
        ),
    )
    return structs.replace(choice, **changes)


def make_step_rates(**changes: Any) -> StepRates:
    """A pass that gains up to eight threads, and casts back to bf16."""
    passes = tuple(
        PassRate(
            threads=threads,
            dtype="bfloat16",
            elements=1 << 24,
            median_seconds=seconds,
            iqr_seconds=seconds * 0.02,
            samples=SAMPLES,
            raw_seconds=_raw(seconds, ("pass", threads)),
        )
        for threads, seconds in ((8, 6e-3), (4, 0.011), (2, 0.02), (1, 0.039))
    )
    states: tuple[tuple[State, float], ...] = (("warm", 3e-3), ("cold", 9e-3))
    narrowings = tuple(
        Narrowing(
            where="host",
            state=state,
            dtype="bfloat16",
            bytes=1 << 26,
            median_seconds=seconds,
            iqr_seconds=seconds * 0.02,
            samples=SAMPLES,
            gbps=(1 << 26) / seconds / 1e9,
            raw_seconds=_raw(seconds, ("narrowing", state)),
        )
        for state, seconds in states
    )
    return structs.replace(StepRates(narrowings=narrowings, passes=passes, threads=1), **changes)


def make_step(**changes: Any) -> StepDecision:
    """The pass with eight threads, 16-bit weights through page-locked buffers."""
    candidates = (
        StepCandidate(threads=0, back="direct", predicted_seconds=0.066),
        StepCandidate(
            threads=8, back="staged", piece_elements=1 << 18, pinned_bytes=11 << 19, predicted_seconds=6.3e-3
        ),
        StepCandidate(
            threads=4, back="staged", piece_elements=1 << 18, rejected="needs more than may be locked"
        ),
        StepCandidate(threads=8, back="direct", piece_elements=1 << 18, predicted_seconds=7.1e-3),
    )
    decision = StepDecision(
        way="fused",
        threads=8,
        back="staged",
        reasons=("one compiled pass with 8 threads should take 6.30 ms a step",),
        candidates=candidates,
    )
    return structs.replace(decision, **changes)


def make_profile(**changes: Any) -> Profile:
    """A profile of ordinary size: 60 transfers and 41 candidates with 20 raw samples each."""
    device = DeviceIdentity(
        kind="cuda",
        name="NVIDIA H200",
        count=8,
        index=0,
        memory_bytes=150_754_820_096,
        capability="9.0",
        driver="570.86.15",
        link_generation=5,
        link_width=16,
        pin_backend="torch",
    )
    software = Software(python="3.11.9", torch="2.13.0+cu128", deepspeed="0.19.8", autotune_offload="0.1.0")
    cgroup = Limit(
        name="cgroup",
        bytes=24_696_061_952,
        source="/sys/fs/cgroup/kubepods/memory.max",
        raise_by="raise the container's memory limit",
    )
    profile = Profile(
        schema=SCHEMA,
        created="2026-05-04T09:30:00+00:00",
        fingerprint={
            "device.kind": device.kind,
            "device.name": device.name,
            "device.count": device.count,
            "device.driver": device.driver,
            "device.link_generation": device.link_generation,
            "device.mig_slice": None,
            "host.cpu_model": "INTEL(R) XEON(R) PLATINUM 8592+",
            "host.affinity_cpus": 16,
            "host.numa_bound": True,
            "software.torch": software.torch,
            "software.deepspeed": software.deepspeed,
            "workload": "3f1c9a62d5e0b874",
        },
        host=HostFacts(
            name="node-17",
            platform="Linux-6.8.0-x86_64",
            cpu_model="INTEL(R) XEON(R) PLATINUM 8592+",
            cpu_count=256,
            affinity_cpus=16,
            ram_bytes=2_164_663_517_184,
            swap_bytes=0,
            numa_nodes=2,
            numa_bound=True,
            last_level_cache_bytes=335_544_320,
            page_bytes=4096,
            wsl=False,
        ),
        device=device,
        software=software,
        limits=Limits(available_bytes=27_440_068_836, pinnable_bytes=24_696_061_952, bounds=(cgroup,)),
        workload=make_workload(),
        transfers=tuple(_transfer(*curve, 1 << power) for curve in _CURVES for power in range(12, 32, 2)),
        casts=(_cast_rate("device", 4.1e-5), _cast_rate("host", 6.3e-3)),
        sync=SyncCost(device_seconds=9.1e-6, stream_seconds=6.2e-6, event_seconds=5.4e-6),
        pin=PinCost(seconds_per_gib=0.31, largest_bytes=1 << 30, capped=True),
        baselines=(
            Baseline(
                name="explicit_upcast",
                versions=">=0.16.3",
                memory="pageable",
                installed=True,
                predicted_seconds=0.41,
                measured_seconds=0.402,
                spread=0.02,
                samples=SAMPLES,
                raw_seconds=_raw(0.402, "baseline"),
            ),
        ),
        candidates=_candidates(),
        step_rates=make_step_rates(),
        step=make_step(),
        choice=make_choice(),
        zero_optimization={
            "stage": 3,
            "reduce_bucket_size": 15_099_494,
            "offload_optimizer": {"device": "cpu", "pin_memory": False},
            "offload_param": {"device": "cpu", "pin_memory": True},
        },
        plan="standard",
        stability=("the h2h curve at 64 MiB spreads by 6 %: other work ran on this host",),
        elapsed_seconds=4.73,
        warnings=("this process may run on every NUMA node: bind it to the device's node",),
    )
    return structs.replace(profile, **changes)
