"""Puts the compiled pass into the step of a live `DeepSpeedZeroOptimizer_Stage3`, and takes it out again.

On the optimizer instance, never on the class, three methods are replaced: `unscale_and_clip_grads`, which leaves out
a multiplication by exactly 1 and else only notes the factor; `_reassign_or_swap_out_partitioned_parameters`, which
finds the 16-bit weights where they belong; and `_post_step`, which waits for them. The pass itself stands in for the
operation of DeepSpeed's CPU Adam, so that step counters, param groups and schedulers stay with DeepSpeed.

First come steps of DeepSpeed's own beside which the pass runs on copies, then steps by either way in turn, which are
timed, then those of the faster. Whatever fails, DeepSpeed's operation finishes the step from where the pass stood.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec

from autotune_offload.engine import step_stage3
from autotune_offload.engine.entrants import Confirmed
from autotune_offload.engine.rounds import OWN
from autotune_offload.engine.step_adam import Call, Factor, FusedAdam, Operation, call_of, in_fp32
from autotune_offload.engine.step_check import CHECKED_ELEMENTS, CHECKED_STEPS, Sample, StepCheck
from autotune_offload.engine.step_contest import StepContest
from autotune_offload.errors import in_words
from autotune_offload.machine.device import Device
from autotune_offload.machine.ranges import named
from autotune_offload.upstream import CPU_ADAM_OPERATION, DESTROY, POST_STEP, REASSIGN, UNFLATTEN, UNSCALE

_KEPT_TIMES = 100

_log = logging.getLogger("autotune_offload")


class StepStatus(msgspec.Struct, kw_only=True):
    """What has become of the step so far. Times are host seconds of one step, without norms and overflow check."""

    why_not: str | None = None
    """Why DeepSpeed's own step runs: from the start, or since the pass was taken out."""
    check: StepCheck | None = None
    """None until the first steps have been compared."""
    confirmed: Confirmed | None = None
    """What came of the rounds in which steps were made either way; None until then."""
    threads: int | None = None
    """Host threads of the pass that makes the steps; 0 where they are DeepSpeed's own, None while that is open."""
    seconds: tuple[float, ...] = ()
    """The latest hundred of steps by the pass that were not part of a round."""
    skipped_scalings: int = 0
    """Sub-groups whose gradients would have been multiplied by exactly 1."""


class _SubGroup(msgspec.Struct):
    """The one that DeepSpeed's `step` is at, between its first and its last call for it."""

    number: int
    factor: Factor
    scale: float
    sample: Sample | None = None
    call: Call | None = None
    fuses: bool = False
    delivered: bool = False


class StepAttachment:
    """One optimizer with the pass in its step, or only without multiplications by 1."""

    def __init__(
        self,
        optimizer: Any,
        device: Device,
        fused: FusedAdam | None,
        contest: StepContest | None,
        *,
        checks: bool,
    ) -> None:
        """Replaces nothing yet. Without `contest`, `threads` says which way every step goes."""
        self.status = StepStatus()
        self.threads = OWN
        self._optimizer = optimizer
        self._device = device
        self._fused = fused
        self._contest = contest
        self._unchecked = CHECKED_STEPS if checks and fused is not None else 0
        self._compared = self._turn = 0
        self._stock: dict[str, Callable[..., Any]] = {}
        self._ours: dict[str, Callable[..., Any]] = {}
        self._before: dict[str, Any] = {}
        self._own: Any = None
        self._operation: Operation | None = None
        self._at: _SubGroup | None = None
        self._way: int | None = None
        self._delivered: list[int] = []
        self._seconds = self._began = 0.0

    @property
    def active(self) -> bool:
        """From `replace_methods` until `remove`."""
        return bool(self._ours)

    def replace_methods(self) -> None:
        """Put ours in charge."""
        optimizer = self._optimizer
        self._ours = {
            UNSCALE: self._unscale,
            REASSIGN: self._reassign,
            POST_STEP: self._post_step,
            DESTROY: self._destroy,
        }
        self._stock = {name: getattr(optimizer, name) for name in self._ours}
        self._before = {name: own for name, own in vars(optimizer).items() if name in self._ours}
        vars(optimizer).update(self._ours)
        if self._fused is not None:
            inner = optimizer.optimizer
            self._own = getattr(inner, CPU_ADAM_OPERATION)
            self._operation = Operation(self._own, self._adam_update)
            setattr(inner, CPU_ADAM_OPERATION, self._operation)

    def remove(self) -> bool:
        """Put DeepSpeed's back, and finish what is under way; False where that has been done before."""
        if not self.active:
            return False
        ours, self._ours = self._ours, {}
        own = vars(self._optimizer)
        for name in [name for name, method in ours.items() if own.get(name) == method]:
            del own[name]
            own.update({name: self._before[name]} if name in self._before else {})
        if self._at is not None and self._at.fuses and not self._at.delivered:
            self._scale_late(self._at)
        self._take_pass_out()
        return True

    def _take_pass_out(self) -> None:
        """From here on DeepSpeed's own step, still without multiplications by 1 while the methods are ours."""
        inner, operation, fused = self._optimizer.optimizer, self._operation, self._fused
        self._operation = self._fused = self._contest = None
        if operation is not None and getattr(inner, CPU_ADAM_OPERATION) is operation:
            setattr(inner, CPU_ADAM_OPERATION, self._own)
        if fused is not None:
            self._arrive(fused)
            try:
                fused.pieces.close()
            except Exception:
                _log.debug("autotune-offload: buffers could not be given back", exc_info=True)

    def give_up(self, cause: str) -> None:
        """DeepSpeed's own step for good, said once."""
        if self._fused is None:
            return
        self.status.why_not, self.status.threads = cause, OWN
        _log.warning("autotune-offload: %s; from here on DeepSpeed makes the steps itself", cause)
        self._take_pass_out()

    # -- what DeepSpeed calls, in this order --

    def _unscale(self, sub_group: int, total_norm: Any) -> None:
        """Same arguments and effect as DeepSpeed's, which may come later, with the pass."""
        self._began = time.perf_counter()
        self._at = None
        if not self.active:
            self._stock[UNSCALE](sub_group, total_norm)
            return
        if self._way is None or sub_group == 0:
            self._begin_step()
        factor = step_stage3.unscaling_factor(self._optimizer, total_norm)
        scale, gradients = in_fp32(factor), step_stage3.gradient(self._optimizer, sub_group)
        if scale is None or gradients is None:
            self._stock[UNSCALE](sub_group, total_norm)
            return
        self._at = at = _SubGroup(sub_group, factor, scale)
        if self._fused is not None and self._unchecked:
            at.sample = self._sample(gradients)
        elif self._fused is not None and self._way != OWN:
            to = step_stage3.target(self._optimizer, sub_group, self._device)
            at.fuses = to is not None
        if at.fuses:
            return
        if scale == 1.0 and not self._exploring:
            self.status.skipped_scalings += 1
        else:
            self._stock[UNSCALE](sub_group, total_norm)

    def _adam_update(self, *arguments: Any) -> Any:
        """The one call of DeepSpeed's CPU Adam for the sub-group."""
        own, at, fused = self._own, self._at, self._fused
        if fused is None or arguments[0] != self._optimizer.optimizer.opt_id:
            return own.adam_update(*arguments)
        call = call_of(own, arguments)
        fused.advance(call.setting)
        if at is None:
            return call.own(call.memory)
        at.call = call
        if at.sample is not None:
            return self._own_with_sample(call, at.sample)
        if not at.fuses:
            with named(self._device, "DeepSpeed's Adam"):
                return call.own(call.memory)
        with named(self._device, f"the pass, host threads: {self._way}"):
            return self._by_the_pass(fused, call, at)

    def _by_the_pass(self, fused: FusedAdam, call: Call, at: _SubGroup) -> Any:
        to = step_stage3.target(self._optimizer, at.number, self._device)
        master = self._optimizer.fp32_partitioned_groups_flat[at.number]
        odd = call.memory.why_not()
        if odd is None and call.memory.weights.data_ptr() != master.data_ptr():
            odd = "its weights are not those of the sub-group"
        if to is None or odd is not None:
            self._scale_late(at)
            self.give_up(f"the pass cannot make this step: {odd or 'its 16-bit weights are elsewhere'}")
            return call.own(call.memory)
        at.fuses = False  # the factor is taken care of
        failure = fused.update(call, at.factor, at.scale, to, self._way or 1)
        if failure is None:
            at.delivered = True
            self._delivered.append(at.number)
        else:
            self.give_up(f"the pass failed ({in_words(failure)})")
            if not isinstance(failure, Exception):
                raise failure
        return 0

    def _reassign(self, sub_group: int) -> None:
        """Same argument and effect as DeepSpeed's: the 16-bit weights are or will be there when the step ends."""
        at, self._at = self._at, None
        if at is None or at.number != sub_group:
            self._stock[REASSIGN](sub_group)
            return
        if at.fuses:  # DeepSpeed's optimizer has left it out
            self._scale_late(at)
            self.give_up("DeepSpeed's optimizer made no step of a sub-group")
        if at.delivered:
            getattr(self._optimizer, UNFLATTEN)(sub_group)
        else:
            self._stock[REASSIGN](sub_group)
        self._seconds += time.perf_counter() - self._began
        if at.sample is not None:
            self._compare(at, at.sample)

    def _post_step(self, *args: Any, **kwargs: Any) -> Any:
        """DeepSpeed's own, once all 16-bit weights are there."""
        began = time.perf_counter()
        if self._fused is not None:
            self._arrive(self._fused)
        way, self._way = self._way, None
        if way is not None:
            self._end_step(way, self._seconds + time.perf_counter() - began)
        return self._stock[POST_STEP](*args, **kwargs)

    def _destroy(self) -> None:
        self.remove()
        self._stock[DESTROY]()

    # -- one step --

    def _begin_step(self) -> None:
        self._seconds = 0.0
        self._delivered.clear()
        self._turn += 1
        self._way = OWN
        if self._fused is None:
            return
        try:
            cause = step_stage3.why_not_now(self._optimizer)
        except Exception as error:
            cause = f"whether the pass may make this step cannot be told ({in_words(error)})"
        if cause is not None:
            self.give_up(cause)
            return
        if not self._unchecked:
            self._way = self.threads if self._contest is None else self._contest.threads
        if self._way != OWN and not self._device.shares_host_memory:
            self._device.synchronize()  # host weights may still be on their way to where they are gathered

    def _end_step(self, way: int, seconds: float) -> None:
        if self._fused is None:
            return
        if self._unchecked:
            self._unchecked -= 1
            if not self._unchecked:
                self.status.check = StepCheck(steps=CHECKED_STEPS, elements=self._compared)
            return
        if way != OWN and not self._exploring:
            self.status.seconds = (*self.status.seconds, seconds)[-_KEPT_TIMES:]
        if (contest := self._contest) is None:
            return
        is_own, self.status.confirmed = contest.over(seconds), contest.confirmed
        self.status.threads = None if contest.exploring else contest.threads
        if is_own:
            self.status.why_not = "" if contest.confirmed is None else contest.confirmed.sentence()
            self._take_pass_out()

    @property
    def _exploring(self) -> bool:
        return self._contest is not None and self._contest.exploring

    def _arrive(self, fused: FusedAdam) -> None:
        """Wait for what is on its way to the device; should that fail, DeepSpeed brings it there once more."""
        try:
            with named(self._device, "wait for the step's weights"):
                fused.pieces.drain()
        except Exception as error:
            again = list(self._delivered)
            self._delivered.clear()
            self.give_up(f"the pass failed ({in_words(error)})")
            for sub_group in again:
                self._stock[REASSIGN](sub_group)

    def _scale_late(self, at: _SubGroup) -> None:
        """What `unscale_and_clip_grads` has put off."""
        at.fuses = False
        gradients = step_stage3.gradient(self._optimizer, at.number)
        if gradients is not None:
            gradients.mul_(at.factor)

    # -- the self-check --

    def _sample(self, gradients: Any) -> Sample | None:
        most = CHECKED_ELEMENTS // max(len(self._optimizer.fp32_partitioned_groups_flat), 1)
        try:
            return Sample(gradients, most, self._turn)
        except Exception as error:  # most likely no memory for the copies
            self.give_up(f"the self-check of the step could not be made ({in_words(error)})")
            return None

    def _own_with_sample(self, call: Call, sample: Sample) -> Any:
        try:
            if (odd := call.memory.why_not()) is not None:
                raise ValueError(odd)
            sample.before(call.memory)
        except Exception as error:
            self.give_up(f"the self-check of the step could not be made ({in_words(error)})")
        return call.own(call.memory)

    def _compare(self, at: _SubGroup, sample: Sample) -> None:
        fused, rounded = self._fused, self._optimizer.fp16_partitioned_groups_flat[at.number]
        if fused is None or at.call is None or rounded is None:
            return
        try:
            found = sample.compare(at.call, rounded, fused, at.scale)
        except Exception as error:
            found = in_words(error)
        self._compared += sample.elements
        if found is not None:
            steps = CHECKED_STEPS - self._unchecked + 1
            self.status.check = StepCheck(steps=steps, elements=self._compared, mismatch=found)
            why = f"the self-check of the step failed: {found}"
            if self._contest is not None:
                self._contest.found_wrong(why)
            self.give_up(why)
