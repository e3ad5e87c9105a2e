"""Real ZeRO-3 training with DeepSpeed, each in a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest

from tests import CHECKOUT

SMALL = ("--layers", "2", "--width", "64", "--length", "32", "--steps", "10", "--every", "1")

pytestmark = pytest.mark.slow


def run(*arguments: str) -> str:
    """Standard output of a Python process that must succeed, run as from a checkout without a launcher."""
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    environment.pop("RANK", None)
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def losses(output: str) -> dict[int, str]:
    """Step to loss, as the example prints them: nine digits, all of a float32."""
    return {int(step): loss for step, loss in re.findall(r"^step +(\d+) +loss (\S+)$", output, re.MULTILINE)}


@pytest.fixture(scope="module")
def stock() -> str:
    """What the example prints when DeepSpeed runs alone."""
    return run("examples/train_gpt.py", *SMALL, "--stock")


@pytest.fixture(scope="module")
def wrapped() -> str:
    """What the example prints through the one-line wrapper."""
    return run("examples/train_gpt.py", *SMALL)


def test_the_loss_falls(stock: str) -> None:
    """Ten steps on real text are enough to see it."""
    by_step = {step: float(loss) for step, loss in losses(stock).items()}
    assert list(by_step) == list(range(1, 11))
    assert by_step[10] < by_step[1] - 0.5


def test_tuning_changes_no_loss_by_a_single_bit(stock: str, wrapped: str) -> None:
    """The wrapped run trains exactly as DeepSpeed alone does: every loss, all nine digits."""
    assert losses(wrapped) == losses(stock)
    assert len(losses(stock)) == 10


def test_the_example_says_what_it_chose_before_it_trains(wrapped: str) -> None:
    """Choice, reasons and the changed keys come first."""
    before, _, _ = wrapped.partition("step   1")
    assert "autotune-offload: path" in before
    assert "zero_optimization.offload_optimizer.pin_memory: absent -> " in before


SCRIPT = """
import json, os, sys, time
from autotune_offload.records import to_plain
from autotune_offload.engine.toy_model import ModelSpec
from autotune_offload.engine.trainee import Variant, stock_config
from autotune_offload.engine.verify import verify

def slow(engine):
    inner = engine.optimizer.partition_grads
    def partition_grads(*args):
        time.sleep(0.1)
        return inner(*args)
    engine.optimizer.partition_grads = partition_grads

def interrupt(what, share):
    if share > 0.6:
        raise KeyboardInterrupt

environment = dict(os.environ)
config = stock_config(micro_batch=2, accumulation_steps=2)
variants = [Variant(name="stock", config=config), Variant(name="same", config=config),
            Variant(name="slow", config=config, prepare=slow)]
model = ModelSpec(layers=1, width=128, length=32, vocabulary=32)
outcome = verify(variants, model=model, steps=8, warmup=1)

import deepspeed.comm
left = {"process_group": deepspeed.comm.is_initialized()}
try:
    verify(variants[:1], model=model, steps=6, warmup=0, progress=interrupt)
except KeyboardInterrupt:
    left["interrupted"] = True
left["process_group"] |= deepspeed.comm.is_initialized()
left["environment"] = dict(os.environ) != environment
print("\\n" + json.dumps({"outcome": to_plain(outcome), "left": left}))
"""


@pytest.fixture(scope="module")
def verified() -> dict[str, Any]:
    """Stock, the same again, and one made slower, with what was left over afterwards."""
    result: dict[str, Any] = json.loads(run("-c", SCRIPT).splitlines()[-1])
    return result


def test_verify_finds_no_difference_between_equal_variants(verified: dict[str, Any]) -> None:
    """Two engines of the same config train alike to the bit, and as fast."""
    first, same, _ = verified["outcome"]["variants"]
    assert "no difference beyond the noise" in same["verdict"]
    assert same["losses"] == first["losses"]
    assert verified["outcome"]["losses_identical"]


def test_verify_finds_a_slower_gradient_offload(verified: dict[str, Any]) -> None:
    """100 ms more in each of two accumulation steps are counted in the offload, the backward and the step."""
    slow = verified["outcome"]["variants"][2]
    assert re.search(r"gradient offload [\d.]+x slower", slow["verdict"])
    samples = (slow[metric]["raw_seconds"] for metric in ("gradient_offload", "backward", "step"))
    for offload, backward, step in zip(*samples, strict=True):
        assert 0.2 <= offload <= backward <= step


def test_verify_trains_every_step_it_reports(verified: dict[str, Any]) -> None:
    """Warm-up steps give losses but no times, and the loss falls."""
    for result in (*verified["outcome"]["variants"], verified["outcome"]["control"]):
        assert len(result["losses"]) == 9
        assert [
            len(result[metric]["raw_seconds"]) for metric in ("step", "backward", "gradient_offload")
        ] == [8] * 3
        assert result["losses"][-1] < result["losses"][0]


def test_verify_leaves_nothing_behind(verified: dict[str, Any]) -> None:
    """Neither a process group nor a changed environment, after a full run and after Ctrl-C."""
    assert verified["left"] == {"process_group": False, "interrupted": True, "environment": False}
