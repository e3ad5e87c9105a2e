"""Trains small engines on one rank and prints, a JSON line a case, every block that DeepSpeed asked to page-lock.

The cases come as a JSON list of `zero_optimization` sections with `steps`, on the standard input.
"""

import json
import os
import sys

os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_SIZE="1", MASTER_ADDR="127.0.0.1")

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

WIDTH, LAYERS = 64, 3

blocks: list[int] = []
accelerator = type(get_accelerator())
own = accelerator.pin_memory


def pin_memory(self, tensor, *args, **kwargs):
    """Write the size down, then as always."""
    blocks.append(tensor.numel() * tensor.element_size())
    return own(self, tensor, *args, **kwargs)


accelerator.pin_memory = pin_memory


def model() -> torch.nn.Module:
    """Six linear layers."""
    layers = []
    for _ in range(LAYERS):
        layers += [torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.GELU(), torch.nn.Linear(2 * WIDTH, WIDTH)]
    return torch.nn.Sequential(*layers)


def trained(zero: dict, steps: int) -> list[int]:
    """Every block of one engine, up to its second step."""
    blocks.clear()
    module = model()
    engine, *_ = deepspeed.initialize(
        model=module,
        model_parameters=module.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": steps,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": zero,
        },
    )
    for _ in range(2 * steps):
        engine.backward(engine(torch.ones(2, WIDTH, dtype=torch.bfloat16)).float().pow(2).mean())
        engine.step()
    engine.destroy()
    return sorted(blocks, reverse=True)


for case in json.load(sys.stdin):
    print("blocks", json.dumps(trained(case["zero"], case["steps"])), flush=True)
