"""Every wait by name, with the drawn runs that go wrong without it, or with the reason why none can.

`tests.race.waits` finds them in the source. A new one belongs in here, and so does a new name of an old one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from autotune_offload.records import Record
from tests.race.moves import moves
from tests.race.training import gradients
from tests.race.weights import steps


class Dies(Record, frozen=True, kw_only=True):
    """Without the wait some of these drawn runs differ from DeepSpeed's own code."""

    run: Callable[..., None]
    fixed: Mapping[str, Any]
    """What is not drawn, so that fewer seeds are enough."""


class Stays(Record, frozen=True, kw_only=True):
    """No drawn run can miss it, and why it is there."""

    why: str


def _training(**fixed: Any) -> Dies:
    return Dies(
        run=gradients,
        fixed={"check": False, "turns": False, "left": False, "between": None, "interrupt": False} | fixed,
    )


def _checked(**fixed: Any) -> Dies:
    return _training(check=True, **fixed)


def _moves(what: str, **fixed: Any) -> Dies:
    return Dies(run=moves, fixed={"what": what, "fail": False} | fixed)


def _failing(**fixed: Any) -> Dies:
    return _moves("path", fail=True, threads=2, **fixed)


def _steps(**fixed: Any) -> Dies:
    return Dies(run=steps, fixed={"fail": False, "check": False, "step": "fused", "on host": False} | fixed)


_A_RECORD = Stays(why="no wait: what a self-check found, in a record")
_STARTS = Stays(
    why="how threads start; on the race device they are others (tests/paths/test_path.py: Entered)"
)
_REPLAYED = Stays(why="DeepSpeed's own code has it, and is timed as it is")
_OWN_CLOCK = Stays(
    why="on described machines only, whose threads have done their work when they have taken it"
)
_VERIFIED = Stays(
    why="of the process that trains for `verify`, around DeepSpeed's whole step: it times, and moves nothing"
)

_AFTER_THE_EPILOGUE = Stays(
    why="which stream the flag is read on: DeepSpeed's epilogue has synchronized the device where there are two, so "
    "only who asks for the overflow before it could miss it (tests/engine/test_one_flag.py: its own stream)"
)

WAITS: dict[str, Dies | Stays] = {
    # overflows of stages 1 and 2
    "engine.one_flag: OneFlag._on_its_stream: self._device.on": _AFTER_THE_EPILOGUE,
    # sums of micro-steps
    "paths.accumulation: Accumulation.drain: self.device.record_event().synchronize": _training(
        **{
            "between": "sums",
            "detach": False,
            "readers wait": False,
            "place": "device",
            "pinned": True,
            "accumulation": 3,
        }
    ),
    "paths.accumulation: Accumulation.drain: sums.drain": _training(place="host", accumulation=3),
    "paths.accumulation: HostSums.add: self._ring.drain": _moves("sums", order=(1, 1, 1)),
    "paths.accumulation: HostSums.drain: self._ring.drain": _moves("sums"),
    "paths.accumulation: HostSums.recover: self._ring.abandon": _training(
        between="fail", place="host", accumulation=3
    ),
    # straight into the destination
    "paths.destination: DestinationPath.offload: self.device.record_event": _moves("path", path="pinned"),
    "paths.destination: DestinationPath._widen_later: self.device.record_event": _moves(
        "path", path="pinned"
    ),
    "paths.destination: DestinationPath._widen: event.synchronize": _moves("path", path="pinned"),
    "paths.destination: DestinationPath.drain: self._widening[0].result": _moves("path", threads=2),
    "paths.destination: DestinationPath.drain: self._queued.synchronize": _moves("path", path="pinned"),
    "paths.destination: DestinationPath.recover: wait": _failing(path="pinned", cast="host"),
    # through a ring
    "paths.ring: Ring.put: self._device.record_event": _moves("path", path="staged"),
    "paths.ring: Ring.put: event.synchronize": _moves("path", path="staged"),
    "paths.ring: Ring._empty: slot.future.result": _moves("path", path="staged", threads=2),
    "paths.ring: StagedPath.drain: self._ring.drain": _moves("path", path="staged"),
    "paths.ring: StagedPath.recover: self._ring.abandon": _failing(path="staged"),
    # DeepSpeed's own sequences
    "paths.stock: StockPath.drain: self.device.record_event().synchronize": _moves("stock", pinned=True),
    "paths.stock: _BounceBuffer.offload: self.device.synchronize": _REPLAYED,
    # host threads
    "paths.threads: HostThreads._start: together.wait": _STARTS,
    "paths.threads: HostThreads._start: future.result": _STARTS,
    "paths.threads: HostThreads.copy: future.result": _moves("host_memory", threads=2, norm=False),
    "paths.threads: HostThreads.widen: future.result": _moves("host_memory", threads=2, norm=True),
    "paths.threads: _single_threaded: together.wait": _STARTS,
    # the step
    "paths.pieces: Pieces._in_place: future.result": _steps(**{"on host": True, "fail": True}),
    "paths.pieces: Pieces._dealt_out: future.result": _OWN_CLOCK,
    "paths.pieces: Pieces._through_ring: future.result": _steps(),
    "paths.pieces: Pieces._settle: wait": _steps(fail=True),
    "paths.pieces: Pieces.drain: ring.drain": _steps(),
    "paths.pieces: _Ring.free: event.synchronize": _steps(),
    "paths.pieces: _Ring.send: self._device.record_event": _steps(),
    "paths.pieces: _Ring.close: self._device.synchronize": _steps(fail=True),
    "engine.step: StepAttachment._begin_step: self._device.synchronize": _steps(**{"on host": True}),
    "engine.step: StepAttachment._arrive: fused.pieces.drain": _steps(),
    # the attached path
    "engine.attachment: Attachment._epilogue: self.drain": _training(look=True),
    "engine.attachment: Attachment._epilogue: checks.result": _A_RECORD,
    "engine.attachment: Attachment._step_begins: self.drain": _training(**{"no epilogue": True}),
    "engine.attachment: Attachment._read: self.drain": _training(between="read"),
    "engine.attachment: Attachment.move: self.device.record_stream": _training(view=True),
    "engine.attachment: Attachment.carry: delivery.settle": _training(order=(1, 1, 2, 0, 0), threads=2),
    "engine.attachment: Attachment.carry_piece: self.drain": _checked(),
    "engine.attachment: Attachment.stock: delivery.settle": Dies(
        run=gradients, fixed={"check": False, "turns": False, "order": (1, 1, 2, 0, 0), "threads": 2}
    ),
    "engine.attachment: Attachment.drain: delivery.drain": _training(),
    "engine.delivery: Delivery.settle: self.drain": _training(order=(1, 1, 2, 0, 0), threads=2),
    "engine.delivery: Delivery.drain: self.device.on": _training(
        **{
            "between": "sums",
            "detach": False,
            "readers wait": False,
            "place": "device",
            "pinned": True,
            "accumulation": 3,
        }
    ),
    "engine.delivery: Delivery.drain: self._path.drain": _training(),
    "engine.delivery: Delivery.drain: self._accumulation.drain": _training(place="host", accumulation=3),
    "engine.delivery: Delivery.end: self.drain": _training(between="detach"),
    "engine.delivery: Delivery._recover: self.device.on": _training(
        between=["fail", "detach"], path="staged", threads=2, accumulation=1, count=4
    ),
    "engine.delivery: Delivery._recover: self.device.synchronize_stream": _training(
        interrupt=0.5, path="pinned", pinned=True
    ),
    "engine.self_check: Checks._both: ours.drain": _checked(**{"no epilogue": True, "accumulation": 3}),
    "engine.self_check: Checks._both: ours.device.synchronize_stream": _checked(
        order=(1, 1, 2, 0, 0), left=0.5, accumulation=3, pinned=True
    ),
    "engine.self_check: Checks._both: ours.drain #2": _checked(),
    "engine.self_check: Checks._both: ours.device.synchronize_stream #2": _checked(pinned=True),
    "engine.self_check: Checks._in_pieces: ours.drain": _checked(
        **{"no epilogue": True, "accumulation": 3, "order": (2,), "place": "host", "dtype": torch.bfloat16}
    ),
    "engine.self_check: Checks._in_pieces: ours.device.synchronize_stream": _checked(
        order=(2, 2, 1, 0), left=0.5, accumulation=3, pinned=True
    ),
    "engine.self_check: Checks._in_pieces: ours.device.synchronize_stream #2": _checked(pinned=True),
    "engine.self_check: Checks._judge: self.result": _A_RECORD,
    # verify
    "engine.trainee: Clock.mark: event.record": _VERIFIED,
    "engine.trainee: Trainee.train: self.clock.accelerator.synchronize": _VERIFIED,
    "engine.trainee: Trainee.train: self.clock.accelerator.synchronize #2": _VERIFIED,
}

FIRST: dict[str, int] = {
    "paths.accumulation: HostSums.recover: self._ring.abandon": 59,
    "paths.pieces: Pieces._in_place: future.result": 6,
    "paths.pieces: Pieces._settle: wait": 14,
    "paths.pieces: Pieces.drain: ring.drain": 31,
    "engine.step: StepAttachment._arrive: fused.pieces.drain": 31,
    "engine.attachment: Attachment.carry: delivery.settle": 10,
    "engine.attachment: Attachment.stock: delivery.settle": 53,
    "engine.delivery: Delivery.settle: self.drain": 10,
    "engine.delivery: Delivery.drain: self._path.drain": 8,
    "engine.delivery: Delivery.end: self.drain": 16,
    "engine.delivery: Delivery._recover: self.device.on": 121,
    "engine.delivery: Delivery._recover: self.device.synchronize_stream": 110,
    "engine.self_check: Checks._both: ours.drain": 9,
    "engine.self_check: Checks._in_pieces: ours.device.synchronize_stream": 13,
}
"""A seed that misses the wait, tried before others where it takes long to find one: a hint, and no more."""
