"""Puts a gradient path into a live `DeepSpeedZeroOptimizer_Stage3`, and takes it out again.

The path replaces methods on the optimizer instance, never on the class: `partition_grads`, which moves
gradients as they are reduced, the epilogue of a backward pass, at whose end everything must be on the host, and
whatever reads or writes what a path fills, so that it waits first. A backward pass need not come to its epilogue
(it may raise, or run through another engine's module), and a partition may be met again before it does: nothing
is sent to memory for which something is still under way.

What DeepSpeed keeps beside the fp32 gradient is kept as it keeps it: the accumulation buffer holds the values in
low precision whenever the fp32 gradient holds them, and each partition has its norm (see `norms`). A path that
fails has left the values there, so that none is lost.

DeepSpeed's own code stays in charge of what a path would not do exactly: NVMe sub-groups, sub-groups
that stay on the device (`ratio` below 1), and the deferred copies of unmanaged accumulation. It also
takes over, for good, as soon as the last path has failed.

Several paths may take turns, DeepSpeed's own code among them (see `confirmation`). One of them carries a whole
accumulation. The next one's turn begins with the optimizer's step, when everything that was sent has arrived.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from autotune_offload.engine import overflow
from autotune_offload.engine.clock import OffloadClock
from autotune_offload.engine.contest import Contest
from autotune_offload.engine.entrants import Confirm, Entrant, Tell
from autotune_offload.engine.norms import Norms
from autotune_offload.engine.passes import Passes
from autotune_offload.engine.replacement import Replacement
from autotune_offload.engine.self_check import SelfCheck
from autotune_offload.engine.stage3 import Stage3
from autotune_offload.engine.status import Account, Status
from autotune_offload.engine.tally import By
from autotune_offload.engine.visible import Events
from autotune_offload.errors import in_words
from autotune_offload.machine.device import Device
from autotune_offload.machine.ranges import named
from autotune_offload.paths.accumulation import Moment
from autotune_offload.paths.path import Spec
from autotune_offload.upstream import (
    AWAY,
    DESTROY,
    EPILOGUE,
    FINALIZE,
    NORMS,
    OVERFLOW,
    PARTITION,
    READERS,
    STEP_BEGINS,
)

_log = logging.getLogger("autotune_offload")


class Attachment:
    """One optimizer with one path in it, or with several that take turns."""

    def __init__(
        self,
        engine: Any,
        choice: Spec,
        device: Device,
        *,
        check: bool,
        confirm: Confirm | None = None,
        tell: Tell | None = None,
    ) -> None:
        """Builds the paths for the dtype that gradients accumulate in; replaces nothing yet.

        Raises what `paths.build` does for `choice`.
        """
        self.status = Status()
        self.device = device
        self.stage3 = Stage3(engine.optimizer)
        self._engine = weakref.ref(engine)
        self._methods = Replacement(engine.optimizer)
        self._norms = Norms(self.stage3, device)
        self._passes = Passes()
        self._clock = OffloadClock(device.now)
        self._account = Account(self.status, self.stage3, device)
        self._events = Events()
        self._checked = False
        checks = self if check else None
        self._contest = Contest(
            self.stage3, device, self._norms, choice, confirm, self._path_failed, tell=tell, checks=checks
        )
        self._account.who(self._contest)

    @property
    def active(self) -> bool:
        """Whether a path carries gradients now."""
        return self._methods.active and self._contest.present.delivery is not None

    def replace_methods(self) -> None:
        """Put the path in charge."""
        readers = (NORMS, AWAY, *READERS)
        self._methods.put(
            {
                PARTITION: self._partition_grads,
                EPILOGUE: self._epilogue,
                STEP_BEGINS: self._step_begins,
                DESTROY: self._destroy,
                **{name: functools.partial(self._read, name) for name in readers},
            }
        )

    def look(self) -> None:
        """Note in the status who is called now; from any thread."""
        replaced = self._methods.replaced(PARTITION, EPILOGUE)
        if self.active:
            self.status.replaced = replaced

    @property
    def pinned_bytes(self) -> dict[str, int]:
        """What is page-locked for the path now, by what it is for."""
        return self._contest.pinned_bytes if self._methods.active else {}

    def remove(self, why: str) -> bool:
        """Put DeepSpeed's methods back, finish what is under way, and give the buffers back.

        A method that somebody has wrapped since stays, and does what DeepSpeed's own does. False where
        all this has been done before.
        """
        if not self._methods.active:
            return False
        self.look()
        self._account.publish()
        self._methods.take_out()
        self._contest.end()
        try:
            self._norms.make_all_exact()
        except Exception:  # they differ in their last bits at most
            _log.debug("autotune-offload: norms could not be computed again", exc_info=True)
        self.status.ended = why if self.status.why_not is None else None
        return True

    def give_up(self, cause: str) -> None:
        """The path that carries now carries no more."""
        self._leaves(self._contest.present, cause)

    def mismatch(self, found: str, result: SelfCheck) -> None:
        """The self-check found a difference in what the path that carries now did."""
        self.status.check = result
        self._contest.found_wrong(self._contest.present, f"the self-check failed: {found}")
        self.give_up(f"the self-check failed: {found}")

    def _path_failed(self, entrant: Entrant, error: BaseException) -> None:
        path = "" if entrant.spec is None else f"{entrant.spec.path} "
        self._leaves(entrant, f"the {path}path failed ({in_words(error)})")

    def _leaves(self, entrant: Entrant, cause: str) -> None:
        """Other paths go on without it, or DeepSpeed's own code alone, for good; said once."""
        if entrant.why_not is not None or not self._methods.active:
            return
        if self._contest.leave(entrant, cause):
            _log.warning("autotune-offload: %s; of the paths that are tried, others go on", cause)
            self._account.who(self._contest)
            return
        self._end(cause)

    def _end(self, cause: str) -> None:
        self.status.why_not = cause
        _log.warning("autotune-offload: %s; from here on DeepSpeed's own code carries the gradients", cause)
        self.remove(cause)

    # -- what DeepSpeed calls --

    def _partition_grads(
        self, params_to_release: Sequence[Any], grad_partitions: Sequence[Tensor]
    ) -> list[Tensor]:
        """Same arguments, result and effects as `DeepSpeedZeroOptimizer_Stage3.partition_grads`."""
        if not self._methods.active:
            return list(self._methods.former(PARTITION)(params_to_release, grad_partitions))
        self._clock.begin()
        with named(self.device, self._contest.present.name):
            moment = Moment(self.stage3.at_first, self.stage3.at_boundary)
            if self._contest.present is self._contest.own:
                for param, gradient in zip(params_to_release, grad_partitions, strict=False):
                    self.count("deepspeed", param, gradient, moment)
                buffers = self.stock(params_to_release, grad_partitions)
            else:
                buffers = []
                for param, gradient in zip(params_to_release, grad_partitions, strict=False):
                    buffers += self._one(param, gradient, moment)
            self._account.publish()
        return buffers

    def _one(self, param: Any, gradient: Tensor, moment: Moment) -> list[Tensor]:
        if not self.active:
            return self.leave(param, gradient)
        if not self.stage3.holds_data(param):
            param.grad = None
            return []
        checks = self._contest.present.checks
        if checks is None:
            return self.move(param, gradient, moment)
        kind = self._passes.kind(self._engine(), param, moment)
        self._passes.met(param, moment)
        return checks.compare(param, gradient, moment, kind)

    def _epilogue(self) -> None:
        """DeepSpeed's own epilogue, then what the path still holds."""
        if not self._methods.active:
            self._methods.former(EPILOGUE)()
            return
        with named(self.device, "epilogue"):
            self._methods.former(EPILOGUE)()
            with named(self.device, f"wait for {self._contest.present.name}"):
                self.drain()
        self._clock.end()
        self._passes.passed()
        checks = self._contest.present.checks
        if checks is not None and self.stage3.at_boundary and checks.end_of_accumulation():
            self._checked = True
            self.status.check = checks.result()

    def _step_begins(self, *args: Any, **kwargs: Any) -> Any:
        """An accumulation is over: what was sent arrives, and another may carry the next."""
        if self._methods.active:
            self.drain()
            self._passes.stepped()
            self._account.stepped()
            self.look()
            try:
                self._turn()
            except Exception as error:  # whatever it is, training goes on
                self._end(f"the confirmation failed ({in_words(error)})")
        return self._methods.former(STEP_BEGINS)(*args, **kwargs)

    def _turn(self) -> None:
        took, checked, self._checked = self._clock.take(), self._checked, False
        if not took.passes or not self._methods.active:
            return
        seconds = took.seconds if took.whole and not checked else None
        if seconds is not None:
            self.status.took(seconds, by_deepspeed=self._contest.present is self._contest.own)
        self._contest.turn(seconds, took.passes)
        self._account.who(self._contest)
        self._events.write(
            self._engine(), seconds=seconds, gain=self._contest.gain, switches=self._contest.switches
        )

    def _destroy(self) -> None:
        self.remove("the engine was destroyed")
        self._methods.former(DESTROY)()

    def _read(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """What reads or writes that which a path fills: everything has arrived before it does."""
        if self._methods.active:
            self.drain()
            if name == NORMS:
                self._norms.make_exact_where_it_shows(*args, **kwargs)
            elif name == FINALIZE:
                self._account.deferred()
            elif name == AWAY:
                self._norms.make_all_exact()
            elif name == OVERFLOW:
                former = self._methods.former(name)
                return overflow.by_extremes(self.stage3.optimizer, former, *args, **kwargs)
        return self._methods.former(name)(*args, **kwargs)

    # -- one partition --

    def move(self, param: Any, gradient: Tensor, moment: Moment) -> list[Tensor]:
        """All that is done with one partition; DeepSpeed's buffer view."""
        buffers = self.carry(param, gradient, moment)
        if param.grad is not None:  # its memory may be used again only after this stream's work
            self.device.record_stream(param.grad)
        param.grad = None
        return buffers

    def carry(self, param: Any, gradient: Tensor, moment: Moment, by: By = "path") -> list[Tensor]:
        """Accumulate one partition's gradient, and at the boundary offload it; DeepSpeed's buffer view."""
        destination, delivery = self.stage3.destination(param, gradient), self._contest.present.delivery
        if destination is None or delivery is None:
            return self.leave(param, gradient)
        delivery.settle(param)
        if not self.active:
            return self.leave(param, gradient)
        low, gradient = self.stage3.buffer(param, gradient), gradient.contiguous().view(-1)
        goal = destination if moment.boundary else None
        try:
            send = delivery.prepare(param, gradient, low, goal, moment)
        except Exception as error:  # nothing of DeepSpeed's has been changed so far
            self._path_failed(self._contest.present, error)
            return self.leave(param, gradient)
        self.stage3.saw(param)
        send()
        crossed = delivery.link_bytes(gradient, low, moment)
        self._account.carried(by, low, moment, crossed, by_path=self.active)
        return [low]

    def carry_piece(self, param: Any, gradient: Tensor, moment: Moment, piece: slice) -> bool:
        """The same of a piece, as if there were no more of it, and its norm; there when this returns, or False.

        Nothing may be under way for the partition.
        """
        destination, entrant = self.stage3.destination(param, gradient), self._contest.present
        assert destination is not None and entrant.delivery is not None
        delivery = entrant.delivery
        low = self.stage3.buffer(param, gradient)[piece]
        values, goal = gradient.contiguous().view(-1)[piece], destination[piece]
        try:
            send = delivery.prepare(param, values, low, goal, moment)
            send()
            self.drain()
        except Exception as error:
            self._path_failed(entrant, error)
        if self.active:
            self._account.crossed(delivery.link_bytes(values, low, moment), low, moment)
        return self.active

    def count(self, by: By, param: Any, gradient: Tensor, moment: Moment) -> None:
        """One partition was moved, if it holds any data."""
        if self.stage3.holds_data(param):
            itemsize = self.stage3.optimizer.gradient_accumulation_dtype.itemsize
            self._account.add(by, gradient.numel() * itemsize, moment)

    def leave(self, param: Any, gradient: Tensor) -> list[Tensor]:
        """One partition by DeepSpeed's own code, counted as left to it."""
        self.status.left_to_deepspeed += self.stage3.holds_data(param)
        self.count("deepspeed", param, gradient, Moment(self.stage3.at_first, self.stage3.at_boundary))
        return self.stock([param], [gradient])

    def stock(self, params: Sequence[Any], gradients: Sequence[Tensor]) -> list[Tensor]:
        """Partitions by DeepSpeed's own code."""
        delivery = self._contest.present.delivery
        for param in params if self._methods.active else ():
            if delivery is not None:
                delivery.settle(param)
            if not self.stage3.at_boundary:
                self._norms.make_exact(param)
        moved: list[Tensor] = self._methods.former(PARTITION)(params, gradients)
        return moved

    def drain(self) -> None:
        """Return when every gradient is where it belongs."""
        delivery = self._contest.present.delivery
        if delivery is not None:
            delivery.drain()
