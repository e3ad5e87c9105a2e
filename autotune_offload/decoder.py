"""Parameter shapes of decoder models, from a Hugging Face config.json or from a number of parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from autotune_offload.errors import ConfigError
from autotune_offload.records import Record

_VOCABULARY = 32_000
"""Rows of the embedding in a model made from a count alone (Llama's tokenizer, arXiv:2302.13971)."""

_WIDTH_PER_LAYER = 128
"""Hidden size over depth, as in published decoders: GPT-3 13B to Llama 7B to 70B lie at 100 to 130."""


class Decoder(Record, frozen=True, kw_only=True):
    """What the parameters of a dense decoder follow from."""

    hidden: int
    layers: int
    heads: int
    head: int
    """Elements of one attention head."""
    key_value_heads: int
    vocabulary: int
    intermediate: int
    """Width of the feed-forward network."""
    tied: bool = False
    """The output head is the embedding."""
    input_biases: bool = False
    """q, k and v have biases."""
    output_bias: bool = False
    """The attention's output has one."""
    network_biases: bool = False
    """The three matrices of the feed-forward network have biases."""
    head_norms: bool = False
    """Queries and keys are normed, each with a weight for one head."""
    classic: bool = False
    """As GPT-2: q, k and v in one matrix, two matrices in the network, every matrix and norm with a bias."""
    positions: int = 0
    """Rows of a learned position embedding."""


def decoder_parameters(decoder: Decoder) -> Iterator[int]:
    """Elements of each parameter: embeddings, then each layer, then norm and head."""
    hidden = decoder.hidden
    yield decoder.vocabulary * hidden
    if decoder.positions:
        yield decoder.positions * hidden
    layer = [*_attention(decoder), *_feed_forward(decoder), *_norms(decoder, 2)]
    for _ in range(decoder.layers):
        yield from layer
    yield from _norms(decoder, 1)
    if not decoder.tied:
        yield decoder.vocabulary * hidden


def _attention(decoder: Decoder) -> list[int]:
    query, key = decoder.heads * decoder.head, decoder.key_value_heads * decoder.head
    hidden, inputs = decoder.hidden, [query, key, key]
    if decoder.classic:
        inputs = [sum(inputs)]
        return [*(hidden * width for width in inputs), hidden * query, *inputs, hidden]
    weights = [*(hidden * width for width in inputs), hidden * query]
    biases = inputs * decoder.input_biases + [hidden] * decoder.output_bias
    return weights + biases + [decoder.head] * 2 * decoder.head_norms


def _feed_forward(decoder: Decoder) -> list[int]:
    hidden, wide = decoder.hidden, decoder.intermediate
    if decoder.classic:
        return [hidden * wide] * 2 + [wide, hidden]
    return [hidden * wide] * 3 + [wide, wide, hidden] * decoder.network_biases


def _norms(decoder: Decoder, count: int) -> list[int]:
    return [decoder.hidden] * (2 * count if decoder.classic else count)


_CLASSIC = frozenset({"gpt2"})
_UNTIED = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Where their configs say nothing: the default of transformers' own class for the model type."""

_KNOWN = _CLASSIC | _UNTIED | {"gemma"}
"""Model types that are counted here exactly; a test holds each against the model itself."""

_HEAD = {"gemma": 256, "qwen3": 128}
"""Elements of a head where the config names none, for the types whose own default is no share of the width."""

_NOT_COUNTED = (
    "expert moe mamba ssm hybrid latent lora_rank linear_num conv recurrent lru block_type cross_attention"
).split()
"""Parts of a key's name that speak of parameters beside those of a plain decoder."""


def decoder_in(described: Mapping[str, Any], *, why_not_built: str) -> Decoder:
    """The dense decoder that a config.json describes.

    Args:
        described: what the file holds.
        why_not_built: why the model itself could not be asked, for the error.

    Raises:
        ConfigError: something else than a decoder of a known kind, or sizes that are missing.
    """
    _refuse_unknown(described, why_not_built)
    sizes = _Sizes(described)
    hidden = sizes.get("hidden_size", "n_embd")
    heads = sizes.get("num_attention_heads", "n_head")
    kind = described["model_type"]
    biases = kind != "mistral" and kind != "qwen2" and bool(described.get("attention_bias"))
    decoder = Decoder(
        hidden=hidden,
        layers=sizes.get("num_hidden_layers", "n_layer"),
        heads=heads,
        head=sizes.get("head_dim", default=_HEAD.get(kind, max(hidden // heads, 1))),
        key_value_heads=sizes.get(
            "num_key_value_heads", default=heads if kind in ("gpt2", "llama") else None
        ),
        vocabulary=sizes.get("vocab_size"),
        intermediate=sizes.get(
            "intermediate_size", "n_inner", default=4 * hidden if kind in _CLASSIC else None
        ),
        tied=bool(described.get("tie_word_embeddings", kind not in _UNTIED)),
        input_biases=biases or kind == "qwen2",
        output_bias=biases,
        network_biases=kind == "llama" and bool(described.get("mlp_bias")),
        head_norms=kind == "qwen3",
        classic=kind in _CLASSIC,
        positions=sizes.get("n_positions", default=1024) if kind in _CLASSIC else 0,
    )
    if sizes.missing:
        raise ConfigError(
            f"this config.json has no positive whole number under {', '.join(sizes.missing)}; "
            "give the model's size with --params instead"
        )
    return decoder


def _refuse_unknown(described: Mapping[str, Any], why_not_built: str) -> None:
    """Count nothing that is not understood: a wrong size decides as firmly as a right one."""
    kind = described.get("model_type")
    stranger = [key for key, value in described.items() if value and _speaks_of_more(key, value)]
    if described.get("is_encoder_decoder"):
        what = "an encoder-decoder"
    elif stranger:
        what = f"parameters that no formula here counts ({', '.join(sorted(stranger))})"
    elif kind not in _KNOWN:
        what = f'the model type "{kind}"' if kind else "a model of no named type"
    else:
        return
    raise ConfigError(
        f"this config.json describes {what}, and its sizes are not known: {why_not_built}; without it, decoders "
        f"of the types {', '.join(sorted(_KNOWN))} are counted; or give the model's size with --params instead"
    )


def _speaks_of_more(key: str, value: object) -> bool:
    """Experts, state spaces, low-rank attention, or another model inside this one."""
    inner = key.endswith("_config") and isinstance(value, Mapping) and key != "quantization_config"
    return inner or any(part in key.lower() for part in _NOT_COUNTED)


class _Sizes:
    """Positive whole numbers of a config.json, under any of several names; collects what is missing."""

    def __init__(self, described: Mapping[str, Any]) -> None:
        self._described = described
        self.missing: list[str] = []

    def get(self, *names: str, default: int | None = None) -> int:
        """The first that is there; without a default, 1 stands in for what is missing."""
        for name in names:
            value = self._described.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        if default is None:
            self.missing.append(" or ".join(names))
            return 1
        return default


def decoder_of(count: int) -> Decoder:
    """Depth and width that give `count` at the usual ratio. Small widths are multiples of 8, others of 64."""
    layers = max(round((count / (12 * _WIDTH_PER_LAYER**2)) ** (1 / 3)), 1)
    vocabulary = min(_VOCABULARY, max(count // 1024, 256))
    # 12 layers hidden^2 + 2 vocabulary hidden = count, for the width that the depth leaves
    a, b = 12 * layers, 2 * vocabulary
    exact = (math.sqrt(b * b + 4 * a * count) - b) / (2 * a)
    step = 64 if exact >= 1024 else 8
    hidden = max(round(exact / step) * step, step)
    heads = hidden // 64 if hidden % 64 == 0 else 1
    return Decoder(
        hidden=hidden,
        layers=layers,
        heads=heads,
        head=hidden // heads,
        key_value_heads=heads,
        vocabulary=vocabulary,
        intermediate=max(round(hidden * 8 / 3 / step) * step, step),
    )
