"""Short loops that once trained on other gradients than DeepSpeed alone, each with what holds it the same now.

    python -m tests.engine.known

runs each as the package is, where it must be the same to the bit, and once without each part that holds it, where
a difference must be found. None depends on chance: what they need is that nothing lands before somebody waits.
Exits 1 where one of them ends otherwise. That clipping takes DeepSpeed's factor where the norm lies at a rounding
is in `test_norms`: no model would come there by itself.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from autotune_offload.engine.trainee import single_process_environment
from tests.engine.faults import FAULTS
from tests.engine.loops import Loops
from tests.matrix.driver import started

ALL = (0, 1, 2)


def _pass(loop: Loops, experts: tuple[int, ...] = ALL, **how: Any) -> None:
    """One forward and backward pass."""
    given: dict[str, Any] = {"kind": "none", "scale": 1.0, "fails": -1, "through": 0, "twice": False}
    loop.batch(experts=experts, **{**given, "forwards": 1, **how})


def _step(loop: Loops) -> None:
    loop.both(lambda world: world.main.step())


def _late(loop: Loops) -> None:
    """A parameter's first gradient of a step comes in a later pass."""
    _pass(loop)
    _step(loop)
    _pass(loop, experts=(0,))
    _pass(loop, experts=(1,))


def _changed(loop: Loops) -> None:
    """An accumulation of two from the third step on, where an expert comes late."""
    _pass(loop)
    _step(loop)
    loop.both(lambda world: world.main.set_train_batch_size(4))
    for _ in range(2):  # the engine counts its micro-steps from the start
        _pass(loop, experts=(0,))
        _step(loop)
    _pass(loop, experts=(0, 1))


def _moved(loop: Loops) -> None:
    """A boundary by hand, and not in the next pass."""
    for boundary in (True, False, True):
        loop.both(lambda world, to=boundary: world.main.set_gradient_accumulation_boundary(to))  # type: ignore[misc]
        _pass(loop)


def _shared(loop: Loops) -> None:
    """A layer is reduced by each of the checkpointed blocks that share it."""
    _pass(loop, kind="reentrant")
    _step(loop)
    _pass(loop, kind="reentrant")


def _survived(loop: Loops) -> None:
    """A backward pass raises; the next goes over the same partitions."""
    _pass(loop)
    _step(loop)
    _pass(loop, fails=1)
    _pass(loop)


def _stepped(loop: Loops) -> None:
    """A backward pass raises, and a step is made with what there is."""
    _pass(loop)
    _step(loop)
    _pass(loop, fails=1)
    _step(loop)


def _dead(loop: Loops) -> None:
    """The norms of a pass that raised, whose gradients were thrown away, come before those of the next."""
    _pass(loop)
    _step(loop)
    _pass(loop, fails=1)
    loop.throw_away(buckets=True, look=False)
    loop.both(lambda world: world.main.set_train_batch_size(2))
    _pass(loop)


def _finalized(loop: Loops) -> None:
    """With unmanaged accumulation the step is the boundary, which takes fp32 gradients from the buffer."""
    _pass(loop, fails=1)
    _step(loop)
    _pass(loop)
    _pass(loop)
    _step(loop)


def _gan(loop: Loops) -> None:
    """Another engine's backward pass leaves gradients here; after a loss of two forwards no epilogue follows."""
    _pass(loop, forwards=2)
    _step(loop)
    loop.seed = 2  # odd once a pass is begun: the other engine's backward
    _pass(loop, through=1)
    _pass(loop)


def _theirs(loop: Loops) -> None:
    """The same, and a step with what there is."""
    _pass(loop, forwards=2)
    _step(loop)
    loop.seed = 2
    _pass(loop, through=1)
    _step(loop)


def _edited(loop: Loops) -> None:
    """fp32 gradients are changed through a view; then comes another pass."""

    def edit(world: Any) -> None:
        for gradients in world.main.optimizer.get_fp32_grad_partitions().values():
            for gradient in gradients.values():
                gradient.mul_(0.5)

    _pass(loop)
    loop.both(edit)
    _pass(loop)


def _overflow(loop: Loops) -> None:
    """Somebody asks for it between the pass and the step."""
    _pass(loop)
    _step(loop)
    _pass(loop, scale=float("nan"))
    loop.both(lambda world: bool(world.main.optimizer.has_overflow()))


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """One loop, and what must be found when it is taken out."""

    loop: Callable[[Loops], None]
    spec: str
    without: str
    differs: str = "fp32 gradient"
    """What is another one then, whatever else may be."""
    accumulation: int = 1
    managed: bool = True

    def differences(self, fault: str | None = None) -> list[str]:
        """With the package as it is, or without a part of it."""
        with pytest.MonkeyPatch.context() as patch:
            if fault is not None:
                FAULTS[fault](patch)
            return self._differences()

    def _differences(self) -> list[str]:
        loop = Loops()
        try:
            loop.begin(
                spec=self.spec,
                check=False,
                dtype="bf16",
                accumulation=self.accumulation,
                bucket=10,
                clipping=0.05,
                offload_param=True,
                managed=self.managed,
            )
            self.loop(loop)
            return list(loop.differences())
        finally:
            for world in loop.worlds:
                world.end()
            loop.folders.close()


LOOPS = {
    "first gradient in a later pass": Known(loop=_late, spec="cpu", without="keep"),
    "first gradient in a later pass, late": Known(loop=_late, spec="late pinned", without="keep"),
    "accumulation changed": Known(loop=_changed, spec="cpu", without="keep"),
    "boundary by hand": Known(loop=_moved, spec="cpu", without="keep"),
    "shared layer": Known(loop=_shared, spec="late staged long", accumulation=2, without="settle"),
    "pass that raises, then the next": Known(
        loop=_survived, spec="late staged long", accumulation=2, without="settle"
    ),
    "pass that raises, then a step": Known(
        loop=_stepped, spec="late pinned", without="wait", differs="master weights"
    ),
    "pass that raises, then an unmanaged step": Known(
        loop=_finalized, spec="late pinned", managed=False, without="wait", differs="master weights"
    ),
    "norms of a dead pass": Known(
        loop=_dead, spec="late staged host sums", accumulation=2, without="settle", differs="norm"
    ),
    "loss through another engine": Known(
        loop=_gan, spec="late staged long", accumulation=2, without="settle"
    ),
    "another engine's gradients, then a step": Known(
        loop=_theirs, spec="late pinned", without="wait", differs="master weights"
    ),
    "edited gradient": Known(loop=_edited, spec="cpu", without="leave edits"),
    "has_overflow by hand": Known(loop=_overflow, spec="cpu", without="keep", differs="what was seen"),
}
"""By what happens in them."""


def main() -> int:
    """Run all of them; 1 where one differs, or where one does not without what holds it."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    wrong = 0
    with single_process_environment(), started():
        for name, known in LOOPS.items():
            found = known.differences()
            wrong += bool(found)
            print(f"{name}: {found[0][:200] if found else 'the same'}", flush=True)
            found = known.differences(known.without)
            there = sorted({one.split(" differs: ")[0] for one in found})
            wrong += not any(one.startswith(known.differs) for one in there)
            print(f"{name}, without `{known.without}`: {', '.join(there) or 'nothing'} differ", flush=True)
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
