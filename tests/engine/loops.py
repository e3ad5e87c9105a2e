"""Random training loops, with DeepSpeed alone and with a path attached, side by side in one process.

Every rule does the same to both: forward and backward in any order, with some experts, with a layer used in several
checkpointed blocks, with an exception or an overflow on the way; steps, thrown away gradients, gradients read and
edited, a changed accumulation, a boundary moved by hand, frozen layers, checkpoints, another engine whose loss runs
through this one, a path that comes and goes. Afterwards, or a few rules later, everything that a user can see must
be the same bits: losses, accumulation buffer, fp32 gradients, master weights, counters, the global norm; norms of
partitions as nearly as two orders of summation must agree.

    python -m tests.engine.loops --examples 300
    python -m tests.engine.loops --examples 300 --spec drawn          on the race device, with a schedule for each loop
    python -m tests.engine.loops --examples 100 --without keep        one of `FAULTS`: must find a difference

Exits 1 and prints the shortest loop found when something differs.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autotune_offload.engine.attach import attach, detach
from autotune_offload.engine.entrants import Confirm
from autotune_offload.engine.trainee import single_process_environment
from autotune_offload.machine.accelerator import AcceleratorDevice
from autotune_offload.testing import FakeAccelerator, FakeAcceleratorDevice
from tests.engine.faults import FAULTS
from tests.factories import make_choice
from tests.matrix.driver import started
from tests.race.guest import GuestDevice

WIDTH, ROWS, EXPERTS = 11, 2, 3
SLOW_SECONDS, SLOW_EVERY = 0.02, 7
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


# -- a device that is late ------------------------------------------------------------------------


class LateEvent:
    """Behind so many copies."""

    def __init__(self, device: LateDevice, position: int) -> None:
        self.device, self.position = device, position

    def synchronize(self) -> None:
        """Let them land."""
        self.device.run_to(self.position)


class LateDevice(FakeAcceleratorDevice):
    """Non-blocking copies to the host land when somebody waits for them, and no sooner; its host threads are slow.

    Sources are read when the copy is queued, as the order of a stream would have it.
    """

    def __init__(self, *, early: bool = False) -> None:
        """With `early` every copy has landed before anybody waits: the other extreme of what a device may do."""
        super().__init__(FakeAccelerator("cuda"))
        self._early = early
        self._lock = threading.RLock()
        self._queue: list[tuple[Tensor, Tensor]] = []
        self._done = self._calls = 0

    def run_to(self, position: int) -> None:
        """Land the copies before this position."""
        with self._lock:
            while self._done < position:
                destination, values = self._queue[self._done]
                destination.copy_(values)
                self._done += 1

    def d2h(self, destination: Tensor, source: Tensor, *, non_blocking: bool = False) -> None:
        """Late, unless it blocks."""
        with self._lock:
            self._queue.append((destination, source.clone()))
            if self._early or not non_blocking:
                self.synchronize()

    def h2d(self, destination: Tensor, source: Tensor, *, non_blocking: bool = False) -> None:
        """Behind everything that was queued."""
        del non_blocking
        self.synchronize()
        destination.copy_(source)

    def h2h(self, destination: Tensor, source: Tensor) -> None:
        """Slow in a thread."""
        self._dawdle()
        super().h2h(destination, source)

    def widen(self, destination: Tensor, source: Tensor, kept: Tensor | None = None) -> float:
        """The same."""
        self._dawdle()
        return super().widen(destination, source, kept)

    def _dawdle(self) -> None:
        """Now and then what a thread does takes so long that others overtake it."""
        if threading.current_thread() is not threading.main_thread():
            self._calls += 1
            if self._calls % SLOW_EVERY == 0:
                time.sleep(SLOW_SECONDS)

    def record_event(self) -> Any:
        """Behind what was queued."""
        return LateEvent(self, len(self._queue))

    def synchronize(self) -> None:
        """Let everything land."""
        self.run_to(len(self._queue))

    def synchronize_stream(self) -> None:
        """There is one."""
        self.synchronize()

    def record_stream(self, tensor: Tensor) -> None:
        """It lies in host memory, which knows no streams."""
        del tensor


def _spec(path: str, cast: str, threads: int, *, count: int = 3, accumulate: str = "device") -> Any:
    sizes = {"buffer_bytes": 256, "buffer_count": count, "host_threads": threads}
    return make_choice(path=path, cast=cast, accumulate=accumulate, **sizes)


SPECS = {
    "cpu": _spec("direct", "host", 0),
    "cpu threads": _spec("direct", "host", 2),
    "cpu device cast": _spec("direct", "device", 0),
    "late direct threads": _spec("direct", "host", 2),
    "late direct device cast": _spec("direct", "device", 0),
    "late pinned": _spec("pinned", "host", 0),
    "late pinned threads": _spec("pinned", "host", 2),
    "late pinned device cast": _spec("pinned", "device", 0),
    "late staged": _spec("staged", "host", 0),
    "late staged long": _spec("staged", "host", 0, count=32),
    "late staged threads": _spec("staged", "host", 2, count=8),
    "late staged device cast": _spec("staged", "device", 2, count=8),
    "late staged host sums": _spec("staged", "host", 1, accumulate="host"),
    "late pinned host sums": _spec("pinned", "host", 0, accumulate="host"),
    "early pinned": _spec("pinned", "host", 0),
    "early staged threads": _spec("staged", "host", 2, count=8),
    "late turns": _spec("pinned", "device", 0),
    "drawn direct device cast": _spec("direct", "device", 0),
    "drawn pinned threads": _spec("pinned", "host", 2),
    "drawn pinned device cast": _spec("pinned", "device", 0),
    "drawn staged": _spec("staged", "host", 0),
    "drawn staged threads": _spec("staged", "host", 2, count=8),
    "drawn staged host sums": _spec("staged", "host", 1, accumulate="host"),
    "drawn pinned host sums": _spec("pinned", "device", 2, accumulate="host"),
    "drawn turns": _spec("pinned", "device", 0),
}
"""By kind of device and name; those on the race device are for loops that ask for them."""

OFFERED = [name for name in sorted(SPECS) if not name.startswith("drawn")]
"""What loops draw from."""

TURNS = ("late staged threads", "late pinned host sums")
"""Who else takes turns with "late turns" or "drawn turns", and with DeepSpeed's own code."""


# -- a model and its engine -----------------------------------------------------------------------


class Fail(torch.autograd.Function):
    """The identity, whose backward fails once when it is armed."""

    armed = False

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        """The same values."""
        del ctx
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Raises RuntimeError once."""
        del ctx
        if Fail.armed:
            Fail.armed = False
            raise RuntimeError("out of memory in the user's backward")
        return gradient


def _may_fail(value: Tensor) -> Tensor:
    same: Tensor = Fail.apply(value)  # type: ignore[no-untyped-call]
    return same


class Experts(nn.Module):
    """Experts by number, one layer that every block shares, and a place where a backward pass may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 1)

    def forward(
        self, rows: Tensor, experts: tuple[int, ...] = (0, 1, 2), kind: str = "none", fails: int = 0
    ) -> Tensor:
        """Shape (rows, WIDTH) to (rows, 1); the backward pass may fail before that of block `fails` - 1."""
        rows = self.first(rows)
        for number, index in enumerate(experts):
            rows = self._block(_may_fail(rows) if number == fails else rows, index, kind)
        out: Tensor = self.last(rows)
        return out

    def _block(self, rows: Tensor, index: int, kind: str) -> Tensor:
        def block(rows: Tensor) -> Tensor:
            return rows + torch.relu(self.shared(torch.relu(self.experts[index](rows))))

        if kind == "none":
            return block(rows)
        out: Tensor = checkpoint(block, rows, use_reentrant=kind == "reentrant")
        return out


def config(
    dtype: str, accumulation: int, bucket: int, clipping: float, offload_param: bool, managed: bool
) -> dict[str, Any]:
    """ZeRO-3 with small sub-groups."""
    zero: dict[str, Any] = {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
        "stage3_param_persistence_threshold": 0,
        "reduce_bucket_size": bucket,
        "sub_group_size": 300,
    }
    if offload_param:
        zero["offload_param"] = {"device": "cpu", "pin_memory": False}
    unmanaged = {} if managed else {"managed_gradient_accumulation": False}
    return {
        **unmanaged,
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": accumulation,
        "bf16": {"enabled": dtype == "bf16"},
        "fp16": {
            "enabled": dtype == "fp16",
            "initial_scale_power": 8,
            "loss_scale_window": 3,
            "hysteresis": 1,
        },
        "gradient_clipping": clipping,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
    }


class World:
    """An engine and another one beside it, with a path or without; what happens is drawn by the loop."""

    def __init__(self, spec: str | None, check: bool, dtype: str, config: dict[str, Any]) -> None:
        import deepspeed

        self.spec, self.check, self.dtype = spec, check, DTYPES[dtype]
        self.drawn = f"{check} {dtype} {sorted(config.items())}"
        self.seen: list[object] = []
        self.statuses: list[Any] = []
        self.engines: list[Any] = []
        for seed, model in enumerate((Experts(), nn.Linear(WIDTH, WIDTH))):
            torch.manual_seed(seed)
            for parameter in model.parameters():
                nn.init.normal_(parameter, std=0.3)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=dict(config))
            self.engines.append(engine)
            self.attach(engine)

    @property
    def main(self) -> Any:
        """The engine that the loop is about."""
        return self.engines[0]

    def attach(self, engine: Any) -> None:
        """The path, where there is one."""
        if self.spec is None:
            return
        kind, _, _ = self.spec.partition(" ")
        own: Any = AcceleratorDevice(FakeAccelerator("cpu"))
        if kind == "drawn":
            own = GuestDevice(f"{self.spec} {self.drawn} {len(self.statuses)}")
        device = own if kind in ("cpu", "drawn") else LateDevice(early=kind == "early")
        others = TURNS if self.spec.endswith(" turns") else ()
        confirm = Confirm(others=tuple(SPECS[other] for other in others), seed="drawn") if others else None
        status = attach(engine, SPECS[self.spec], device, check=self.check, confirm=confirm)
        assert status.why_not is None, status.why_not
        self.statuses.append(status)

    def loss(self, seed: int, through: int, forwards: int, **forward: Any) -> Tensor:
        """Of one forward pass or several; with `through` the other engine makes the batch: both have gradients."""
        generator, losses = torch.Generator().manual_seed(seed), []
        for _ in range(forwards):
            rows = torch.randn(ROWS, WIDTH, generator=generator).to(self.dtype)
            made = self.main(self.engines[1](rows) if through else rows, **forward)
            losses.append(made.float().pow(2).mean())
        loss: Tensor = torch.stack(losses).sum()
        self.seen.append(float(loss.detach()))
        return loss

    def attempt(self, what: Callable[[World], object]) -> None:
        """Whatever it raises is part of what is seen."""
        try:
            self.seen.append(what(self))
        except Exception as error:
            self.seen.append(type(error).__name__)
        Fail.armed = False

    def state(self) -> Iterator[tuple[str, Any]]:
        """Everything that must be the same bits; asking for the gradients waits for them."""
        yield "what was seen", self.seen
        for number, engine in enumerate(self.engines):
            z = engine.optimizer
            z.get_fp32_grad_partitions()
            yield f"accumulation buffer {number}", z.grad_partitions_flat_buffer
            for group, fp32 in enumerate(z.fp32_partitioned_groups_flat):
                yield f"fp32 gradient {number}.{group}", fp32.grad
                yield f"master weights {number}.{group}", fp32.detach()
                for name, value in z.optimizer.state.get(fp32, {}).items():
                    yield f"{name} {number}.{group}", value
            norm = engine.get_global_grad_norm()
            yield f"global norm {number}", None if norm is None else float(norm)
            yield (
                f"counters {number}",
                (z.micro_step_id, engine.global_steps, engine.skipped_steps, z.loss_scale),
            )

    def norms(self) -> list[float]:
        """Of the partitions of both."""
        return [float(norm) for e in self.engines for norm in e.optimizer.norm_for_param_grads.values()]

    def end(self) -> None:
        """Both engines."""
        for engine in self.engines:
            engine.destroy()


def same(ours: Any, stock: Any) -> bool:
    """To the bit; the payload of a NaN is torch's own affair."""
    if isinstance(stock, Tensor):
        return torch.equal(ours.isnan(), stock.isnan()) and torch.equal(ours.nan_to_num(), stock.nan_to_num())
    return repr(ours) == repr(stock)


# -- the loop -------------------------------------------------------------------------------------

experts = st.lists(st.integers(0, EXPERTS - 1), unique=True, max_size=EXPERTS).map(tuple)
sometimes = st.sampled_from([False, False, False, True])


class Loops(RuleBasedStateMachine):
    """One loop."""

    def __init__(self) -> None:
        super().__init__()
        self.worlds: list[World] = []
        self.seed = 0
        self.saved: Path | None = None
        self.folders = contextlib.ExitStack()

    @initialize(
        spec=st.deferred(lambda: st.sampled_from(OFFERED)),
        check=st.booleans(),
        dtype=st.sampled_from(sorted(DTYPES)),
        accumulation=st.sampled_from([1, 1, 2, 3]),
        bucket=st.sampled_from([10, 10, 300, 10**6]),
        clipping=st.sampled_from([0.0, 0.05]),
        offload_param=st.booleans(),
        managed=st.sampled_from([True, True, True, False]),
    )
    def begin(self, spec: str, check: bool, dtype: str, accumulation: int, **more: Any) -> None:
        """The same weights twice."""
        wanted = config(dtype, accumulation, **more)
        self.worlds = [World(None, check, dtype, wanted), World(spec, check, dtype, wanted)]
        self.offload_param = more["offload_param"]

    def both(self, what: Callable[[World], object], look: bool = False) -> None:
        """In both worlds; then compared, or left as it is until later."""
        for world in self.worlds:
            world.attempt(what)
        if look:
            self.compare()

    def compare(self) -> None:
        """Raises AssertionError where a user could see a difference."""
        for difference in self.differences():
            raise AssertionError(difference)

    def differences(self) -> Iterator[str]:
        """What a user could see, in words."""
        stock, ours = self.worlds
        for (what, expected), (_, found) in zip(stock.state(), ours.state(), strict=True):
            if not same(found, expected):
                yield f"{what} differs: {found} with the path, {expected} without"
        for found, expected in zip(ours.norms(), stock.norms(), strict=True):
            near = found == expected or abs(found - expected) <= 1e-12 * abs(expected)
            if not near and (found == found or expected == expected):
                yield f"norm of a partition differs: {found} with the path, {expected} without"
        yield from (f"path differs: {status.why_not}" for status in ours.statuses if status.why_not)

    @rule(
        experts=experts,
        kind=st.sampled_from(["none", "non-reentrant", "reentrant"]),
        scale=st.sampled_from([1.0, 1.0, 1.0, float("inf"), float("nan")]),
        fails=st.sampled_from([None, None, 0, 1]),
        clears=st.sampled_from([True, True, False]),
        more=st.integers(0, 2),
        forwards=st.sampled_from([1, 1, 2]),
        through=sometimes,
        twice=sometimes,
        step=st.booleans(),
        look=st.booleans(),
    )
    def batches(
        self,
        experts: tuple[int, ...],
        kind: str,
        scale: float,
        fails: int | None,
        clears: bool,
        more: int,
        step: bool,
        look: bool,
        **how: Any,
    ) -> None:
        """One, whose backward pass may fail, and some more of the same kind; then maybe a step."""
        failing = fails is not None and fails < len(experts)
        self.batch(kind, 1.0 if failing else scale, experts=experts, fails=fails if failing else -1, **how)
        if failing and clears:
            self.throw_away(buckets=True, look=False)
        for _ in range(more):
            self.batch(kind, 1.0, experts=experts, fails=-1, **how)
        if look:
            self.compare()
        if step:
            self.both(lambda world: world.main.step(), look)

    def batch(self, kind: str, scale: float, *, through: int, twice: bool, **forward: Any) -> None:
        """A forward and a backward pass, or two backward passes through one graph."""
        self.seed += 1

        def one(world: World) -> None:
            loss = world.loss(self.seed, through, kind=kind, **forward)
            Fail.armed = forward["fails"] >= 0
            if twice and kind == "none":
                world.main.backward(loss, retain_graph=True)
            (world.engines[1] if through and self.seed % 2 else world.main).backward(loss * scale)

        self.both(one)

    @rule(look=st.booleans(), other=sometimes)
    def step(self, look: bool, other: bool) -> None:
        """With whatever there is."""
        self.both(lambda world: world.engines[other].step(), look)

    @rule(buckets=st.booleans(), look=sometimes)
    def throw_away(self, buckets: bool, look: bool) -> None:
        """What zero_grad does where there are streams; DeepSpeed's on the CPU cannot, after a failure."""

        def one(world: World) -> None:
            for engine in world.engines:
                z = engine.optimizer
                z.micro_step_id, z._epilogue_ran_this_backward = 0, False
                for parameter in engine.module.parameters():
                    parameter.grad = None
                for bucket in z.ipg_buckets.values() if buckets else ():
                    bucket.clear_params()

        self.both(one, look)

    @rule(
        how=st.sampled_from(["set", "local", "vectorized", "in place", "all", "flat"]),
        index=st.integers(0, 7),
    )
    def edit(self, how: str, index: int) -> None:
        """An fp32 gradient, by every way that DeepSpeed has."""
        import deepspeed.utils as ds

        def one(world: World) -> None:
            z, parameter = world.main.optimizer, list(world.main.module.parameters())[index]
            if how == "set":
                ds.safe_set_full_grad(parameter, ds.safe_get_full_grad(parameter) * 3 + 1)
            elif how == "local":
                ds.safe_set_local_grad(parameter, ds.safe_get_local_grad(parameter) * 3 + 1)
            elif how == "vectorized":
                z.update_fp32_grad_for_param_vectorized(lambda full, _: full * 0.25 + 1, [parameter])
            elif how == "in place":
                ds.safe_get_local_grad(parameter).mul_(3)
            else:
                groups = z.get_fp32_grad_partitions().values()
                for group in groups if how == "all" else ():
                    for gradient in group.values():
                        gradient.mul_(0.5)
                for fp32 in z.fp32_partitioned_groups_flat if how == "flat" else ():
                    fp32.grad.clamp_(-0.01, 0.01)

        self.both(one)

    @rule()
    def ask_for_an_overflow(self) -> None:
        """By hand, in every dtype."""
        self.both(lambda world: bool(world.main.optimizer.has_overflow()))

    @rule(accumulation=st.integers(1, 3))
    def change_accumulation(self, accumulation: int) -> None:
        """As a batch-size warm-up does."""
        self.both(lambda world: world.main.set_train_batch_size(ROWS * accumulation))

    @rule(boundary=st.sampled_from([True, False, None]))
    def move_boundary(self, boundary: bool | None) -> None:
        """By hand, or back to the engine's own."""

        def one(world: World) -> None:
            if boundary is None:
                world.main._is_gradient_accumulation_boundary = None
            else:
                world.main.set_gradient_accumulation_boundary(boundary)

        self.both(one)

    @rule(index=st.integers(0, EXPERTS - 1), trained=st.booleans())
    def freeze(self, index: int, trained: bool) -> None:
        """Or unfreeze."""
        self.both(lambda world: bool(world.main.module.experts[index].requires_grad_(trained)))

    @rule()
    def save(self) -> None:
        """To be loaded by both."""
        self.saved = Path(self.folders.enter_context(tempfile.TemporaryDirectory()))
        folders = iter((self.saved / "stock", self.saved / "ours"))
        self.both(lambda world: world.main.save_checkpoint(str(next(folders)), tag="kept"))

    @precondition(lambda self: self.saved is not None)
    @rule(look=st.booleans())
    def load(self, look: bool) -> None:
        """What was saved last."""
        assert self.saved is not None
        folders = iter((self.saved / "stock", self.saved / "ours"))
        self.both(lambda world: bool(world.main.load_checkpoint(str(next(folders)), tag="kept")), look)

    @precondition(lambda self: not self.offload_param)
    @rule()
    def away_and_back(self) -> None:
        """The accumulation buffer."""
        from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

        def one(world: World) -> None:
            world.main.offload_states(include=[OffloadStateTypeEnum.lp_grads], pin_memory=False)
            world.main.reload_states()

        self.both(one)

    @rule(again=st.booleans())
    def come_and_go(self, again: bool) -> None:
        """The path, in the middle of whatever is under way."""
        ours = self.worlds[1]
        if not detach(ours.main) or again:
            ours.attach(ours.main)

    def teardown(self) -> None:
        """Compared once more, whatever was looked at before."""
        try:
            if self.worlds:
                self.compare()
        finally:
            for world in self.worlds:
                world.end()
            self.folders.close()


def main(arguments: list[str]) -> int:
    """Run so many loops; 1 where one differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=5)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--without", choices=sorted(FAULTS))
    parser.add_argument(
        "--spec", choices=["drawn", *sorted(SPECS)], help="this one alone, or all that are drawn"
    )
    given = parser.parse_args(arguments)
    if given.spec is not None:
        every = [name for name in sorted(SPECS) if name.startswith("drawn ")]
        OFFERED[:] = [given.spec] if given.spec in SPECS else every
    if given.without:
        FAULTS[given.without](pytest.MonkeyPatch())
    return run(Loops, given.examples, given.steps, given.seed, shrinks=not given.without)


def run(machine: type[Loops], examples: int, steps: int, seed: int | None, *, shrinks: bool) -> int:
    """So many loops of so many steps, the same ones without a seed; 1 where one differs."""
    torch.set_num_threads(1)
    drawn = machine if seed is None else hypothesis.seed(seed)(machine)
    with single_process_environment(), started():
        try:
            run_state_machine_as_test(
                drawn,
                settings=settings(
                    max_examples=examples,
                    stateful_step_count=steps,
                    deadline=None,
                    database=None,
                    derandomize=seed is None,
                    phases=[Phase.generate, *[Phase.shrink] * shrinks],
                    suppress_health_check=list(hypothesis.HealthCheck),
                ),
            )
        except AssertionError as error:
            print(error, *getattr(error, "__notes__", ()), sep="\n")
            return 1
        except hypothesis.errors.Flaky as error:  # by the order of threads: seen once is enough
            once = getattr(error, "exceptions", ())
            print("differ in one run of two:", *once, *getattr(error, "__notes__", ()), sep="\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
