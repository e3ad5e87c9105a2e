"""A model built under `zero.Init`: partitioned layer by layer, in the memory that was chosen.

    deepspeed examples/zero_init.py

`zero.Init` lays the parameters out for good, so what is decided later about ``offload_param.pin_memory`` no
longer reaches them. `zero_init` decides before.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

import autotune_offload


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(nn.functional.gelu(self.up(x)))
        return y


def main() -> None:
    os.chdir(Path(__file__).parent)  # where ds_config.json is
    torch.manual_seed(0)

    with autotune_offload.zero_init(config_dict_or_path="ds_config.json"):
        model = Net()
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
