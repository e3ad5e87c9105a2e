"""What people reported in public threads, tried as they would have met it: a file, a host, a device."""

from __future__ import annotations

import json
import os
from collections import UserList
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from msgspec import structs

from autotune_offload import workload
from autotune_offload.config import reading
from autotune_offload.doctor.checks.case import Case
from autotune_offload.doctor.examine import run_checks
from autotune_offload.doctor.self_report import Answers
from autotune_offload.errors import AgreementError, ConfigError
from autotune_offload.profiles.store import Store
from autotune_offload.ranks import group
from autotune_offload.records import Finding
from autotune_offload.workload import from_parameter_count
from tests.factories import make_choice, make_profile
from tests.reliability.registry import Check, fault
from tests.reliability.scenes import answering, faked_root, patched, shortened, start

GB = 10**9
CUDA = {"kind": "cuda", "name": "NVIDIA A100-SXM4-80GB", "count": 8, "index": 0, "pin_backend": "torch"}
CPU = {"kind": "cpu", "name": "cpu", "count": 1, "index": 0, "pin_backend": "none"}
BOTH: dict[str, Any] = {
    name: {"device": "cpu", "pin_memory": True} for name in ("offload_optimizer", "offload_param")
}


def report(thread: str, *, name: str, tried: str, expected: str) -> Callable[[Check], Check]:
    """One public thread, ``owner/repository#number``."""
    repository, _, number = thread.partition("#")
    link = f"[{repository.rpartition('/')[2]}#{number}](https://github.com/{repository}/issues/{number})"
    return fault(area="reports", name=name, injected=f"{link}: {tried}", expected=expected)


def examined(
    folder: Path,
    config: Mapping[str, Any] | None = None,
    *,
    free_bytes: int = 4096 * GB,
    parameters: int = 7 * GB,
    ranks: int = 1,
    files: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
    **answers: Any,
) -> list[Finding]:
    """What doctor finds on a made-up host for a model of so many parameters."""
    lines = f"MemTotal: 1 kB\nMemAvailable: {free_bytes // 1024} kB\nSwapTotal: 0 kB\n"
    root = faked_root(folder, {"proc/meminfo": lines, "proc/self/cgroup": "0::/\n", **(files or {})})
    store = Store(folder / "profiles")
    stored = store.save(
        structs.replace(make_profile(), workload=from_parameter_count(parameters, world_size=ranks))
    )
    said = {"torch": {"threads": 1, "cuda": "12.8"}, "device": CUDA, "profile": {"path": str(stored)}}
    case = Case(
        answers=Answers(answers={**said, "config": [], **answers}),
        store=store,
        config=config,
        root=root,
        environ={"LOCAL_WORLD_SIZE": str(ranks), "TORCH_EXTENSIONS_DIR": str(folder), **(environ or {})},
    )
    return list(run_checks(case).findings)


def the(findings: list[Finding], check: str, severity: str, *words: str) -> str:
    """The finding of this check and severity that has these words."""
    for finding in findings:
        whole = f"{finding.found} {finding.costs} {finding.fix}"
        if finding.id == check and finding.severity == severity and all(word in whole for word in words):
            return shortened(f"{severity}: {finding.found}")
    raise AssertionError(f"no {severity} of {check} with {words} in {[(f.id, f.found) for f in findings]}")


def zero(stage: int = 3, **sections: Any) -> dict[str, Any]:
    """A ds_config in bf16 with this section."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, **sections},
    }


def refusal(call: Callable[[], object]) -> str:
    """What a call is refused with."""
    try:
        done = call()
    except (AgreementError, ConfigError) as error:
        return str(error)
    raise AssertionError(f"it was taken: {done}")


def display_of(vendor: str, kind: str) -> dict[str, str]:
    """A card on the bus."""
    card = "sys/bus/pci/devices/0000:17:00.0/"
    return {card + "vendor": vendor, card + "class": kind, card + "max_link_width": "16"}


# -- memory ---------------------------------------------------------------------------------------


@report(
    "deepspeedai/DeepSpeed#4239",
    name="exit -9 with memory that seemed enough",
    tried="both sections offloaded, 13 billion parameters on 4 ranks, 188 GB free",
    expected="doctor says before the run that the host is too small, with the sum",
)
def _(folder: Path) -> str:
    return the(
        examined(folder, zero(**BOTH), parameters=13 * GB, ranks=4, free_bytes=188 * GB),
        "memory",
        "will break",
        "-9",
    )


@report(
    "deepspeedai/DeepSpeed#3823",
    name="exit -9 on one large card",
    tried="7 billion parameters, both sections, one rank on a host of 120 GB",
    expected="the same; the card's own 80 GB play no part",
)
def _(folder: Path) -> str:
    return the(
        examined(folder, zero(**BOTH), free_bytes=120 * GB), "memory", "will break", "page-locked or not"
    )


@report(
    "deepspeedai/DeepSpeed#4571",
    name="killed with both sections on NVMe",
    tried="6.7 billion parameters, buffer_size 1e9, a host of 31 GB",
    expected="the swap buffers count, though the state is on a disk",
)
def _(folder: Path) -> str:
    nvme = {"device": "nvme", "nvme_path": "nvme", "pin_memory": True}
    sections: dict[str, Any] = {
        "offload_optimizer": {**nvme, "buffer_count": 4, "ratio": 0.3},
        "offload_param": {**nvme, "buffer_count": 5, "buffer_size": 1e9, "max_in_cpu": 1e9},
    }
    found = examined(
        folder, zero(sub_group_size=1e9, **sections), parameters=6_700_000_000, free_bytes=31 * GB
    )
    return the(found, "memory", "will break", "buffers of the parameters on NVMe 10 GB")


@report(
    "deepspeedai/DeepSpeed#3506",
    name="larger NVMe buffers end in a lack of memory",
    tried="inference, buffer_size 6e8 by advice, 7 GB free",
    expected="5 buffers of 6e8 in 16 bit are counted: 6 GB, and what stays in host memory beside them",
)
def _(folder: Path) -> str:
    param = {"device": "nvme", "nvme_path": "/n", "buffer_count": 5, "buffer_size": 6e8, "pin_memory": True}
    return the(
        examined(folder, zero(offload_param=param), free_bytes=7 * GB), "memory", "will break", "on NVMe 6 GB"
    )


@report(
    "hao-ai-lab/FastVideo#1710",
    name="offload on a GB10 makes the peak worse",
    tried="a device of that name, offload_param on the CPU",
    expected="costs: it frees nothing there",
)
def _(folder: Path) -> str:
    device = {**CUDA, "name": "NVIDIA GB10"}
    return the(
        examined(folder, zero(offload_param=BOTH["offload_param"]), device=device), "unified-memory", "costs"
    )


@report(
    "hao-ai-lab/FastVideo#1715",
    name="the same on integrated devices",
    tried="a device that torch calls integrated",
    expected="costs, by what torch says and not by a name",
)
def _(folder: Path) -> str:
    device = {**CUDA, "name": "Orin", "integrated": True}
    return the(examined(folder, zero(**BOTH), device=device), "unified-memory", "costs", "Orin")


@report(
    "cloudfoundry/gosigar#57",
    name="a limit of the pod above the container's cgroup",
    tried="cgroup v1, no limit of its own, hierarchical_memory_limit 16 GB, 256 GB free on the host",
    expected="16 GB count",
)
def _(folder: Path) -> str:
    files = {
        "proc/self/cgroup": "9:memory:/kubepods/pod1/c1\n",
        "proc/self/mountinfo": "40 30 0:35 /kubepods/pod1/c1 /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.stat": f"hierarchical_memory_limit {16 * GB}\n",
    }
    return the(
        examined(folder, free_bytes=256 * GB, files=files), "cgroup", "notice", "hierarchical_memory_limit"
    )


# -- values and places ----------------------------------------------------------------------------


@report(
    "huggingface/accelerate#1828",
    name="the learning rate arrives as a text",
    tried='"lr": "2e-5" in optimizer.params',
    expected="will break, with what to write; DeepSpeed's parser says nothing",
)
def _(folder: Path) -> str:
    config = {**zero(**BOTH), "optimizer": {"type": "AdamW", "params": {"lr": "2e-5"}}}
    return the(
        examined(folder, config), "config-keys", "will break", "optimizer.params.lr", "2e-5 without quotes"
    )


@report(
    "salesforce/ALBEF#128",
    name="1e-05 from YAML is a text",
    tried="eps and weight_decay as YAML's loader gives them",
    expected="each is named",
)
def _(folder: Path) -> str:
    config = {
        **zero(**BOTH),
        "optimizer": {"type": "AdamW", "params": {"eps": "1e-08", "weight_decay": "1e-02"}},
    }
    found = examined(folder, config)
    the(found, "config-keys", "will break", "optimizer.params.weight_decay")
    return the(found, "config-keys", "will break", "optimizer.params.eps")


@report(
    "deepspeedai/DeepSpeed#1270",
    name='gradient_clipping "auto" without the Trainer',
    tried='"auto" outside zero_optimization, handed to DeepSpeed itself',
    expected="it is named, with who fills it in and that DeepSpeed alone stops",
)
def _(folder: Path) -> str:
    found = examined(folder, {**zero(**BOTH), "gradient_clipping": "auto"})
    return the(found, "config-auto", "notice", "gradient_clipping", "DeepSpeed alone stops")


@report(
    "deepspeedai/DeepSpeed#4571",
    name="a template that nobody filled in",
    tried="CONFIG_BATCH_SIZE and LOG_INTERVAL without quotes, which hjson takes with the comma",
    expected="each is named as a placeholder",
)
def _(folder: Path) -> str:
    text = '{\n"train_batch_size" : CONFIG_BATCH_SIZE,\n"steps_per_print": LOG_INTERVAL,\n"dump_state": false\n}\n'
    found = examined(folder, reading.read(text))
    the(found, "config-keys", "will break", "in the place of LOG_INTERVAL")
    return the(found, "config-keys", "will break", "in the place of CONFIG_BATCH_SIZE")


@report(
    "wenet-e2e/wenet#2499",
    name="offload_param at stage 2 is without meaning",
    tried="stage 2 with both sections",
    expected="costs: which of them has no effect",
)
def _(folder: Path) -> str:
    return the(
        examined(folder, zero(2, **BOTH)), "config-offload", "costs", "offload_param has no effect at stage 2"
    )


@report(
    "deepspeedai/DeepSpeed#2174",
    name="optimizer offload at stage 1",
    tried="stage 1 with offload_optimizer, unpinned",
    expected="it acts there, and nothing is said against it",
)
def _(folder: Path) -> str:
    found = examined(folder, zero(1, offload_optimizer={"device": "cpu", "pin_memory": False}))
    assert [f.id for f in found if f.id.startswith("config")] == [], found
    return "no finding of the file"


@report(
    "deepspeedai/DeepSpeed#943",
    name="cpu_offload_params beside cpu_offload",
    tried="the misspelt switch at stage 2",
    expected="will break, with the nearest key",
)
def _(folder: Path) -> str:
    found = examined(folder, zero(2, cpu_offload=True, cpu_offload_params=True))
    return the(found, "config-keys", "will break", "cpu_offload_params", '"cpu_offload_param"')


@report(
    "deepspeedai/DeepSpeed#1543",
    name="aio inside zero_optimization",
    tried="the block one level too deep",
    expected="will break, and where it belongs",
)
def _(folder: Path) -> str:
    found = examined(folder, zero(aio={"block_size": 1048576}, **BOTH))
    return the(found, "config-keys", "will break", "zero_optimization.aio", "move it to the top level")


@report(
    "deepspeedai/DeepSpeed#2624",
    name="NVMe without a path",
    tried='"device": "nvme" and no nvme_path',
    expected="will break; DeepSpeed's parser takes it",
)
def _(folder: Path) -> str:
    return the(
        examined(folder, zero(offload_param={"device": "nvme"})), "config-keys", "will break", "nvme_path"
    )


# -- files ----------------------------------------------------------------------------------------


@report(
    "deepspeedai/DeepSpeed#5124",
    name="accelerate's YAML that names the ds_config",
    tried="the YAML given to doctor, the ds_config beside it",
    expected="the file that it names is looked at",
)
def _(folder: Path) -> str:
    (folder / "deepspeed_config.json").write_text(json.dumps(zero(**BOTH)))
    yaml = folder / "ds_zero3_nvme.yaml"
    yaml.write_text(
        "compute_environment: LOCAL_MACHINE\ndebug: false\ndeepspeed_config:\n"
        f"  deepspeed_config_file: {folder}/deepspeed_config.json\ndistributed_type: DEEPSPEED\nnum_processes: 1\n"
    )
    found, said = reading.followed(yaml)
    assert reading.read(found) == zero(**BOTH)
    return shortened(said[0].replace(str(folder), "..."))


@report(
    "huggingface/accelerate#2298",
    name="accelerate's YAML that holds fields of its own",
    tried="offload_optimizer_device and zero_stage, no ds_config",
    expected="refused in words: what it is, and what to do",
)
def _(folder: Path) -> str:
    text = (
        "compute_environment: LOCAL_MACHINE\ndeepspeed_config:\n  offload_optimizer_device: cpu\n  zero_stage: 2\n"
        "distributed_type: DEEPSPEED\n"
    )
    (folder / "accelerate.yaml").write_text(text)
    said = refusal(lambda: reading.read(folder / "accelerate.yaml"))
    assert "accelerate's own configuration" in said and "deepspeed_config_file" in said
    return shortened(said.replace(str(folder), "..."))


@report(
    "bowang-lab/BioReason#10",
    name="a path that is not there",
    tried="ds_config_stage2.json from another folder, where the message speaks of base64",
    expected="no such file, where it was looked for, and what is near",
)
def _(folder: Path) -> str:
    (folder / "ds_config_stage3.json").write_text("{}")
    said = refusal(lambda: reading.read(str(folder / "ds_config_stage2.json")))
    assert "no such file" in said and 'did you mean "ds_config_stage3.json"' in said
    return shortened(said.replace(str(folder), "..."))


@report(
    "pytorch/pytorch#167319",
    name="OmegaConf's list among the betas",
    tried="a sequence that is no list, in a configuration of mappings",
    expected="DeepSpeed gets a plain dict with a plain list",
)
def _(folder: Path) -> str:
    params = {"lr": 1e-3, "betas": UserList([0.9, 0.95])}
    given = {**zero(**BOTH), "optimizer": {"type": "AdamW", "params": params}}
    seen = start(folder, given, probe=answering())
    betas = seen.config["optimizer"]["params"]["betas"]
    assert type(betas) is list and json.dumps(seen.config)
    return f"a {type(betas).__name__}: {betas}"


# -- devices, ranks, builds -----------------------------------------------------------------------


@report(
    "deepspeedai/DeepSpeed#4892",
    name="an Ascend NPU and a torch that does not know it",
    tried="vendor 0x19e5 on the bus, DeepSpeed on the CPU",
    expected="costs, with the package that drives it",
)
def _(folder: Path) -> str:
    found = examined(folder, device=CPU, torch={"cuda": None}, files=display_of("0x19e5", "0x120000"))
    return the(found, "torch-build", "costs", "Huawei", "torch_npu")


@report(
    "hiyouga/LlamaFactory#2491",
    name="an Arc A770, and a run that stops without a word",
    tried="a display card of Intel on the bus, DeepSpeed on the CPU",
    expected="a notice: the card may compute, and torch does not use it",
)
def _(folder: Path) -> str:
    found = examined(folder, device=CPU, torch={"cuda": None}, files=display_of("0x8086", "0x030000"))
    return the(found, "torch-build", "notice", "may compute", "Intel")


@report(
    "pytorch/pytorch#8091",
    name="a world size of 2 and one process",
    tried="the variables of two ranks, and nobody else comes",
    expected="who said so, and what to unset; signals are heard meanwhile (a test sends them)",
)
def _(folder: Path) -> str:
    variables = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    with patched(folder, variables):
        said = refusal(lambda: group.launched_group(0.5))
    assert "WORLD_SIZE=2 says" in said and "unset WORLD_SIZE" in said
    return shortened(said)


@report(
    "deepspeedai/DeepSpeed#5627",
    name="no ninja for an operation of DeepSpeed",
    tried="DS_PIN_MEMORY_BACKEND=native where ninja is missing",
    expected="will break, before a run needs it",
)
def _(folder: Path) -> str:
    found = examined(
        folder, environ={"DS_PIN_MEMORY_BACKEND": "native"}, native_pins="ninja is not installed"
    )
    return the(found, "pin-backend", "will break", "ninja is not installed")


@report(
    "pytorch/pytorch#189245",
    name="a build was killed, and the next start waits for ever",
    tried="the lock that it left, two days old",
    expected="will break, with path and age; compilers of ours end with their probe (a test kills it)",
)
def _(folder: Path) -> str:
    lock = folder / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    os.utime(lock, (0, 0))
    return the(examined(folder), "build-lock", "will break", "waits for it for ever").replace(
        str(folder), "..."
    )


@report(
    "deepspeedai/DeepSpeed#1514",
    name="ZeRO-3 inference: no optimizer, no gradients",
    tried="a model that is all frozen, offload_param on the CPU",
    expected="its pin_memory is chosen; no path is attached",
)
def _(folder: Path) -> str:
    config = zero(offload_param={"device": "cpu"})
    frozen = torch.nn.Linear(64, 64).requires_grad_(False)
    seen = start(folder, config, probe=answering(choice=make_choice(pin_parameters=True)), model=frozen)
    assert seen.error is None and not seen.warnings, (seen.error, seen.warnings)
    assert seen.config["zero_optimization"]["offload_param"]["pin_memory"] is True
    assert workload.from_module(frozen).elements == 64 * 65
    return "pin_memory true, by the choice"
