"""Trains with DeepSpeed's CPU Adam, with DeepSpeed's own step and with the compiled pass, and compares.

    python -m tests.matrix.step GROUP [GROUP ...]

Prints as `tests.matrix.driver` does: `difference` is null where losses, norms, fp32 gradients, master weights, both
moments, counters, 16-bit weights, overflows and loss scales are the same to the bit after each of 20 steps. Builds
DeepSpeed's CPU Adam once (a minute), in TORCH_EXTENSIONS_DIR.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tests.matrix import driver
from tests.matrix.driver import DTYPES, INPUT, LARGE, MARKER, ROWS, Model, Trace, digest, started

PIECE_ELEMENTS = 256
"""Far below the model's 14,000 values, so that sub-groups are larger than a piece, or with `SMALL` about as large."""

SMALL = 300
CLIPPING = 0.1


@dataclass(frozen=True)
class StepCase:
    """One way to train."""

    group: str
    dtype: str = "bf16"
    accumulation: int = 1
    clipping: float = CLIPPING
    sub_group_size: int = LARGE
    offload_param: bool = True
    adamw: bool = True
    overflow: bool = False
    threads: int = 2
    habit: str = "plain"
    steps: int = 20
    overlap: bool | None = None
    """What `overlap_comm` says; None leaves it to DeepSpeed."""

    @property
    def name(self) -> str:
        """What tells it from others."""
        words = [self.dtype, f"accumulation {self.accumulation}", f"{self.threads} threads"]
        words += ["no clipping"] * (not self.clipping) + ["small sub-groups"] * (self.sub_group_size == SMALL)
        words += ["optimizer only"] * (not self.offload_param) + ["Adam"] * (not self.adamw)
        return ", ".join(words + ["overflow"] * self.overflow + [self.habit] * (self.habit != "plain"))


def cases() -> Iterator[StepCase]:
    """Every case of both groups."""
    for dtype in ("bf16", "fp16", "fp32"):
        yield StepCase("step", dtype)
        yield StepCase("step", dtype, accumulation=4, sub_group_size=SMALL, threads=1, clipping=0.0)
        yield StepCase("step", dtype, offload_param=False, adamw=False, sub_group_size=SMALL)
    for accumulation in (1, 4):
        yield StepCase("step", "fp16", accumulation=accumulation, overflow=True)
    for accumulation in (1, 4):
        yield StepCase("step", "fp16", accumulation=accumulation, habit="with_path", overflow=True)
    for habit in ("checkpoint", "coming_and_going", "checked", "reading"):
        yield StepCase("step", habit=habit, sub_group_size=SMALL if habit != "reading" else LARGE)
    for dtype in ("bf16", "fp16", "fp32"):
        yield StepCase(
            "step_ranks", dtype, accumulation=4 if dtype == "bf16" else 1, overflow=dtype == "fp16"
        )
    yield StepCase("step_ranks", sub_group_size=SMALL)


def config(case: StepCase) -> dict[str, Any]:
    """The ds_config of a case."""
    like = driver.Case(
        group="bf16",
        dtype=case.dtype,
        accumulation=case.accumulation,
        clipping=case.clipping,
        sub_group_size=case.sub_group_size,
        overlap=case.overlap,
    )
    settings = driver.config(like)
    settings["fp16"]["initial_scale_power"] = 16
    settings["scheduler"] = {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-2, "warmup_num_steps": 10},
    }
    if not case.offload_param:
        del settings["zero_optimization"]["offload_param"]
    return settings


def start(case: StepCase) -> Any:
    """An engine with seeded weights, in two param groups."""
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    torch.manual_seed(0)
    model = Model("none")
    parameters = list(model.parameters())
    groups = [
        {"params": parameters[::2], "weight_decay": 0.1},
        {"params": parameters[1::2], "weight_decay": 0.0, "betas": (0.8, 0.99)},
    ]
    optimizer = DeepSpeedCPUAdam(groups, lr=1e-2, adamw_mode=case.adamw)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config(case))
    return engine


class Loop:
    """One training run, with or without the pass."""

    def __init__(self, case: StepCase, *, fused: bool, prepare: Callable[[Any], Any] | None = None) -> None:
        """Attaches it, as the case says, on the device that `prepare` returns for the engine, or DeepSpeed's."""
        self.case, self.fused, self.trace = case, fused, Trace()
        self.engine = start(case)
        self.device = prepare(self.engine) if fused and prepare is not None else None
        self.status: Any = None
        self.batches = torch.Generator().manual_seed(1 + int(os.environ.get("RANK", "0")))
        if fused:
            self.attach()

    def attach(self) -> None:
        """With the check where it is what the case is about, or where the operation's history is to be found out."""
        from autotune_offload.engine.step_attach import StepSpec, attach_step

        if self.case.habit == "with_path":
            driver.attached(self.engine, driver.Spec(), self.device)
        spec = StepSpec(step="fused", threads=self.case.threads, piece_elements=PIECE_ELEMENTS)
        check = self.case.habit in {"checked", "coming_and_going"}
        self.status = attach_step(self.engine, spec, self.device, check=check)

    def run(self) -> Trace:
        """All steps."""
        try:
            for step in range(self.case.steps):
                self.before(step)
                self.step(step)
            self.expect_used()
            return self.trace
        finally:
            self.engine.destroy()
            gc.collect()

    def before(self, step: int) -> None:
        """What the case's habit does between steps."""
        if self.case.habit == "coming_and_going" and self.fused and step in {5, 7}:
            from autotune_offload.engine.step_attach import detach_step

            detach_step(self.engine) if step == 5 else self.attach()
        if self.case.habit == "checkpoint" and step in {6, 9}:
            with tempfile.TemporaryDirectory() as folder:
                self.engine.save_checkpoint(folder, tag="kept")
                if step == 9:
                    self.step(step)
                    self.engine.load_checkpoint(folder, tag="kept")

    def step(self, step: int) -> None:
        """One optimizer step with its micro-batches; with `overflow` too large a one in the middle."""
        for _ in range(self.case.accumulation):
            x = torch.randn(ROWS, INPUT, generator=self.batches)
            x = x.to(self.engine.device, DTYPES[self.case.dtype])
            if self.case.overflow and step == 10:
                x *= 2000
            loss = self.engine(x, True).float().pow(2).mean()
            self.trace.see(f"loss of step {step}", float(loss.detach()).hex())
            self.engine.backward(loss)
            self.engine.step()
        self.seen(step)

    def seen(self, step: int) -> None:
        """Everything that a step leaves."""
        z, where = self.engine.optimizer, f"step {step}"
        states = [
            z.optimizer.state[master]
            for master in z.fp32_partitioned_groups_flat
            if master in z.optimizer.state
        ]
        self.trace.see(f"overflow, {where}", bool(z.overflow))
        self.trace.see(f"loss scale, {where}", float(z.loss_scale))
        self.trace.see(f"skipped steps, {where}", int(self.engine.skipped_steps))
        self.trace.see(f"rates, {where}", [float(group["lr"]) for group in z.optimizer.param_groups])
        self.trace.see(f"counters, {where}", [int(state["step"]) for state in states])
        self.trace.see(f"norm, {where}", float(self.engine.get_global_grad_norm() or 0.0).hex())
        self.trace.see(f"fp32 gradients, {where}", digest(m.grad for m in z.fp32_partitioned_groups_flat))
        self.trace.see(f"master weights, {where}", digest(driver.weights(self.engine)))
        for moment in ("exp_avg", "exp_avg_sq"):
            self.trace.see(f"{moment}, {where}", digest(state[moment] for state in states))
        parts = [p.ds_tensor.data for p in self.engine.module.parameters()]
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:  # else the padding, never initialised, is among them
            self.trace.see(f"16-bit weights, {where}", digest(parts))
        if self.case.habit == "reading":
            self.read(step)

    def read(self, step: int) -> None:
        """Gradients, weights and moments through the public functions."""
        from deepspeed.utils import (
            safe_get_full_fp32_param,
            safe_get_full_grad,
            safe_get_full_optimizer_state,
        )

        for number, parameter in enumerate(self.engine.module.parameters()):
            values = [
                safe_get_full_grad(parameter),
                safe_get_full_fp32_param(parameter),
                safe_get_full_optimizer_state(parameter, "exp_avg"),
            ]
            self.trace.see(f"read of {number}, step {step}", digest(v for v in values if v is not None))

    def expect_used(self) -> None:
        """A pass that quietly did nothing would compare well."""
        if self.status is None:
            return
        if self.status.why_not is not None:
            raise AssertionError(f"the pass was not used: {self.status.why_not}")
        if self.case.habit == "checked" and self.status.check is None:
            raise AssertionError("nothing was checked")
        if not self.status.seconds and self.case.habit == "plain":
            raise AssertionError("no step was made by the pass")


def compare(case: StepCase, prepare: Callable[[Any], Any] | None = None) -> dict[str, Any]:
    """One case, both ways; `prepare` is that of `Loop`."""
    began = time.perf_counter()
    result: dict[str, Any] = {
        "group": case.group,
        "case": case.name,
        "difference": None,
        "stock_failed": None,
    }
    try:
        stock = Loop(case, fused=False).run()
    except Exception as error:
        result["stock_failed"] = f"{type(error).__name__}: {error}"[:300]
    else:
        result["overflows"] = sum(value is True for what, value in stock.exact if what.startswith("overflow"))
        if case.overflow and not result["overflows"]:
            result["difference"] = "no step overflowed"
        try:
            result["difference"] = result["difference"] or stock.difference(
                Loop(case, fused=True, prepare=prepare).run()
            )
        except Exception as error:
            result["difference"] = f"{type(error).__name__}: {error}"[:300]
    result["seconds"] = round(time.perf_counter() - began, 2)
    return result


def main(groups: list[str]) -> int:
    """Run the cases of the named groups; 1 where one differs."""
    torch.set_num_threads(1)
    failed = False
    with started():
        for case in cases():
            if case.group in groups:
                result = compare(case)
                failed |= result["difference"] is not None
                print(MARKER + json.dumps(result), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
