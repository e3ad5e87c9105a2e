"""Versions, imports, builds and tools."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence

from packaging.version import Version

from autotune_offload import upstream
from autotune_offload.doctor.checks.case import Case, version
from autotune_offload.machine import bus, host
from autotune_offload.records import Finding

OLDEST = {"python": "3.10", "torch": "2.1", "deepspeed": upstream.OLDEST}
"""What pyproject.toml asks for; a checkout on the path has no metadata to read it from."""


_TORCH = "https://pytorch.org/get-started/locally"

_EXTENSIONS = {"Huawei": "torch_npu", "Habana": "habana_frameworks", "Cambricon": "torch_mlu"}
"""What DeepSpeed imports for devices that a torch for the CPU can drive (`accelerator/real_accelerator.py`)."""


def versions(case: Case) -> Iterator[Finding]:
    """Python, torch and DeepSpeed against what this package needs, and was tried with."""
    software = host.software()
    for name, oldest in OLDEST.items():
        found = getattr(software, name)
        parsed = version(found)
        if parsed is not None and parsed.release < Version(oldest).release:
            another = (
                f"run it with Python {oldest} or newer"
                if name == "python"
                else f"pip install '{name}>={oldest}'"
            )
            yield Finding(
                id="versions",
                severity="will break",
                found=f"{name} is {found}; expected {oldest} or newer",
                fix=another,
            )
    deepspeed = version(software.deepspeed)
    if deepspeed is not None and deepspeed.release > Version(upstream.NEWEST).release:
        yield Finding(
            id="versions",
            severity="notice",
            found=f"DeepSpeed {deepspeed} is newer than {upstream.NEWEST}, the newest that was tried",
            costs="a gradient path is taken out again where its first gradients are not DeepSpeed's own to the bit",
            fix="`autotune-offload verify` trains both ways and compares",
        )
    if deepspeed is not None and deepspeed < upstream.NEEDS_NUMACTL_BELOW:
        yield from _numactl(case, deepspeed)


def _numactl(case: Case, version: Version) -> Iterator[Finding]:
    on_cpu = case.device.get("kind", case.environ.get("DS_ACCELERATOR")) == "cpu"
    if on_cpu and "LOCAL_SIZE" not in case.environ and shutil.which("numactl") is None:
        yield Finding(
            id="versions",
            severity="will break",
            found=f"DeepSpeed {version} on the CPU asks numactl for the number of sockets, which is not installed",
            costs="`deepspeed.initialize` ends in FileNotFoundError: numactl",
            fix="LOCAL_SIZE=1 in the environment (the ranks on this host), or install numactl",
        )


def libraries(case: Case) -> Iterator[Finding]:
    """Imports that fail, and a device that cannot be used or does not answer."""
    said = case.answers
    for name in ("torch", "deepspeed"):
        if name in said.errors:
            installed = getattr(host.software(), name)
            yield Finding(
                id="libraries",
                severity="will break",
                found=f"`import {name}` fails ({name} {installed}): {said.errors[name]}",
                fix=f"pip install {name}"
                if installed == "not installed"
                else f"mend what the message names, or install {name} again with this Python ({sys.executable})",
            )
            return  # DeepSpeed fails with torch
    if "device" in said.errors:
        yield Finding(
            id="libraries",
            severity="will break",
            found=f"DeepSpeed's accelerator cannot be used: {said.errors['device']}",
            fix="mend what the message names; DS_ACCELERATOR names another accelerator (cpu, cuda, hpu, xpu, npu)",
        )
    if said.died is not None:
        yield Finding(
            id="libraries",
            severity="will break",
            found=f"a process that asked torch, DeepSpeed and the device {said.died}",
            costs="a training process would most likely end, or hang, in the same place",
            fix="see that driver, torch and DeepSpeed fit each other, and that the device answers its vendor's tool",
        )


def torch_build(case: Case) -> Iterator[Finding]:
    """An accelerator that /sys shows and DeepSpeed would not train on."""
    found = bus.accelerators(root=case.root)
    devices = [device for device in found if not device.display] or found
    if case.device.get("kind") != "cpu" or not devices:
        return
    there = ", ".join(sorted({f"{device.vendor} at {device.address}" for device in devices}))
    display = devices[0].display  # a Radeon or an Arc computes, and so does not every card for a screen
    chosen = case.environ.get("DS_ACCELERATOR", "").strip().lower() == "cpu"
    built = [
        name
        for name, version in (case.answers.answers.get("torch") or {}).items()
        if name != "threads" and version
    ]
    if chosen:
        why, fix = "DS_ACCELERATOR=cpu chooses that", "unset DS_ACCELERATOR to use the accelerator"
    elif built:
        why = f"torch {host.software().torch} is built for {built[0]}, but no such device answers it"
        fix = "check the driver with the vendor's tool, and what CUDA_VISIBLE_DEVICES or the like leaves visible"
    else:
        why, fix = (
            f"torch {host.software().torch} is built for the CPU alone",
            _another_build(devices),
        )
    a_card = "a display card that may compute" if display else "an accelerator"
    yield Finding(
        id="torch-build",
        severity="notice" if chosen or display else "costs",
        found=f"DeepSpeed would train on the CPU, though this host has {a_card} ({there}): {why}",
        costs="everything is computed on the host",
        fix=fix,
    )


def _another_build(devices: Sequence[bus.BusDevice]) -> str:
    vendors = sorted({device.vendor for device in devices})
    packages = [f"{_EXTENSIONS[vendor]} for {vendor}" for vendor in vendors if vendor in _EXTENSIONS]
    if len(packages) == len(vendors):
        return f"install {' and '.join(packages)}, in the version that fits this torch"
    return f"install another build: {_TORCH}" + (f"; {' and '.join(packages)}" if packages else "")


def compiler(case: Case) -> Iterator[Finding]:
    """Whether the fused pass of `host_pass` came with the package or can be compiled."""
    why = case.answers.errors.get("compiler") or case.answers.answers.get("compiler")
    if why:
        yield Finding(
            id="compiler",
            severity="costs",
            found=str(why),
            costs="a gradient's cast and norm take three passes over memory in place of one: about twice the time",
            fix="install the wheel for this architecture or a C compiler (`apt install gcc`), or name one in CC",
        )


def libyaml(case: Case) -> Iterator[Finding]:
    """Whether profiles are read by libyaml."""
    del case
    import yaml

    if not yaml.__with_libyaml__:
        yield Finding(
            id="libyaml",
            severity="costs",
            found="PyYAML was built without libyaml",
            costs="each start reads its profile some 15 times slower",
            fix="install its binary wheel: pip install --force-reinstall --only-binary :all: pyyaml",
        )
