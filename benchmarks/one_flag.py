"""What looking for overflows costs a backward pass at stage 2: DeepSpeed's own way, and one flag for all gradients.

One engine in one process trains the 67M-parameter bf16 MLP of `benchmarks.gradient_path` at stage 2 with its
optimizer on the host; its steps alternate between both, so that they meet the same machine. Measured a step: host
seconds in DeepSpeed's tracker of overflows, and the backward pass.

    python -m benchmarks.one_flag [--pairs 15]
    PYTHONPATH=.cache/matrix/0.16.9 python -m benchmarks.one_flag       another DeepSpeed, after `make matrix`

On the CPU this tells the passes that are saved; what it is to wait for a device, only a device can tell.
`python -m tests.matrix --groups stages` shows that the bits are the same.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import torch

from autotune_offload.engine import one_flag
from autotune_offload.engine.one_flag import attach_flag, detach_flag
from autotune_offload.engine.trainee import single_process_environment
from autotune_offload.machine.accelerator import AcceleratorDevice
from autotune_offload.machine.host import software
from autotune_offload.upstream import TRACKERS
from benchmarks.gradient_path import ROWS, WIDTH, mlp
from benchmarks.output import add_output, reporting
from benchmarks.results import Number, pair


def engine_at_stage_2() -> Any:
    """With torch's AdamW, which needs no C++ build."""
    import deepspeed

    torch.manual_seed(0)
    model = mlp()
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


class Tracked:
    """Host seconds in the tracker, whoever supplies it."""

    def __init__(self, optimizer: Any) -> None:
        self.seconds = 0.0
        self._optimizer = optimizer
        self._name = next(name for name in TRACKERS if hasattr(optimizer, name))

    def watch(self) -> None:
        """From now on."""
        inner = getattr(self._optimizer, self._name)

        def timed(of: Any) -> None:
            began = time.perf_counter()
            inner(of)
            self.seconds += time.perf_counter() - began

        setattr(self._optimizer, self._name, timed)

    def leave(self) -> None:
        """DeepSpeed's own is the class's again."""
        vars(self._optimizer).pop(self._name, None)


def main() -> int:
    """Prints medians and ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_output(parser)
    parser.add_argument("--pairs", type=int, default=15, help="steps each way (15)")
    options = parser.parse_args()
    with reporting(options) as emit, single_process_environment():
        engine, device = engine_at_stage_2(), AcceleratorDevice()
        one_flag.CHECKED = 0  # the matrix compares; here all that is timed is one way or the other
        batch = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)
        tracked: dict[str, list[float]] = {"DeepSpeed": [], "ours": []}
        backward: dict[str, list[float]] = {"DeepSpeed": [], "ours": []}
        for number in range(2 * (options.pairs + 1)):
            way = ("DeepSpeed", "ours")[(number // 2 + number) % 2]
            if way == "ours":
                attach_flag(engine, device)
            watch = Tracked(engine.optimizer)
            watch.watch()
            loss = engine(batch).float().square().mean()
            began = time.perf_counter()
            engine.backward(loss)
            took = time.perf_counter() - began
            engine.step()
            watch.leave()
            detach_flag(engine)
            if number >= 2:
                tracked[way].append(watch.seconds)
                backward[way].append(took)
        print(f"DeepSpeed {software().deepspeed}, stage 2, {options.pairs} steps each way")
        numbers: list[Number] = []
        for what, series in (("overflow checks", tracked), ("backward", backward)):
            stock, ours = series["DeepSpeed"], series["ours"]
            ratio = statistics.median(a / b for a, b in zip(stock, ours, strict=True))
            print(
                f"{what}: DeepSpeed's own {statistics.median(stock) * 1e3:.1f} ms, one flag "
                f"{statistics.median(ours) * 1e3:.1f} ms: {ratio:.2f}x",
                flush=True,
            )
            numbers += pair(f"{what}, stage 2", stock, ours)
        emit({"tracked": tracked, "backward": backward}, numbers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
