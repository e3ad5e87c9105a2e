"""Faults of what a process may allocate and page-lock."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from autotune_offload import workload
from autotune_offload.machine import host
from autotune_offload.machine import limits as machine_limits
from autotune_offload.paths.page_locking import PinRules
from autotune_offload.records import Limit, Limits, PinCost, Settings
from tests.factories import make_profile
from tests.reliability.registry import NotPossible, fault
from tests.reliability.scenes import (
    CONFIG,
    UNPRIVILEGED,
    child,
    environment,
    faked_root,
    may_mount,
    probed,
    shortened,
    simulated,
    start,
    without_ipc_lock,
)

GIB = 1 << 30
PINS = PinCost(seconds_per_gib=0.3, largest_bytes=1 << 40, capped=True)

_LIMITS = """
import json, resource
from autotune_offload.machine import limits
resource.setrlimit(resource.RLIMIT_MEMLOCK, ({bytes}, {bytes}))
{drop}
found = limits.limits(pin_backend="native")
print(json.dumps([found.pinnable_bytes, limits.check_pinned([1 << 20], found),
                  [b.name for b in found.bounds]]))
"""


def rules(parameters: int, limits: Limits) -> PinRules:
    """The rules for a decoder of so many parameters on one rank."""
    return PinRules(workload=workload.from_parameter_count(parameters), pin=PINS, limits=limits)


def memory(free: int, *, source: str = "MemAvailable") -> Limits:
    """A host with so much free memory."""
    ram = Limit(name="ram", bytes=free, source=source, raise_by="use one with more RAM")
    return machine_limits.bounded([ram], [], ranks_per_host=1, max_pinned_bytes=None)


def says(sentence: str | None, *words: str) -> str:
    """The rejection, which holds these words."""
    assert sentence is not None, "nothing was rejected"
    for word in words:
        assert word in sentence, f'"{word}" is not in: {sentence}'
    return f"rejected: {shortened(sentence)}"


@fault(
    area="limits",
    name="memlock of 64 KiB without CAP_IPC_LOCK",
    injected="setrlimit(RLIMIT_MEMLOCK) in a child that drops to an unprivileged user",
    expected="a megabyte is rejected with both numbers, /proc/self/limits and how to raise it",
)
def _(folder: Path) -> str:
    pinnable, why, _ = child(_LIMITS.format(bytes=65536, drop=UNPRIVILEGED.format(uid=65534)))
    assert pinnable == 65536
    return says(why, "0.00105 GB", "memlock", "/proc/self/limits", "ulimit -l")


@fault(
    area="limits",
    name="memlock of 64 KiB with CAP_IPC_LOCK",
    injected="the same limit in a child of root",
    expected="no bound: the kernel does not enforce it there",
)
def _(folder: Path) -> str:
    if os.geteuid() != 0:
        raise NotPossible("only root has CAP_IPC_LOCK, and this user is not")
    _, why, names = child(_LIMITS.format(bytes=65536, drop=""))
    if "memlock" in names:
        raise NotPossible("root has no CAP_IPC_LOCK here")
    assert why is None
    return f"bounds: {', '.join(names)}; a megabyte passes"


@fault(
    area="limits",
    name="memlock changed by prlimit while running",
    injected="prlimit on a live child, which reads its limits before and after",
    expected="the new limit is seen",
)
def _(folder: Path) -> str:
    source = (
        "import sys\nfrom autotune_offload.machine import limits\n"
        "for line in sys.stdin:\n"
        "    print(limits.limits(pin_backend='native').pinnable_bytes, flush=True)\n"
    )
    source = without_ipc_lock(source, memlock_bytes=1 << 20)
    process = subprocess.Popen(
        [sys.executable, "-c", source],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write("\n")
        process.stdin.flush()
        before = int(process.stdout.readline())
        try:
            resource.prlimit(process.pid, resource.RLIMIT_MEMLOCK, (32768, 32768))
        except OSError as error:
            raise NotPossible(f"prlimit cannot be used: {error}") from error
        process.stdin.write("\n")
        process.stdin.flush()
        after = int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
    assert (before, after) == (1 << 20, 32768)
    return f"{before:,} bytes before, {after:,} after"


@fault(
    area="limits",
    name="memlock without bound",
    injected="no limit in the faked /proc",
    expected="memlock is no bound",
)
def _(folder: Path) -> str:
    root = faked_root(
        folder,
        {
            "proc/meminfo": "MemAvailable: 16777216 kB\n",
            "proc/self/limits": "Max locked memory         unlimited            unlimited            bytes\n",
        },
    )
    names = [bound.name for bound in machine_limits.limits(pin_backend="native", root=root).bounds]
    assert names == ["ram"]
    return "the memory is the only bound"


# -- cgroups --------------------------------------------------------------------------------------


@contextlib.contextmanager
def cgroup(*limits_bytes: int) -> Iterator[Path]:
    """A memory cgroup below this process's own, one in the other, outermost first; the innermost one."""
    made: list[Path] = []
    try:
        for limit in limits_bytes:
            made.append(_made(made[-1] if made else _own_cgroup(), limit))
        yield made[-1]
    finally:
        for path in reversed(made):
            with contextlib.suppress(OSError):
                path.rmdir()


def _own_cgroup() -> Path:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for base in ("/sys/fs/cgroup/memory", "/sys/fs/cgroup"):
            if ("memory" in controllers.split(",")) is (base.endswith("memory")):
                folder = Path(base + path)
                if (folder / "memory.limit_in_bytes").exists() or (folder / "memory.max").exists():
                    return folder
    raise NotPossible("this process lies in no memory cgroup that can be seen")


def _made(parent: Path, limit: int) -> Path:
    path = parent / f"autotune-offload-{os.getpid()}"
    try:
        path.mkdir()
        name = "memory.limit_in_bytes" if (path / "memory.limit_in_bytes").exists() else "memory.max"
        (path / name).write_text(str(limit))
    except OSError as error:
        with contextlib.suppress(OSError):
            path.rmdir()
        raise NotPossible(f"no memory cgroup can be made here: {error}") from error
    return path


def in_cgroup(group: Path) -> tuple[int, str | None]:
    """What a child in there may pin, and what it says to twice the outer limit."""
    source = (
        "import json, os\n"
        f"open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
        "from autotune_offload.machine import limits\n"
        "found = limits.limits(pin_backend='torch')\n"
        "print(json.dumps([found.pinnable_bytes, limits.check_pinned([1 << 29], found)]))\n"
    )
    pinnable, why = child(source)
    return pinnable, why


@fault(
    area="limits",
    name="memory cgroup of 256 MiB",
    injected="a child in a real memory cgroup",
    expected="512 MiB are rejected by the cgroup's own file, although the host has more",
)
def _(folder: Path) -> str:
    with cgroup(256 << 20) as group:
        pinnable, why = in_cgroup(group)
    assert 0 < pinnable <= 256 << 20
    return says(why, "cgroup", group.name, "docker run --memory")


@fault(
    area="limits",
    name="a smaller cgroup further up",
    injected="a child in a real cgroup of 4 GiB inside one of 256 MiB",
    expected="the smaller one counts",
)
def _(folder: Path) -> str:
    with cgroup(256 << 20, 4 << 30) as group:
        pinnable, why = in_cgroup(group)
    assert 0 < pinnable <= 256 << 20
    return says(why, "cgroup", "of 0.268 GB free")


def _cgroup_files(kind: str, limits: dict[str, str]) -> dict[str, str]:
    controllers, mount = ("", "sys/fs/cgroup") if kind == "v2" else ("memory", "sys/fs/cgroup/memory")
    files = {"proc/meminfo": "MemAvailable: 1073741824 kB\n", "proc/self/cgroup": f"0:{controllers}:/a/b\n"}
    return files | {f"{mount}/{name}": text for name, text in limits.items()}


@fault(
    area="limits",
    name="cgroup v2 with a limit on an ancestor",
    injected="memory.max of 8 GiB above one that says max, in a faked /sys of a 1 TiB host",
    expected="8 GiB count",
)
def _(folder: Path) -> str:
    root = faked_root(folder, _cgroup_files("v2", {"a/memory.max": str(8 * GIB), "a/b/memory.max": "max\n"}))
    found = machine_limits.limits(pin_backend="torch", root=root)
    assert found.pinnable_bytes == 8 * GIB - GIB
    return says(machine_limits.check_pinned([8 * GIB], found), "cgroup", "memory.max", "Slurm --mem")


@fault(
    area="limits",
    name="cgroup v1 sentinel for no limit",
    injected="9223372036854771712 in memory.limit_in_bytes of a faked /sys",
    expected="no bound",
)
def _(folder: Path) -> str:
    name = "a/b/memory.limit_in_bytes"
    root = faked_root(folder, _cgroup_files("v1", {name: "9223372036854771712\n"}))
    names = [bound.name for bound in machine_limits.limits(pin_backend="torch", root=root).bounds]
    assert names == ["ram"]
    return "the memory is the only bound"


@fault(
    area="limits",
    name="cgroup files full of junk",
    injected="text instead of numbers in a faked /sys",
    expected="ignored; the memory counts",
)
def _(folder: Path) -> str:
    root = faked_root(folder, _cgroup_files("v2", {"a/memory.max": "\x00\xff", "a/b/memory.max": "-7 GB"}))
    assert [bound.name for bound in machine_limits.limits(pin_backend="torch", root=root).bounds] == ["ram"]
    return "the memory is the only bound"


# -- memory ---------------------------------------------------------------------------------------


@fault(
    area="limits",
    name="little RAM and much swap",
    injected="8 GiB free and 1 TiB of swap in a faked /proc",
    expected="a billion parameters are not pinned: swap does not count",
)
def _(folder: Path) -> str:
    root = faked_root(
        folder,
        {"proc/meminfo": f"MemAvailable: {8 << 20} kB\nSwapTotal: {1 << 30} kB\nSwapFree: {1 << 30} kB\n"},
    )
    found = machine_limits.limits(pin_backend="torch", root=root)
    return says(rules(10**9, found).against_path("pinned"), "ram", "MemAvailable", "swap does not help")


@fault(
    area="limits",
    name="a node of 1.4 TB that runs out",
    injected="the rules for 70 billion parameters on one rank with 1.4 TB free",
    expected="pinned is rejected in GB, before the kernel kills anything",
)
def _(folder: Path) -> str:
    why = rules(70 * 10**9, memory(1_400_000_000_000)).against_path("pinned")
    return says(why, "GB of", "ram: MemAvailable", "use one with more RAM")


@fault(
    area="limits",
    name="a block that rounding doubles",
    injected="129.5 MiB to be pinned where 200 MiB may be",
    expected="rejected: torch takes 256 MiB",
)
def _(folder: Path) -> str:
    found = Limits(available_bytes=64 * GIB, pinnable_bytes=200 << 20, bounds=())
    return says(
        machine_limits.check_pinned([int(129.5 * (1 << 20))], found), "0.268 GB", "power of two", "0.21 GB"
    )


@fault(
    area="limits",
    name="the second copy while pinning",
    injected="4 GiB to be pinned where 7 GiB of memory are free",
    expected="rejected: the block exists twice for a moment",
)
def _(folder: Path) -> str:
    found = Limits(available_bytes=7 * GIB, pinnable_bytes=6 * GIB, bounds=())
    return says(machine_limits.check_pinned([4 * GIB], found), "8.59 GB", "exists twice", "7.52 GB")


@fault(
    area="limits",
    name="optimizer state beside the pinned gradients",
    injected="a billion parameters, 16 GB free: the pinned blocks alone would fit",
    expected="rejected: fp32 weights and Adam's moments need their 12 GB too",
)
def _(folder: Path) -> str:
    found = Limits(available_bytes=16 * 10**9, pinnable_bytes=15 * 10**9, bounds=())
    return says(rules(10**9, found).against_path("pinned"), "of optimizer state")


@fault(
    area="limits",
    name="what DeepSpeed pins in any case leaves no room for a ring",
    injected="300 MB may be locked, 124 million parameters: the flat copy takes 268 MB",
    expected="staged is rejected with both parts",
)
def _(folder: Path) -> str:
    found = Limits(available_bytes=64 * GIB, pinnable_bytes=300_000_000, bounds=())
    mine = rules(124_000_000, found)
    staged = next(c for c in make_profile().candidates if c.buffer_bytes * c.buffer_count == 48 << 20)
    assert mine.against(next(c for c in make_profile().candidates if c.path == "direct")) is None
    return says(mine.against(staged), "it DeepSpeed locks in any case", "0.3 GB")


@fault(
    area="limits",
    name="memlock that DeepSpeed itself will exceed",
    injected="a machine with memlock of 8 MiB, a billion parameters",
    expected="direct, and a warning that DeepSpeed's own flat buffer does not fit, with the way out",
)
def _(folder: Path) -> str:
    from tests.described.test_simulated import changed

    device = simulated("h100_sxm_pcie5")
    device.machine = changed(device.machine, {"limits.memlock_bytes": 8 << 20})
    profile = probed(device)
    assert profile.choice.path == "direct" and not profile.choice.pin_optimizer
    warning = next(w for w in profile.warnings if "whatever pin_memory says" in w)
    return says(warning, "memlock", "take offload_param out")


@fault(
    area="limits",
    name="max_pinned_bytes of 0",
    injected='"max_pinned_bytes": 0 on a described GH200, where pinned would win',
    expected="nothing is pinned, and the reason is the user's own bound",
)
def _(folder: Path) -> str:
    choice = probed(simulated("gh200"), settings=Settings(max_pinned_bytes=0)).choice
    assert choice.path == "direct" and not choice.pin_optimizer and not choice.pin_parameters
    reason = next(r for r in choice.reasons if "max_pinned_bytes" in r)
    return says(reason, "set by the user")


@fault(
    area="limits",
    name="a fixed path that does not fit",
    injected='"path": "pinned" with "max_pinned_bytes": "1MiB"',
    expected="the run starts untuned; the warning names the number and the bound",
)
def _(folder: Path) -> str:
    config = {**CONFIG, "autotune_offload": {"path": "pinned", "max_pinned_bytes": "1MiB"}}

    def probe(*, workload: object, settings: Settings, **others: object) -> object:
        return probed(simulated("gh200"), settings=settings)

    return start(folder, config, probe=probe).runs_untuned(
        config, "path pinned", "0.00105 GB", "max_pinned_bytes"
    )


@fault(
    area="limits",
    name="a NUMA node with less memory than the host",
    injected="a process bound to a node with 4 GiB free of a 1 TiB host, in a faked /sys",
    expected="the node's memory counts",
)
def _(folder: Path) -> str:
    cpus = sorted(os.sched_getaffinity(0))
    mine = ",".join(map(str, cpus))
    root = faked_root(
        folder,
        {
            "proc/meminfo": "MemAvailable: 1073741824 kB\n",
            "sys/devices/system/node/node0/cpulist": mine,
            "sys/devices/system/node/node0/meminfo": f"Node 0 MemFree: {4 << 20} kB\n",
            "sys/devices/system/node/node1/cpulist": f"{cpus[-1] + 1}-{cpus[-1] + 8}",
            "sys/devices/system/node/node1/meminfo": f"Node 1 MemFree: {512 << 20} kB\n",
        },
    )
    found = machine_limits.limits(pin_backend="torch", root=root)
    return says(
        machine_limits.check_pinned([8 * GIB], found),
        "numa",
        "node0/meminfo",
        "bind the process to one with more",
    )


@fault(
    area="limits",
    name="WSL",
    injected="a kernel version of Microsoft's and 8 GiB in a faked /proc",
    expected="the way to more memory is WSL's own",
)
def _(folder: Path) -> str:
    root = faked_root(
        folder,
        {
            "proc/version": "Linux version 5.15.153.1-microsoft-standard-WSL2",
            "proc/meminfo": f"MemAvailable: {8 << 20} kB\n",
        },
    )
    assert host.facts(root=root).wsl
    found = machine_limits.limits(pin_backend="torch", root=root)
    return says(machine_limits.check_pinned([8 * GIB], found), ".wslconfig")


@fault(
    area="limits",
    name="no /proc and no /sys",
    injected="an empty root",
    expected="limits from the C library, no exception",
)
def _(folder: Path) -> str:
    found = machine_limits.limits(root=folder)
    assert found.available_bytes > 0 and "sysconf" in found.bounds[0].source
    return f"{found.available_bytes / 1e9:.3g} GB available by sysconf"


@fault(
    area="limits",
    name="no memory left in the middle of a probe",
    injected="MemoryError out of the probe",
    expected="the run starts untuned with one warning",
)
def _(folder: Path) -> str:
    seen = start(folder, CONFIG, probe=_address_space_used_up)
    assert seen.error is None and seen.config == CONFIG and len(seen.warnings) == 1
    assert "MemoryError" in seen.warnings[0] or "allocate" in seen.warnings[0]
    return f"one warning: {shortened(seen.warnings[0])}"


def _address_space_used_up(**arguments: object) -> object:
    """Asks for more memory than an address space has, so that a real allocator refuses."""
    import torch

    return torch.empty(1 << 60, dtype=torch.uint8)


@fault(
    area="limits",
    name="a masked /proc/meminfo",
    injected="an empty file over it in a mount namespace of a child's own",
    expected="limits all the same, no exception",
)
def _(folder: Path) -> str:
    may_mount(folder)
    empty = folder / "empty"
    empty.touch()
    names, free = child(
        "import json\nfrom autotune_offload.machine import limits\nfound = limits.limits()\n"
        "print(json.dumps([[b.source for b in found.bounds], found.available_bytes]))",
        before=f"mount --bind {empty} /proc/meminfo",
    )
    assert free >= 0
    return f"bounds: {shortened('; '.join(names))}"
