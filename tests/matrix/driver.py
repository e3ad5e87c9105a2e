"""Trains one small model many ways, each with DeepSpeed's own code and with a path attached, and compares.

    python -m tests.matrix.driver GROUP [GROUP ...]

One JSON line a case on stdout, after a marker: `difference` is null where fp32 gradients, master weights,
losses, overflows, loss scales and skipped steps are the same to the bit and all norms within 1e-12, else the
first difference in words; `stock_failed` says that this DeepSpeed cannot do the case at all. Runs on every
supported DeepSpeed, so it uses nothing that one of them lacks, and builds no C++ operation. With RANK and
WORLD_SIZE in the environment it is one of several ranks, over gloo.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

MARKER = "case: "
WIDTH, INPUT, ROWS = 37, 16, 4
"""An odd width, so that two ranks have a partition with padding."""
SMALL_BUCKET, SMALL_SUB_GROUP, LARGE = 3000, 2000, 10**8
NORM_TOLERANCE = 1e-12


@dataclass(frozen=True)
class Spec:
    """What a path is built from; see `autotune_offload.paths.path.Spec`."""

    path: str = "direct"
    cast: str = "host"
    buffer_bytes: int = 1 << 16
    buffer_count: int = 2
    host_threads: int = 0
    accumulate: str = "device"
    """With "host" the path runs on a device whose memory counts as apart from the host's."""


@dataclass(frozen=True)
class Case:
    """One way to train.

    `habit` is what the training loop does beside forward, backward and step; see `HABITS`.
    """

    group: str
    dtype: str = "bf16"
    accumulation: int = 1
    clipping: float = 0.0
    sub_group_size: int = LARGE
    reduce_bucket_size: int = LARGE
    frozen: bool = False
    unused: bool = False
    checkpointing: str = "none"
    overflow: bool = False
    habit: str = "plain"
    steps: int = 20
    overlap: bool | None = None
    """What `overlap_comm` says; None leaves it to DeepSpeed."""
    pin_memory: bool = False
    spec: Spec = field(default_factory=Spec)

    @property
    def name(self) -> str:
        """The fields that differ from the defaults."""
        plain, words = Case(group=self.group), [self.dtype]
        for key, value in asdict(self).items():
            if key in {"group", "dtype", "steps", "overlap", "pin_memory", "spec"} or value == getattr(
                plain, key
            ):
                continue
            words.append(key.replace("_size", "") if value is True or "size" in key else f"{key} {value}")
        added = "/added on the host" * (self.spec.accumulate == "host")
        return ", ".join([*words, f"{self.spec.path}/{self.spec.cast}/{self.spec.host_threads}{added}"])


SPECS = (Spec(), Spec(host_threads=2), Spec(path="pinned", cast="device", buffer_bytes=1 << 10))

HOST_SPECS = (
    Spec(accumulate="host"),
    Spec(path="pinned", cast="device", accumulate="host"),
    Spec(path="staged", cast="host", host_threads=1, buffer_bytes=1 << 10, accumulate="host"),
)

PAIRS = (
    (1, 0.0, True, True),
    (1, 0.1, False, False),
    (2, 0.0, False, True),
    (2, 0.1, True, False),
    (4, 0.0, True, False),
    (4, 0.1, False, True),
)
"""Accumulation, clipping, small sub-groups, small buckets: any two values of two of them meet."""


def cases() -> Iterator[Case]:
    """Every case of every group."""
    for dtype in ("bf16", "fp16", "fp32"):
        for number, (accumulation, clipping, small_sub_group, small_bucket) in enumerate(PAIRS):
            yield Case(
                group=dtype,
                dtype=dtype,
                accumulation=accumulation,
                clipping=clipping,
                sub_group_size=SMALL_SUB_GROUP if small_sub_group else LARGE,
                reduce_bucket_size=SMALL_BUCKET if small_bucket else LARGE,
                spec=SPECS[(number // 2 + number) % len(SPECS)],
            )
    for accumulation in (1, 2):
        yield Case(group="fp16", dtype="fp16", accumulation=accumulation, clipping=0.1, overflow=True)
    for dtype in ("bf16", "fp16"):
        yield Case(group="parameters", dtype=dtype, frozen=True, clipping=0.1)
        yield Case(group="parameters", dtype=dtype, unused=True, clipping=0.1)
        yield Case(
            group="parameters", dtype=dtype, unused=True, frozen=True, accumulation=2, clipping=0.1,
            reduce_bucket_size=SMALL_BUCKET, sub_group_size=SMALL_SUB_GROUP,
        )  # fmt: skip
    for kind in ("reentrant", "non-reentrant"):
        for accumulation in (1, 2):
            yield Case(
                group="checkpointing", checkpointing=kind, accumulation=accumulation,
                reduce_bucket_size=SMALL_BUCKET,
            )  # fmt: skip
    for habit in HABITS:
        if habit != "plain":
            yield Case(group="habits", habit=habit, clipping=0.1)
            yield Case(group="habits", habit=habit, clipping=0.1, accumulation=2, dtype="fp16")
    for number, dtype in enumerate(("bf16", "fp16", "fp32")):
        for accumulation in (2, 4):
            yield Case(
                group="host", dtype=dtype, accumulation=accumulation, clipping=0.1,
                overflow=dtype == "fp16",
                reduce_bucket_size=SMALL_BUCKET if accumulation == 2 else LARGE,
                sub_group_size=SMALL_SUB_GROUP if accumulation == 4 else LARGE,
                spec=HOST_SPECS[(number + accumulation) % len(HOST_SPECS)],
            )  # fmt: skip
    for number, habit in enumerate(("no_step", "by_hand", "unmanaged", "safe_set", "coming_and_going")):
        yield Case(
            group="host", habit=habit, clipping=0.1, accumulation=2, dtype=("bf16", "fp16")[number % 2],
            unused=habit == "by_hand", spec=HOST_SPECS[number % len(HOST_SPECS)],
        )  # fmt: skip
    for dtype in ("bf16", "fp32"):
        for accumulation in (1, 2):
            yield Case(
                group="ranks", dtype=dtype, accumulation=accumulation, clipping=0.1,
                reduce_bucket_size=SMALL_BUCKET if accumulation == 2 else LARGE,
                sub_group_size=SMALL_SUB_GROUP,
            )  # fmt: skip
    yield Case(group="ranks", dtype="fp16", overflow=True)


# -- the model ------------------------------------------------------------------------------------


class Block(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Shape kept."""
        change: Tensor = self.down(torch.relu(self.up(x)))
        return x + change


class Model(nn.Module):
    """Layers of several sizes, one of which gets no gradient when it is told so."""

    def __init__(self, checkpointing: str) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.first = nn.Linear(INPUT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(1))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, everything: bool) -> Tensor:
        """Shape (rows, 1)."""
        x = self.first(x)
        for block in self.blocks:
            if self.checkpointing == "none":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
        more = self.sometimes(x)
        x = more if everything else x + more.detach()
        output: Tensor = self.last(x * self.scale)
        return output


def config(case: Case) -> dict[str, Any]:
    """The ds_config of a case."""
    fp16 = {
        "enabled": case.dtype == "fp16",
        "initial_scale_power": 30 if case.overflow else 8,
        "loss_scale_window": 4,
        "hysteresis": 1,
    }
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": case.accumulation,
        "bf16": {"enabled": case.dtype == "bf16"},
        "fp16": fp16,
        "gradient_clipping": case.clipping,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": case.pin_memory},
            "offload_param": {"device": "cpu", "pin_memory": case.pin_memory},
            "sub_group_size": case.sub_group_size,
            "reduce_bucket_size": case.reduce_bucket_size,
            "stage3_param_persistence_threshold": 0,
        },
    }
    if case.overlap is not None:
        settings["zero_optimization"]["overlap_comm"] = case.overlap
    if case.habit == "offload_states":
        del settings["zero_optimization"]["offload_param"]
    if case.habit == "unmanaged":
        settings["managed_gradient_accumulation"] = False
    return settings


def start(case: Case) -> Any:
    """An engine with seeded weights."""
    import deepspeed

    torch.manual_seed(0)
    model = Model(case.checkpointing)
    if case.frozen:
        for parameter in model.blocks[1].parameters():
            parameter.requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(trained, lr=1e-3), config=config(case)
    )
    return engine


# -- what is compared -----------------------------------------------------------------------------


@dataclass
class Trace:
    """What can be seen of a training run. `exact` must be the same, `norms` nearly."""

    exact: list[tuple[str, object]] = field(default_factory=list)
    norms: list[tuple[str, float]] = field(default_factory=list)

    def see(self, what: str, value: object) -> None:
        """Something that must be the same to the bit."""
        self.exact.append((what, value))

    def gradients(self, engine: Any, where: str) -> None:
        """Every fp32 gradient, and every norm that DeepSpeed keeps."""
        z = engine.optimizer
        self.see(f"fp32 gradients, {where}", digest(group.grad for group in z.fp32_partitioned_groups_flat))
        self.see(f"partitions with a norm, {where}", len(z.norm_for_param_grads))
        self.norms += [(f"norm of a partition, {where}", float(n)) for n in z.norm_for_param_grads.values()]

    def after_step(self, engine: Any, where: str) -> None:
        """Master weights and the bookkeeping of the step."""
        z = engine.optimizer
        self.see(f"overflow, {where}", bool(z.overflow))
        self.see(f"loss scale, {where}", float(z.loss_scale))
        self.see(f"skipped steps, {where}", int(engine.skipped_steps))
        self.see(f"master weights, {where}", digest(weights(engine)))
        norm = engine.get_global_grad_norm()
        if norm is not None:
            self.norms.append((f"global norm, {where}", float(norm)))

    def difference(self, other: Trace) -> str | None:
        """The first thing in which `other` differs from this."""
        if len(self.exact) != len(other.exact) or len(self.norms) != len(other.norms):
            return (
                f"{len(self.exact)} values and {len(self.norms)} norms seen, "
                f"then {len(other.exact)} and {len(other.norms)}"
            )
        for (what, mine), (_, theirs) in zip(self.exact, other.exact, strict=True):
            if mine != theirs:
                return f"{what}: {mine}, then {theirs}"
        for (what, norm), (_, another) in zip(self.norms, other.norms, strict=True):
            same = norm == another or (norm != norm and another != another)
            if not same and not abs(norm - another) <= NORM_TOLERANCE * abs(norm):
                return f"{what}: {norm!r}, then {another!r}"
        return None


def weights(engine: Any) -> Iterator[Tensor]:
    """This rank's master weights, without the padding at a parameter's end, which is never initialised."""
    z, rank = engine.optimizer, int(os.environ.get("RANK", "0"))
    for group in z.fp16_groups:
        for parameter in group:
            number, offset, length = z.grad_position[z.get_param_id(parameter)]
            real = min(length, max(0, parameter.ds_numel - rank * parameter.partition_numel()))
            yield z.fp32_partitioned_groups_flat[number].narrow(0, offset, real)


def digest(tensors: Any) -> str:
    """Of the bytes of all tensors; NaN is NaN, since torch gives that of fp16 another payload by its place."""
    sha = hashlib.sha256()
    for tensor in tensors:
        same = tensor.detach().masked_fill(tensor.isnan(), torch.nan)
        sha.update(same.cpu().contiguous().view(torch.uint8).numpy())
    return sha.hexdigest()[:16]


# -- how it is trained ----------------------------------------------------------------------------

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Loop:
    """One training run."""

    def __init__(self, case: Case, engine: Any) -> None:
        self.case, self.engine, self.trace = case, engine, Trace()
        self.batches = torch.Generator().manual_seed(1 + int(os.environ.get("RANK", "0")))

    def backward(self, step: int, micro_step: int) -> None:
        """One micro-batch."""
        x = torch.randn(ROWS, INPUT, generator=self.batches)
        x = x.to(self.engine.device, DTYPES[self.case.dtype])
        # with accumulation, some windows use the layer for the first time in a later micro-step
        everything = not self.case.unused or (step + micro_step) % 3 == 0
        loss = self.engine(x, everything).float().pow(2).mean()
        self.trace.see(f"loss of step {step}, micro-step {micro_step}", float(loss.detach()).hex())
        self.engine.backward(loss)

    def step(self, step: int) -> None:
        """One optimizer step with its micro-batches."""
        for micro_step in range(self.case.accumulation):
            self.backward(step, micro_step)
            if micro_step == self.case.accumulation - 1:
                self.seen(step)
            self.engine.step()
        self.trace.after_step(self.engine, f"step {step}")

    def seen(self, step: int) -> None:
        """Called between the last backward pass and the step."""
        self.trace.gradients(self.engine, f"step {step}")


class SafeSet(Loop):
    """Reads and changes gradients through the public functions."""

    def seen(self, step: int) -> None:
        """Doubles one gradient, as a user may."""
        from deepspeed.utils import safe_get_full_grad, safe_set_full_grad

        super().seen(step)
        for number, parameter in enumerate(self.engine.module.parameters()):
            gradient = safe_get_full_grad(parameter)
            self.trace.see(f"safe_get_full_grad {number}, step {step}", digest([gradient]))
            if number == 2:
                safe_set_full_grad(parameter, 2 * gradient)
        super().seen(step)


class NoStep(Loop):
    """Every third step, another backward pass beyond the boundary comes before the step."""

    def seen(self, step: int) -> None:
        """Accumulates onto a gradient that was at the boundary already, and once changed by hand."""
        super().seen(step)
        if step % 3:
            return
        if step % 2 and hasattr(self.engine.optimizer, "set_fp32_grad_for_param"):  # not in 0.14.5
            from deepspeed.utils import safe_get_full_grad, safe_set_full_grad

            first = next(iter(self.engine.module.parameters()))
            safe_set_full_grad(first, safe_get_full_grad(first) + 1)
        self.backward(step, self.case.accumulation - 1)
        super().seen(step)


class ByHand(Loop):
    """The boundary is set by hand, with a number of micro-steps that the config does not know."""

    def step(self, step: int) -> None:
        """Two or three micro-batches."""
        last = 1 + step % 2
        for micro_step in range(last + 1):
            self.engine.set_gradient_accumulation_boundary(micro_step == last)
            self.backward(step, micro_step)
        self.seen(step)
        self.engine.step()
        self.trace.after_step(self.engine, f"step {step}")


class Unmanaged(Loop):
    """`managed_gradient_accumulation: false`: the caller's step() is the boundary."""

    def step(self, step: int) -> None:
        """Two or three micro-batches."""
        for micro_step in range(2 + step % 2):
            self.backward(step, micro_step)
        self.engine.step()
        self.trace.after_step(self.engine, f"step {step}")


class Coming(Loop):
    """The path is taken out and put in again, also in the middle of an accumulation and before a step."""

    attached: Spec | None = None
    device: Any = None

    def backward(self, step: int, micro_step: int) -> None:
        """Takes turns."""
        super().backward(step, micro_step)
        self.toggle(step + micro_step)

    def seen(self, step: int) -> None:
        """Once more before the step."""
        super().seen(step)
        self.toggle(step)
        if step % 5 == 4:  # accumulates onto what a path has left
            super().backward(step, self.case.accumulation - 1)
            super().seen(step)

    def toggle(self, number: int) -> None:
        """Only where the run has a path at all."""
        from autotune_offload.engine.attach import detach

        if self.attached is not None and not detach(self.engine) and number % 2:
            attached(self.engine, self.attached, self.device)


class OffloadStates(Loop):
    """The accumulation buffer leaves and comes back, between backward and step and between steps."""

    def step(self, step: int) -> None:
        """Then once more after the step."""
        super().step(step)
        if step % 4 == 3:
            self.away_and_back()

    def seen(self, step: int) -> None:
        """And accumulates onto what came back."""
        super().seen(step)
        if step % 3 == 2:
            self.away_and_back()
            self.backward(step, self.case.accumulation - 1)
            super().seen(step)

    def away_and_back(self) -> None:
        """0.15.4 and newer."""
        from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

        self.engine.offload_states(include=[OffloadStateTypeEnum.lp_grads])
        self.engine.reload_states()


class Coalesced(Loop):
    """Gradients of a whole window are reduced at once, in 0.19.4 and newer."""

    def step(self, step: int) -> None:
        """Two micro-batches in every other window."""
        if step % 2:
            return super().step(step)
        with self.engine.coalesce_grad_reduction():
            for micro_step in range(2):
                self.backward(step, micro_step)
        self.seen(step)
        self.engine.set_gradient_accumulation_boundary(True)
        self.engine.step()
        self.engine._is_gradient_accumulation_boundary = None
        self.trace.after_step(self.engine, f"step {step}")


class Checkpoint(Loop):
    """Saves, goes on, and returns to what was saved."""

    def step(self, step: int) -> None:
        """Saved twice, loaded once."""
        if step in {5, 10}:
            with tempfile.TemporaryDirectory() as folder:
                self.engine.save_checkpoint(folder, tag="kept")
                if step == 10:
                    super().step(step)
                    self.engine.load_checkpoint(folder, tag="kept")
        super().step(step)


HABITS: dict[str, type[Loop]] = {
    "plain": Loop,
    "safe_set": SafeSet,
    "no_step": NoStep,
    "by_hand": ByHand,
    "unmanaged": Unmanaged,
    "offload_states": OffloadStates,
    "coalesced": Coalesced,
    "checkpoint": Checkpoint,
    "coming_and_going": Coming,
}


def train(case: Case, spec: Spec | None, prepare: Callable[[Any], Any] | None = None) -> Trace:
    """One run, with DeepSpeed's own code or with the path of `spec`.

    `prepare` is given the engine, and returns the device on which the path is built; else that is `apart` or
    DeepSpeed's.
    """
    engine = start(case)
    try:
        loop = HABITS[case.habit](case, engine)
        status = None
        if spec is not None:
            device = None if prepare is None else prepare(engine)
            status = attached(engine, spec, device)
            if isinstance(loop, Coming):
                loop.attached, loop.device = spec, device
        for step in range(case.steps):
            loop.step(step)
        if status is not None:
            _expect_used(case, status)
        return loop.trace
    finally:
        engine.destroy()
        del engine
        gc.collect()


def attached(engine: Any, spec: Spec, device: Any = None) -> Any:
    """The status of a path that must have been attached."""
    from autotune_offload.engine.attach import attach

    if device is None and spec.accumulate == "host":
        device = apart()
    status = attach(engine, spec, device)  # type: ignore[arg-type]  # plain fields, not literals
    if status.why_not is not None:
        raise AssertionError(f"not attached: {status.why_not}")
    return status


def apart() -> Any:
    """A device whose memory is not the host's, as far as a path can tell: there, places for adding up differ."""
    from autotune_offload.testing import FakeAccelerator, FakeAcceleratorDevice

    class Apart(FakeAcceleratorDevice):
        def record_stream(self, tensor: Tensor) -> None:
            del tensor  # it lies in host memory, which knows no streams

    return Apart(FakeAccelerator("cuda"))


def _expect_used(case: Case, status: Any) -> None:
    """A path that quietly did nothing would compare well."""
    if status.why_not is not None or status.left_to_deepspeed:
        raise AssertionError(f"{status.left_to_deepspeed} partitions left to DeepSpeed: {status.why_not}")
    checked = status.check is not None and status.check.partitions > 0
    if not checked and case.habit not in {"unmanaged", "coming_and_going"}:
        raise AssertionError(f"the self-check has not run: {status.check}")


def compare(case: Case, prepare: Callable[[Any], Any] | None = None) -> dict[str, Any]:
    """One case, both ways; `prepare` is that of `train`."""
    began = time.perf_counter()
    result: dict[str, Any] = {
        "group": case.group,
        "case": case.name,
        "difference": None,
        "stock_failed": None,
    }
    try:
        stock = train(case, None)
    except Exception as error:
        result["stock_failed"] = f"{type(error).__name__}: {error}"[:300]
    else:
        result["digest"] = hashlib.sha256(repr(stock.exact).encode()).hexdigest()[:16]
        result["overflows"] = sum(value is True for what, value in stock.exact if what.startswith("overflow"))
        try:
            result["difference"] = stock.difference(train(case, case.spec, prepare))
        except Exception as error:
            result["difference"] = f"{type(error).__name__}: {error}"[:300]
    result["seconds"] = round(time.perf_counter() - began, 2)
    return result


@contextmanager
def started() -> Iterator[None]:
    """DeepSpeed ready in this process: no C++ build, fp16 allowed on the CPU, where messages go by gloo."""
    import deepspeed
    import deepspeed.comm
    from deepspeed.accelerator import get_accelerator

    # `deepspeed.comm.torch` as an attribute is torch itself
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    accelerator = get_accelerator()
    accelerator.is_fp16_supported = lambda: True
    on_cpu = str(accelerator.device_name()) == "cpu"
    backend = "gloo" if on_cpu else accelerator.communication_backend_name()
    deepspeed.comm.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    gc.freeze()  # older versions collect garbage ten times an engine, through all that was imported
    try:
        yield
    finally:
        deepspeed.comm.destroy_process_group()


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
