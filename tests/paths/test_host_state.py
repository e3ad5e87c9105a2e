"""What a rank keeps in host memory by a ds_config, counted against DeepSpeed's own tensors."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

from autotune_offload import workload
from autotune_offload.paths.host_state import host_state
from tests.ports import free_port

CPU = {"device": "cpu", "pin_memory": False}


def config(optimizer: dict[str, Any] | None = None, **zero: Any) -> dict[str, Any]:
    """A ds_config in bf16 with this section."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": optimizer or {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }


MODEL = workload.from_parameter_count(1_000_000)
P = MODEL.elements


@pytest.mark.parametrize(
    ("given", "bytes_each"),
    [
        (config(stage=3, offload_optimizer=CPU), 18),
        (config(stage=3, offload_optimizer=CPU, offload_param=CPU), 20),
        (config(stage=3, offload_param=CPU), 2),
        (config(stage=2, offload_optimizer=CPU), 18),
        (config(stage=1, offload_optimizer=CPU), 18),
        (config(stage=2, offload_param=CPU), 0),
        (config(stage=0, offload_optimizer=CPU), 0),
        (config(stage=3, offload_optimizer={**CPU, "ratio": 0.5}), 10),
        (config({"type": "Lion"}, stage=3, offload_optimizer=CPU), 14),
        ({**config(stage=3, offload_optimizer=CPU), "bf16": {"bf16_master_weights_and_grads": True}}, 14),
        ({"zero_optimization": "3"}, 0),
        ({}, 0),
    ],
)
def test_bytes_a_parameter(given: dict[str, Any], bytes_each: int) -> None:
    """Weights 4, gradients 4, two moments 8, a 16-bit copy 2, and 2 for parameters."""
    assert sum(host_state(given, MODEL).values()) == bytes_each * P


def test_buffers_for_nvme_count_by_their_own_keys() -> None:
    """Number times size, whatever the model; the defaults where nothing is written."""
    nvme = {"device": "nvme", "nvme_path": "/n"}
    default = host_state(config(stage=3, offload_param=nvme), MODEL)
    assert default["buffers of the parameters on NVMe"] == 2 * 5 * 100_000_000
    large = host_state(config(stage=3, offload_param={**nvme, "buffer_count": 7, "buffer_size": 1e9}), MODEL)
    assert large["buffers of the parameters on NVMe"] == 2 * 7 * 10**9
    optimizer = host_state(config(stage=3, offload_optimizer=nvme, sub_group_size=1000), MODEL)
    assert optimizer["buffers of the optimizer on NVMe"] == 4 * 4 * 1000


def test_frozen_parameters_lie_on_the_host_too() -> None:
    """Without gradients or state."""
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8).requires_grad_(False))
    found = host_state(
        config(stage=3, offload_optimizer=CPU, offload_param=CPU), workload.from_module(layers)
    )
    assert found["16-bit parameters"] == 4 * 2 * 72  # a module in fp32
    assert found["master weights"] == 4 * 72


_REAL = """
import json
import sys

import deepspeed
import torch

given = json.loads(sys.argv[1])
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(8)))
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=given)
engine.backward(engine(torch.randn(2, 256, dtype=torch.bfloat16)).float().pow(2).mean())
engine.step()
optimizer = engine.optimizer
flat = getattr(optimizer, "fp32_partitioned_groups_flat", None) or optimizer.single_partition_of_fp32_groups
copies = [getattr(optimizer, "grad_partitions_flat_buffer", None)]
copies += getattr(optimizer, "param_buffer_of_bit16_for_cpu_offload_groups", [])
copies += [getattr(optimizer, "temp_grad_buffer_for_cpu_offload", None)]
states = [value for state in optimizer.optimizer.state.values() for value in state.values()]
tensors = [*flat, *(weights.grad for weights in flat), *copies, *states]
kept = {t.data_ptr(): t.nbytes for t in tensors if isinstance(t, torch.Tensor) and t.dim() > 0}
print("kept", sum(kept.values()))
"""


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_real_engine_keeps_as_much(stage: int) -> None:
    """The tensors of DeepSpeed's own optimizer on the host after a step; stages 1 and 2 have one more parameter."""
    given = config(stage=stage, offload_optimizer=CPU)
    port = str(free_port())
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", _REAL, json.dumps(given)],
        env={**os.environ, **rank, "MASTER_PORT": port},
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )
    kept = int(re.findall(r"^kept (\d+)$", done.stdout, re.MULTILINE)[0])
    layers = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(8)))
    counted = sum(host_state(given, workload.from_module(layers, dtype="bfloat16")).values())
    assert kept - counted == (0 if stage == 3 else 2 * 256 * 256)
