"""Tests of `autotune_offload.machine.host`: facts and limits, read from made-up /proc and /sys trees."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune_offload.errors import ConfigError
from autotune_offload.machine import bus, host
from autotune_offload.machine import limits as machine_limits
from autotune_offload.records import Limit, Limits
from tests import CHECKOUT

GIB = 1 << 30
NO_CAPABILITY = "CapEff:\t00000000a80425fb\nVmLck:\t       0 kB\n"  # Docker's default set
IPC_LOCK = "CapEff:\t0000000000004000\nVmLck:\t       0 kB\n"
V2_MOUNT = "31 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1_SENTINEL = str((1 << 63) - 4096)


def write(root: Path, name: str, text: str) -> None:
    """Writes one file of a made-up tree."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A host with 64 GiB available, one NUMA node, no cgroup limit and no memlock limit."""
    write(
        tmp_path,
        "proc/meminfo",
        f"MemTotal: 999 kB\nMemAvailable: {64 * GIB // 1024} kB\nSwapFree: 99999999 kB\n",
    )
    write(tmp_path, "proc/self/limits", memlock_line("unlimited"))
    write(tmp_path, "proc/self/status", NO_CAPABILITY)
    write(tmp_path, "proc/self/uid_map", "         0          0 4294967295\n")
    return tmp_path


def memlock_line(soft: str) -> str:
    """/proc/self/limits with this soft limit of locked memory."""
    return f"Limit                     Soft Limit           Hard Limit           Units\nMax locked memory         {soft:<20} unlimited            bytes\n"  # noqa: E501 - the kernel's own layout


def bound(limits: Limits, name: str) -> Limit | None:
    """The bound of this name, if there is one."""
    return next((limit for limit in limits.bounds if limit.name == name), None)


def node(root: Path, index: int, cpus: str, free_bytes: int, inactive_bytes: int = 0) -> None:
    """Adds a NUMA node."""
    folder = f"sys/devices/system/node/node{index}"
    write(root, f"{folder}/cpulist", cpus + "\n")
    lines = f"Node {index} MemFree: {free_bytes // 1024} kB\nNode {index} Inactive(file): {inactive_bytes // 1024} kB\n"
    write(root, f"{folder}/meminfo", lines)


# -- RAM, margin, ranks ---------------------------------------------------------------------------


def test_ram_is_what_is_available_without_swap_less_a_tenth(root: Path) -> None:
    """Free RAM less the margin is pinnable; swap adds nothing."""
    limits = machine_limits.limits(root=root)
    assert limits.available_bytes == 64 * GIB
    assert limits.pinnable_bytes == 64 * GIB - int(6.4 * GIB)
    assert [limit.name for limit in limits.bounds] == ["ram"]


@pytest.mark.parametrize(("free", "pinnable"), [(4 * GIB, 3 * GIB), (GIB, GIB // 2)])
def test_a_small_host_keeps_one_gib_or_half(root: Path, free: int, pinnable: int) -> None:
    """The margin is at least 1 GiB, but never more than half of what is free."""
    write(root, "proc/meminfo", f"MemAvailable: {free // 1024} kB\n")
    assert machine_limits.limits(root=root).pinnable_bytes == pinnable


def test_ranks_of_one_host_share_its_memory_but_not_their_own_limits(root: Path) -> None:
    """RAM is divided by the ranks; memlock and the user's bound count for each process."""
    write(root, "proc/self/limits", memlock_line(str(GIB)))
    limits = machine_limits.limits(root=root, ranks_per_host=4, max_pinned_bytes=2 * GIB)
    assert limits.available_bytes == 16 * GIB
    assert {limit.name: limit.bytes for limit in limits.bounds} == {
        "ram": (64 * GIB - int(6.4 * GIB)) // 4,
        "memlock": GIB,
        "max_pinned_bytes": 2 * GIB,
    }
    assert limits.pinnable_bytes == GIB


@given(ranks=st.integers(1, 64), most=st.none() | st.integers(0, 1 << 40))
def test_pinnable_is_the_smallest_bound_and_every_bound_says_how_to_raise_it(
    ranks: int, most: int | None
) -> None:
    """On this very host, whatever its limits are."""
    limits = machine_limits.limits(ranks_per_host=ranks, max_pinned_bytes=most)
    assert limits.pinnable_bytes == min(limit.bytes for limit in limits.bounds)
    assert all(limit.source and limit.raise_by and limit.bytes >= 0 for limit in limits.bounds)


def test_device_memory_shown_as_a_node_without_cpus_is_not_host_ram(root: Path) -> None:
    """A GH200's HBM counts in MemAvailable but is left out here."""
    node(root, 0, "0-71", 40 * GIB)
    node(root, 1, "", 16 * GIB)
    assert machine_limits.limits(root=root).available_bytes == 48 * GIB


def test_no_proc_at_all_falls_back_to_the_c_library(tmp_path: Path) -> None:
    """Where nothing can be read, RAM is the one bound, from sysconf."""
    limits = machine_limits.limits(root=tmp_path)
    assert [limit.name for limit in limits.bounds] == ["ram"]
    assert "sysconf" in limits.bounds[0].source
    assert limits.available_bytes > 0


@pytest.mark.parametrize("arguments", [{"ranks_per_host": 0}, {"max_pinned_bytes": -1}])
def test_an_impossible_argument_is_refused_by_name(root: Path, arguments: dict[str, int]) -> None:
    """The message names the argument and its value."""
    ((name, value),) = arguments.items()
    with pytest.raises(ConfigError, match=f"{name} is {value}"):
        machine_limits.limits(
            root=root,
            max_pinned_bytes=arguments.get("max_pinned_bytes"),
            ranks_per_host=arguments.get("ranks_per_host", 1),
        )


# -- cgroups --------------------------------------------------------------------------------------


def v2(root: Path, path: str, mount: str = V2_MOUNT) -> None:
    """This process is in this cgroup of a v2 hierarchy."""
    write(root, "proc/self/cgroup", f"0::{path}\n")
    write(root, "proc/self/mountinfo", mount)


def v2_files(root: Path, folder: str, limit: str, used: int, inactive: int = 0) -> None:
    """The memory files of one v2 cgroup."""
    write(root, f"{folder}/memory.max", limit + "\n")
    write(root, f"{folder}/memory.current", f"{used}\n")
    write(root, f"{folder}/memory.stat", f"anon 1\ninactive_file {inactive}\nactive_file 7\n")


def v1_files(root: Path, folder: str, limit: str, used: int, inactive: int = 0) -> None:
    """The memory files of one v1 cgroup."""
    write(root, f"{folder}/memory.limit_in_bytes", limit + "\n")
    write(root, f"{folder}/memory.usage_in_bytes", f"{used}\n")
    write(root, f"{folder}/memory.stat", f"inactive_file 5\ntotal_inactive_file {inactive}\n")


def test_v2_takes_the_smallest_headroom_of_all_ancestors(root: Path) -> None:
    """The parent's limit counts though this cgroup's own says max, and a larger grandparent's does not."""
    v2(root, "/slurm/job/step")
    v2_files(root, "sys/fs/cgroup/slurm", str(40 * GIB), 4 * GIB)
    v2_files(root, "sys/fs/cgroup/slurm/job", str(16 * GIB), 8 * GIB)
    v2_files(root, "sys/fs/cgroup/slurm/job/step", "max", 8 * GIB)
    limits = machine_limits.limits(root=root)
    assert limits.available_bytes == 8 * GIB
    assert limits.pinnable_bytes == 7 * GIB
    found = bound(limits, "cgroup")
    assert found is not None
    assert str(root / "sys/fs/cgroup/slurm/job/memory.max") in found.source
    assert "--memory" in found.raise_by


def test_inactive_file_cache_counts_as_free(root: Path) -> None:
    """Page cache that the kernel would give back is not in use."""
    v2(root, "/job")
    v2_files(root, "sys/fs/cgroup/job", str(16 * GIB), 12 * GIB, inactive=4 * GIB)
    assert machine_limits.limits(root=root).available_bytes == 8 * GIB


def test_max_everywhere_means_no_cgroup_bound(root: Path) -> None:
    """`max` in every ancestor leaves RAM as the bound."""
    v2(root, "/job")
    v2_files(root, "sys/fs/cgroup", "max", GIB)
    v2_files(root, "sys/fs/cgroup/job", "max", GIB)
    assert bound(machine_limits.limits(root=root), "cgroup") is None


def test_a_throttling_limit_counts_too(root: Path) -> None:
    """Beyond memory.high a process is stalled, so it bounds pinned memory like memory.max."""
    v2(root, "/job")
    v2_files(root, "sys/fs/cgroup/job", "max", GIB)
    write(root, "sys/fs/cgroup/job/memory.high", f"{9 * GIB}\n")
    assert machine_limits.limits(root=root).available_bytes == 8 * GIB


def test_usage_above_the_limit_leaves_nothing(root: Path) -> None:
    """Headroom is never negative."""
    v2(root, "/job")
    v2_files(root, "sys/fs/cgroup/job", str(GIB), 2 * GIB)
    assert machine_limits.limits(root=root).pinnable_bytes == 0


def test_v1_ancestors_count_and_the_sentinel_means_none(root: Path) -> None:
    """A v1 limit of 2**63 less a page is no limit; the parent's is one."""
    write(root, "proc/self/cgroup", "9:name=systemd:/x\n4:cpu,memory:/job/step\n0::/\n")
    write(root, "proc/self/mountinfo", "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n")
    v1_files(root, "sys/fs/cgroup/memory", V1_SENTINEL, GIB)
    v1_files(root, "sys/fs/cgroup/memory/job", str(12 * GIB), 6 * GIB, inactive=2 * GIB)
    v1_files(root, "sys/fs/cgroup/memory/job/step", V1_SENTINEL, GIB)
    limits = machine_limits.limits(root=root)
    assert limits.available_bytes == 8 * GIB
    found = bound(limits, "cgroup")
    assert found is not None
    assert "memory/job/memory.limit_in_bytes" in found.source


def test_v1_sentinel_of_large_pages_means_none(root: Path) -> None:
    """The sentinel is rounded down to the page size, which is 64 KiB on some Arm hosts."""
    write(root, "proc/self/cgroup", "4:memory:/\n")
    v1_files(root, "sys/fs/cgroup/memory", str((1 << 63) - 65536), GIB)
    assert bound(machine_limits.limits(root=root), "cgroup") is None


def test_a_container_that_sees_only_its_own_part_finds_its_limit(root: Path) -> None:
    """Without a cgroup namespace the path is the host's, and the mount shows just the container's part."""
    mount = "35 31 0:32 /docker/ab12 /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    write(root, "proc/self/cgroup", "4:memory:/docker/ab12\n")
    write(root, "proc/self/mountinfo", mount)
    v1_files(root, "sys/fs/cgroup/memory", str(4 * GIB), 0)
    assert machine_limits.limits(root=root).available_bytes == 4 * GIB


def test_a_path_outside_the_namespace_falls_back_to_the_mounted_top(root: Path) -> None:
    """A process moved out of its namespace still obeys what is mounted."""
    v2(root, "/other", mount="31 23 0:28 /mine /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    v2_files(root, "sys/fs/cgroup", str(4 * GIB), 0)
    v2_files(root, "sys/fs/other", str(GIB), 0)
    assert machine_limits.limits(root=root).available_bytes == 4 * GIB


def test_v1_names_a_limit_that_lies_above_what_a_container_sees(root: Path) -> None:
    """The parent that Docker limits is not mounted; the kernel's own sum of all limits is in memory.stat."""
    write(root, "proc/self/cgroup", "9:memory:/docker/abc\n0::/docker/abc\n")
    mount = "40 30 0:35 /docker/abc /sys/fs/cgroup/memory ro,nosuid - cgroup cgroup rw,memory\n"
    write(root, "proc/self/mountinfo", mount)
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", V1_SENTINEL)
    write(root, "sys/fs/cgroup/memory/memory.usage_in_bytes", str(3 * GIB))
    stat = f"hierarchical_memory_limit {16 * GIB}\nhierarchical_memsw_limit {V1_SENTINEL}\ntotal_inactive_file {GIB}\n"
    write(root, "sys/fs/cgroup/memory/memory.stat", stat)
    limits = machine_limits.limits(root=root)
    assert limits.available_bytes == 14 * GIB
    found = bound(limits, "cgroup")
    assert found is not None and "hierarchical_memory_limit in " in found.source
    write(root, "sys/fs/cgroup/memory/memory.stat", f"hierarchical_memory_limit {V1_SENTINEL}\n")
    assert bound(machine_limits.limits(root=root), "cgroup") is None


def test_of_equal_limits_the_file_that_sets_it_is_named(root: Path) -> None:
    """memory.stat repeats an ancestor's limit; the ancestor's own file is where it can be raised."""
    write(root, "proc/self/cgroup", "9:memory:/slurm/job\n")
    write(root, "sys/fs/cgroup/memory/slurm/memory.limit_in_bytes", str(16 * GIB))
    write(root, "sys/fs/cgroup/memory/slurm/job/memory.limit_in_bytes", V1_SENTINEL)
    write(root, "sys/fs/cgroup/memory/slurm/job/memory.stat", f"hierarchical_memory_limit {16 * GIB}\n")
    found = bound(machine_limits.limits(root=root), "cgroup")
    assert found is not None and "slurm/memory.limit_in_bytes" in found.source


@pytest.mark.parametrize(
    ("cgroup", "mountinfo"),
    [
        ("2\n0::/a\n", V2_MOUNT),
        ("0::\n0::/a\n", V2_MOUNT),
        ("\n:\n0::/a\n", "garbage\n\n" + V2_MOUNT),
        ("0::/a\n", "1 1 0:1 / / rw - rootfs\n" + V2_MOUNT),
        ("0::/a\n", "1 - cgroup2\n31 23 0:28 nowhere /x rw - cgroup2 cgroup2 rw\n" + V2_MOUNT),
        ("0::/a\n", "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2\n"),
    ],
)
def test_lines_that_no_kernel_writes_are_passed_over(root: Path, cgroup: str, mountinfo: str) -> None:
    """GVisor and lxcfs play these files; the good lines beside the odd ones still count."""
    write(root, "proc/self/cgroup", cgroup)
    write(root, "proc/self/mountinfo", mountinfo)
    write(root, "sys/fs/cgroup/a/memory.max", str(8 * GIB))
    assert machine_limits.limits(root=root).available_bytes == 8 * GIB


_ODD = st.lists(
    st.sampled_from(
        [
            *" \n\t:-,/.",
            "0",
            "7",
            "x",
            "\u0663",
            "9" * 5000,
            "kB",
            " - cgroup2 ",
            "memory",
            "MemAvailable: ",
            "VmLck:\t",
            "Max locked memory ",
            "CapEff:\t",
            "hierarchical_memory_limit ",
            "16.0.0 GT/s",
            "model name\t: ",
            "0::/a",
        ]
    ),
    max_size=12,
).map("".join)


@given(
    texts=st.fixed_dictionaries(
        dict.fromkeys(
            (
                *(
                    f"proc/{name}"
                    for name in ("meminfo", "cpuinfo", "version", "self/cgroup", "self/mountinfo")
                ),
                *(f"proc/self/{name}" for name in ("limits", "status", "uid_map")),
                *(f"sys/fs/cgroup/memory.{name}" for name in ("max", "high", "current", "stat")),
                *(f"sys/devices/system/node/node0/{name}" for name in ("cpulist", "meminfo")),
                *(
                    f"sys/devices/system/cpu/cpu0/cache/index3/{name}"
                    for name in ("level", "size", "shared_cpu_list")
                ),
                *(f"sys/bus/pci/devices/0000:01:00.0/{name}" for name in ("numa_node", "max_link_speed")),
            ),
            _ODD,
        )
    )
)
@settings(deadline=None)  # the disk may be busy
def test_no_text_in_proc_or_sys_raises(
    tmp_path_factory: pytest.TempPathFactory, texts: dict[str, str]
) -> None:
    """Whatever stands there, facts, limits and the devices on the bus are read."""
    root = tmp_path_factory.mktemp("root")
    for name, text in texts.items():
        write(root, name, text)
    write(root, "sys/bus/pci/devices/0000:01:00.0/vendor", "0x10de")
    write(root, "sys/bus/pci/devices/0000:01:00.0/class", "0x030200")
    assert host.facts(root=root).numa_nodes >= 1
    assert machine_limits.limits(root=root).available_bytes >= 0
    assert len(bus.accelerators(root=root)) == 1


def test_a_limit_above_the_ram_does_not_hide_the_ram(root: Path) -> None:
    """The smaller of RAM and cgroup counts."""
    v2(root, "/job")
    v2_files(root, "sys/fs/cgroup/job", str(1024 * GIB), 0)
    assert machine_limits.limits(root=root).available_bytes == 64 * GIB


# -- memlock --------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [None, "native"])
def test_memlock_bounds_a_process_without_the_capability(root: Path, backend: str | None) -> None:
    """8 MiB, as containers have by default, is the bound, less what is locked already."""
    write(root, "proc/self/limits", memlock_line("8388608"))
    write(root, "proc/self/status", NO_CAPABILITY.replace("       0", "    1024"))
    limits = machine_limits.limits(root=root, pin_backend=backend)
    assert limits.pinnable_bytes == 7 << 20
    found = bound(limits, "memlock")
    assert found is not None
    assert "ulimit -l" in found.raise_by
    assert str(root / "proc/self/limits") in found.source


def test_memlock_is_not_enforced_with_the_capability(root: Path) -> None:
    """CAP_IPC_LOCK lifts it."""
    write(root, "proc/self/limits", memlock_line("8388608"))
    write(root, "proc/self/status", IPC_LOCK)
    assert bound(machine_limits.limits(root=root), "memlock") is None


def test_the_capability_of_a_rootless_container_does_not_lift_memlock(root: Path) -> None:
    """The kernel asks for CAP_IPC_LOCK in the first user namespace."""
    write(root, "proc/self/limits", memlock_line("8388608"))
    write(root, "proc/self/status", IPC_LOCK)
    write(root, "proc/self/uid_map", "         0       1000          1\n")
    assert machine_limits.limits(root=root).pinnable_bytes == 8 << 20


def test_unlimited_memlock_is_no_bound(root: Path) -> None:
    """`unlimited` sets none."""
    assert bound(machine_limits.limits(root=root), "memlock") is None


def test_memlock_does_not_bound_what_the_driver_pins(root: Path) -> None:
    """The kernel does not charge an accelerator driver's pinning to RLIMIT_MEMLOCK."""
    write(root, "proc/self/limits", memlock_line("8388608"))
    assert bound(machine_limits.limits(root=root, pin_backend="torch"), "memlock") is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_MEMLOCK in /proc is Linux's")
def test_the_real_soft_limit_is_the_one_reported() -> None:
    """The kernel's own /proc/self/limits is understood: a child lowers its limit and finds it."""
    code = (
        "import resource, re; from autotune_offload.machine import limits\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))\n"
        "limits._may_lock_any_amount = lambda root: False\n"
        "print([limit.bytes for limit in limits.limits().bounds if limit.name == 'memlock'])\n"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=CHECKOUT
    )
    assert shown.stdout.strip() == "[65536]"


# -- NUMA, caches, facts --------------------------------------------------------------------------


def test_a_process_bound_to_one_node_of_two_is_limited_to_its_memory(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node's free memory and inactive cache bound it; four ranks on two nodes are two a node."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 5}, raising=False)
    node(root, 0, "0-3", 30 * GIB)
    node(root, 1, "4-7", 12 * GIB, inactive_bytes=4 * GIB)
    found = bound(machine_limits.limits(root=root, ranks_per_host=4), "numa")
    assert found is not None
    assert found.bytes == (16 * GIB - int(1.6 * GIB)) // 2
    assert "node1/meminfo" in found.source
    assert host.facts(root=root).numa_bound


@pytest.mark.parametrize("cpus", [{3, 4}, set(range(8))])
def test_a_process_that_may_run_on_two_nodes_is_not_bound(
    root: Path, monkeypatch: pytest.MonkeyPatch, cpus: set[int]
) -> None:
    """An affinity across nodes gives no NUMA bound."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cpus, raising=False)
    node(root, 0, "0-3", GIB)
    node(root, 1, "4-7", GIB)
    assert bound(machine_limits.limits(root=root), "numa") is None
    facts = host.facts(root=root)
    assert not facts.numa_bound
    assert facts.numa_nodes == 2
    assert facts.affinity_cpus == len(cpus)


def test_one_node_with_cpus_binds_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GH200's device memory is no second node."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    node(root, 0, "0-71", GIB)
    node(root, 1, "", GIB)
    facts = host.facts(root=root)
    assert (facts.numa_nodes, facts.numa_bound) == (1, False)


def cache(
    root: Path, cpu: int, index: int, level: int, size: str, shared: str, kind: str = "Unified"
) -> None:
    """Adds one cache of one CPU."""
    folder = f"sys/devices/system/cpu/cpu{cpu}/cache/index{index}"
    for name, text in (("level", str(level)), ("size", size), ("shared_cpu_list", shared), ("type", kind)):
        write(root, f"{folder}/{name}", text + "\n")


def test_last_level_caches_within_the_affinity_are_summed_once_each(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two L3 slices that the affinity reaches count once each, a third that it does not reach not at all."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    for cpu, shared in ((0, "0-1"), (1, "0-1"), (2, "2-3"), (3, "2-3"), (4, "4")):
        cache(root, cpu, 0, 1, "32K", str(cpu), kind="Data")
        cache(root, cpu, 1, 3, "16384K", shared)
    assert host.facts(root=root).last_level_cache_bytes == 32 << 20


def test_an_unreadable_cache_has_the_documented_size(root: Path) -> None:
    """No /sys gives the fallback."""
    assert host.facts(root=root).last_level_cache_bytes == host.FALLBACK_CACHE_BYTES


def test_affinity_falls_back_to_all_cpus(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the platform has no affinity, every CPU counts."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert host.facts(root=root).affinity_cpus == 6


@pytest.mark.parametrize(
    ("cpuinfo", "model"),
    [
        ("processor : 0\nmodel name\t: AMD EPYC 9654\nmodel name\t: other\n", "AMD EPYC 9654"),
        ("CPU implementer\t: 0x41\nCPU part\t: 0xd4f\n", "aarch64 implementer 0x41 part 0xd4f"),
        ("", "aarch64"),
    ],
)
def test_cpu_model(root: Path, monkeypatch: pytest.MonkeyPatch, cpuinfo: str, model: str) -> None:
    """From /proc/cpuinfo; on Arm the part's numbers tell hosts apart; else the platform's word."""
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    write(root, "proc/cpuinfo", cpuinfo)
    assert host.facts(root=root).cpu_model == model


@pytest.mark.parametrize(
    ("version", "wsl"),
    [("Linux version 5.15.90.1-microsoft-standard-WSL2", True), ("Linux version 6.8.0-generic", False)],
)
def test_wsl_is_told_by_the_kernel_version(root: Path, version: str, wsl: bool) -> None:
    """/proc/version names Microsoft on WSL."""
    write(root, "proc/version", version)
    assert host.facts(root=root).wsl is wsl


def test_facts_of_this_host_agree_with_each_other() -> None:
    """The real /proc and /sys are understood."""
    facts = host.facts()
    assert 1 <= facts.affinity_cpus <= facts.cpu_count
    assert facts.cpu_model
    assert facts.ram_bytes > machine_limits.limits().available_bytes
    assert facts.page_bytes in (4096, 16384, 65536)


def test_versions_come_without_importing_the_packages() -> None:
    """Reading them loads neither torch nor deepspeed."""
    code = "import sys; from autotune_offload.machine import host; print(host.software().torch, 'torch' in sys.modules, 'deepspeed' in sys.modules)"  # noqa: E501 - one line of code
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=CHECKOUT
    )
    version, *loaded = shown.stdout.split()
    assert version[0].isdigit()
    assert loaded == ["False", "False"]


def test_absent_packages_have_a_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing package is "not installed", this one "0+unknown"."""

    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    for name in ("torch", "deepspeed"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    found = host.software()
    assert (found.torch, found.deepspeed, found.autotune_offload) == (
        "not installed",
        "not installed",
        "0+unknown",
    )


# -- pinned blocks --------------------------------------------------------------------------------


def test_the_reported_block_of_129_5_mb_takes_256() -> None:
    """The case of pytorch#150517."""
    assert machine_limits.pinned_block_bytes(int(129.5 * (1 << 20))) == 256 << 20


@given(st.integers(1, 1 << 44))
def test_a_block_is_the_next_power_of_two(requested: int) -> None:
    """At least what was asked for, less than twice as much, a power of two."""
    block = machine_limits.pinned_block_bytes(requested)
    assert block & (block - 1) == 0
    assert requested <= block < 2 * requested


def test_an_empty_block_takes_nothing() -> None:
    """0 bytes need no memory, and no blocks none either."""
    assert machine_limits.pinned_block_bytes(0) == 0
    assert machine_limits.pinning_peak_bytes([]) == 0


def test_the_peak_holds_the_largest_block_twice() -> None:
    """Rounded blocks, plus the original of the largest while it is copied."""
    assert machine_limits.pinning_peak_bytes([3 * GIB, GIB]) == 4 * GIB + GIB + 3 * GIB


def limits_of(pinnable: int, available: int, name: str = "cgroup") -> Limits:
    """Limits with one bound."""
    limit = Limit(name=name, bytes=pinnable, source="/the/source", raise_by="do this")  # type: ignore[arg-type]
    return Limits(available_bytes=available, pinnable_bytes=pinnable, bounds=(limit,))


def test_blocks_that_fit_exactly_are_accepted() -> None:
    """No complaint at the very limit; an iterator may be given."""
    assert machine_limits.check_pinned(iter([GIB, GIB]), limits_of(2 * GIB, 3 * GIB)) is None


def test_the_rounding_is_what_makes_blocks_too_large() -> None:
    """5 GiB fit 6 GiB, but torch takes 8: the sentence has both numbers, the source and the way out."""
    sentence = machine_limits.check_pinned([5 * GIB], limits_of(6 * GIB, 64 * GIB))
    assert sentence is not None
    for part in ("8.59 GB", "6.44 GB", "cgroup", "/the/source", "do this"):
        assert part in sentence


def test_the_second_copy_is_what_does_not_fit() -> None:
    """The locked 4 GiB fit, but not beside the 4 GiB that they are copied from."""
    sentence = machine_limits.check_pinned([4 * GIB], limits_of(6 * GIB, 7 * GIB))
    assert sentence is not None
    assert "8.59 GB" in sentence
    assert "7.52 GB" in sentence


def test_the_users_bound_does_not_count_the_second_copy(root: Path) -> None:
    """max_pinned_bytes bounds what is locked: a block of just that size is allowed."""
    assert machine_limits.check_pinned([GIB], machine_limits.limits(root=root, max_pinned_bytes=GIB)) is None
    sentence = machine_limits.check_pinned([GIB + 1], machine_limits.limits(root=root, max_pinned_bytes=GIB))
    assert sentence is not None
    assert "max_pinned_bytes" in sentence


@pytest.mark.parametrize("name", ["torch", "deepspeed"])
def test_a_loaded_package_says_its_own_version(name: str) -> None:
    """The same as its metadata, so that a profile fits whether it is loaded or not."""
    loaded = importlib.import_module(name)
    assert getattr(host.software(), name) == str(loaded.__version__) == importlib.metadata.version(name)


def test_what_is_pinned_in_any_case_takes_its_part(root: Path) -> None:
    """A block that fits alone does not fit beside it; the sentence tells the part."""
    assert machine_limits.check_pinned([GIB], limits_of(3 * GIB, 64 * GIB)) is None
    sentence = machine_limits.check_pinned(
        [GIB], limits_of(3 * GIB, 64 * GIB), in_any_case_bytes=[4 * GIB - 1]
    )
    assert sentence is not None
    assert "needs 5.37 GB" in sentence and "4.29 GB of it DeepSpeed locks in any case" in sentence


def test_what_the_run_holds_beside_the_blocks_counts_as_memory() -> None:
    """It is not locked, so it counts for the memory alone."""
    assert machine_limits.check_pinned([GIB], limits_of(GIB, 3 * GIB), beside_bytes=GIB) is None
    sentence = machine_limits.check_pinned([GIB], limits_of(GIB, 3 * GIB), beside_bytes=GIB + 1)
    assert sentence is not None and "optimizer state" in sentence


@pytest.mark.parametrize(
    ("told", "world_size", "devices", "here"),
    [
        ({}, 1, 8, 1),
        ({}, 16, 8, 8),
        ({}, 4, 8, 4),
        ({}, 4, 0, 1),
        ({"LOCAL_WORLD_SIZE": "4"}, 16, 1, 4),
        ({"LOCAL_SIZE": "2"}, 16, 8, 2),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, 4, 1, 4),
        ({"LOCAL_WORLD_SIZE": "", "LOCAL_SIZE": "no"}, 16, 8, 8),
    ],
)
def test_ranks_of_a_host_are_those_of_the_launcher_or_of_the_devices(
    monkeypatch: pytest.MonkeyPatch, told: dict[str, str], world_size: int, devices: int, here: int
) -> None:
    """Never more than there are ranks, never less than one."""
    for name in machine_limits._LOCAL_SIZES:
        monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert machine_limits.ranks_here(world_size, devices) == here
