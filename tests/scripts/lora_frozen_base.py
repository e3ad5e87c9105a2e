"""Fine-tunes low-rank adapters on a frozen base with ZeRO-3 offload, and saves what they learned nowhere."""

import argparse

import torch
from deepspeed import initialize
from torch import nn

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
    },
}


class LoRA(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 4):
        super().__init__()
        self.base = base
        for parameter in base.parameters():
            parameter.requires_grad = False
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Classifier(nn.Module):
    def __init__(self, width: int = 64):
        super().__init__()
        self.layers = nn.ModuleList(LoRA(nn.Linear(width, width)) for _ in range(3))
        self.head = LoRA(nn.Linear(width, 10))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return nn.functional.cross_entropy(self.head(x).float(), y)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--local_rank", type=int, default=0)
    options = parser.parse_args()

    torch.manual_seed(0)
    model = Classifier()
    trainable = [p for p in model.parameters() if p.requires_grad]
    engine, _, _, _ = initialize(model=model, model_parameters=trainable, config=CONFIG)

    torch.manual_seed(engine.global_rank)
    x, y = torch.randn(2, 64, dtype=torch.bfloat16), torch.tensor([3, 7])
    for step in range(options.steps):
        loss = engine(x.to(engine.device), y.to(engine.device))
        engine.backward(loss)
        engine.step()
        print(f"rank {engine.global_rank} step {step} loss {loss.item():.9g}")


if __name__ == "__main__":
    main()
