"""One rank of a job on the CPU that trains a tiny model, again and again, with something wrong each time.

    RANK=0 WORLD_SIZE=2 ... python tests/rank_processes.py FOLDER SCENARIO [SCENARIO ...]
    FORK=2 RANK=0 WORLD_SIZE=4 ... python tests/rank_processes.py FOLDER SCENARIO [SCENARIO ...]

With FORK it imports once and becomes so many ranks, from RANK on: most of a rank's start are imports.

One JSON line a scenario goes to FOLDER/rank-N.jsonl: what was decided, with which sizes the engine trained, the
losses, and how long the decision took. Nothing is printed, so that it runs under any launcher.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from msgspec import structs
from torch import Tensor, nn

WIDTH, STEPS = 48, 3
WAIT_SECONDS = 4.0
SIZES = ("reduce_bucket_size", "sub_group_size", "prefetch_bucket_size", "param_persistence_threshold")


LOADED_LATER = (
    "optuna",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "deepspeed.module_inject",
    "networkx",
)
"""What the first engine and the first probe would import in every rank, for seconds; absent ones do not matter."""


def rank() -> int:
    """Of this process."""
    return int(os.environ["RANK"])


def config(**zero: Any) -> dict[str, Any]:
    """A ds_config with both offloads."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_force_ds_cpu_optimizer": False,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
            "reduce_bucket_size": 5000,
            "sub_group_size": 4000,
            "stage3_prefetch_bucket_size": 3000,
            "stage3_param_persistence_threshold": 100,
            **zero,
        },
        "autotune_offload": {"budget_seconds": 0.4, "wait_seconds": WAIT_SECONDS},
    }


def model() -> nn.Module:
    """Seeded, the same on all ranks."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    return nn.Sequential(*layers)


def train(engine: Any) -> list[str]:
    """Losses of this rank, as exact hexadecimal numbers."""
    draw = torch.Generator().manual_seed(1 + rank())
    losses = []
    for _ in range(STEPS):
        x: Tensor = torch.randn(2, WIDTH, generator=draw)
        loss = engine(x).pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()).hex())
    return losses


def sizes(engine: Any) -> dict[str, int]:
    """What the engine really uses."""
    zero = engine._config.zero_config
    return {name: int(getattr(zero, name)) for name in SIZES}


class Warnings(logging.Handler):
    """Keeps what this package warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """One more."""
        self.seen.append(record.getMessage())


Setup = Callable[[], dict[str, Any]]
"""Prepares what is wrong in this scenario; gives the keyword arguments of `initialize`."""


def plain() -> dict[str, Any]:
    """Nothing wrong."""
    return {"config": config()}


def miss_on_one() -> dict[str, Any]:
    """The other ranks have a profile; rank 1 looks into an empty folder."""
    if rank() == 1:
        os.environ["AUTOTUNE_OFFLOAD_CACHE"] += "/empty"
    return plain()


def other_sizes_on_one() -> dict[str, Any]:
    """Rank 1 was given sizes that hang a job."""
    return {"config": config(**({"reduce_bucket_size": 9000, "sub_group_size": 900} if rank() == 1 else {}))}


def other_stage_on_one() -> dict[str, Any]:
    """Rank 1 was given another configuration altogether, which DeepSpeed happens to survive."""
    return {"config": config(**({"contiguous_gradients": False} if rank() == 1 else {}))}


def tune_before() -> dict[str, Any]:
    """`tune_config` on every rank before there is a group, and its result to `initialize`."""
    import autotune_offload

    os.environ["AUTOTUNE_OFFLOAD_CACHE"] += "/tuned"
    _choose(reduce_bucket_elements=2500, fresh=False)
    tuned = autotune_offload.tune_config(config(reduce_bucket_size="auto"), model=model())
    assert not torch.distributed.is_initialized()
    seen["tune_config"] = tuned["zero_optimization"]
    return {"config": tuned}


seen: dict[str, Any] = {}
"""What a scenario wants to be written down beside the rest."""


def pinning_differs() -> dict[str, Any]:
    """What may differ."""
    on = {"device": "cpu", "pin_memory": rank() == 0}
    return {"config": config(offload_param=on, offload_optimizer=on)}


def kept_on_one() -> dict[str, Any]:
    """Rank 1 keeps a key that the others fill; the tuned sizes would differ."""
    _choose(reduce_bucket_elements=2500)
    given = config(reduce_bucket_size="auto")
    if rank() == 1:
        given["autotune_offload"]["keep"] = ["reduce_bucket_size"]
    return {"config": given}


def auto_sizes() -> dict[str, Any]:
    """Each rank's own measurement asks for another size."""
    _choose(reduce_bucket_elements=2000 + 500 * rank())
    return {"config": config(reduce_bucket_size="auto")}


def disabled_on_one() -> dict[str, Any]:
    """Rank 1 has the block switched off."""
    given = config()
    given["autotune_offload"]["enabled"] = rank() != 1
    return {"config": given}


def bad_block_on_one() -> dict[str, Any]:
    """Rank 1 has a mistake in the block."""
    given = config()
    if rank() == 1:
        given["autotune_offload"]["pth"] = "direct"
    return {"config": given}


def switched_off_on_one() -> dict[str, Any]:
    """Rank 1 asks for nothing."""
    return {"config": config(), "autotune": None if rank() != 1 else False}


def never_comes() -> dict[str, Any]:
    """Rank 1 calls DeepSpeed itself; see `run`."""
    return plain()


def fails_in_the_probe() -> dict[str, Any]:
    """Rank 1 meets an error while it measures."""
    _instead_of_probe(lambda probe, **how: _fail() if rank() == 1 else probe(**how))
    return plain()


def dies_in_the_probe() -> dict[str, Any]:
    """Rank 1 is gone in the middle of it."""
    _instead_of_probe(lambda probe, **how: os._exit(0) if rank() == 1 else probe(**how))
    return plain()


def slow_link_on_one() -> dict[str, Any]:
    """Rank 1 measures a hundred times as slow."""
    _instead_of_probe(_slowed)
    return plain()


def slow_start_on_one() -> dict[str, Any]:
    """Rank 1 comes late, but within the time."""
    if rank() == 1:
        time.sleep(WAIT_SECONDS / 4)
    return plain()


def _fail() -> Any:
    from autotune_offload.errors import MeasurementError

    raise MeasurementError("wrong bytes")


def _slowed(probe: Callable[..., Any], **how: Any) -> Any:

    profile = probe(**how)
    factor = 100.0 if rank() == 1 else 1.0

    def times(record: Any) -> Any:
        seconds = record.measured_seconds
        return structs.replace(record, measured_seconds=None if seconds is None else seconds * factor)

    choice = structs.replace(profile.choice, buffer_bytes=(7 + rank()) << 10, host_threads=1)
    chosen = structs.replace(
        profile.candidates[0],
        **{name: getattr(choice, name) for name in ("path", "cast", "buffer_bytes", "buffer_count")},
        host_threads=1,
    )
    return structs.replace(
        profile,
        choice=choice,
        candidates=(times(chosen), *map(times, profile.candidates)),
        baselines=tuple(map(times, profile.baselines)),
    )


def _choose(*, reduce_bucket_elements: int, fresh: bool = True) -> None:

    from autotune_offload.records import ZeroSizes

    def probe_and_choose(probe: Callable[..., Any], **how: Any) -> Any:
        profile = probe(**how)
        seen.setdefault("measured_with", []).append(how["ranks_per_host"])
        return structs.replace(
            profile,
            choice=structs.replace(
                profile.choice, sizes=ZeroSizes(reduce_bucket_elements=reduce_bucket_elements)
            ),
        )

    _instead_of_probe(probe_and_choose, fresh)


def _instead_of_probe(stand_in: Callable[..., Any], fresh: bool = True) -> None:
    """With a fresh folder for this rank, there is no stored profile."""
    from autotune_offload.api import probe as api_probe
    from autotune_offload.api import profile as api

    vars(api)["probe"] = lambda **how: stand_in(api_probe.probe, **how)
    if fresh:
        os.environ["AUTOTUNE_OFFLOAD_CACHE"] += f"/fresh-{time.monotonic_ns()}"


SCENARIOS: dict[str, Setup] = {
    setup.__name__: setup
    for setup in (
        tune_before,
        plain,
        miss_on_one,
        other_sizes_on_one,
        other_stage_on_one,
        pinning_differs,
        kept_on_one,
        auto_sizes,
        disabled_on_one,
        bad_block_on_one,
        switched_off_on_one,
        never_comes,
        fails_in_the_probe,
        dies_in_the_probe,
        slow_link_on_one,
        slow_start_on_one,
    )
}


class StoppedHere(BaseException):
    """In place of DeepSpeed's own start, where a rank is dead and it would only wait."""


def run(name: str) -> dict[str, Any]:
    """One scenario: decide, train, and say what happened."""
    import deepspeed

    import autotune_offload
    from autotune_offload.api import probe as api_probe
    from autotune_offload.api import profile as api

    cache = os.environ["AUTOTUNE_OFFLOAD_CACHE"]
    seen.clear()
    caught = Warnings()
    logging.getLogger("autotune_offload").addHandler(caught)
    began, decided = time.monotonic(), [0.0]
    own = deepspeed.initialize

    def timed(*args: Any, **kwargs: Any) -> Any:
        decided[0] = time.monotonic() - began
        if name == "dies_in_the_probe":
            raise StoppedHere
        return own(*args, **kwargs)

    timed.__signature__ = __import__("inspect").signature(own)  # type: ignore[attr-defined]
    try:
        deepspeed.initialize = timed
        if name == "stock" or (name == "never_comes" and rank() == 1):
            engine, *_ = own(model=model(), config=config())
        else:
            engine, *_ = autotune_offload.initialize(model=model(), **SCENARIOS[name]())
        report = autotune_offload.report(engine)
        losses = train(engine)
        used = sizes(engine)
        result = {
            "tuned": report.profile is not None,
            "choice": _choice(report),
            "copying": report.profile.ranks_copying if report.profile else None,
            "text": report.text(),
            "carried": report.path is not None and report.path.why_not is None,
            "sizes": used,
            "hash": hashlib.sha256(json.dumps(used, sort_keys=True).encode()).hexdigest(),
            "losses": losses,
        }
        engine.destroy()
    except StoppedHere:
        result = {"tuned": False}
    finally:
        deepspeed.initialize = own
        vars(api)["probe"] = api_probe.probe
        os.environ["AUTOTUNE_OFFLOAD_CACHE"] = cache
        logging.getLogger("autotune_offload").removeHandler(caught)
    gc.collect()
    return {
        **result,
        **seen,
        "scenario": name,
        "rank": rank(),
        "decided_seconds": decided[0],
        "warnings": caught.seen,
    }


def _choice(report: Any) -> list[Any]:
    if report.profile is None:
        return []
    choice = report.profile.choice
    return [choice.path, choice.cast, choice.buffer_bytes, choice.pin_optimizer, choice.pin_parameters]


def main(folder: str, *names: str) -> None:
    """Run the scenarios in turn, all in one process group."""
    import deepspeed.comm  # noqa: F401  the next but one line needs it loaded

    torch.set_num_threads(1)
    # gloo alone: no C++ build, and nothing shared between ranks that a test calls two hosts
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    logging.getLogger("autotune_offload").setLevel(logging.INFO)
    out = Path(folder) / f"rank-{rank()}.jsonl"
    for name in names:
        result = run(name)
        with out.open("a") as file:
            file.write(json.dumps(result) + "\n")
    if names[-1] == "dies_in_the_probe":
        os._exit(0)  # the group has lost a member and cannot be taken down


def fork(count: int, folder: str, *names: str) -> int:
    """The exit status of that many ranks of one host."""
    for name in ("autotune_offload.api.initialize", "deepspeed", *LOADED_LATER):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    first, children = rank(), []
    for local in range(count):
        child = os.fork()
        if not child:
            os.environ.update(RANK=str(first + local), LOCAL_RANK=str(local), LOCAL_SIZE=str(count))
            try:
                main(folder, *names)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    return max([os.waitpid(child, 0)[1] for child in children])


if __name__ == "__main__":
    # DeepSpeed's launcher puts --local_rank before the arguments
    words = [argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")]
    if "FORK" in os.environ:
        sys.exit(bool(fork(int(os.environ["FORK"]), *words)))
    main(*words)
