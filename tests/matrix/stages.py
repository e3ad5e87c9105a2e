"""Trains at stages 1 and 2 with the optimizer on the host, with DeepSpeed's own code and with ours in it, and compares.

    python -m tests.matrix.stages

Prints as `tests.matrix.driver` does, group "stages": `difference` is null where losses, weights, norms, overflows and
loss scales are the same to the bit after each step. With RANK and WORLD_SIZE in the environment it is one of several.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from autotune_offload.engine import one_flag
from autotune_offload.engine.one_flag import attach_flag
from autotune_offload.machine.accelerator import AcceleratorDevice
from autotune_offload.upstream import loses_gradients
from tests.matrix.driver import DTYPES, INPUT, MARKER, ROWS, Model, Trace, digest, started

GROUP = "stages"
STEPS = 8


class Case(dict[str, Any]):
    """stage, dtype, accumulation, clipping, overflow."""

    @property
    def name(self) -> str:
        """In words."""
        return ", ".join(f"{key} {value}" for key, value in self.items())


def cases() -> Iterator[Case]:
    """Both stages in each dtype; accumulation where DeepSpeed's own is right."""
    for stage in (1, 2):
        for dtype, accumulation, clipping in (
            ("bf16", 1, 0.1),
            ("bf16", 2, 0.0),
            ("bf16", 4, 0.1),
            ("fp32", 1, 0.1),
            ("fp16", 1, 0.1),
            ("fp16", 2, 0.1),
        ):
            yield Case(
                stage=stage,
                dtype=dtype,
                accumulation=accumulation,
                clipping=clipping,
                overflow=dtype == "fp16",
            )


def start(case: Case) -> Any:
    """An engine with seeded weights."""
    import deepspeed

    torch.manual_seed(0)
    model = Model("none")
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        config={
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_accumulation_steps": case["accumulation"],
            "bf16": {"enabled": case["dtype"] == "bf16"},
            "fp16": {
                "enabled": case["dtype"] == "fp16",
                "initial_scale_power": 30 if case["overflow"] else 8,
                "loss_scale_window": 4,
                "hysteresis": 1,
            },
            "gradient_clipping": case["clipping"],
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {
                "stage": case["stage"],
                "reduce_bucket_size": 3000,
                "offload_optimizer": {"device": "cpu", "pin_memory": False},
            },
        },
    )
    return engine


def train(case: Case, *, ours: bool) -> Trace:
    """What can be seen of a run."""
    engine, trace = start(case), Trace()
    status = attach_flag(engine, AcceleratorDevice()) if ours else None
    if status is not None and status.why_not is not None:
        raise AssertionError(f"not attached: {status.why_not}")
    draws = torch.Generator().manual_seed(3)
    for step in range(STEPS):
        for _ in range(case["accumulation"]):
            batch = torch.randn(ROWS, INPUT, generator=draws).to(DTYPES[case["dtype"]])
            loss = engine(batch, everything=True).square().mean()
            engine.backward(loss)
            engine.step()
            trace.see(f"loss, step {step}", float(loss).hex())
        z = engine.optimizer
        trace.see(f"overflow, step {step}", bool(z.overflow))
        trace.see(f"scale, step {step}", float(z.loss_scale))
        trace.see(f"norm, step {step}", float(z._global_grad_norm).hex())
        trace.see(f"masters, step {step}", digest(z.single_partition_of_fp32_groups))
        trace.see(f"weights, step {step}", digest(parameter.data for parameter in engine.module.parameters()))
    if status is not None and (status.why_not is not None or not status.gradients):
        raise AssertionError(f"the flag was not used: {status.why_not}")
    engine.destroy()
    return trace


def compare(case: Case) -> dict[str, Any]:
    """One case, both ways."""
    began = time.perf_counter()
    found: dict[str, Any] = {"group": GROUP, "case": case.name, "difference": None, "stock_failed": None}
    try:
        stock = train(case, ours=False)
    except Exception as error:
        found["stock_failed"] = f"{type(error).__name__}: {error}"[:300]
    else:
        overflows = sum(value is True for what, value in stock.exact if what.startswith("overflow"))
        if bool(overflows) is not case["overflow"]:
            found["difference"] = f"{overflows} steps overflowed"
        try:
            found["difference"] = found["difference"] or stock.difference(train(case, ours=True))
        except Exception as error:
            found["difference"] = f"{type(error).__name__}: {error}"[:300]
    found["seconds"] = round(time.perf_counter() - began, 2)
    return found


def main() -> int:
    """Every case; 1 where one differs."""
    import deepspeed

    torch.set_num_threads(1)
    one_flag.CHECKED = 3  # so that most gradients of a small model are looked at by ours alone
    different = False
    with started():
        for case in cases():
            if loses_gradients(deepspeed.__version__, case["stage"], case["accumulation"]):
                continue
            result = compare(case)
            different |= result["difference"] is not None
            print(MARKER + json.dumps(result), flush=True)
    return int(different)


if __name__ == "__main__":
    sys.exit(main())
