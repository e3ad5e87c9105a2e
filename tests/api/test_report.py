"""What the report says is so: who carries, who has carried how much, and what is page-locked."""

from __future__ import annotations

import copy
import json
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch import Tensor

from autotune_offload import units
from autotune_offload.api.page_locked import page_locked
from autotune_offload.api.report import Report, report, reports
from autotune_offload.engine.attach import detach
from autotune_offload.engine.delivery import Delivery
from autotune_offload.engine.tally import Carried
from autotune_offload.errors import ConfigError
from autotune_offload.machine.spans import Kept, Span
from autotune_offload.records import to_plain
from tests.engine.test_attach import (
    SIZES,
    DeepSpeedZeroOptimizer_Stage3,
    Engine,
    Streamed,
    attached,
    candidate,
    gradients,
    on_host,
)
from tests.factories import make_profile
from tests.fakes import DeferredDevice

ALL = Carried(partitions=len(SIZES), bytes=2 * sum(SIZES))
IN_WORDS = f"3 partitions ({units.size(2 * sum(SIZES))})"


class Unmanaged(DeepSpeedZeroOptimizer_Stage3):
    """Adds up, and takes to fp32 what it has summed when the engine steps, as 0.19.5 and newer do it."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self._offload_boundary_param_ids: set[int] = set()

    def partition_grads(self, params: Any, gradients: Any) -> list[Tensor]:
        """Notes whose gradients there were."""
        self._offload_boundary_param_ids |= {param.ds_id for param in params}
        return super().partition_grads(params, gradients)

    def finalize_gradient_accumulation_boundary(self) -> None:
        """What the engine calls when it steps."""
        for ds_id in self._offload_boundary_param_ids:
            _, offset, size = self.grad_position[ds_id]
            low = self.buffer.narrow(0, offset, size)
            self.fp32_partitioned_groups_flat[0].grad.narrow(0, offset, size).copy_(low)
            self.norm_for_param_grads[ds_id] = self._constant_buffered_norm2(low)
        self._offload_boundary_param_ids = set()


Unmanaged.__name__ = DeepSpeedZeroOptimizer_Stage3.__name__
Unmanaged.__module__ = DeepSpeedZeroOptimizer_Stage3.__module__


def tuned(engine: Engine | None = None, **options: Any) -> Engine:
    """An engine as `initialize` leaves it: with a path, and a report that knows of it."""
    engine = engine or Engine()
    reports[engine] = Report(profile=make_profile(), path=attached(engine, **options))
    return engine


def train(engine: Engine, steps: int) -> None:
    """So many steps of one backward pass."""
    for step in range(steps):
        engine.backward(gradients(step))
        engine.optimizer.step()


def words(engine: Engine) -> str:
    """What is said of who carries, and how much: both stand in the text."""
    found = report(engine)
    assert {f"carried out {found.carrier()}", found.carried()} <= set(found.text().splitlines())
    return f"{found.carrier()}; {found.carried()}"


def test_who_carried_how_much_is_told_now_and_since_the_start() -> None:
    """The first accumulation is compared, the second DeepSpeed's, and from then on they are the path's."""
    engine = tuned()
    told = []
    for _ in range(4):
        train(engine, 1)
        path = report(engine).path
        assert path is not None
        told.append(path.tally)
    last = [each.last_accumulation for each in told]
    assert [last[0].compared, last[1].deepspeed, last[2].path, last[3].path] == [ALL] * 4
    nothing = Carried()
    assert last[3].deepspeed == last[3].compared == last[0].path == last[1].path == nothing
    start = told[3].since_start
    assert (start.compared, start.deepspeed) == (ALL, ALL)
    assert (start.path.partitions, start.path.bytes) == (2 * ALL.partitions, 2 * ALL.bytes)
    text = words(engine)
    assert text.startswith("in the running optimizer")
    assert (
        f"taken to fp32 in the last accumulation: {IN_WORDS} by the path; since the start: 6 partitions"
        in text
    )
    assert f"{IN_WORDS} by DeepSpeed's own code and {IN_WORDS} by both, compared" in text


def test_micro_steps_before_the_last_are_counted_apart() -> None:
    """They are added up, and go to fp32 with the last one."""
    engine = tuned(Engine(3), check=False)
    for micro_step in range(3):
        engine.backward(gradients(micro_step), micro_step == 2)
        path = report(engine).path
        assert path is not None
        now = path.tally.last_accumulation.path
        assert now.summed_partitions == 3 * min(micro_step + 1, 2)
        assert now.summed_bytes == 2 * sum(SIZES) * min(micro_step + 1, 2)
        assert now.partitions == 3 * (micro_step == 2)


@pytest.mark.parametrize(
    ("end", "why"),
    [
        (detach, "the path was taken out"),
        (lambda engine: engine.optimizer.destroy(), "the engine was destroyed"),
    ],
)
def test_a_path_that_was_taken_out_carries_nothing(end: Any, why: str) -> None:
    """What it did before stays told."""
    engine = tuned()
    train(engine, 4)
    end(engine)
    train(engine, 3)
    text = words(engine)
    assert text.startswith(f"by DeepSpeed's own code, with the keys below: {why}")
    assert "running optimizer" not in text and "to fp32 until then: 6 partitions" in text
    assert "last accumulation" not in text
    assert "running optimizer" not in report(engine).text()


def test_somebody_elses_method_in_place_of_ours_is_told() -> None:
    """Also after the path was taken out; a wrapper that still calls ours shows in the counts."""
    engine = tuned()
    train(engine, 4)
    ours, own = engine.optimizer.partition_grads, type(engine.optimizer).partition_grads
    vars(engine.optimizer)["partition_grads"] = lambda p, g: ours(p, g)
    train(engine, 2)
    wrapped = words(engine)
    assert wrapped.startswith("by somebody else's partition_grads, put in place after the path was attached")
    assert f"in the last accumulation: {IN_WORDS} by the path" in wrapped
    vars(engine.optimizer)["partition_grads"] = lambda p, g: own(engine.optimizer, p, g)
    train(engine, 3)
    replaced = words(engine)
    assert replaced.startswith("by somebody else's partition_grads")
    assert "in the last accumulation: none; since the start: 12 partitions" in replaced
    detach(engine)
    assert words(engine).startswith("by somebody else's partition_grads")


def test_what_deepspeed_takes_to_fp32_at_the_step_is_deepspeeds() -> None:
    """With unmanaged accumulation the path only adds up; the bytes of both cross the link."""
    device = DeferredDevice()
    engine = Streamed(device)
    engine.optimizer = Unmanaged()
    vars(engine.optimizer)["reduce_and_partition_stream"] = device.new_stream()
    tuned(engine, device=device)
    for step in range(5):
        engine.backward(gradients(step), boundary=False)
        engine.optimizer.finalize_gradient_accumulation_boundary()
        engine.optimizer.step()
        engine.optimizer.micro_step_id = 0
    path = report(engine).path
    assert path is not None
    start = path.tally.since_start
    assert (start.path.partitions, start.path.summed_partitions) == (0, 5 * len(SIZES))
    assert (start.deepspeed.partitions, start.deepspeed.bytes) == (5 * len(SIZES), 5 * 2 * sum(SIZES))
    each = 5 * sum(SIZES)
    assert (path.link_bytes, path.stock_link_bytes) == (each * (2 + 2 + 4), each * (4 + 2 + 4))
    text = words(engine)
    assert text.startswith("by DeepSpeed's own code in the last accumulation, added up by the path before")
    assert "in the running optimizer" not in text and "80% of the bytes" in text
    detach(engine)


def test_what_was_left_to_deepspeed_is_said_in_words() -> None:
    """A sub-group on NVMe, for example."""
    engine = tuned()
    engine.optimizer.swappable = True
    train(engine, 2)
    text = words(engine)
    assert text.startswith("by DeepSpeed's own code in the last accumulation")
    assert "3 times a partition was left to DeepSpeed's own code" in text


def test_a_partition_that_is_padding_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the path carries the others, DeepSpeed's own code is being timed, or the path fails at the first."""
    engine = tuned()
    padding = engine.optimizer.parameters[2]
    vars(engine.optimizer)["_get_param_partition_rank"] = lambda param: int(param is padding)
    train(engine, 3)
    tally = report(engine).path.tally.since_start  # type: ignore[union-attr]
    assert [of.partitions for of in (tally.compared, tally.deepspeed, tally.path)] == [2, 2, 2]

    def prepare(*args: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(Delivery, "prepare", prepare)
    z = engine.optimizer
    z.partition_grads([z.parameters[0], padding], [gradients(1)[0], gradients(1)[2]])
    path = report(engine).path
    assert path is not None and "no memory" in str(path.why_not)
    assert (path.left_to_deepspeed, path.tally.since_start.deepspeed.partitions) == (1, 3)


def test_the_report_is_plain_data_too() -> None:
    """With the same numbers."""
    engine = tuned()
    train(engine, 3)
    found = report(engine)
    assert found.path is not None
    plain = json.loads(json.dumps(to_plain(found)))
    assert plain["path"]["tally"] == to_plain(found.path.tally)
    assert plain["path"]["tally"]["last_accumulation"]["path"]["bytes"] == 2 * sum(SIZES)


# -- from another thread --------------------------------------------------------------------------


def test_nothing_in_a_status_changes_in_place() -> None:
    """So that whoever has read a value may use it for as long as he likes."""
    engine = tuned()
    train(engine, 3)
    path = report(engine).path
    assert path is not None
    held = {name: getattr(path, name) for name in msgspec.structs.asdict(path)}
    before = copy.deepcopy(held)
    train(engine, 3)
    assert held == before
    assert held["tally"] != path.tally
    for value in held.values():
        assert not isinstance(value, list | dict | set)


def test_the_report_may_be_read_and_copied_while_training_goes_on() -> None:
    """By another thread, again and again."""
    engine, failed, over, reads = tuned(), [], threading.Event(), 0

    def read() -> None:
        nonlocal reads
        try:
            while not over.is_set():
                found = copy.deepcopy(report(engine))
                assert found.text() and to_plain(found)
                reads += 1
                over.wait(0.002)  # else the interpreter's lock may be its alone: handing it over takes 5 ms
        except BaseException as error:
            failed.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    train(engine, 60)
    while not reads and not failed:
        over.wait(0.01)
    over.set()
    reader.join()
    assert not failed and reads


# -- what is page-locked --------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("path", ["direct", "pinned", "staged"])
def test_what_a_path_page_locks_is_counted_as_long_as_it_is_held(path: str, place: str) -> None:
    """The ring, and the buffers of sums on the host."""
    engine = Streamed(DeferredDevice(), 2)
    spec = candidate(path=path)
    tuned(engine, spec=on_host(spec) if place == "host" else spec, device=engine.device)
    for _ in range(2):
        engine.backward(gradients(1), False)
        engine.backward(gradients(2))
        engine.optimizer.step()
    locked = report(engine).pinned_bytes
    assert sum(locked.values()) == sum(engine.device.pinned.values())
    assert ("the path's ring" in locked) is (path == "staged")
    assert ("sums on the host" in locked) is (place == "host" and path != "direct")
    assert all(f"{name}: {count:,} bytes" in report(engine).text() for name, count in locked.items())
    detach(engine)
    assert page_locked(engine) == {} == engine.device.pinned


def test_a_trace_needs_something_that_ran(tmp_path: Path) -> None:
    """Else it says so; nor does a folder in the file's place pass for one."""
    with pytest.raises(ConfigError, match="nothing to trace"):
        Report(profile=None).trace(tmp_path / "run.json")
    kept = Kept()
    kept.add(Span("epilogue", 1, 2.0, 0.5))
    ran = Report(profile=None, ranges=(kept.number,))
    with pytest.raises(ConfigError, match="name another file"):
        ran.trace(tmp_path)
    ran.trace(str(tmp_path / "run.json"))
    document = json.loads((tmp_path / "run.json").read_text("utf-8"))
    (event,) = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert (event["name"], event["ts"], event["dur"]) == ("epilogue", 0.0, 5e5)
    assert document["otherData"]["kept"] == "the latest 1 of 1 ranges"
    del kept
    with pytest.raises(ConfigError, match="nothing to trace"):
        ran.trace(tmp_path / "later.json")
