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
    """What the parameters of a decoder follow from. `experts` 0 is a dense one."""

    hidden: int
    layers: int
    heads: int
    head: int
    """Elements of one attention head."""
    key_value_heads: int
    vocabulary: int
    intermediate: int
    """Width of the feed-forward network, or of one expert's."""
    mlp_matrices: int = 3
    """3 where the network is gated, else 2."""
    tied: bool = False
    """The output head is the embedding."""
    experts: int = 0
    shared_intermediate: int = 0
    """Width of the expert that every token passes, behind a gate; 0 where there is none."""
    attention_biases: bool = False
    """q, k and v have biases."""
    classic: bool = False
    """As GPT-2: q, k and v in one matrix, every matrix and norm with a bias."""
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
    weights = [*(hidden * width for width in inputs), hidden * query]
    if decoder.classic:
        return [*weights, *inputs, hidden]
    return weights + inputs * decoder.attention_biases


def _feed_forward(decoder: Decoder) -> list[int]:
    hidden, matrices = decoder.hidden, decoder.mlp_matrices
    network = [hidden * decoder.intermediate] * matrices
    if decoder.classic:
        return [*network, decoder.intermediate, hidden]
    if not decoder.experts:
        return network
    shared = [hidden * decoder.shared_intermediate] * matrices + [hidden]
    return network * decoder.experts + [hidden * decoder.experts] + shared * bool(decoder.shared_intermediate)


def _norms(decoder: Decoder, count: int) -> list[int]:
    return [decoder.hidden] * (2 * count if decoder.classic else count)


_CLASSIC = frozenset({"gpt2", "gpt_bigcode", "openai-gpt", "gpt_neo", "gptj", "codegen", "opt", "bloom"})
_UNGATED = _CLASSIC | {"gpt_neox", "falcon", "mpt", "phi", "starcoder2", "nemotron"}
"""Model types (Hugging Face transformers) whose feed-forward network has two matrices and no gate."""

_UNGATED_ACTIVATIONS = frozenset({"gelu", "gelu_new", "gelu_fast", "relu", "relu2"})
"""Taken for a sign of the same, where the model type is not given."""

_LEARNED_POSITIONS = frozenset({"gpt2", "gpt_bigcode", "openai-gpt", "gpt_neo", "opt"})

# Where these configs say nothing, the default of transformers' own class for the model type holds.
_UNTIED = frozenset(
    {"llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "phi3", "olmo"}
)
_ATTENTION_BIASES = frozenset({"qwen2", "qwen2_moe"})


def decoder_in(described: Mapping[str, Any]) -> Decoder:
    """The decoder that a config.json describes; multimodal ones keep theirs in text_config.

    Raises:
        ConfigError: something else than a decoder, or sizes that are missing.
    """
    text = described.get("text_config")
    if isinstance(text, dict) and "hidden_size" in text:
        described = {**described, **text}
    if described.get("is_encoder_decoder") or "kv_lora_rank" in described:
        what = "an encoder-decoder" if described.get("is_encoder_decoder") else "latent attention"
        raise ConfigError(
            f"this config.json describes {what}, whose parameters are not known here; expected a decoder of the "
            "Llama, Mistral, Qwen, Gemma or GPT-2 kind; give the model's size with --params instead"
        )
    sizes = _Sizes(described)
    hidden = sizes.get("hidden_size", "n_embd", "d_model")
    heads = sizes.get("num_attention_heads", "n_head", "n_heads", "num_heads")
    kind = described.get("model_type") or ("gpt2" if "n_embd" in described else None)
    gated = kind not in _UNGATED if kind else described.get("hidden_act") not in _UNGATED_ACTIVATIONS
    experts = sizes.get("num_local_experts", "num_experts", default=0)
    widths = ("moe_intermediate_size",) * bool(experts) + ("intermediate_size", "n_inner", "ffn_dim")
    decoder = Decoder(
        hidden=hidden,
        layers=sizes.get("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
        heads=heads,
        head=sizes.get("head_dim", default=max(hidden // heads, 1)),
        key_value_heads=sizes.get("num_key_value_heads", "n_head_kv", default=heads),
        vocabulary=sizes.get("vocab_size", "padded_vocab_size"),
        intermediate=sizes.get(*widths, default=4 * hidden),
        mlp_matrices=3 if gated else 2,
        tied=bool(described.get("tie_word_embeddings", kind not in _UNTIED)),
        experts=experts,
        shared_intermediate=sizes.get("shared_expert_intermediate_size", default=0) if experts else 0,
        attention_biases=bool(described.get("attention_bias", kind in _ATTENTION_BIASES)),
        classic=kind in _CLASSIC,
        positions=sizes.get("n_positions", "max_position_embeddings", default=0)
        if kind in _LEARNED_POSITIONS
        else 0,
    )
    if sizes.missing:
        raise ConfigError(
            f"this config.json has no positive whole number under {', '.join(sizes.missing)}; "
            "give the model's size with --params instead"
        )
    return decoder


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
