#!/usr/bin/env python
"""Gradient checkpointing with accumulation over four micro-batches; the config comes by --deepspeed_config."""

import argparse
import sys

import deepspeed
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self, vocab=64, width=64, depth=3):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        logits = self.head(x).float()
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


parser = argparse.ArgumentParser()
parser.add_argument("--updates", type=int, default=3)
parser.add_argument("--local_rank", type=int, default=-1)
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()

torch.manual_seed(1)
engine, _, _, scheduler = deepspeed.initialize(args, Model())
for micro_step in range(4 * args.updates):
    generator = torch.Generator().manual_seed(100 * engine.global_rank + micro_step % 4)
    ids = torch.randint(64, (1, 16), generator=generator).to(engine.device)
    loss = engine(ids)
    engine.backward(loss)
    engine.step()
    print(f"rank {engine.global_rank} step {micro_step} loss {loss.item():.9g}")
print("arguments", sys.argv[1:], "learning rate", scheduler.get_last_lr())
sys.exit(7 if engine.global_steps != args.updates else 0)
