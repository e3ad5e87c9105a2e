"""Many `initialize`/`destroy` cycles in one process: do memory, file descriptors and threads stay as they are?

    python -m tests.reliability.soak [--cycles 500] [--stock]

Each cycle makes a small model, starts it through `autotune_offload.initialize` with real DeepSpeed on whatever device
is there, trains one step, and destroys the engine. DeepSpeed 0.19.8 lets go of no engine: its hooks make autograd
classes that hold the module for ever, and a list of its own (FWD_MODULE_STACK) does too. So each cycle then empties
what DeepSpeed keeps, and what still grows is a leak that is seen. `--keep` leaves it; `--stock` does either with
DeepSpeed alone, so that a leak can be told to be one of ours. The last line on stdout is JSON: resident memory at a
tenth and at the end of the cycles, its growth a cycle (least squares over the last nine tenths), descriptors,
threads, and our own objects that are alive.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import logging
import os
import statistics
import sys
import time
from typing import Any

import psutil
import torch
from msgspec import structs

from autotune_offload.profiles.store import Store

WIDTH = 256
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "zero_force_ds_cpu_optimizer": False,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
    },
    "autotune_offload": {"budget_seconds": 2, "strict": True},
}


def main() -> int:
    """Exit 0 always: whether it is flat is for the reader of the numbers to say."""
    parser = argparse.ArgumentParser(prog="python -m tests.reliability.soak", description=__doc__)
    parser.add_argument("--cycles", type=int, default=500, help="how many [default: 500]")
    parser.add_argument("--stock", action="store_true", help="DeepSpeed alone")
    parser.add_argument("--keep", action="store_true", help="leave what DeepSpeed keeps")
    given = parser.parse_args()
    for name, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("LOCAL_RANK", "0"),
        ("MASTER_ADDR", "127.0.0.1"),
    ):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", str(20_000 + os.getpid() % 20_000))
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    print(json.dumps(soak(given.cycles, stock=given.stock, keep=given.keep)))
    return 0


def soak(cycles: int, *, stock: bool, keep: bool) -> dict[str, Any]:
    """So many cycles, and what the process held after each."""
    own, seen = psutil.Process(), []
    if not stock:
        _cycle(stock, keep)
        _make_it_win()
    started = time.monotonic()
    attached = 0
    for _ in range(cycles):
        attached += _cycle(stock, keep)
        gc.collect()
        seen.append((own.memory_info().rss, own.num_fds(), own.num_threads(), _own_objects()))
    tenth = max(cycles // 10, 1)
    rss = [each[0] for each in seen]
    return {
        "cycles": cycles,
        "by": "deepspeed" if stock else "autotune_offload",
        "paths_attached": attached,
        "seconds": round(time.monotonic() - started, 1),
        "rss_bytes": {"at a tenth": rss[tenth - 1], "at the end": rss[-1]},
        "growth_bytes_a_cycle": round(statistics.linear_regression(range(cycles - tenth), rss[tenth:]).slope),
        "descriptors": {"at a tenth": seen[tenth - 1][1], "at the end": seen[-1][1]},
        "threads": {"at a tenth": seen[tenth - 1][2], "at the end": seen[-1][2]},
        "own_objects": {"at a tenth": seen[tenth - 1][3], "at the end": seen[-1][3]},
    }


def _make_it_win() -> None:
    """Give the stored choice a gain, so that its path is attached in every cycle, however busy the host is."""
    store = Store()
    profile = store.entries()[0].profile
    assert profile is not None
    store.save(structs.replace(profile, choice=structs.replace(profile.choice, gain=2.0, noise=0.02)))


def _own_objects() -> int:
    """Instances of this package's classes that are alive."""
    return sum(str(type(each).__module__).startswith("autotune_offload") for each in gc.get_objects())


def _cycle(stock: bool, keep: bool) -> bool:
    """One engine's life; whether a path was attached."""
    import deepspeed

    import autotune_offload

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    initialize = deepspeed.initialize if stock else autotune_offload.initialize
    engine, *_ = initialize(model=model, config=copy.deepcopy(CONFIG))
    loss = engine(torch.ones(2, WIDTH, dtype=torch.bfloat16, device=engine.device)).float().square().mean()
    engine.backward(loss)
    engine.step()
    carried = "" if stock else autotune_offload.report(engine).carrier()
    engine.destroy()
    if not keep:
        _empty(engine, model)
    return carried.startswith("in the running optimizer")


def _empty(engine: Any, model: torch.nn.Module) -> None:
    """Take out of the remains of an engine whatever they hold."""
    from deepspeed.runtime.zero import parameter_offload

    parameter_offload.FWD_MODULE_STACK.clear()
    for parameter in model.parameters():
        vars(parameter).clear()
    for remains in (engine.optimizer.parameter_offload, engine.optimizer, *model.modules(), engine):
        vars(remains).clear()


if __name__ == "__main__":
    sys.exit(main())
