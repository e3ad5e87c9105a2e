"""The gradient partitions that a model's training step really moves.

A workload comes from a module (whole, or already partitioned by `zero.Init`), from a Hugging Face
config.json, or from a parameter count. ZeRO-3 gives each rank ceil(numel / world size) elements of
every parameter.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune_offload.errors import ConfigError
from autotune_offload.records import Record, Workload, histogram

DEFAULT_PARAMETERS = 1_000_000_000
"""Size of the stand-in when neither a model nor a count is given."""

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

TIMED_MICRO_STEPS = 4
"""Of a longer accumulation the first, the last and two of those between are timed: the others are like the two."""

_VOCABULARY = 32_000
"""Rows of the embedding in a model made from a count alone (Llama's tokenizer, arXiv:2302.13971)."""

_WIDTH_PER_LAYER = 128
"""Hidden size over depth, as in published decoders: GPT-3 13B to Llama 7B to 70B lie at 100 to 130."""


def from_module(
    module: Any, *, world_size: int = 1, accumulation_steps: int = 1, dtype: str | None = None
) -> Workload:
    """The workload of a torch module; parameters that `zero.Init` partitioned count in full.

    Args:
        module: with at least one trainable parameter. Frozen ones are fetched, but have no gradients.
        world_size: ranks that share each parameter.
        accumulation_steps: micro-batches in a step.
        dtype: of the gradients; None takes that of the first trainable parameter.

    Raises:
        ConfigError: no trainable parameters, or gradients of a dtype that is not offloaded.
    """
    parameters = [(p, elements) for p in module.parameters() if (elements := _elements(p)) > 0]
    trainable = [(p, elements) for p, elements in parameters if p.requires_grad]
    if not trainable:
        raise ConfigError(
            f"{type(module).__name__} has no trainable parameters, so there are no gradients to offload"
        )
    return _workload(
        [elements for _, elements in trainable],
        [elements for _, elements in parameters],
        dtype=dtype or str(trainable[0][0].dtype).removeprefix("torch."),
        world_size=world_size,
        accumulation_steps=accumulation_steps,
        source=f"module {type(module).__name__}",
    )


def from_hf_config(
    path: str | Path, *, world_size: int = 1, accumulation_steps: int = 1, dtype: str = "bfloat16"
) -> Workload:
    """The workload of a dense or mixture-of-experts decoder described by a Hugging Face config.json.

    Args:
        path: the file, or the folder that holds it.

    Raises:
        ConfigError: no such file, not JSON, or an architecture whose sizes are not all there.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
        if not file.exists():
            raise ConfigError(f'the folder "{path}" holds no config.json')
    try:
        described = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f'no such file "{path}", looked in {Path.cwd()}; expected a config.json') from None
    except (OSError, ValueError) as error:
        raise ConfigError(f'"{file}" is not a readable JSON file: {error}') from error
    if not isinstance(described, dict):
        raise ConfigError(f'"{file}" holds {type(described).__name__}, expected a JSON object')
    sizes = list(decoder_parameters(_decoder_in(described)))
    return _workload(
        sizes,
        sizes,
        dtype=dtype,
        world_size=world_size,
        accumulation_steps=accumulation_steps,
        source=f"{file.name} ({described.get('model_type', 'unnamed')})",
    )


def from_parameter_count(
    count: int, *, world_size: int = 1, accumulation_steps: int = 1, dtype: str = "bfloat16"
) -> Workload:
    """The workload of a Llama-shaped decoder with about `count` parameters (within 15 %).

    Raises:
        ConfigError: below 100,000 parameters, where no such decoder exists.
    """
    if count < 100_000:
        raise ConfigError(f"{count:,} parameters are too few for a decoder; expected at least 100,000")
    sizes = list(decoder_parameters(_decoder_of(count)))
    return _workload(
        sizes,
        sizes,
        dtype=dtype,
        world_size=world_size,
        accumulation_steps=accumulation_steps,
        source=f"a decoder of {sum(sizes):,} parameters (asked for {count:,})",
    )


def workload_class(workload: Workload) -> str:
    """What two workloads must share to share a choice: dtype, world size, and both sizes to a power of 2.

    The sizes are all of this rank's elements, and the partition that half of them lie in or above.
    """
    total = round(math.log2(workload.elements))
    partition = round(math.log2(middle_elements(workload.partitions)))
    return f"{workload.dtype} world={workload.world_size} total=2^{total} partition=2^{partition}"


def middle_elements(sizes: Sequence[tuple[int, int]]) -> int:
    """The size in or above which half of all elements lie, of (elements, count) pairs, largest first."""
    half, seen = sum(size * count for size, count in sizes) / 2, 0
    for size, count in sizes:
        seen += size * count
        if seen >= half:
            return size
    raise ValueError("no sizes to find the middle of")


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


def _elements(parameter: Any) -> int:
    """A parameter that zero.Init partitioned holds its full size in ds_numel."""
    return int(getattr(parameter, "ds_numel", None) or parameter.numel())


def _workload(
    trainable: list[int],
    parameters: list[int],
    *,
    dtype: str,
    world_size: int,
    accumulation_steps: int,
    source: str,
) -> Workload:
    if dtype not in DTYPE_BYTES:
        raise ConfigError(
            f'gradients of dtype "{dtype}" are not offloaded; expected one of {", ".join(DTYPE_BYTES)}'
        )
    if world_size < 1 or accumulation_steps < 1:
        raise ConfigError(
            f"world size {world_size} and accumulation steps {accumulation_steps} must be at least 1"
        )
    return Workload(
        partitions=histogram(-(-size // world_size) for size in trainable),
        parameters=histogram(parameters),
        dtype=dtype,
        world_size=world_size,
        accumulation_steps=accumulation_steps,
        source=source,
    )


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


def _decoder_in(described: Mapping[str, Any]) -> Decoder:
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


def _decoder_of(count: int) -> Decoder:
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
