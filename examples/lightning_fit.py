"""Lightning, which hands its strategy's configuration to DeepSpeed: `tune_config` around it.

    deepspeed examples/lightning_fit.py

`tune_config` returns a plain dict with the offload keys chosen; DeepSpeed's own code carries the gradients then.
With `autotune_offload.install()` before `fit` in its place, the chosen path is carried out too.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import torch
from lightning.pytorch import strategies
from torch import Tensor, nn

import autotune_offload

ON_CUDA = torch.cuda.is_available()


class Net(lightning.LightningModule):  # type: ignore[misc]  # lightning's types are not read
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        (x,) = batch
        loss: Tensor = (self.layers(x) - x.roll(1, dims=1)).float().square().mean()
        self.print(f"step {index + 1:2d}   loss {loss.item():.9g}")
        return loss

    def configure_optimizers(self) -> None:
        """The optimizer is in ds_config.json."""


class DeepSpeedStrategy(strategies.DeepSpeedStrategy):  # type: ignore[misc]  # the same
    """Lightning's own, on the CPU too: it refuses every device but CUDA, though DeepSpeed has others."""

    @property
    def root_device(self) -> Any:
        return super().root_device if ON_CUDA else torch.device("cpu", 0)

    def setup_environment(self) -> None:
        super(strategies.DeepSpeedStrategy, self).setup_environment()

    def setup_distributed(self) -> None:
        self.set_world_ranks()
        self._init_deepspeed_distributed()


def main() -> None:
    os.chdir(Path(__file__).parent)  # where ds_config.json is
    lightning.seed_everything(0)

    strategy = DeepSpeedStrategy(config=autotune_offload.tune_config("ds_config.json"))

    rows = torch.randn(2, 64).repeat(10, 1)
    trainer = lightning.Trainer(
        strategy=strategy,
        accelerator="cuda" if ON_CUDA else "cpu",
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        precision="bf16-mixed",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data: Any = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=2)
    trainer.fit(Net(), data)


if __name__ == "__main__":
    main()
