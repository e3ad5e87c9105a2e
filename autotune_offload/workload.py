"""The gradient partitions that a model's training step really moves.

A workload comes from a module (whole, or already partitioned by `zero.Init`), from a Hugging Face
config.json, or from a parameter count. ZeRO-3 gives each rank ceil(numel / world size) elements of
every parameter.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import structs

from autotune_offload.architecture import built
from autotune_offload.decoder import decoder_in, decoder_of, decoder_parameters
from autotune_offload.errors import ConfigError
from autotune_offload.records import Workload, histogram

DEFAULT_PARAMETERS = 1_000_000_000
"""Size of the stand-in when neither a model nor a count is given."""

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

TIMED_MICRO_STEPS = 4
"""Of a longer accumulation the first, the last and two of those between are timed: the others are like the two."""


def from_module(
    module: Any, *, world_size: int = 1, accumulation_steps: int = 1, dtype: str | None = None
) -> Workload:
    """The workload of a torch module; parameters that `zero.Init` partitioned count in full.

    Args:
        module: its frozen parameters are fetched, but have no gradients. Where all are frozen, as for inference,
            each counts as if it had one: what is fetched and laid out on the host is the same.
        world_size: ranks that share each parameter.
        accumulation_steps: micro-batches in a step.
        dtype: of the gradients; None takes that of the first parameter that has one.

    Raises:
        ConfigError: no parameters, or gradients of a dtype that is not offloaded.
    """
    parameters = [(p, elements) for p in module.parameters() if (elements := _elements(p)) > 0]
    trainable = [(p, elements) for p, elements in parameters if p.requires_grad] or parameters
    if not trainable:
        raise ConfigError(f"{type(module).__name__} has no parameters, so there is nothing to offload")
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
    """The workload of the model that a Hugging Face config.json describes.

    Where `transformers` is installed, it builds the model without weights, and its own parameters count. Without
    it, dense decoders of the kinds that are known here are counted by a formula, and all else is refused.

    Args:
        path: the file, or the folder that holds it.

    Raises:
        ConfigError: no such file, not JSON, or a model whose sizes are not known.
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
    source = f"{file.name} ({described.get('model_type', 'unnamed')})"
    model = built(described)
    if not isinstance(model, str):
        found = from_module(model, world_size=world_size, accumulation_steps=accumulation_steps, dtype=dtype)
        return structs.replace(found, source=source)
    sizes = list(decoder_parameters(decoder_in(described, why_not_built=model)))
    return _workload(
        sizes,
        sizes,
        dtype=dtype,
        world_size=world_size,
        accumulation_steps=accumulation_steps,
        source=f"{source}, by a formula",
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
    sizes = list(decoder_parameters(decoder_of(count)))
    return _workload(
        sizes,
        sizes,
        dtype=dtype,
        world_size=world_size,
        accumulation_steps=accumulation_steps,
        source=f"a decoder of {sum(sizes):,} parameters (asked for {count:,})",
    )


def default_workload() -> Workload:
    """The stand-in when no model is known: a bf16 decoder of a billion parameters on one rank."""
    return from_parameter_count(DEFAULT_PARAMETERS)


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
