"""Trains a small model whose parameters and optimizer state are swapped to a folder, as a ds_config says.

    python -m tests.engine.swapped CONFIG.json

Prints the losses of eight steps as one JSON line, exactly, and how long the steps took.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from torch import nn

STEPS = 8
WIDTH = 768
"""Of layers whose gradients have 2.4 MB in fp32: more than what DeepSpeed leaves in memory."""


def main(file: str) -> int:
    """Train."""
    import deepspeed

    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = json.loads(Path(file).read_text("utf-8"))
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    losses, took = [], []
    for step in range(STEPS):
        batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.bfloat16)
        began = time.perf_counter()
        loss = engine(batch).square().mean()
        engine.backward(loss)
        engine.step()
        took.append(time.perf_counter() - began)
        losses.append(float(loss).hex())
    print("\n" + json.dumps({"losses": losses, "seconds": took}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
