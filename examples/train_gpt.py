"""Train a small GPT on Python's own source code with ZeRO-3 offload, tuned to this machine.

    python examples/train_gpt.py                    22M parameters, 30 steps
    python examples/train_gpt.py --stock            the same through plain deepspeed.initialize
    deepspeed examples/train_gpt.py                 on every accelerator of this host

Prints what was chosen, why, and what changed in the config; then the loss (nine digits: all that a float32
has, so that two runs can be compared exactly). Exits with 1 if the loss did not fall.
"""

from __future__ import annotations

import argparse
import atexit
import logging
import os
import socket
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autotune_offload

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    # torch_adam: DeepSpeedCPUAdam, the default with offload_optimizer, first compiles a C++ extension for
    # a minute or more. torch's AdamW steps the same offloaded state; for real training remove the key.
    "optimizer": {"type": "AdamW", "params": {"lr": 5e-4, "torch_adam": True}},
    "gradient_clipping": 1.0,
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
    },
}


class Linear(nn.Linear):
    """Multiplies in fp32 on the CPU, where torch needs up to 50 times as long for bf16 without AVX-512."""

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu":
            return super().forward(x)
        return F.linear(x.float(), self.weight.float(), self.bias.float()).to(x.dtype)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = Linear(width, 3 * width), Linear(width, width)
        self.mlp = nn.Sequential(Linear(width, 4 * width), nn.GELU(), Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        x = x + self.mlp(self.norm_mlp(x))
        return x


class GPT(nn.Module):
    """Predicts the next byte; returns the loss."""

    def __init__(self, *, layers: int, width: int, length: int) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads=width // 64) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), Linear(width, 256)

    def forward(self, text: Tensor, target: Tensor) -> Tensor:
        x = self.bytes(text) + self.positions.weight[: text.shape[1]]
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.float().flatten(0, 1), target.flatten())


def python_sources() -> Tensor:
    """The standard library's top-level modules, one long row of bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray().join(file.read_bytes() for file in files), dtype=torch.uint8).long()


def run_without_launcher() -> None:
    """Let DeepSpeed start as a single process, and build its C++ extensions inside this checkout."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    builds = Path(__file__).resolve().parents[1] / ".cache" / "torch_extensions"
    defaults = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    # LOCAL_SIZE: without it DeepSpeed up to 0.15.4 asks numactl, which may not be installed.
    for name, value in {**defaults, "LOCAL_SIZE": 1, "TORCH_EXTENSIONS_DIR": builds}.items():
        os.environ.setdefault(name, str(value))
    if os.environ["MASTER_PORT"] == str(port):
        atexit.register(remove_shared_buffer, port)
    # ninja is installed next to Python, which need not be on the path.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


def remove_shared_buffer(port: int) -> None:
    """DeepSpeed leaves 66 MB of shared memory behind, under a new name for each port."""
    for buffer in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_{os.getuid()}_127.0.0.1_{port}_*"):
        buffer.unlink(missing_ok=True)


def start(model: nn.Module, config: dict[str, Any] | str, *, stock: bool, show: bool) -> Any:
    """The engine, from DeepSpeed itself or through the one-line wrapper."""
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if stock:
        return deepspeed.initialize(model=model, config=config)[0]

    engine, *_ = autotune_offload.initialize(model=model, config=config)
    if show and engine.global_rank == 0:
        print(autotune_offload.report(engine).text(), flush=True)
    return engine


def train(engine: Any, *, steps: int, length: int, every: int) -> list[float]:
    """The loss of every step; the first and each `every`-th are printed, with 0 none."""
    text = python_sources()
    draw = torch.Generator().manual_seed(engine.global_rank)
    losses = []
    for step in range(1, steps + 1):
        starts = torch.randint(
            len(text) - length, (engine.train_micro_batch_size_per_gpu(), 1), generator=draw
        )
        rows = text[starts + torch.arange(length + 1)].to(engine.device)
        loss = engine(rows[:, :-1], rows[:, 1:])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if every and (step % every == 0 or step == 1):
            print(f"step {step:3d}   loss {losses[-1]:.9g}", flush=True)
    return losses


def arguments() -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument(
        "--config", metavar="FILE", help="a ds_config to use instead of the one in this script"
    )
    parser.add_argument("--stock", action="store_true", help="plain deepspeed.initialize, for comparison")
    parser.add_argument("--every", type=int, default=5, metavar="STEPS", help="how often the loss is printed")
    parser.add_argument("--quiet", action="store_true", help="print the last line only")
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--width", type=int, default=512, help="a multiple of 64")
    parser.add_argument("--length", type=int, default=128, help="bytes in a row of text")
    parser.add_argument("--local_rank", type=int, help="set by launchers; DeepSpeed reads the environment")
    return parser.parse_args()


def main() -> int:
    """Train, and say whether the loss fell."""
    options = arguments()
    run_without_launcher()
    torch.manual_seed(0)
    model = GPT(layers=options.layers, width=options.width, length=options.length)
    parameters = sum(parameter.numel() for parameter in model.parameters())

    engine = start(model, options.config or CONFIG, stock=options.stock, show=not options.quiet)
    show = not options.quiet and engine.global_rank == 0
    began = time.perf_counter()
    losses = train(engine, steps=options.steps, length=options.length, every=options.every if show else 0)
    seconds = (time.perf_counter() - began) / options.steps

    if engine.global_rank == 0:
        print(
            f"{parameters / 1e6:.1f}M parameters, {options.steps} steps, {seconds:.2f} s a step:"
            f" loss {losses[0]:.9g} -> {losses[-1]:.9g}"
        )
        if not options.stock:
            print(f"gradients: carried out {autotune_offload.report(engine).carrier()}")
    engine.destroy()
    return 0 if losses[-1] < losses[0] else 1


if __name__ == "__main__":
    sys.exit(main())
