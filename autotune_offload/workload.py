"""The gradient partitions that a model's training step really moves.

A workload comes from a module (whole, or already partitioned by `zero.Init`), from a Hugging Face
config.json, or from a parameter count. ZeRO-3 gives each rank ceil(numel / world size) elements of
every parameter.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from autotune_offload.errors import ConfigError
from autotune_offload.records import Workload, histogram

DEFAULT_PARAMETERS = 1_000_000_000
"""Size of the stand-in when neither a model nor a count is given."""

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

_VOCABULARY = 32_000
"""Rows of the embedding in a model made from a count alone (Llama's tokenizer, arXiv:2302.13971)."""

_WIDTH_PER_LAYER = 128
"""Hidden size over depth, as in published decoders: GPT-3 13B to Llama 7B to 70B lie at 100 to 130."""


def from_module(
    module: Any, *, world_size: int = 1, accumulation_steps: int = 1, dtype: str | None = None
) -> Workload:
    """The workload of a torch module; parameters that `zero.Init` partitioned count in full.

    Raises:
        ConfigError: when the module has no trainable parameters.
    """
    parameters = [(_elements(p), bool(p.requires_grad)) for p in module.parameters()]
    trainable = [elements for elements, trained in parameters if trained]
    if not trainable:
        raise ConfigError(
            f"{type(module).__name__} has no trainable parameters, so there are no gradients to offload"
        )
    first = next(module.parameters())
    return _workload(
        trainable,
        [elements for elements, _ in parameters],
        dtype=dtype or str(first.dtype).removeprefix("torch."),
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
    try:
        described = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f'no such file "{path}", looked in {Path.cwd()}; expected a config.json') from None
    except (OSError, ValueError) as error:
        raise ConfigError(f'"{file}" is not a readable JSON file: {error}') from error
    if not isinstance(described, dict):
        raise ConfigError(f'"{file}" holds {type(described).__name__}, expected a JSON object')
    sizes = list(decoder_parameters(_flat_text_config(described)))
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
    half, seen, middle = workload.elements / 2, 0, workload.largest_elements
    for size, count in workload.partitions:
        middle = size
        seen += size * count
        if seen >= half:
            break
    total = round(math.log2(workload.elements))
    return (
        f"{workload.dtype} world={workload.world_size} total=2^{total} partition=2^{round(math.log2(middle))}"
    )


def decoder_parameters(sizes: Mapping[str, int]) -> Iterable[int]:
    """Elements of each parameter of a decoder: embedding, then each layer, then norm and head."""
    hidden, vocabulary = sizes["hidden"], sizes["vocabulary"]
    head = sizes["head"]
    yield vocabulary * hidden
    for _ in range(sizes["layers"]):
        yield hidden * sizes["heads"] * head  # q
        yield hidden * sizes["key_value_heads"] * head  # k
        yield hidden * sizes["key_value_heads"] * head  # v
        yield hidden * sizes["heads"] * head  # output
        for _ in range(max(sizes["experts"], 1)):
            yield from [hidden * sizes["intermediate"]] * sizes["mlp_matrices"]
        if sizes["experts"]:
            yield hidden * sizes["experts"]  # router
        yield from (hidden, hidden)  # the two norms
    yield hidden
    if not sizes["tied"]:
        yield vocabulary * hidden


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


def _flat_text_config(described: Mapping[str, Any]) -> dict[str, int]:
    """A config.json's sizes under one name each; multimodal ones keep theirs in text_config."""
    text = described.get("text_config")
    if isinstance(text, dict) and "hidden_size" in text:
        described = {**described, **text}
    missing: list[str] = []

    def size(*names: str, default: int | None = None) -> int:
        for name in names:
            value = described.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        if default is None:
            missing.append(" or ".join(names))
            return 1
        return default

    hidden = size("hidden_size", "n_embd", "d_model")
    layers = size("num_hidden_layers", "n_layer", "num_layers", "n_layers")
    heads = size("num_attention_heads", "n_head", "n_heads", "num_heads")
    vocabulary = size("vocab_size", "padded_vocab_size")
    gated = (
        described.get("hidden_act") in {"silu", "swish", "gelu_pytorch_tanh", None}
        and "n_embd" not in described
    )
    sizes = {
        "hidden": hidden,
        "layers": layers,
        "heads": heads,
        "head": size("head_dim", default=max(hidden // heads, 1)),
        "key_value_heads": size("num_key_value_heads", "n_head_kv", default=heads),
        "vocabulary": vocabulary,
        "intermediate": size(
            "moe_intermediate_size", "intermediate_size", "n_inner", "ffn_dim", default=4 * hidden
        ),
        "experts": size("num_local_experts", "num_experts", "n_routed_experts", default=0),
        "mlp_matrices": 3 if gated else 2,
        "tied": int(bool(described.get("tie_word_embeddings", not gated))),
    }
    if missing:
        raise ConfigError(
            f"this config.json has no positive whole number under {', '.join(missing)}; "
            "give the model's size with --params instead"
        )
    return sizes


def _decoder_of(count: int) -> dict[str, int]:
    """Depth and width that give `count` at the usual ratio; the width is a multiple of 64."""
    layers = max(round((count / (12 * _WIDTH_PER_LAYER**2)) ** (1 / 3)), 1)
    vocabulary = min(_VOCABULARY, max(count // 1024, 256))
    # 12 layers hidden^2 + 2 vocabulary hidden = count, for the width that the depth leaves
    a, b = 12 * layers, 2 * vocabulary
    exact = (math.sqrt(b * b + 4 * a * count) - b) / (2 * a)
    hidden = max(round(exact / 64) * 64, 64)
    return {
        "hidden": hidden,
        "layers": layers,
        "heads": hidden // 64,
        "head": 64,
        "key_value_heads": hidden // 64,
        "vocabulary": vocabulary,
        "intermediate": max(round(hidden * 8 / 3 / 64) * 64, 64),
        "experts": 0,
        "mlp_matrices": 3,
        "tied": 0,
    }
