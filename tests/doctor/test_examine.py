"""`autotune-offload doctor`: what each check says about which host and which ds_config, and the verb itself."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from deepspeed.runtime.config import DeepSpeedConfig
from hypothesis import example, given, settings
from hypothesis import strategies as st
from packaging.version import Version
from torch.utils import cpp_extension

from autotune_offload.config import reading
from autotune_offload.doctor import examine, self_report
from autotune_offload.doctor.checks.case import Case
from autotune_offload.doctor.checks.software import OLDEST
from autotune_offload.doctor.examine import CONFIG_CHECKS, HOST_CHECKS, run_checks
from autotune_offload.doctor.self_report import Answers
from autotune_offload.machine import host
from autotune_offload.profiles.store import Store
from autotune_offload.records import Finding, Software
from autotune_offload.upstream import NEWEST
from autotune_offload.workload import from_parameter_count
from tests import CHECKOUT
from tests.factories import make_profile
from tests.machine.test_host import GIB, IPC_LOCK, NO_CAPABILITY, memlock_line, node, v2, v2_files, write
from tests.odd_configs import ODD, ORDINARY, PLACES, odd_configs, with_odd

CONFIGS = CHECKOUT / "tests" / "data" / "configs"
CPU = {"kind": "cpu", "name": "cpu", "count": 1, "index": 0, "pin_backend": "none"}
CUDA = {"kind": "cuda", "name": "NVIDIA H200", "count": 8, "index": 0, "pin_backend": "torch"}
BOTH: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
PINNED = {name: {"device": "cpu", "pin_memory": True} for name in BOTH}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A host of one node with 4 TiB free, no cgroup, no limit of locked memory, no accelerator in /sys."""
    made = tmp_path / "root"
    write(made, "proc/meminfo", f"MemTotal: 999 kB\nMemAvailable: {4096 * GIB // 1024} kB\n")
    write(made, "proc/self/limits", memlock_line("unlimited"))
    write(made, "proc/self/status", NO_CAPABILITY)
    write(made, "proc/self/uid_map", "         0          0 4294967295\n")
    return made


@pytest.fixture
def case(root: Path, tmp_path: Path) -> Case:
    """A case in which all is well: the device answers, and a stored profile fits."""
    store = Store(tmp_path / "cache")
    stored = store.save(make_profile())
    answers = {
        "torch": {"threads": 1, "cuda": "12.8"},
        "deepspeed": "0.19.8",
        "compiler": None,
        "device": CUDA,
    }
    return Case(
        answers=Answers(answers={**answers, "link": None, "profile": {"path": str(stored)}}),
        store=store,
        root=root,
        environ={"TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")},
    )


def saying(
    case: Case, *, errors: Mapping[str, str] | None = None, died: str | None = None, **said: Any
) -> Case:
    """The same case with other answers of the child."""
    answers = Answers(answers={**case.answers.answers, **said}, errors=errors or {}, died=died)
    return replace(case, answers=answers)


def under(case: Case, **variables: str) -> Case:
    """The same case with more environment variables."""
    return replace(case, environ={**case.environ, **variables})


def configured(case: Case, zero: object = None, **top: Any) -> Case:
    """The same case with a ds_config, judged by DeepSpeed's own parser in this process."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        **top,
        **({} if zero is None else {"zero_optimization": zero}),
    }
    return saying(replace(case, config=config), config=self_report._refusals(config))


def found(case: Case, check: str) -> list[Finding]:
    """What one check finds."""
    return list({**HOST_CHECKS, **CONFIG_CHECKS}[check](case))


def only(case: Case, check: str) -> Finding:
    """The one thing that a check finds."""
    (finding,) = found(case, check)
    assert finding.id == check
    return finding


def accelerator(root: Path, address: str = "0000:17:00.0", slot: str = "32.0", **files: str) -> Path:
    """Puts an H200 behind a port of the bus into a made-up /sys."""
    port = root / "sys/devices/pci0000:16/0000:16:01.0"
    device = port / address
    known = {"vendor": "0x10de", "class": "0x030200", "current_link_width": "16", "max_link_width": "16"}
    for name, text in {**known, "max_link_speed": "32.0 GT/s PCIe", "numa_node": "1", **files}.items():
        write(device, name, text + "\n")
    write(port, "max_link_speed", f"{slot} GT/s PCIe\n" if slot != "Unknown" else "Unknown\n")
    link = root / "sys/bus/pci/devices" / address
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(device)
    return device


# -- all of them ----------------------------------------------------------------------------------


def test_a_host_without_fault_has_no_findings(case: Case) -> None:
    """Every check of the host is made, and none finds anything."""
    made = run_checks(case)
    assert (made.findings, made.checks) == ((), tuple(HOST_CHECKS))


def test_a_check_that_fails_is_a_finding_and_the_others_go_on(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had found before stays, and what comes after it is found."""

    def failing(case: Case) -> Iterator[Finding]:
        yield Finding(id="memlock", severity="notice", found="seen before", fix="none")
        raise ZeroDivisionError("no number")

    monkeypatch.setitem(HOST_CHECKS, "memlock", failing)
    findings = run_checks(under(case, LOCAL_WORLD_SIZE="999")).findings
    assert {f.id for f in findings} == {"memlock", "threads"}
    (failed,) = [f for f in findings if "failed itself" in f.found]
    assert "ZeroDivisionError: no number" in failed.found


def test_the_worst_comes_first(case: Case) -> None:
    """What will break stands above what costs time, whatever the order of the checks."""
    case = saying(
        under(case, LOCAL_WORLD_SIZE="999"), compiler="no cc", errors={"deepspeed": "ImportError: x"}
    )
    severities = [f.severity for f in run_checks(case).findings]
    assert severities == ["will break", "costs", "costs"]


def test_the_documentation_has_a_section_for_every_check() -> None:
    """No check without its words, and no words without a check."""
    text = (CHECKOUT / "docs" / "doctor.md").read_text(encoding="utf-8")
    assert re.findall(r"^### `([\w-]+)`", text, re.MULTILINE) == [*HOST_CHECKS, *CONFIG_CHECKS]


# -- software -------------------------------------------------------------------------------------


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """These versions are installed."""
    software = Software(
        **{"python": "3.11.9", "torch": "2.13.0", "deepspeed": "0.19.8", "autotune_offload": "0", **versions}
    )
    monkeypatch.setattr(host, "software", lambda: software)


@pytest.mark.parametrize(
    ("versions", "says"),
    [
        ({"python": "3.9.18"}, "python is 3.9.18; expected 3.10 or newer"),
        ({"torch": "2.0.1+cu118"}, "torch is 2.0.1+cu118; expected 2.1 or newer"),
        ({"deepspeed": "0.14.4"}, "deepspeed is 0.14.4; expected 0.14.5 or newer"),
    ],
)
def test_a_version_below_the_supported_range_will_break(
    case: Case, monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], says: str
) -> None:
    """Found and expected."""
    installed(monkeypatch, **versions)
    finding = only(case, "versions")
    assert (finding.severity, finding.found) == ("will break", says)


def test_a_local_build_and_a_release_candidate_are_in_the_range(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2.13.0+cpu is 2.13, and 0.19.8rc1 is not older than 0.14.5."""
    installed(monkeypatch, torch="2.13.0+cpu", deepspeed="0.19.8rc1")
    assert found(case, "versions") == []


def test_a_newer_deepspeed_than_was_tried_is_told(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """It works as far as anyone knows: a notice."""
    installed(monkeypatch, deepspeed="0.21.0")
    finding = only(case, "versions")
    assert finding.severity == "notice"
    assert NEWEST in finding.found


@pytest.mark.parametrize(
    ("version", "device", "variables", "breaks"),
    [
        ("0.15.4", CPU, {}, True),
        ("0.14.5", CPU, {}, True),
        ("0.15.4", CPU, {"LOCAL_SIZE": "1"}, False),
        ("0.15.4", CUDA, {}, False),
        ("0.16.2", CPU, {}, False),
    ],
)
def test_an_old_deepspeed_on_the_cpu_needs_local_size(
    case: Case,
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    device: dict[str, Any],
    variables: dict[str, str],
    breaks: bool,
) -> None:
    """Without it and without numactl, `initialize` ends in a FileNotFoundError."""
    installed(monkeypatch, deepspeed=version)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    findings = found(under(saying(case, device=device), **variables), "versions")
    assert [("LOCAL_SIZE=1" in f.fix, f.severity) for f in findings] == [(True, "will break")] * breaks


def test_the_range_is_the_one_that_the_package_declares() -> None:
    """The table and pyproject.toml name the same versions."""
    declared = (CHECKOUT / "pyproject.toml").read_text(encoding="utf-8")
    for name, oldest in OLDEST.items():
        assert f'"{name}>={oldest}"' in declared or f'requires-{name} = ">={oldest}"' in declared


def test_an_import_that_fails_will_break(case: Case) -> None:
    """Torch's failure stands for DeepSpeed's, which imports it."""
    both = {"torch": "ImportError: libcudart.so.11", "deepspeed": "ImportError: the same"}
    finding = only(saying(case, errors=both), "libraries")
    assert finding.severity == "will break"
    assert "`import torch` fails" in finding.found
    assert "libcudart.so.11" in finding.found


def test_a_device_that_fails_or_does_not_answer_will_break(case: Case) -> None:
    """The message of the one, the signal or deadline of the other."""
    failed = only(saying(case, errors={"device": "DeviceError: no driver"}), "libraries")
    silent = only(
        saying(case, died="did not answer within 120 s while it was asked about device"), "libraries"
    )
    assert (failed.severity, silent.severity) == ("will break", "will break")
    assert "no driver" in failed.found
    assert "asked about device" in silent.found


@pytest.mark.parametrize(
    ("built", "variables", "severity", "says"),
    [
        ({"threads": 1, "cuda": None}, {}, "costs", "built for the CPU alone"),
        ({"threads": 1, "cuda": "12.8"}, {}, "costs", "built for cuda, but no such device answers"),
        (
            {"threads": 1, "cuda": "12.8"},
            {"DS_ACCELERATOR": "cpu"},
            "notice",
            "DS_ACCELERATOR=cpu chooses that",
        ),
    ],
)
def test_an_accelerator_that_is_not_used_is_named_with_the_cause(
    case: Case, root: Path, built: dict[str, Any], variables: dict[str, str], severity: str, says: str
) -> None:
    """A torch without its support, a driver that does not answer, or the user's own wish."""
    accelerator(root)
    finding = only(under(saying(case, torch=built, device=CPU), **variables), "torch-build")
    assert finding.severity == severity
    assert says in finding.found
    assert "NVIDIA at 0000:17:00.0" in finding.found


@pytest.mark.parametrize(
    ("vendor", "kind", "address", "width"),
    [
        ("0x1af4", "0x038000", "0000:17:00.0", "16"),
        ("0x1a03", "0x030000", "0000:17:00.0", "1"),
        ("0x19e5", "0x030000", "0000:17:00.0", "1"),
        ("0x1002", "0x030000", "0000:17:00.0", "0"),
        ("0x8086", "0x030000", "0000:00:02.0", "16"),
    ],
    ids=["virtual", "ASPEED", "Huawei's console", "AMD's on the board", "Intel's in the processor"],
)
def test_a_console_adapter_is_no_accelerator(
    case: Case, root: Path, vendor: str, kind: str, address: str, width: str
) -> None:
    """A virtual display and a server's own graphics are not what torch should have been built for."""
    accelerator(root, address, vendor=vendor, max_link_width=width, **{"class": kind})
    assert found(saying(case, torch={"cuda": None}, device=CPU), "torch-build") == []


@pytest.mark.parametrize(
    ("vendor", "kind", "severity", "says", "fix"),
    [
        ("0x19e5", "0x120000", "costs", "Huawei at 0000:17:00.0", "install torch_npu for Huawei"),
        ("0x1da3", "0x120000", "costs", "Habana at 0000:17:00.0", "install habana_frameworks for Habana"),
        ("0xcabc", "0x120000", "costs", "Cambricon at 0000:17:00.0", "install torch_mlu for Cambricon"),
        ("0x1002", "0x030000", "notice", "a display card that may compute (AMD", "another build"),
        ("0x8086", "0x030000", "notice", "a display card that may compute (Intel", "another build"),
    ],
)
def test_devices_beside_nvidias_are_missed_too(
    case: Case, root: Path, vendor: str, kind: str, severity: str, says: str, fix: str
) -> None:
    """Ascend and its like with the package that drives them; a Radeon or an Arc with a question mark."""
    accelerator(root, vendor=vendor, **{"class": kind})
    finding = only(saying(case, torch={"cuda": None}, device=CPU), "torch-build")
    assert finding.severity == severity
    assert says in finding.found
    assert fix in finding.fix


def test_a_card_for_a_screen_needs_no_wide_link(case: Case, root: Path) -> None:
    """An Arc shows one lane behind its own bridge."""
    accelerator(root, vendor="0x8086", current_link_width="1", **{"class": "0x030000"})
    assert found(case, "link") == []


def test_a_compiler_that_is_missing_costs(case: Case) -> None:
    """With what the fused pass itself says."""
    finding = only(saying(case, compiler="the fused pass could not be compiled: no cc"), "compiler")
    assert (finding.severity, "no cc" in finding.found) == ("costs", True)


def test_a_missing_libyaml_costs(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyYAML says so itself."""
    monkeypatch.setattr(yaml, "__with_libyaml__", False)
    assert only(case, "libyaml").severity == "costs"


# -- builds ---------------------------------------------------------------------------------------


@pytest.fixture
def lock(case: Case) -> Path:
    """The lock of a build of cpu_adam that was begun two days ago."""
    made = Path(case.environ["TORCH_EXTENSIONS_DIR"]) / "cpu_adam" / "lock"
    made.parent.mkdir(parents=True)
    made.touch()
    os.utime(made, (time.time() - 2 * 86400,) * 2)
    return made


def test_a_lock_that_nobody_holds_will_hang_deepspeed(case: Case, lock: Path) -> None:
    """Named with its path, its age, and the command that removes it."""
    finding = only(case, "build-lock")
    assert finding.severity == "will break"
    assert f"{lock}, 2 days old" in finding.found
    assert finding.fix.startswith(f"rm {lock}")


def test_a_lock_of_a_build_that_runs_is_a_notice(case: Case, lock: Path) -> None:
    """A real process has it open, as torch's file baton does."""
    code = "import os, sys; os.open(sys.argv[1], os.O_RDONLY); print('open', flush=True); sys.stdin.read()"
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"open\n"
        finding = only(case, "build-lock")
    assert finding.severity == "notice"
    assert f"process {child.pid} is building" in finding.found


def test_without_a_variable_torchs_own_folder_is_looked_at(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder that torch itself would build in, of this Python and whatever accelerator."""
    from torch.utils import cpp_extension

    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    lock = Path(cpp_extension._get_build_directory("cpu_adam", False), "lock")
    lock.touch()
    finding = only(replace(case, environ={"XDG_CACHE_HOME": str(tmp_path / "caches")}), "build-lock")
    assert str(lock) in finding.found


# -- page-locked memory ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "version", "severity", "says"),
    [
        ("nativ", "0.19.8", "notice", 'DS_PIN_MEMORY_BACKEND is "nativ"'),
        ("native", "0.19.4", "notice", "has no effect: DeepSpeed 0.19.4"),
    ],
)
def test_a_pin_backend_without_effect_is_told(
    case: Case, monkeypatch: pytest.MonkeyPatch, backend: str, version: str, severity: str, says: str
) -> None:
    """A misspelt name, and a DeepSpeed that does not read the variable."""
    installed(monkeypatch, deepspeed=version)
    finding = only(under(case, DS_PIN_MEMORY_BACKEND=backend), "pin-backend")
    assert finding.severity == severity
    assert says in finding.found


def test_memory_that_is_not_registered_with_the_device_costs(case: Case) -> None:
    """It is locked, and copied at the speed of pageable memory."""
    device = {**CUDA, "pin_backend": "native, not registered with the device"}
    finding = only(under(saying(case, device=device), DS_PIN_MEMORY_BACKEND="native"), "pin-backend")
    assert (finding.severity, "10 to 17 GB/s" in str(finding.costs)) == ("costs", True)


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_a_native_backend_that_cannot_be_built_will_break(case: Case, backend: str) -> None:
    """What is missing is named; without the variable nobody needs it."""
    case = under(saying(case, native_pins="ninja is not installed"), DS_PIN_MEMORY_BACKEND=backend)
    findings = found(case, "pin-backend")
    assert [f.severity for f in findings] == ["will break"] * (backend == "native")
    assert all("cannot be built: ninja is not installed" in f.found for f in findings)


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"CXX": "/nowhere/g++"}, "the C++ compiler `/nowhere/g++` fails"),
        ({"CXX": "false"}, "the C++ compiler `false` fails"),
        ({"TORCH_EXTENSIONS_DIR": "/dev/null/x"}, "/dev/null, where torch builds"),
    ],
)
def test_what_a_build_lacks_is_asked_without_building(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], says: str
) -> None:
    """A compiler that is not there or refuses, and no folder to build in."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cpp_extension, "is_ninja_available", lambda: True)

    class Builder:
        """What is asked of DeepSpeed's own."""

        error_log = None

        def is_compatible(self) -> bool:
            """On every system."""
            return True

        def sources(self) -> list[str]:
            """There are none that could be missing."""
            return []

    assert says in str(self_report._why_no_extension(Builder()))


NATIVE = {**CUDA, "pin_backend": "native"}


def test_native_pinning_beyond_memlock_will_abort(case: Case, root: Path) -> None:
    """With the limit, what would be locked, and how to raise it."""
    write(root, "proc/self/limits", memlock_line(str(64 << 10)))
    finding = only(saying(case, device=NATIVE), "memlock")
    assert finding.severity == "will break"
    assert "65,536 bytes" in finding.found
    assert "--ulimit memlock=-1" in finding.fix


@pytest.mark.parametrize(
    ("limit", "status", "device", "zero"),
    [
        ("unlimited", NO_CAPABILITY, NATIVE, None),
        ("65536", IPC_LOCK, NATIVE, None),
        ("65536", NO_CAPABILITY, CUDA, None),
        ("65536", NO_CAPABILITY, CPU, None),
        (
            "65536",
            NO_CAPABILITY,
            NATIVE,
            {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": False}},
        ),
    ],
    ids=["no limit", "capability", "the driver pins", "nothing is pinned", "the config pins nothing"],
)
def test_memlock_is_no_matter_where_nothing_is_charged_to_it(
    case: Case, root: Path, limit: str, status: str, device: dict[str, Any], zero: dict[str, Any] | None
) -> None:
    """A capability lifts it, and a driver's page-locking is not counted there."""
    write(root, "proc/self/limits", memlock_line(limit))
    write(root, "proc/self/status", status)
    case = saying(case, device=device)
    assert found(case if zero is None else configured(case, zero), "memlock") == []


def test_memlock_bounds_the_nvme_swapper_whatever_pins_the_rest(case: Case, root: Path) -> None:
    """Its buffers are locked by DeepSpeed's own code."""
    write(root, "proc/self/limits", memlock_line("8388608"))
    zero = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/x", "pin_memory": True}}
    finding = only(configured(case, zero), "memlock")
    assert (finding.severity, "NVMe swapper" in finding.found) == ("notice", True)


def test_a_cgroup_below_the_hosts_ram_is_told_with_its_file(case: Case, root: Path) -> None:
    """The smallest over the ancestors: here the parent's."""
    v2(root, "/slurm/job")
    v2_files(root, "sys/fs/cgroup/slurm", str(40 * GIB), 4 * GIB)
    v2_files(root, "sys/fs/cgroup/slurm/job", "max", GIB)
    finding = only(case, "cgroup")
    assert finding.severity == "notice"
    assert "sys/fs/cgroup/slurm/memory.max" in finding.found
    assert "--mem" in finding.fix


def small(root: Path, mib: int = 330) -> None:
    """A host with so much memory free: by default enough for the model's state, not for pinning it."""
    write(root, "proc/meminfo", f"MemAvailable: {mib * 1024} kB\n")


def test_a_model_that_does_not_fit_pinned_will_break_where_the_config_pins_it(case: Case, root: Path) -> None:
    """The stored profile's model, counted with the config's own keys."""
    small(root)
    finding = only(configured(case, {"stage": 3, **PINNED}), "memory")
    assert finding.severity == "will break"
    assert "the stored profile's model" in finding.found
    assert "pin_memory" in finding.fix


@pytest.mark.parametrize(
    ("zero", "breaks"),
    [
        ({"stage": 3}, False),
        ({"stage": 3, "sub_group_size": 1e12}, True),
        ({"stage": 2}, True),
        ({"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}}, False),
    ],
)
def test_stage_and_sub_group_size_decide_what_is_page_locked(
    case: Case, root: Path, zero: dict[str, Any], breaks: bool
) -> None:
    """One sub-group of all exists twice while it is locked; stage 2 locks 10 bytes a parameter, undivided."""
    small(root, 74 * 1024)
    workload = from_parameter_count(3_500_000_000)
    path = case.store.save(make_profile(workload=workload))
    big = saying(under(case, LOCAL_WORLD_SIZE="1"), profile={"path": str(path)})
    section = {"offload_optimizer": {"device": "cpu", "pin_memory": True}, **zero}
    assert [f.severity for f in found(configured(big, section), "memory")] == ["will break"] * breaks


def test_without_the_users_own_model_what_does_not_fit_is_a_notice(case: Case, root: Path) -> None:
    """A stand-in says so, and cannot say that a run will break."""
    small(root)
    finding = only(configured(saying(case, profile={"miss": "none"}), {"stage": 3, **PINNED}), "memory")
    assert finding.severity == "notice"
    assert "stands in since no stored profile fits" in finding.found


def test_parameters_are_pinned_whatever_the_config_says(case: Case, root: Path) -> None:
    """DeepSpeed's flat copy counts with `pin_memory: false`; the optimizer alone, unpinned, needs nothing."""
    small(root, 310)
    unpinned = {name: {"device": "cpu", "pin_memory": False} for name in PINNED}
    assert only(configured(case, {"stage": 3, **unpinned}), "memory").severity == "will break"
    optimizer = {"offload_optimizer": unpinned["offload_optimizer"]}
    assert found(configured(case, {"stage": 3, **optimizer}), "memory") == []


def test_ranks_of_one_host_share_its_memory(case: Case, root: Path) -> None:
    """What fits one rank does not fit eight."""
    small(root, 1024)
    assert found(under(case, LOCAL_WORLD_SIZE="1"), "memory") == []
    assert "shared by 8 ranks" in only(under(case, LOCAL_WORLD_SIZE="8"), "memory").found


def test_ranks_that_no_launcher_counts_are_the_profiles_own(case: Case, root: Path) -> None:
    """As the probe counts them: those of the job, as many as there are devices for."""
    small(root, 1024)
    assert "shared by 8 ranks" in only(case, "memory").found


def test_where_nothing_is_pinned_memory_is_no_matter(case: Case, root: Path) -> None:
    """The CPU accelerator returns pageable memory."""
    small(root)
    assert found(saying(case, device=CPU), "memory") == []


def unpinned(device: str = "cpu", **section: Any) -> dict[str, Any]:
    """An offload section that page-locks nothing by itself."""
    return {"device": device, "pin_memory": False, **section}


@pytest.mark.parametrize(
    ("zero", "keeps"),
    [
        ({"stage": 3, "offload_optimizer": unpinned()}, "keeps 0.28 GB"),
        ({"stage": 3, "offload_optimizer": unpinned(), "offload_param": unpinned()}, "keeps 0.311 GB"),
        ({"stage": 2, "offload_optimizer": unpinned()}, "keeps 0.28 GB"),
        ({"stage": 3, "offload_param": unpinned("nvme", nvme_path="/n", buffer_size=1e9)}, "keeps 10 GB"),
    ],
    ids=["optimizer", "both", "stage 2", "buffers for NVMe"],
)
def test_state_that_does_not_fit_will_end_the_process(
    case: Case, root: Path, zero: dict[str, Any], keeps: str
) -> None:
    """The kernel's exit -9, page-locked or not: the number, its parts, and who says what there is."""
    small(root, 200)
    finding = only(configured(case, zero), "memory")
    assert finding.severity == "will break"
    assert keeps in finding.found and "page-locked or not" in finding.found
    assert "MemAvailable" in finding.found and "-9" in str(finding.costs)
    small(root, 200_000)  # for the eight ranks of the profile
    assert found(configured(case, zero), "memory") == []


def test_a_cgroup_bounds_the_state_and_swap_is_no_room(case: Case, root: Path) -> None:
    """The host has plenty; the container does not."""
    v2(root, "/pod")
    write(root, "sys/fs/cgroup/pod/memory.max", str(200 << 20))
    write(root, "proc/meminfo", f"MemAvailable: {64 * GIB // 1024} kB\nSwapTotal: {64 * GIB // 1024} kB\n")
    finding = only(configured(case, {"stage": 3, "offload_optimizer": unpinned()}), "memory")
    assert "pod/memory.max" in finding.found and "swap would be written" in finding.found


@pytest.mark.parametrize(
    ("answer", "unified"),
    [
        ({"name": "NVIDIA GB10"}, True),
        ({"name": "Orin", "integrated": True}, True),
        ({"name": "AMD Instinct MI300A"}, True),
        ({"name": "NVIDIA GH200 480GB", "integrated": False}, False),
        ({"name": "AMD Instinct MI300X"}, False),
    ],
    ids=lambda answer: answer["name"] if isinstance(answer, dict) else "",
)
def test_offload_to_the_memory_that_the_device_has_itself_frees_nothing(
    case: Case, answer: dict[str, Any], unified: bool
) -> None:
    """One memory for both: it costs where a config offloads to the CPU, and nothing on a disk."""
    case = saying(case, device={**CUDA, **answer})
    assert [f.severity for f in found(case, "unified-memory")] == ["notice"] * unified
    to_cpu = configured(case, {"stage": 3, "offload_optimizer": unpinned()})
    assert [f.severity for f in found(to_cpu, "unified-memory")] == ["costs"] * unified
    to_disk = configured(case, {"stage": 3, "offload_param": unpinned("nvme", nvme_path="/n")})
    assert found(to_disk, "unified-memory") == []


# -- link, nodes, threads -------------------------------------------------------------------------


def test_a_link_at_half_its_width_costs_half_the_rate(case: Case, root: Path) -> None:
    """Present against possible width, with the factor."""
    accelerator(root, current_link_width="8")
    finding = only(case, "link")
    assert (finding.severity, "x8 wide; the device can do x16" in finding.found) == ("costs", True)
    assert "2 times" in str(finding.costs)


def test_a_slot_slower_than_the_device_costs(case: Case, root: Path) -> None:
    """The slot's most, since an idle device lowers its own."""
    accelerator(root, slot="16.0", current_link_speed="2.5 GT/s PCIe")
    assert "16 GT/s in its slot; the device can do 32 GT/s" in only(case, "link").found


@pytest.mark.parametrize("files", [{}, {"current_link_width": "0"}, {"max_link_speed": "Unknown"}])
def test_a_full_or_unknown_link_is_no_finding(case: Case, root: Path, files: dict[str, str]) -> None:
    """A virtual machine shows 0 or "Unknown"."""
    accelerator(root, slot="Unknown", **files)
    assert found(case, "link") == []


def test_nvml_tells_where_sys_does_not(case: Case, root: Path) -> None:
    """Width and generation; not said twice where /sys has the device."""
    told = saying(case, link={"width": 8, "device_width": 16, "generation": 4, "device_generation": 5})
    assert [f.found.partition(" link of ")[2] for f in found(told, "link")] == [
        "NVIDIA H200 is x8 wide; the device can do x16",
        "NVIDIA H200 can run at generation 4 in its slot; the device can do generation 5",
    ]
    accelerator(root)
    assert found(told, "link") == []


def test_an_unbound_process_on_two_nodes_costs_and_the_devices_node_is_named(
    case: Case, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bound to one of them, or with one node alone, nothing is found."""
    accelerator(root)
    node(root, 0, "0-7", 8 * GIB)
    node(root, 1, "8-15", 8 * GIB)
    monkeypatch.setattr(host, "affinity", lambda: frozenset(range(16)))
    finding = only(case, "numa")
    assert (finding.severity, "node 1" in finding.fix) == ("costs", True)
    monkeypatch.setattr(host, "affinity", lambda: frozenset(range(8, 12)))
    assert found(case, "numa") == []


@pytest.mark.parametrize(
    ("variables", "torch_threads", "says"),
    [
        (
            {"LOCAL_WORLD_SIZE": "4", "OMP_NUM_THREADS": "8"},
            1,
            "4 ranks with 8 threads each (OMP_NUM_THREADS)",
        ),
        ({"LOCAL_WORLD_SIZE": "4"}, 16, "4 ranks with 16 threads each (torch's own number of threads)"),
        ({"OMP_NUM_THREADS": "32,4"}, 1, "1 ranks with 32 threads each"),
        ({"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}, 1, "leaves 14 of 16 CPUs idle"),
        ({"LOCAL_WORLD_SIZE": "4", "OMP_NUM_THREADS": "4"}, 16, None),
        ({"LOCAL_WORLD_SIZE": "many", "OMP_NUM_THREADS": "x"}, 16, None),
    ],
)
def test_threads_of_all_ranks_are_counted_against_the_cpus(
    case: Case,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    torch_threads: int,
    says: str | None,
) -> None:
    """On 16 CPUs: too many of them, far too few, and as many as there are."""
    monkeypatch.setattr(host, "affinity", lambda: frozenset(range(16)))
    findings = found(saying(under(case, **variables), torch={"threads": torch_threads}), "threads")
    assert [says in f.found for f in findings if says] == [True] * bool(says)
    assert len(findings) == bool(says)


def test_too_few_threads_are_told_by_what_the_stored_profile_measured(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torchrun's single thread: what DeepSpeed's Adam suffers by this host's own curve, and what the pass does."""
    monkeypatch.setattr(host, "affinity", lambda: frozenset(range(16)))
    launched = under(case, LOCAL_WORLD_SIZE="2", OMP_NUM_THREADS="1")
    costs = str(only(launched, "threads").costs)
    assert "DeepSpeed's CPU Adam run on 1 thread (torchrun, and accelerate through it" in costs
    assert "6.5 times as long as with 8 (stored profile)" in costs
    assert "threads of its own, up to 8 a rank" in costs
    older = case.store.save(make_profile(step=None, step_rates=None))
    costs = str(only(saying(launched, profile={"path": str(older)}), "threads").costs)
    assert "stored profile" not in costs and "threads of its own" in costs


def test_too_many_threads_tell_what_the_pass_does(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the deepspeed launcher leaves it: every rank takes all CPUs."""
    monkeypatch.setattr(host, "affinity", lambda: frozenset(range(16)))
    finding = only(saying(under(case, LOCAL_WORLD_SIZE="4"), torch={"threads": 16}), "threads")
    assert "DeepSpeed's CPU Adam, which takes all of them in each rank" in str(finding.costs)
    assert "up to 4 a rank" in str(finding.costs)


# -- profiles -------------------------------------------------------------------------------------


def test_no_profile_that_fits_is_a_notice_with_the_reason(case: Case) -> None:
    """The store's own words."""
    finding = only(saying(case, profile={"miss": "no stored profile fits; device.name differs"}), "profiles")
    assert (finding.severity, finding.found) == ("notice", "no stored profile fits; device.name differs")
    assert "probe" in finding.fix


def test_a_corrupt_profile_is_named(case: Case) -> None:
    """It is not used, and there is a verb that removes it."""
    (case.store.folder / "cuda-x-0.yaml").write_text("schema: 1\n")
    finding = only(case, "profiles")
    assert "cuda-x-0.yaml is truncated" in finding.found
    assert "prune --broken" in finding.fix


def test_a_folder_that_cannot_be_made_costs_a_measurement_a_start(case: Case, tmp_path: Path) -> None:
    """A file stands where a folder should be; a home that is not there."""
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file" / "profiles", Path("~nobody-of-that-name/x")):
        finding = only(replace(case, store=Store(folder)), "profiles")
        assert finding.severity == "costs"
        assert "AUTOTUNE_OFFLOAD_CACHE" in finding.fix


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_costs_too(case: Case) -> None:
    """The folder exists and takes no file."""
    case.store.folder.chmod(0o500)
    assert only(case, "profiles").severity == "costs"


# -- a ds_config ----------------------------------------------------------------------------------


EXPECTED: dict[str, list[tuple[str, str, str]]] = {
    "comments_and_commas": [("notice", "zero-init", "parameters get pin_memory true")],
    "float_sizes": [
        (
            "notice",
            "config-offload",
            "offload_optimizer.pin_memory is absent, which DeepSpeed 0.19.8 takes as true",
        ),
        (
            "notice",
            "config-offload",
            "offload_param.pin_memory is absent, which DeepSpeed 0.19.8 takes as true",
        ),
        ("notice", "zero-init", "parameters get pin_memory true"),
    ],
    "fractional_size": [
        ("will break", "config-keys", "stage3_prefetch_bucket_size is 943718.4, which DeepSpeed refuses"),
        ("notice", "config-offload", "offload_param.pin_memory is absent"),
        ("notice", "zero-init", "parameters get pin_memory true"),
    ],
    "hf_auto": [
        ("notice", "config-auto", 'still "auto": zero_optimization.reduce_bucket_size'),
        ("notice", "config-auto", 'still "auto": train_batch_size'),
        ("notice", "zero-init", "parameters get pin_memory true"),
    ],
    "legacy_switches": [
        ("costs", "config-legacy", "cpu_offload_use_pin_memory is false, and DeepSpeed does nothing with it"),
        ("notice", "config-legacy", "cpu_offload is deprecated: offload_optimizer stands for it"),
        ("notice", "config-legacy", "cpu_offload_param is deprecated: offload_param stands for it"),
        ("notice", "zero-init", "parameters get pin_memory true"),
    ],
    "misplaced_section": [
        ("costs", "config-keys", '"offload_optimizer" at the top level has no effect'),
        ("notice", "config-offload", "this file offloads nothing"),
    ],
    "no_offload": [("notice", "config-offload", "this file offloads nothing")],
    "nvme": [("notice", "nvme", "does not exist here")],
    "optimizer_only_unpinned": [],
    "stage2": [],
    "string_numbers": [
        ("will break", "config-keys", 'reduce_bucket_size is "5e8", which DeepSpeed refuses'),
        ("notice", "config-keys", 'pin_memory is the text "true", which DeepSpeed reads as a boolean'),
        ("notice", "zero-init", "parameters get pin_memory true"),
    ],
}
"""What is said of each example, the worst first, without a stored profile."""


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_what_is_said_of_each_example(case: Case, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Every finding about the file, and no other; DeepSpeed's own parser has judged it too."""
    installed(monkeypatch)
    read = reading.read(path)
    case = saying(replace(case, config=read), config=self_report._refusals(read), profile=None)
    findings = [f for f in run_checks(case).findings if f.id in CONFIG_CHECKS]
    expected = EXPECTED[path.stem]
    assert [(f.severity, f.id) for f in findings] == [(severity, check) for severity, check, _ in expected]
    for finding, (_, _, says) in zip(findings, expected, strict=True):
        assert says in finding.found
        assert finding.fix


@pytest.mark.parametrize(
    ("zero", "says", "fix"),
    [
        (
            {"stage": 3, "reduce_bucket_sise": 5},
            "reduce_bucket_sise is no key",
            'did you mean "reduce_bucket_size"?',
        ),
        (
            {"stage": 3, "offload_optimizer": {"device": "cpu", "buffer_size": 5, "pin_memory": True}},
            "offload_optimizer.buffer_size is no key",
            'it belongs in "offload_param"',
        ),
        (
            {"stage": 3, "pin_memory": True},
            "zero_optimization.pin_memory is no key",
            '"offload_optimizer" and "offload_param"',
        ),
        ({"stage": 3, "autotune_offload": {}}, "zero_optimization.autotune_offload is no key", "top level"),
        (
            {"stage": 3, "prefetch_bucket_size": 5, "stage3_prefetch_bucket_size": 6},
            "holds both stage3_prefetch_bucket_size and prefetch_bucket_size",
            "keep one",
        ),
        (
            {"stage": 3, "cpu_offload": True, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
            "holds both cpu_offload and offload_optimizer",
            "drop cpu_offload",
        ),
        ({"stage": 3, "reduce_bucket_size": 0}, "reduce_bucket_size is 0, which DeepSpeed refuses", "from 1"),
        ({"stage": 3, "offload_param": "cpu"}, 'offload_param is "cpu"', '{"device": "cpu"}'),
        ({"stage": 3, "prefetch_bucket_size": 1.5}, "prefetch_bucket_size is 1.5", "whole number"),
        ([3], "zero_optimization is [3], which DeepSpeed refuses", "write an object"),
    ],
)
def test_what_deepspeed_refuses_is_said_once_with_the_way_out(
    case: Case, zero: dict[str, Any], says: str, fix: str
) -> None:
    """In our words, and not again in the parser's."""
    broken = [f for f in run_checks(configured(case, zero)).findings if f.severity == "will break"]
    assert len(broken) == 1
    assert says in broken[0].found
    assert fix in broken[0].fix


@pytest.mark.parametrize(
    ("zero", "top", "says"),
    [
        ({"stage": 9}, {}, "zero_optimization.stage is 9: "),
        ({"stage": 3, "mics_shard_size": 4}, {}, "mics_shard_size"),
        ({"stage": 3}, {"bf16": {"enabled": "maybe"}}, 'bf16.enabled is "maybe": '),
        ({"stage": 3}, {"elasticity": {"enabled": True}}, "elasticity"),
    ],
)
def test_what_only_the_installed_deepspeed_refuses_is_in_its_own_words(
    case: Case, zero: dict[str, Any], top: dict[str, Any], says: str
) -> None:
    """Readable, on one line, without the parser's links."""
    if Version(host.software().deepspeed) < Version("0.19.8"):
        pytest.skip("these keys are refused from 0.19.8 on")
    (finding,) = found(configured(case, zero, **top), "config-parser")
    assert says in finding.found
    assert "errors.pydantic.dev" not in finding.found
    assert "\n" not in finding.found


KEYS = (
    "reduce_bucket_size",
    "stage3_prefetch_bucket_size",
    "prefetch_bucket_size",
    "sub_group_size",
    "stage",
    "foo",
)
SECTION_KEYS = ("device", "pin_memory", "buffer_size", "buffer_count", "ratio", "foo")
odd: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, 0, 1, 3, -1, 1.5, 5e8, "5e8", "5", "true", "auto", "cpu", "nvme", [], {}, 1e30]
)
sections = st.dictionaries(st.sampled_from(SECTION_KEYS), odd, max_size=4)
zeros = st.dictionaries(
    st.sampled_from((*KEYS, "cpu_offload", "cpu_offload_use_pin_memory")), odd, max_size=4
)


@settings(deadline=None)  # the first example imports what counts bytes
@example(
    zero={"cpu_offload": True, "stage": 1},
    optimizer=True,
    param=None,
    ours=None,
    top={},
)
@given(
    zero=zeros,
    optimizer=st.none() | odd | sections,
    param=st.none() | odd | sections,
    ours=st.none() | st.dictionaries(st.sampled_from(["path", "keep", "strict", "x"]), odd) | odd,
    top=st.dictionaries(
        st.sampled_from(["offload_param", "zero_optimisation", "autotune_ofload", "stage"]), odd
    ),
)
def test_whatever_the_file_no_check_fails_and_refusals_are_the_parsers(
    zero: dict[str, Any], optimizer: object, param: object, ours: object, top: dict[str, Any]
) -> None:
    """A file is said to break exactly where DeepSpeed's own parser refuses it, or our own block is strict."""
    zero = zero | {
        k: v for k, v in (("offload_optimizer", optimizer), ("offload_param", param)) if v is not None
    }
    top = {**top, **({} if ours is None else {"autotune_offload": ours})}
    config = {"zero_optimization": zero, **top}
    refusals = self_report._refusals(config)
    findings = [f for f in checked(config, refusals) if f.id in CONFIG_CHECKS]
    breaks = {f.id for f in findings if f.severity == "will break"} - {"config-block"}
    assert bool(breaks) is bool(refusals), (refusals, findings)


def checked(config: dict[str, Any], refusals: list[str]) -> list[Finding]:
    """What all checks find that look at a configuration; none of them fails itself."""
    case = Case(
        answers=Answers(answers={"config": refusals}), store=Store(Path("/none")), config=config, environ={}
    )
    checks = CONFIG_CHECKS | {name: HOST_CHECKS[name] for name in ("memlock", "memory")}
    findings = [f for name, check in checks.items() for f in examine._made(name, check, case)]
    assert not [f for f in findings if "failed itself" in f.found]
    return findings


@pytest.mark.parametrize("place", PLACES, ids=".".join)
def test_no_check_fails_for_what_stands_in_a_place(place: tuple[str, ...]) -> None:
    """Whatever kind of value it is."""
    for value in ODD:
        checked(with_odd(ORDINARY, place, value), [])


@given(config=odd_configs())
def test_no_check_fails_for_several_odd_values(config: dict[str, Any]) -> None:
    """Drawn JSON in several places at once."""
    checked(config, [])


@pytest.mark.parametrize(
    ("ours", "severity", "says"),
    [
        ({"pat": "direct"}, "costs", 'the nearest known key is "path"'),
        ({"path": "dirct"}, "costs", "expected one of auto, direct"),
        ({"path": "dirct", "strict": True}, "will break", "expected one of auto, direct"),
        ({"keep": ["offload_parm"]}, "notice", 'keep "offload_parm" protects nothing'),
        ("on", "costs", "expected an object"),
    ],
)
def test_mistakes_in_our_own_block_cost_the_tuning(
    case: Case, ours: object, severity: str, says: str
) -> None:
    """The run starts untuned, or not at all where it is strict."""
    finding = only(configured(case, {"stage": 3}, autotune_offload=ours), "config-block")
    assert finding.severity == severity
    assert says in finding.found


def test_a_misspelt_block_or_section_is_named(case: Case) -> None:
    """DeepSpeed takes both without a word."""
    case = configured(case, None, zero_optimisation={"stage": 3}, autotune_ofload={"path": "direct"})
    assert "zero_optimisation" in only(case, "config-keys").found
    assert "autotune_ofload" in only(case, "config-block").found


def test_an_auto_pin_is_told_with_what_becomes_of_it(case: Case) -> None:
    """DeepSpeed makes it true, and says nothing."""
    zero = {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": "auto"}}
    assert "page-locked from 0.19.5" in str(only(configured(case, zero), "config-auto").costs)


def test_zero_init_is_no_matter_where_the_file_has_what_was_chosen(case: Case) -> None:
    """Else both values are named."""
    pinned = make_profile().choice.pin_parameters
    section = {"device": "cpu", "pin_memory": pinned}
    assert found(configured(case, {"stage": 3, "offload_param": section}), "zero-init") == []
    other = {"stage": 3, "offload_param": {**section, "pin_memory": not pinned}}
    finding = only(configured(case, other), "zero-init")
    assert f"{json.dumps(pinned)} was chosen here" in finding.found


def test_an_unknown_key_that_is_auto_breaks_nothing(case: Case) -> None:
    """DeepSpeed takes it out before it looks at the names."""
    finding = only(configured(case, {"stage": 3, "foo": "auto"}), "config-keys")
    assert finding.severity == "costs"
    assert "drops it" in finding.found


@pytest.mark.parametrize(
    ("config", "says", "fix"),
    [
        ({"train_batch_size": "64"}, 'train_batch_size is "64"', "write 64 without quotes"),
        ({"train_batch_size": "2.5"}, 'train_batch_size is "2.5"', "a whole number from 1"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps is 0", "a whole number from 1"),
        ({"optimizer": {"params": {"lr": "1e-5"}}}, 'optimizer.params.lr is "1e-5"', "write 1e-5 without"),
        (
            {"optimizer": {"params": {"betas": [0.9, "0.95"]}}},
            'optimizer.params.betas is "0.95"',
            "0.95 without",
        ),
        (
            {"scheduler": {"params": {"warmup_num_steps": "10"}}},
            "scheduler.params.warmup_num_steps",
            "write 10",
        ),
        ({"gradient_clipping": "1.0"}, 'gradient_clipping is "1.0"', "write 1 without quotes"),
        ({"steps_per_print": "LOG_INTERVAL"}, 'steps_per_print is "LOG_INTERVAL"', "write a number"),
        ({"train_batch_size": "CONFIG_BATCH,"}, "in the place of CONFIG_BATCH,", "fill in"),
        ({"train_batch_size": "$BATCH_SIZE"}, "in the place of $BATCH_SIZE", "fill in the template"),
        ({"bf16": {"enabled": "{{ bf16 }}"}}, "in the place of {{ bf16 }}", "fill in"),
        ({"zero_optimization": {"stage": "<stage>"}}, "in the place of <stage>", "fill in"),
        ({"optimizer": {"params": {"lr": "TODO"}}}, "in the place of TODO", "fill in"),
    ],
)
def test_what_fails_later_is_found_before(case: Case, config: dict[str, Any], says: str, fix: str) -> None:
    """Texts and templates that DeepSpeed's parser takes, and its arithmetic does not: said once."""
    case = replace(case, config={"train_micro_batch_size_per_gpu": 1, **config})
    (finding,) = [f for f in found(case, "config-keys") if f.severity == "will break"]
    assert says in finding.found
    assert fix in finding.fix


def _batch() -> Any:
    return DeepSpeedConfig({"train_batch_size": "64", "train_micro_batch_size_per_gpu": "4"})


def _rate() -> Any:
    return torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr="1e-5")  # type: ignore[arg-type]  # the fault


def _clipping() -> Any:
    return DeepSpeedConfig({"train_batch_size": 1, "gradient_clipping": "1.0"}).gradient_clipping > 0.0


@pytest.mark.parametrize("fails", [_batch, _rate, _clipping])
def test_deepspeed_really_fails_there(fails: Callable[[], Any]) -> None:
    """Its own batch arithmetic, torch's own optimizer, and the comparison in the step."""
    with pytest.raises(TypeError):
        fails()


def test_a_text_that_counts_as_true_costs(case: Case) -> None:
    """The word false in quotes outside the sections; a placeholder in a path is a folder of that name."""
    config = {"wall_clock_breakdown": "false", "tensorboard": {"output_path": "/logs/$USER"}}
    findings = found(replace(case, config=config), "config-keys")
    assert [f.severity for f in findings] == ["costs", "costs"]
    assert any("counts as true" in f.found for f in findings)


@pytest.mark.parametrize(
    "value", ["auto", "WarmupLR", "log", "/local_nvme", "data/{}", "a < b", "100%", "true"]
)
def test_an_ordinary_text_is_no_placeholder(case: Case, value: str) -> None:
    """Names, paths and the frameworks' own word."""
    assert found(replace(case, config={"scheduler": {"params": {"warmup_type": value}}}), "config-keys") == []


def test_one_section_without_effect_beside_one_with_effect_costs(case: Case) -> None:
    """Stage 2 offloads the optimizer, and no parameters."""
    finding = only(configured(case, {"stage": 2, **PINNED}), "config-offload")
    assert finding.severity == "costs"
    assert "offload_param has no effect at stage 2" in finding.found


@pytest.mark.parametrize(
    ("zero", "why"),
    [
        ({"stage": 3, "offload_optimizer": None}, "offload_optimizer is null"),
        ({"stage": 3, "offload_param": {"device": None}}, "offload_param.device is null"),
        ({"stage": 3, "offload_param": {"device": "none"}}, 'offload_param.device is "none"'),
        (
            {"stage": 3, "offload_param": {"pin_memory": True}},
            "offload_param names no device, which means none",
        ),
        ({"stage": 2, "cpu_offload_param": True}, "cpu_offload_param has no effect at stage 2"),
    ],
)
def test_why_nothing_is_offloaded_is_said(case: Case, zero: dict[str, Any], why: str) -> None:
    """The section's own reason, and not another one's."""
    finding = only(replace(case, config={"zero_optimization": zero}), "config-offload")
    assert f"({why})" in finding.found


ACCELERATE = """
compute_environment: LOCAL_MACHINE
deepspeed_config:
  deepspeed_config_file: {named}
  zero3_init_flag: true
distributed_type: DEEPSPEED
"""


def test_a_file_that_names_the_ds_config_leads_to_it(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked at in the other's place, and a notice says so."""
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3, "offload_param": "x"}}))
    (tmp_path / "accelerate.yaml").write_text(ACCELERATE.format(named="ds.json"))
    monkeypatch.setattr(examine, "ask", lambda **asked: Answers(answers={"config": []}))
    findings = examine.examine(tmp_path / "accelerate.yaml", cache=tmp_path).findings
    (notice,) = [f for f in findings if f.id == "config"]
    assert f"names {tmp_path / 'ds.json'}, which is taken" in notice.found
    assert any('offload_param is "x"' in f.found for f in findings)


@pytest.mark.parametrize(
    ("version", "clipping", "costs"),
    [("0.19.8", 1.0, True), ("0.18.9", "auto", True), ("0.18.8", 1.0, False), ("0.19.8", 0.0, False)],
)
def test_superoffload_with_clipping_does_not_overlap(
    case: Case, monkeypatch: pytest.MonkeyPatch, version: str, clipping: object, costs: bool
) -> None:
    """From 0.18.9 on it waits for the norm; without clipping it does not."""
    installed(monkeypatch, deepspeed=version)
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True, "super_offload": True}}
    config = {"zero_optimization": zero, "gradient_clipping": clipping}
    assert [f.severity for f in found(replace(case, config=config), "super-offload")] == ["costs"] * costs


def swapping(folder: Path, **aio: object) -> dict[str, object]:
    """A configuration with both sections on NVMe."""
    where = {"device": "nvme", "nvme_path": str(folder)}
    zero = {"stage": 3, "offload_optimizer": dict(where), "offload_param": dict(where)}
    return {"zero_optimization": zero, "aio": aio}


def test_nvme_is_looked_at_only_where_it_is_used(case: Case) -> None:
    """Not a word otherwise."""
    cpu = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
    assert found(replace(case, config=cpu), "nvme") == []


def test_nvme_folders_libraries_and_keys(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in one finding: what a run would stop at, what another run left, what nobody has measured."""
    folder = tmp_path / "drive"
    (folder / "zero_stage_3").mkdir(parents=True)
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    told = found(replace(case, config=swapping(folder, num_threads=8, overlap_events="true")), "nvme")
    words = " ".join(finding.found for finding in told)
    for part in (
        "libaio was not found",
        "aio.num_threads is a key that DeepSpeed 0.19.8 does not read",
        'aio.overlap_events is "true", a text',
        "zero_stage_3 is there already",
        "was not measured",
        "each step writes",
    ):
        assert part in words, part
    assert [f.severity for f in told].count("will break") >= 2
    missing = found(replace(case, config=swapping(tmp_path / "none")), "nvme")
    assert any("does not exist here" in finding.found for finding in missing)


def test_too_little_space_on_the_drive_breaks_a_run(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it falls short in the middle of a step."""
    monkeypatch.setattr("shutil.disk_usage", lambda path: types.SimpleNamespace(free=1 << 20))
    told = found(replace(case, config=swapping(tmp_path)), "nvme")
    assert any("has 1 MiB free" in f.found and f.severity == "will break" for f in told)


@pytest.mark.parametrize(
    ("steps", "severities"), [(4, ["will break"]), ("auto", ["notice"]), (2, []), (None, [])]
)
def test_lost_gradients_stand_first(
    case: Case, monkeypatch: pytest.MonkeyPatch, steps: object, severities: list[str]
) -> None:
    """A run that goes on and trains wrongly is the worst there is; "auto" may become such a one."""
    installed(monkeypatch, deepspeed="0.18.9")
    config: dict[str, object] = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    if steps is not None:
        config["gradient_accumulation_steps"] = steps
    findings = found(replace(case, config=config), "lost-gradients")
    assert [finding.severity for finding in findings] == severities
    assert all("0.19.0 or newer" in finding.fix for finding in findings)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('{"train_batch_size": 8}', 0),
        ('{\n  // a comment\n  "train_batch_size": 8\n}', 2),
        ('{"train_batch_size": 8,}', 1),
        ("{train_batch_size: 8}", 1),
        ('\ufeff{"train_batch_size": 8}', 1),
    ],
    ids=["strict", "comment", "comma", "no quotes", "byte order mark"],
)
def test_what_only_deepspeeds_reader_takes_is_a_notice(
    case: Case, tmp_path: Path, text: str, line: int
) -> None:
    """The Trainer, accelerate and Lightning stop at the line that is named."""
    file = tmp_path / "ds.json"
    file.write_text(text, encoding="utf-8")
    findings = found(replace(case, file=file, config=reading.read(file)), "strict-json")
    assert [(f.severity, f"line {line}," in f.found) for f in findings] == [("notice", True)] * bool(line)


def test_a_wrong_stage_is_named(case: Case) -> None:
    """Parameters are offloaded at stage 3 alone."""
    zero = {"stage": 2, "offload_param": {"device": "cpu", "pin_memory": True}}
    assert "offload_param has no effect at stage 2" in only(configured(case, zero), "config-offload").found


def test_a_parser_that_could_not_be_asked_is_told(case: Case) -> None:
    """The other checks of the file are made without it."""
    case = saying(
        configured(case, {"stage": 3, "reduce_bucket_size": "x"}),
        config=None,
        errors={"config": "ImportError: x"},
    )
    findings = run_checks(case).findings
    assert "did not judge this file: ImportError: x" in next(
        f.found for f in findings if f.id == "config-parser"
    )
    assert any(f.id == "config-keys" and f.severity == "will break" for f in findings)


# -- the verb -------------------------------------------------------------------------------------


def run(
    *arguments: str, variables: Mapping[str, str] | None = None, prefix: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """The verb in a process of its own."""
    return subprocess.run(
        [*prefix, sys.executable, "-m", "autotune_offload", "doctor", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=CHECKOUT,
        env={**os.environ, **(variables or {})},
    )


def limited() -> tuple[str, ...]:
    """Runs what follows with 64 KiB of lockable memory, and without the capability that would lift that."""
    without = ("setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock") if os.geteuid() == 0 else ()
    if without and shutil.which("setpriv") is None:
        pytest.skip("root without setpriv keeps CAP_IPC_LOCK")
    return ("sh", "-c", 'ulimit -l 64; exec "$@"', "sh", *without)


def test_real_faults_are_found_in_one_document_and_the_exit_is_1(tmp_path: Path) -> None:
    """A memlock limit with DeepSpeed's own pinning, a stale lock, a refused file and no compiler, in one run."""
    lock = tmp_path / "extensions" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    zero = {"stage": 3, "reduce_bucket_size": "5e8", "offload_param": {"device": "cpu", "pin_memory": True}}
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}))
    done = run(
        *("--json", "--config", str(config), "--cache", str(tmp_path / "cache")),
        prefix=limited(),
        variables={
            "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"),
            "DS_PIN_MEMORY_BACKEND": "native",
            "DS_ACCELERATOR": "cpu",
            "CC": str(tmp_path / "no-cc"),
        },
    )
    document = json.loads(done.stdout)
    assert (done.returncode, document["will_break"], document["config"]) == (1, True, str(config))
    assert document["checks"] == [*HOST_CHECKS, *CONFIG_CHECKS]
    severities = {f["id"]: f["severity"] for f in document["findings"]}
    assert {name: severities.get(name) for name in ("memlock", "build-lock", "config-keys", "compiler")} == {
        **dict.fromkeys(("memlock", "build-lock", "config-keys"), "will break"),
        "compiler": "costs",
    }
    assert set(document["findings"][0]) == {"id", "severity", "found", "costs", "fix"}
    assert not [f for f in document["findings"] if "failed itself" in f["found"]]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (("--config", "no-such-file.json"), 2, "no-such-file.json"),
        (("--confg", "x"), 2, "--config"),
        (("extra",), 2, "unexpected extra argument"),
    ],
)
def test_bad_usage_is_2_and_nothing_is_looked_at(arguments: tuple[str, ...], status: int, says: str) -> None:
    """With what is wrong on stderr, and nothing on stdout."""
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (status, "")
    assert says in done.stderr


def test_a_broken_file_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it breaks; the host is looked at all the same."""
    broken = tmp_path / "ds_config.json"
    broken.write_text('{"zero_optimization": {"stage": 3')
    monkeypatch.setattr(examine, "ask", lambda **_: Answers())
    examined = examine.examine(broken, cache=tmp_path)
    finding = next(f for f in examined.findings if f.id == "config")
    assert (finding.severity, examined.will_break) == ("will break", True)
    assert "looks cut short" in finding.found
    assert not [f for f in examined.findings if f.id.startswith("config-") or "failed itself" in f.found]


def without_torch(folder: Path) -> dict[str, str]:
    """An environment in which importing torch takes the process down."""
    (folder / "torch.py").write_text("import os\nos.abort()")
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(CHECKOUT)])}


def test_a_torch_that_takes_the_process_down_is_a_finding(tmp_path: Path) -> None:
    """The verb itself never loads it."""
    done = run("--cache", str(tmp_path), variables=without_torch(tmp_path))
    assert done.returncode == 1
    assert done.stdout.startswith("will break: libraries\n")
    said = " ".join(done.stdout.split())
    assert "SIGABRT while it was asked about torch" in said
    assert "failed itself" not in said


@pytest.mark.parametrize("arguments", ["", "--json"])
def test_a_reader_that_leaves_is_no_traceback(tmp_path: Path, arguments: str) -> None:
    """`autotune-offload doctor | head -1`."""
    command = f"{sys.executable} -m autotune_offload doctor {arguments} --cache {tmp_path} | head -1"
    environ = {**os.environ, **without_torch(tmp_path)}
    done = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, check=True, cwd=CHECKOUT, env=environ
    )
    assert len(done.stdout.splitlines()) == 1
    assert done.stderr in ("", "looking at this host ...\n")
