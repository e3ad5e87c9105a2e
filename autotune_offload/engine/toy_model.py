"""A small decoder of honest layers, to train on any machine."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autotune_offload.errors import ConfigError

# -- what is trained ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A GPT-style model: `layers` blocks of `width`, fed rows of `length` of `vocabulary` tokens."""

    layers: int = 6
    width: int = 512
    length: int = 64
    vocabulary: int = 256

    def __post_init__(self) -> None:
        """Check what the attention heads need."""
        if self.width % 64 or min(self.layers, self.width, self.length, self.vocabulary) < 1:
            raise ConfigError(
                f"{self}: all fields must be positive and width a multiple of 64, the size of a head"
            )

    def build(self, seed: int = 0) -> nn.Module:
        """The model, with weights that depend on the seed alone; the caller's random state is kept."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            return Model(self)


# -- the model ------------------------------------------------------------------------------------


class Linear(nn.Linear):
    """In fp32 on the CPU: torch's bf16 product is up to 50 times slower there without AVX-512."""

    def forward(self, x: Tensor) -> Tensor:
        """The product."""
        if x.device.type != "cpu":
            return super().forward(x)
        return F.linear(x.float(), self.weight.float(), self.bias.float()).to(x.dtype)


class Block(nn.Module):
    """Attention and a feed-forward of a decoder layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = Linear(width, 3 * width), Linear(width, width)
        self.up, self.down = Linear(width, 4 * width), Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        qkv = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.heads, 64))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        mlp: Tensor = self.down(F.gelu(self.up(self.norm_mlp(x))))
        return x + mlp


class Model(nn.Module):
    """The whole decoder with its loss."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.tokens = nn.Embedding(spec.vocabulary, spec.width)
        self.blocks = nn.Sequential(*(Block(spec.width) for _ in range(spec.layers)))
        self.norm, self.head = nn.LayerNorm(spec.width), Linear(spec.width, spec.vocabulary)

    def forward(self, rows: Tensor) -> Tensor:
        """The mean cross entropy of predicting each token from those before it."""
        logits = self.head(self.norm(self.blocks(self.tokens(rows[:, :-1]))))
        return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
