"""DeepSpeed itself: `autotune_offload.initialize` stands for `deepspeed.initialize`.

    deepspeed examples/raw.py

Prints the choice with its reasons, and ten losses.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

import autotune_offload


def main() -> None:
    os.chdir(Path(__file__).parent)  # where ds_config.json is
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    engine, *_ = autotune_offload.initialize(model=model, config="ds_config.json")

    if engine.global_rank == 0:
        print(autotune_offload.report(engine).text())
    torch.manual_seed(engine.global_rank)
    x = torch.randn(2, 64, dtype=torch.bfloat16, device=engine.device)
    for step in range(1, 11):
        loss = (engine(x) - x.roll(1, dims=1)).float().square().mean()
        engine.backward(loss)
        engine.step()
        if engine.global_rank == 0:
            print(f"step {step:2d}   loss {loss.item():.9g}")
    engine.destroy()


if __name__ == "__main__":
    main()
