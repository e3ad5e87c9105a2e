"""Configurations with something odd in them: any JSON in any place of a ds_config."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

ORDINARY: dict[str, Any] = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    "bf16": {"enabled": True},
    "bfloat16": {"enabled": "auto"},
    "fp16": {"enabled": False, "loss_scale": 0},
    "aio": {"block_size": 1 << 20, "queue_depth": 8},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True, "buffer_count": 4},
        "offload_param": {"device": "nvme", "nvme_path": "/local", "buffer_size": 10**8},
        "reduce_bucket_size": 5e8,
        "stage3_prefetch_bucket_size": "auto",
        "sub_group_size": 10**9,
    },
    "autotune_offload": {
        "path": "auto",
        "buffer_bytes": "4MiB",
        "keep": ["offload_param.pin_memory"],
        "budget_seconds": 5.0,
        "strict": False,
    },
}

_ZERO = ("zero_optimization",)
_SECTIONS = ((*_ZERO, "offload_optimizer"), (*_ZERO, "offload_param"))
_MORE = ("cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory", "prefetch_bucket_size", "foo")


def _places(value: object, here: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if here:
        yield here
    for name, inner in value.items() if isinstance(value, dict) else ():
        yield from _places(inner, (*here, name))


PLACES = (
    *_places(ORDINARY),
    *((*_ZERO, name) for name in _MORE),
    *((*section, name) for section in _SECTIONS for name in ("ratio", "pin_memory", "foo")),
    *(("autotune_offload", name) for name in ("enabled", "host_threads", "max_pinned_bytes", "foo")),
    *((name,) for name in ("offload_param", "zero_optimisation", "autotune_ofload", "stage")),
)
"""Where something odd is put: every key above, and some that are not there."""

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 3, -1, 1.5, 5e8, 1e308, 10**400),
    *("", "auto", "cpu", "nvme", "true", "5e8", "9" * 5000, "٣", "\ud800"),
    *([], [3], ["auto"], [[]], [{"device": "cpu"}], {}, {"auto": "auto"}, {"device": []}, {"device": {}}),
    *({"enabled": {"enabled": []}}, {"stage": None}, {"stage": [3]}, {"pin_memory": {"pin_memory": True}}),
)
"""Values of every kind, and those that code which asks for a name or a number may stumble over."""

json_values: st.SearchStrategy[Any] = st.recursive(
    st.sampled_from(ODD) | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([place[-1] for place in PLACES]), inner, max_size=3)
    ),
    max_leaves=6,
)


def with_odd(config: dict[str, Any], place: tuple[str, ...], value: Any) -> dict[str, Any]:
    """A copy of `config` with `value` in this place, where something else in the way has not gone before."""
    changed = copy.deepcopy(config)
    holder: Any = changed
    for name in place[:-1]:
        holder = holder.get(name) if isinstance(holder, dict) else None
    if isinstance(holder, dict):
        holder[place[-1]] = copy.deepcopy(value)
    return changed


@st.composite
def odd_configs(draw: st.DrawFn) -> dict[str, Any]:
    """The ordinary one with up to four places changed, one within another too."""
    config = ORDINARY
    for place in draw(st.lists(st.sampled_from(PLACES), min_size=1, max_size=4)):
        config = with_odd(config, place, draw(json_values))
    return config
