"""Whether DeepSpeed accumulates all gradients at stages 1 and 2 with its optimizer on the host, against plain torch.

    python -m tests.matrix.sums

Prints as `tests.matrix.driver` does, group "sums": `difference` is null where the norm after a step is that of all
micro-steps in exactly the cases in which `upstream.loses_gradients` does not say otherwise.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

from autotune_offload.upstream import loses_gradients
from tests.matrix.driver import INPUT, MARKER, ROWS, Model, started

GROUP = "sums"
TOLERANCE = 1e-5
"""Of norms in fp32, added up in different orders; a micro-step that is missing changes the norm by a tenth."""


def batches(steps: int) -> list[torch.Tensor]:
    """The same for both, shape (rows, inputs) each."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(ROWS, INPUT, generator=generator) * (1 + step) for step in range(steps)]


def true_norm(steps: int) -> float:
    """Of the mean of all micro-steps' gradients."""
    torch.manual_seed(0)
    model = Model("none")
    for batch in batches(steps):
        (model(batch, everything=True).square().mean() / steps).backward()
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return float(torch.stack([grad.double().square().sum() for grad in grads]).sum().sqrt())


def norm_of_deepspeed(stage: int, steps: int) -> float:
    """What it says after one step in fp32."""
    import deepspeed

    torch.manual_seed(0)
    model = Model("none")
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        config={
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_accumulation_steps": steps,
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {
                "stage": stage,
                "offload_optimizer": {"device": "cpu", "pin_memory": False},
            },
        },
    )
    for batch in batches(steps):
        engine.backward(engine(batch, everything=True).square().mean())
        engine.step()
    return float(engine.get_global_grad_norm())


def compare(stage: int, steps: int) -> dict[str, Any]:
    """One case."""
    import deepspeed

    began, difference, failed = time.perf_counter(), None, None
    try:
        norm, true = norm_of_deepspeed(stage, steps), true_norm(steps)
    except Exception as error:
        failed = f"{type(error).__name__}: {error}"[:300]
    else:
        lost = abs(norm - true) > TOLERANCE * true
        if lost is not loses_gradients(deepspeed.__version__, stage, steps):
            difference = f"norm {norm:.6f}, of all micro-steps {true:.6f}"
    return {
        "group": GROUP,
        "case": f"stage {stage}, accumulation {steps}",
        "difference": difference,
        "stock_failed": failed,
        "seconds": round(time.perf_counter() - began, 2),
    }


def main() -> int:
    """Every case; 1 where one differs."""
    torch.set_num_threads(1)
    different = False
    with started():
        for stage in (1, 2):
            for steps in (1, 2, 3, 4):
                result = compare(stage, steps)
                different |= result["difference"] is not None
                print(MARKER + json.dumps(result), flush=True)
    return int(different)


if __name__ == "__main__":
    sys.exit(main())
