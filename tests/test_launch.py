"""The launch lines of `examples/launch`: what the ranks are started with, by stand-ins for what is not here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from deepspeed.launcher.runner import fetch_hostfile
from torch.distributed.run import get_args_parser

from tests import CHECKOUT

LAUNCH = CHECKOUT / "examples" / "launch"
WATCHED = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "AUTOTUNE_OFFLOAD_CACHE",
)

RECORDER = f"""#!{sys.executable}
import json, os, sys
with open(os.environ["RECORD"], "a") as file:
    print(json.dumps([sys.argv[1:], {{k: os.environ[k] for k in {WATCHED!r} if k in os.environ}}]), file=file)
"""

SRUN = """#!/usr/bin/env bash
[[ $1 == --cpu-bind=cores ]] || exit 2
shift
for id in $(seq 0 $((SLURM_NTASKS - 1))); do
    SLURM_PROCID=$id SLURM_LOCALID=$((id % SLURM_NTASKS_PER_NODE)) "$@"
done
"""

SCONTROL = """#!/usr/bin/env bash
[[ "$1 $2 $3" == "show hostnames node-[1-2]" ]] && printf 'node-1\\nnode-2\\n'
"""


def run(tmp_path: Path, script: str, *arguments: str, **environment: str) -> list[Any]:
    """What the recorded programs were called with: arguments and the variables of a rank."""
    programs = dict.fromkeys(("deepspeed", "torchrun", "python"), RECORDER)
    for name, text in (programs | {"srun": SRUN, "scontrol": SCONTROL}).items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if name not in WATCHED}
    paths = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "RECORD": str(tmp_path / "record")}
    subprocess.run(
        ["bash", str(LAUNCH / script), *arguments], env=kept | paths | environment, check=True, timeout=60
    )
    return [json.loads(line) for line in (tmp_path / "record").read_text().splitlines()]


@pytest.mark.parametrize(
    ("environment", "options"),
    [
        ({}, []),
        ({"RANKS": "2"}, ["--num_gpus", "2"]),
        ({"LAUNCHER": "torchrun"}, ["--nproc-per-node", "gpu"]),
        ({"LAUNCHER": "torchrun", "RANKS": "2"}, ["--nproc-per-node", "2"]),
    ],
)
def test_one_host(tmp_path: Path, environment: dict[str, str], options: list[str]) -> None:
    """Options of the launcher, then the script, then what was asked for."""
    ((words, _),) = run(tmp_path, "one_host.sh", "--steps", "3", **environment)
    assert words == [*options, str(LAUNCH.parent / "train_gpt.py"), "--steps", "3"]
    if environment.get("LAUNCHER") == "torchrun":
        assert get_args_parser().parse_args(words).training_script == str(LAUNCH.parent / "train_gpt.py")


def test_several_hosts(tmp_path: Path) -> None:
    """The hostfile is one that DeepSpeed reads."""
    hostfile = str(LAUNCH / "hostfile")
    ((words, _),) = run(tmp_path, "several_hosts.sh", hostfile, "--steps", "3", MASTER_ADDR="node-1")
    assert words[:4] == ["--hostfile", hostfile, "--master_addr", "node-1"]
    assert fetch_hostfile(hostfile) == {"node-1": 8, "node-2": 8}


def test_slurm_gives_every_task_what_a_rank_needs(tmp_path: Path) -> None:
    """Ranks count through the job, local ranks through a host, and all meet on the first host."""
    slurm = {"SLURM_JOB_NODELIST": "node-[1-2]", "SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2"}
    started = run(tmp_path, "slurm.sbatch", "--steps", "3", USER="me", **slurm)
    assert [words for words, _ in started] == [["examples/train_gpt.py", "--steps", "3"]] * 4
    assert [(e["RANK"], e["LOCAL_RANK"]) for _, e in started] == [
        ("0", "0"),
        ("1", "1"),
        ("2", "0"),
        ("3", "1"),
    ]
    for _, environment in started:
        assert environment["WORLD_SIZE"] == "4" and environment["LOCAL_SIZE"] == "2"
        assert environment["MASTER_ADDR"] == "node-1" and environment["MASTER_PORT"] == "29500"
        assert environment["AUTOTUNE_OFFLOAD_CACHE"] == "/var/tmp/me/autotune-offload"


def test_the_kubernetes_job_starts_torchrun_on_every_host() -> None:
    """Its hosts, the address where they meet, and the volumes belong together."""
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    spec = job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    words = container["args"][0].replace('"$JOB_COMPLETION_INDEX"', "1").split()
    assert words[:2] == ["exec", "torchrun"]
    parsed = get_args_parser().parse_args(words[2:])
    assert int(parsed.nnodes) == spec["completions"] == spec["parallelism"]
    assert int(parsed.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert parsed.master_addr == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert spec["completionMode"] == "Indexed" and pod["subdomain"] == service["metadata"]["name"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
