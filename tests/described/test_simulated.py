"""The simulated device: its clock and its values, and the decision on machines of every kind."""

from __future__ import annotations

import copy
import dataclasses
import functools
import time
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from autotune_offload import workload
from autotune_offload.api.probe import load_plan, probe
from autotune_offload.decide.candidates import grid
from autotune_offload.decide.decide import cost_model, decide
from autotune_offload.decide.decision import Decision
from autotune_offload.described import machine as described_machine
from autotune_offload.described.clocked import Faults
from autotune_offload.described.machine import Machine
from autotune_offload.described.simulated import SimulatedDevice
from autotune_offload.described.speeds import Speeds, speeds
from autotune_offload.errors import ConfigError, DeviceError, MeasurementError, PinError
from autotune_offload.machine import limits as machine_limits
from autotune_offload.measure.bench import Bench
from autotune_offload.measure.measure import measure
from autotune_offload.paths.build import build
from autotune_offload.paths.page_locking import PinRules
from autotune_offload.paths.path import chunks, destination_memory
from autotune_offload.paths.ring import StagedPath
from autotune_offload.paths.stock import stock_path
from autotune_offload.records import Baseline, Candidate, Memory, Profile, Settings, Workload, histogram
from autotune_offload.upstream import STOCK_SEQUENCES
from benchmarks import regret
from tests.described.test_machine import SHIPPED

MIB = 1 << 20
each_machine = pytest.mark.parametrize("name", SHIPPED)


@functools.cache
def machine(name: str = "t4_pcie3", **changes: float) -> Machine:
    """A shipped machine, some dotted numbers of which are others (dots written as two underscores)."""
    return changed(
        described_machine.load(name), {key.replace("__", "."): value for key, value in changes.items()}
    )


def changed(described: Machine, numbers: dict[str, float]) -> Machine:
    """The same machine with other numbers, sourced to this test."""
    plain = copy.deepcopy(described_machine.plain(described))
    plain["sources"] = [source for source in plain["sources"] if source["field"] not in numbers]
    for path, value in numbers.items():
        *parents, last = path.split(".")
        part = plain
        for parent in parents:
            part = part.setdefault(parent, {})
        part[last] = value
        plain["sources"].append({"field": path, "value": value, "kind": "estimate", "url": "this test"})
    return described_machine.parse(plain)


def simulated(name: str = "t4_pcie3", **arguments: Any) -> SimulatedDevice:
    """A device on a shipped machine."""
    return SimulatedDevice(machine(name), **arguments)


@functools.cache
def decided(name: str, ranks: int = 1, plan: str = "quick", max_pinned_bytes: int | None = None) -> Profile:
    """The default model's profile on a shipped machine."""
    load = workload.from_parameter_count(1_000_000_000, world_size=ranks)
    device = SimulatedDevice(machine(name), ranks=ranks)
    return probe(workload=load, plan=plan, device=device, max_pinned_bytes=max_pinned_bytes)


def small(elements: int = 300_000, count: int = 4) -> Workload:
    """A few partitions and a tiny one."""
    sizes = [elements] * count + [64]
    return Workload(
        partitions=histogram(sizes),
        parameters=histogram(sizes),
        dtype="bfloat16",
        world_size=1,
        accumulation_steps=1,
        source="test",
    )


def bf16(elements: int) -> torch.Tensor:
    """Values that are not all the same."""
    return (torch.arange(elements, dtype=torch.float32) % 251 - 125).to(torch.bfloat16)


# -- the clock ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("memory", "expected"), [("pinned", 6.7e-6 + MIB / 11.1e9), ("pageable", 7.5e-6 + MIB / 3.5e9)]
)
def test_a_copy_takes_latency_and_bytes_over_bandwidth(memory: Memory, expected: float) -> None:
    """A blocking copy lasts as long as the description says for its memory."""
    device = simulated()
    make = device.pinned_empty if memory == "pinned" else device.host_empty
    target, source = make(MIB, torch.uint8), device.empty(MIB, torch.uint8)
    before = device.now()
    device.d2h(target, source)
    assert device.now() - before == pytest.approx(expected)


def test_cold_pages_cost_once() -> None:
    """The first copy into untouched memory has the cold rate, the second one the warm rate."""
    device = simulated()
    target, source = device.host_empty(MIB, torch.uint8, touched=False), device.empty(MIB, torch.uint8)
    taken = []
    for _ in range(2):
        before = device.now()
        device.d2h(target, source)
        taken.append(device.now() - before)
    assert taken == pytest.approx([8e-6 + MIB / 1.5e9, 7.5e-6 + MIB / 3.5e9])


def test_a_blocking_copy_between_dtypes_goes_through_a_cold_temporary_and_casts_on_the_host() -> None:
    """The implicit upcast pays for half the bytes at the cold rate and for a cast by one host thread."""
    device = simulated()
    target, source = device.host_empty(MIB, torch.float32), device.empty(MIB, torch.bfloat16)
    device.d2h(target, source)
    assert device.now() == pytest.approx(8e-6 + 2 * MIB / 1.5e9 + 1.7e-6 + 4 * MIB / 10e9)


def test_an_asynchronous_copy_costs_the_host_one_call() -> None:
    """The host goes on at once, and whoever waits for the event waits for the copy."""
    device = simulated()
    target, source = device.pinned_empty(MIB, torch.uint8), device.empty(MIB, torch.uint8)
    before = device.now()
    device.d2h(target, source, non_blocking=True)
    event = device.record_event()
    assert device.now() - before == pytest.approx(1.7e-6)
    event.synchronize()
    assert device.now() - before == pytest.approx(1.7e-6 + 6.7e-6 + MIB / 11.1e9 + 5e-6)


def test_a_device_synchronize_waits_for_every_stream() -> None:
    """It is a barrier over all queued work and a fixed cost; a stream's waits for its own."""
    device = simulated("gaudi2")
    side = device.new_stream()
    target, source = device.pinned_empty(MIB, torch.uint8), device.empty(MIB, torch.uint8)
    with device.on(side):
        device.d2h(target, source, non_blocking=True)
        done = side.free
    before = device.now()
    device.synchronize_stream()
    assert device.now() - before == pytest.approx(20e-6)
    device.synchronize()
    assert device.now() == pytest.approx(done + device.machine.sync.device_us * 1e-6)


def test_both_directions_share_what_the_link_carries_together() -> None:
    """d2h keeps its rate, and the h2d that comes second gets what is left: 36 - 25.8 of an A100."""
    device = simulated("a100_pcie4")
    size = 64 * MIB
    down, up = (device.pinned_empty(size, torch.uint8) for _ in range(2))
    memory = [device.empty(size, torch.uint8) for _ in range(2)]
    streams = [device.new_stream(), device.new_stream()]
    before = device.now()
    with device.timed_only():
        with device.on(streams[0]):
            device.d2h(down, memory[0], non_blocking=True)
        with device.on(streams[1]):
            device.h2d(memory[1], up, non_blocking=True)
    first, second = streams[0].free - before, streams[1].free - before
    assert first == pytest.approx(size / 25.8e9, rel=0.02)
    beside = first * (36.0 - 25.8) * 1e9
    assert second == pytest.approx(first + (size - beside) / 25.7e9, rel=0.02)


def test_host_threads_work_at_the_same_time() -> None:
    """Two threads of a path's own take half the time of one, until all of them reach what the socket has."""
    device = simulated("h100_sxm_pcie5")
    target, source = (device.host_empty(64 * MIB, torch.uint8) for _ in range(2))
    taken = {}
    for count in (1, 2, 12):
        pool, before = device.own_threads(count), device.now()
        pieces = zip(target.chunk(count), source.chunk(count), strict=True)
        for future in [pool.submit(device.h2h, *piece) for piece in pieces]:
            future.result()
        taken[count] = device.now() - before
    assert taken[2] == pytest.approx(taken[1] / 2, rel=0.01)
    assert taken[12] == pytest.approx(64 * MIB / 37.4e9, rel=0.02)


def test_copies_and_host_work_share_the_hosts_memory() -> None:
    """On a host whose memory carries little, a host copy beside a transfer takes longer than alone."""
    device = SimulatedDevice(machine("t4_pcie3", host__mem_gbps=15.0))
    target, source = (device.host_empty(8 * MIB, torch.uint8) for _ in range(2))
    before = device.now()
    device.h2h(target, source)
    alone = device.now() - before
    pinned, memory = device.pinned_empty(64 * MIB, torch.uint8), device.empty(64 * MIB, torch.uint8)
    with device.timed_only():
        device.d2h(pinned, memory, non_blocking=True)
        before = device.now()
        device.h2h(target, source)
    assert device.now() - before == pytest.approx(alone * (11.1 + 12.4) / 15.0, rel=0.05)


@pytest.mark.parametrize(
    ("name", "ranks", "gbps"),
    [
        ("a100_pcie4", 1, 25.8),
        ("a100_pcie4", 2, 12.9),
        ("a100_pcie4", 64, 12.9),
        ("gh200", 4, 170.0),
        ("rtx4090_desktop", 8, 25.0),
    ],
)
def test_ranks_share_the_link(name: str, ranks: int, gbps: float) -> None:
    """Ranks behind one switch get their part of it; those of other hosts do not matter."""
    assert speeds(machine(name), ranks).link["d2h", "pinned"] == pytest.approx(gbps * 1e9)


def test_a_whole_node_may_carry_less_than_its_links() -> None:
    """`link.total_gbps` bounds what the ranks of a host get together."""
    node = machine("intel_max1550", link__total_gbps=257.0)
    assert speeds(node, 12).link["d2h", "pinned"] == pytest.approx(257e9 / 12)


def test_without_noise_everything_repeats_and_with_a_seed_too() -> None:
    """The same machine, noise and seed give the same times; another seed gives others."""

    def taken(noise: float, seed: int) -> float:
        device = SimulatedDevice(machine(), noise=noise, seed=seed)
        target, source = device.host_empty(MIB, torch.uint8), device.empty(MIB, torch.uint8)
        with device.timed_only():
            for _ in range(100):
                device.d2h(target, source)
        return device.now()

    assert taken(0.0, 1) == taken(0.0, 2)
    assert taken(0.05, 1) == taken(0.05, 1) != taken(0.05, 2)
    assert taken(0.05, 1) == pytest.approx(taken(0.0, 1), rel=0.1)


def test_a_minute_takes_moments() -> None:
    """Nothing sleeps: a virtual minute of copies is over in less than a tenth of it."""
    device = simulated()
    target, source = device.host_empty(64 * MIB, torch.uint8), device.empty(64 * MIB, torch.uint8)
    started = time.monotonic()
    with device.timed_only():
        while device.now() < 60:
            device.d2h(target, source)
    assert time.monotonic() - started < 6


@pytest.mark.parametrize("arguments", [{"noise": -0.1}, {"ranks": 0}, {"ranks": 2, "rank": 2}])
def test_a_device_that_cannot_be_is_refused(arguments: dict[str, Any]) -> None:
    """Negative noise and ranks that do not exist are errors."""
    with pytest.raises(ConfigError, match="expected noise of at least 0"):
        simulated(**arguments)


# -- faults ---------------------------------------------------------------------------------------


def test_a_pin_fails_above_its_size() -> None:
    """Blocks up to the size lock, larger ones do not, and the probe finds the size."""
    device = simulated(faults=Faults(pin_fails_above_bytes=8 * MIB))
    device.pinned_empty(8 * MIB, torch.uint8)
    with pytest.raises(PinError, match="8,388,608"):
        device.pinned_empty(8 * MIB + 1, torch.uint8)
    faulty = simulated(faults=Faults(pin_fails_above_bytes=8 * MIB))
    profile = probe(workload=small(), plan="quick", device=faulty)
    assert (profile.pin.largest_bytes, profile.pin.capped) == (8 * MIB, False)


def test_a_copy_that_never_completes_ends_in_an_error_and_not_in_a_hang() -> None:
    """Whoever waits for it is told; a smaller copy before it is fine."""
    device = simulated(faults=Faults(pinned_copy_hangs_above_bytes=MIB))
    target, source = device.pinned_empty(2 * MIB, torch.uint8), device.empty(2 * MIB, torch.uint8)
    device.d2h(target[:MIB], source[:MIB])
    device.d2h(target, source, non_blocking=True)
    with pytest.raises(DeviceError, match="never completes"):
        device.record_event().synchronize()


def test_a_slow_rank_is_slow_alone() -> None:
    """The rank that is named takes its factor longer, the others do not."""
    taken = []
    for rank in (0, 1):
        device = simulated(ranks=2, rank=rank, faults=Faults(slow_rank=1, slow_factor=3.0))
        device.h2d(device.empty(MIB, torch.uint8), device.host_empty(MIB, torch.uint8))
        taken.append(device.now())
    assert taken[1] == pytest.approx(3 * taken[0])


def test_a_slow_start_does_not_change_the_choice() -> None:
    """A first 200 ms at a fifth of the speed leaves path and cast as they are."""
    slow = simulated(faults=Faults(slow_start_seconds=0.2))
    load = workload.from_parameter_count(1_000_000_000)
    choice = probe(workload=load, plan="quick", device=slow).choice
    usual = decided("t4_pcie3").choice
    assert (choice.path, choice.cast) == (usual.path, usual.cast)


# -- values ---------------------------------------------------------------------------------------


@each_machine
def test_every_path_gives_the_same_bits_on_every_machine(name: str) -> None:
    """All candidates and DeepSpeed's own sequences bring the gradients as fp32, bit for bit."""
    device = SimulatedDevice(machine(name))
    bench = Bench(device, small(), 2_000_000)
    ring = Candidate(path="staged", cast="host", buffer_bytes=1 << 18, buffer_count=3, host_threads=1)
    tried = [*grid(device, small(), Settings()), ring]
    checked = 0
    for candidate in tried:
        if candidate.path == "direct" or device.why_not_pinned() is None:
            bench.check(build(device, candidate, bench.dtype), destination_memory(candidate.path))
            checked += 1
    for sequence in STOCK_SEQUENCES:
        bench.check(stock_path(sequence, device, bench.dtype, bench.largest_elements), "pageable")
    assert checked >= 3


class Careless(StagedPath):
    """A staged path that does not wait for the copy into its buffer."""

    def offload(
        self, source: torch.Tensor, destination: torch.Tensor, low: torch.Tensor | None = None
    ) -> None:
        """Empties the buffer at once."""
        del low
        assert self._block is not None
        for low, fp32 in chunks(source, destination, self.buffer_elements):
            buffer = self._block[: low.numel()]
            self.device.d2h(buffer, low, non_blocking=True)
            self.device.h2h(fp32, buffer)


def test_a_path_that_forgets_to_wait_is_found_out() -> None:
    """Values land no sooner than something waits for them, so wrong bytes are seen."""
    device = simulated()
    bench = Bench(device, small(), 2_000_000)
    spec = Candidate(path="staged", cast="host", buffer_bytes=1 << 18, buffer_count=3)
    with pytest.raises(MeasurementError, match="wrong bits"):
        bench.check(Careless(device, spec, bench.dtype), "pageable")


def test_an_event_of_another_stream_orders_values_too() -> None:
    """Work behind an event sees what the other stream queued before it."""
    device = simulated()
    side = device.new_stream()
    values, middle = bf16(1000), device.empty(1000, torch.float32)
    source = device.empty(1000, torch.bfloat16)
    device.h2d(source, values)
    device.cast(middle, source)
    event = device.record_event()
    target = device.pinned_empty(1000, torch.float32)
    with device.on(side):
        device.order_after(side, event)
        device.d2h(target, middle, non_blocking=True)
        device.synchronize_stream()
    assert torch.equal(target, values.float())


def test_timed_only_moves_nothing_and_takes_as_long() -> None:
    """Inside, the clock runs as ever and memory keeps what it held."""
    device = simulated()
    target, source = device.host_empty(MIB, torch.uint8), device.empty(MIB, torch.uint8)
    source.fill_(7)
    target.zero_()
    with device.timed_only():
        device.d2h(target, source)
    alone = device.now()
    assert int(target.sum()) == 0
    device.d2h(target, source)
    assert device.now() == pytest.approx(2 * alone) and int(target[0]) == 7


# -- the decision ---------------------------------------------------------------------------------


@each_machine
def test_the_whole_flow_runs_in_seconds_and_never_chooses_what_is_worse(name: str) -> None:
    """What would run takes no longer than the best sequence of any DeepSpeed, within the least tie of 2 %."""
    started = time.monotonic()
    profile = decided(name)
    assert time.monotonic() - started < 60  # a few seconds on an idle machine
    stock = [each.measured_seconds for each in profile.baselines if each.measured_seconds is not None]
    assert in_effect(profile) <= 1.02 * min(stock)
    assert profile.choice.reasons and profile.device.kind == machine(name).kind


def chosen(profile: Profile) -> Candidate:
    """The candidate that was chosen."""
    names = ("path", "cast", "buffer_bytes", "buffer_count", "host_threads")
    wanted = [getattr(profile.choice, name) for name in names]
    return next(each for each in profile.candidates if [getattr(each, name) for name in names] == wanted)


def in_effect(profile: Profile) -> float:
    """Seconds of what carries the gradients: our path, or DeepSpeed's own code where that is kept."""
    if profile.choice.beats_deepspeed:
        seconds = chosen(profile).measured_seconds
    else:
        own: Memory = "pinned" if profile.choice.pin_optimizer else "pageable"
        installed = next(each for each in profile.baselines if each.installed)
        same = [each for each in profile.baselines if each.name == installed.name and each.memory == own]
        seconds = same[0].measured_seconds
    assert seconds is not None
    return seconds


def said(profile: Profile) -> str:
    """All reasons in one text."""
    return "\n".join(profile.choice.reasons)


def test_pinning_loses_on_arc_a770() -> None:
    """Pinned copies are slower from 1 MiB on, so neither the gradients' path nor the keys pin."""
    profile = decided("arc_a770")
    rates = {
        (each.memory, each.bytes): each.gbps
        for each in profile.transfers
        if each.kind == "d2h" and each.state == "warm" and not each.duplex and each.bytes >= MIB
    }
    sizes = {size for memory, size in rates if memory == "pinned"}
    assert sizes and all(rates["pinned", size] < rates["pageable", size] for size in sizes)
    choice = profile.choice
    assert (choice.path, choice.pin_optimizer, choice.pin_parameters) == ("direct", False, False)
    assert "offload_optimizer is not pinned: DeepSpeed's own copies take" in said(profile)


def test_a_direct_fused_copy_wins_on_the_cpu() -> None:
    """Where device memory is host memory nothing is staged and nothing pinned, and it says why."""
    profile = decided("cpu")
    choice = profile.choice
    assert (choice.path, choice.cast, choice.pin_optimizer, choice.pin_parameters) == (
        "direct",
        "host",
        False,
        False,
    )
    assert choice.gain > 1.5
    assert "page-locked memory is not on offer here" in said(profile)


def test_staged_wins_on_a_t4_whose_memlock_is_capped() -> None:
    """A few MiB of locked memory are enough for a ring, and too few for the destination."""
    capped = machine("t4_pcie3", limits__memlock_bytes=64 * MIB)
    profile = probe(
        workload=workload.from_parameter_count(1_000_000_000), plan="quick", device=SimulatedDevice(capped)
    )
    choice = profile.choice
    assert choice.path == "staged" and choice.gain > 1.5
    assert choice.buffer_bytes * choice.buffer_count <= 64 * MIB
    assert "pinned was not tried" in said(profile) and "limits.memlock_bytes" in said(profile)


def test_the_cast_and_not_pinning_is_what_matters_on_gh200() -> None:
    """Elsewhere the cast costs several times as much; without pinning it is little more."""
    profile = decided("gh200")
    assert profile.choice.cast == "device"
    best = {
        (path, cast): min(
            each.measured_seconds
            for each in profile.candidates
            if (each.path, each.cast) == (path, cast) and each.measured_seconds is not None
        )
        for path, cast in (("direct", "device"), ("pinned", "device"), ("pinned", "host"))
    }
    assert best["direct", "device"] < 1.3 * best["pinned", "device"]
    assert best["pinned", "host"] > 3 * best["pinned", "device"]
    assert "with the cast on the host the same path adds" in said(profile)


@pytest.mark.parametrize(
    ("name", "pinnable_bytes", "place"),
    [("a100_pcie4", None, "host"), ("t4_pcie3", 256 * MIB, "host"), ("gh200", None, "device")],
)
def test_micro_steps_are_added_up_where_the_link_says(
    name: str, pinnable_bytes: int | None, place: str
) -> None:
    """On the host behind a slow link, on the device where the link is as fast as the host's memory; in time."""
    profile = probe(
        workload=workload.from_parameter_count(1_000_000_000, accumulation_steps=4),
        plan="standard",
        max_pinned_bytes=pinnable_bytes,
        device=SimulatedDevice(machine(name), noise=0.01),
    )
    assert profile.choice.accumulate == place
    assert f"micro-steps are added up on the {place}" in said(profile)
    assert profile.elapsed_seconds <= 5


def test_ranks_can_change_what_is_chosen_for() -> None:
    """Two ranks behind one switch of an A100 see half of its bandwidth, and the profile shows it."""
    alone, shared = decided("a100_pcie4"), decided("a100_pcie4", ranks=2)

    def fastest(profile: Profile) -> float:
        return max(each.gbps for each in profile.transfers if each.kind == "d2h" and each.memory == "pinned")

    assert fastest(shared) == pytest.approx(fastest(alone) / 2, rel=0.03)


def test_compute_to_hide_behind_makes_pinned_copies_win_on_arc_a770() -> None:
    """With a compute rate in the description, a copy that does not block costs less than a faster one that does."""
    computing = machine("arc_a770", compute__tflops=40.0)
    profile = probe(
        workload=workload.from_parameter_count(100_000_000), plan="quick", device=SimulatedDevice(computing)
    )
    assert profile.choice.path == "pinned"


# -- machines drawn at random ---------------------------------------------------------------------

bandwidths = st.floats(0.3, 400.0)
latencies = st.floats(0.5, 60.0)


@st.composite
def random_machines(draw: st.DrawFn) -> Machine:
    """Any machine: no relation between its numbers is taken for granted, but that one thread is not all."""
    drawn: dict[str, float] = {}
    for direction in ("d2h", "h2d"):
        for memory in ("pinned", "pageable"):
            drawn[f"{direction}.{memory}.latency_us"] = draw(latencies)
            drawn[f"{direction}.{memory}.bandwidth_gbps"] = draw(bandwidths)
    drawn["d2h.pageable_cold.bandwidth_gbps"] = draw(st.floats(0.1, 5.0))
    drawn["h2h.bandwidth_gbps"] = draw(st.floats(1.0, 30.0))
    drawn["h2h.threads_gbps"] = drawn["h2h.bandwidth_gbps"] * draw(st.floats(1.0, 12.0))
    drawn["cast.device_gbps"] = draw(st.floats(50.0, 3000.0))
    drawn["cast.host_gbps"] = draw(st.floats(1.0, 40.0))
    drawn["host.mem_gbps"] = draw(st.floats(10.0, 500.0))
    drawn["duplex.total_gbps"] = draw(bandwidths)
    drawn["sync.device_us"] = draw(latencies)
    return changed(described_machine.load(draw(st.sampled_from(["t4_pcie3", "gaudi2"]))), drawn)


few = settings(
    max_examples=settings().max_examples // 10,  # each decides whole machines
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def quick(described: Machine, load: Workload, **arguments: Any) -> Profile:
    """A short probe without a look at the bytes, which other tests take."""
    device = SimulatedDevice(described, **arguments)
    device.checked_elements = 0
    return probe(workload=load, plan="quick", budget_seconds=0.5, device=device)


@pytest.mark.slow
@few
@given(random_machines(), st.integers(0, 40), st.sampled_from([1_000_000, 50_000_000]))
def test_the_choice_never_exceeds_a_limit(described: Machine, power: int, parameters: int) -> None:
    """Whatever may be locked, what is chosen fits it, path and keys alike."""
    capped = changed(described, {"limits.memlock_bytes": 1 << power})
    load = workload.from_parameter_count(parameters)
    profile = quick(capped, load)
    choice, rules = profile.choice, PinRules(workload=load, pin=profile.pin, limits=profile.limits)
    if choice.path == "staged":
        assert (
            machine_limits.check_pinned([choice.buffer_bytes * choice.buffer_count], profile.limits) is None
        )
        assert choice.buffer_bytes * choice.buffer_count <= 1 << power
    if choice.path == "pinned" or choice.pin_optimizer:
        assert rules.against_optimizer() is None
    if choice.pin_parameters:
        assert rules.against_parameters(with_optimizer=choice.pin_optimizer) is None


@pytest.mark.slow
@few
@given(random_machines(), st.sampled_from(["d2h.pinned", "d2h.pageable", "h2h", "cast"]), st.floats(1.2, 4.0))
def test_more_bandwidth_never_makes_a_predicted_time_longer(
    described: Machine, what: str, factor: float
) -> None:
    """A faster link, host copy or cast makes no prediction longer, of ours or of DeepSpeed's own."""
    plain = described_machine.plain(described)
    names = {
        "h2h": ["h2h.bandwidth_gbps", "h2h.threads_gbps"],
        "cast": ["cast.device_gbps", "cast.host_gbps"],
    }.get(what, [f"{what}.bandwidth_gbps"])
    roomy = {"host.mem_gbps": 10_000.0}  # so that the memory does not bind what is made faster
    numbers = dict(
        described_machine.numbers({key: value for key, value in plain.items() if key != "sources"})
    )
    faster = {name: numbers[name] * factor for name in names}
    slow = predictions(changed(described, roomy))
    fast = predictions(changed(described, roomy | faster))
    assert all(fast[each] <= slow[each] * (1 + 1e-3) for each in slow)


def predictions(described: Machine) -> dict[object, float]:
    """All that the cost model predicts from this machine's measured curves."""
    device, load = SimulatedDevice(described), small(2_000_000)
    profile = quick(described, load)
    model = cost_model(device, profile.measurements, load)
    found: dict[object, float] = {
        (c.path, c.cast, c.buffer_bytes, c.buffer_count, c.host_threads): model.seconds(c)
        for c in grid(device, load, Settings())
    }
    memories: tuple[Memory, ...] = ("pageable", "pinned")
    for sequence in STOCK_SEQUENCES:
        for memory in memories:
            own = Baseline(name=sequence.name, versions="", memory=memory, installed=False)
            found[sequence.name, memory] = model.seconds(own)
    return found


@pytest.mark.slow
@few
@given(random_machines(), st.integers(0, 1000))
def test_noise_below_the_tie_flips_no_decision_with_a_real_margin(described: Machine, seed: int) -> None:
    """Where every other path is over 10 % behind, 1 % of noise leaves path and cast alone.

    A probe that had no time for enough rounds says itself that its noise is larger; then that counts.
    """
    load = workload.from_parameter_count(20_000_000)
    still = quick(described, load)
    best = best_by_kind(still)
    mine = best.pop((still.choice.path, still.choice.cast))
    if min(best.values(), default=0.0) < max(1.1, 1 + still.choice.noise) * mine:
        return
    noisy = quick(described, load, noise=0.01, seed=seed).choice
    assert (noisy.path, noisy.cast) == (still.choice.path, still.choice.cast)


def best_by_kind(profile: Profile) -> dict[tuple[str, str], float]:
    """The least measured time of each path and cast."""
    best: dict[tuple[str, str], float] = {}
    for each in profile.candidates:
        if each.measured_seconds is not None:
            kind = (each.path, each.cast)
            best[kind] = min(best.get(kind, float("inf")), each.measured_seconds)
    return best


_PINS = {"direct": 0, "staged": 1, "pinned": 2}


@pytest.mark.slow
@few
@given(random_machines(), st.floats(0.985, 1.015))
def test_a_near_tie_pins_less(described: Machine, ratio: float) -> None:
    """No path that pins less than the chosen one is within the noise of the fastest."""
    rate = described_machine.plain(described)["d2h"]["pageable"]["bandwidth_gbps"]
    near = changed(
        described,
        {
            "d2h.pinned.bandwidth_gbps": rate * ratio,
            "d2h.pinned.latency_us": described.d2h.pageable.latency_us,
        },
    )
    profile = quick(near, workload.from_parameter_count(20_000_000))
    timed = [each for each in profile.candidates if each.measured_seconds is not None]
    fastest = min(each.measured_seconds or 0.0 for each in timed)
    for each in timed:
        if _PINS[each.path] < _PINS[profile.choice.path] and each.samples >= 10:
            assert (each.measured_seconds or 0.0) > fastest * (1 + profile.choice.noise) * (1 - 1e-9)


@pytest.mark.slow
@few
@given(random_machines())
def test_the_buffer_is_the_smallest_within_the_noise_of_the_best(described: Machine) -> None:
    """Of all that was timed of the chosen path, nothing with smaller buffers is within 1 % of the fastest."""
    decision = with_all_as_finalists(described, workload.from_parameter_count(50_000_000))
    mine = decision.choice
    timed = {
        (each.buffer_bytes * each.buffer_count, each.measured_seconds)
        for each in decision.candidates
        if each.path == mine.path and each.measured_seconds is not None
    }
    fastest = min(seconds for _, seconds in timed)
    smaller = [seconds for size, seconds in timed if size < mine.buffer_bytes * mine.buffer_count]
    assert all(seconds > fastest * 1.01 * (1 - 1e-9) for seconds in smaller)


def with_all_as_finalists(described: Machine, load: Workload) -> Decision:
    """A decision in which whatever was timed takes part in the verdict."""
    device, plan = SimulatedDevice(described), structs.replace(load_plan("quick"), finalists=1000)
    device.checked_elements = 0
    limits = device.host_limits(None)
    measurements = measure(
        device,
        structs.replace(plan, budget_seconds=0.3),
        dtype=torch.bfloat16,
        cache_bytes=0,
        memory_bytes=1 << 30,
        pinnable_bytes=limits.pinnable_bytes,
    )
    return decide(
        device,
        plan,
        measurements,
        load,
        limits,
        deepspeed_version=(0, 19, 8),
        steer=Settings(),
        cache_bytes=0,
        deadline=device.now() + 0.5,
        progress=lambda what, done: None,
    )


@pytest.mark.slow
@few
@given(random_machines(), st.booleans(), st.booleans())
def test_the_two_directions_are_decided_apart(described: Machine, down: bool, up: bool) -> None:
    """The optimizer's key follows the d2h rates and the parameters' key the h2d rates, whatever the other does."""
    rates = {
        "d2h.pinned.bandwidth_gbps": 40.0 if down else 4.0,
        "d2h.pageable.bandwidth_gbps": 4.0 if down else 40.0,
        "h2d.pinned.bandwidth_gbps": 40.0 if up else 4.0,
        "h2d.pageable.bandwidth_gbps": 4.0 if up else 40.0,
        "cast.device_gbps": 1000.0,
        "host.mem_gbps": 500.0,
        "duplex.total_gbps": 1000.0,  # DeepSpeed's own copies go both ways at once where they are pinned
    }
    lines = [f"{d}.{m}.latency_us" for d in ("d2h", "h2d") for m in ("pinned", "pageable")]
    both = changed(described, rates | dict.fromkeys(lines, 5.0))
    choice = quick(both, workload.from_parameter_count(100_000_000)).choice
    assert (choice.pin_optimizer_alone, choice.pin_parameters) == (down, up)


def test_what_ranks_get_adds_up_to_no_more_than_there_is() -> None:
    """For every shipped machine and any number of ranks, a host's ranks together stay within its memory."""
    for name in SHIPPED:
        for ranks in (1, 3, 8, 64):
            described = machine(name)
            here = min(ranks, described.ranks_per_host)
            got: Speeds = speeds(described, ranks)
            sharing = min(described.host.shared_by_ranks or here, here)
            assert got.memory * sharing <= described.host.mem_gbps * 1e9 * (1 + 1e-9)
            assert got.copy_all * sharing * 2 <= described.host.mem_gbps * 1e9 * (1 + 1e-9)
            assert dataclasses.replace(got) == got


@pytest.mark.slow
def test_the_regret_of_a_few_cases_is_within_its_limits() -> None:
    """Noisy probes of three machines choose what is at most 5 % slower than the best of an exhaustive search."""
    cases = [case for case in regret.some_cases(["t4_pcie3", "arc_a770", "cpu"], 60) if case.ranks == 1][:3]
    results = [regret.evaluate(case, plan="quick") for case in cases]
    figures = regret.summary(results)
    assert figures["cases"] == 3 and figures["trials"] > 10
    assert 0 <= figures["mean_regret"] <= figures["worst_regret"] < regret.WORST_LIMIT
    assert 0 <= figures["mean_step_regret"] <= figures["worst_step_regret"] < regret.WORST_LIMIT


@pytest.mark.slow
def test_the_place_of_accumulation_counts_as_regret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adding where it takes longer is a wrong choice, too; behind a fast link it is the host."""
    case = regret.Case(
        machine="gh200", model="gpt2", ranks=1, accumulation_steps=4, pinning="forbidden"
    )  # fmt: skip
    assert regret.evaluate(case, plan="quick").regret < regret.WORST_LIMIT

    def contrary(*args: Any, **kwargs: Any) -> Profile:
        """Carried out, and added up on the host."""
        found = probe(*args, **kwargs)
        return structs.replace(found, choice=structs.replace(found.choice, accumulate="host", gain=9.0))

    monkeypatch.setattr(regret, "probe", contrary)
    wrong = regret.evaluate(case, plan="quick")
    assert wrong.regret > 0.5 and "added up on the host" in wrong.chosen


@pytest.mark.parametrize(
    ("model", "parameters"),
    {
        "tinystories-1m": 3_745_984,
        "pythia-14m": 14_067_712,
        "gpt2": 124_439_808,
        "tinyllama-1.1b": 1_100_048_384,
        "llama-3.2-3b": 3_212_749_824,
        "llama-2-7b": 6_738_415_616,
        "llama-2-13b": 13_015_864_320,
        "llama-2-70b": 68_976_648_192,
    }.items(),
)
def test_the_models_of_the_cases_have_their_published_sizes(model: str, parameters: int) -> None:
    """Each config.json has all the keys that its sizes follow from, and no model is left out here."""
    assert regret.described_workload(model, 1, 1).elements == parameters
    assert len(regret.MODELS) == 8


def test_the_cases_are_spread_over_all_machines() -> None:
    """As many of each machine, within one, and no case twice."""
    cases = regret.some_cases(SHIPPED, 25)
    counts = [sum(case.machine == name for case in cases) for name in SHIPPED]
    assert len(set(cases)) == 25 and set(counts) == {2, 3}
