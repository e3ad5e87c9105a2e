"""Faults of a configuration: each ends in clear words, and a run with the user's own configuration."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from autotune_offload.config import reading, tune
from autotune_offload.errors import ConfigError
from tests.factories import make_choice
from tests.reliability.registry import fault
from tests.reliability.scenes import CONFIG, answering, shortened, start, verb

_THROUGH = "DeepSpeed gets it as it is and says its own; our warning says what was found"


def block(**settings: Any) -> dict[str, Any]:
    """The configuration with our block in it."""
    return {**CONFIG, "autotune_offload": settings}


def refused(source: Any, *words: str) -> str:
    """What reading it says; nothing but our own error may come."""
    with pytest.raises(ConfigError) as caught:
        reading.read(source)
    for word in words:
        assert word in str(caught.value), f'"{word}" is not in: {caught.value}'
    return shortened(str(caught.value))


@fault(
    area="config",
    name="a mistyped path",
    injected='initialize(config="ds_confg.json") beside a ds_config.json',
    expected=_THROUGH,
)
def _(folder: Path) -> str:
    (folder / "ds_config.json").write_text("{}")
    given = str(folder / "ds_confg.json")
    return start(folder, given).runs_untuned(given, "no such file", "did you mean")


@fault(
    area="config",
    name="a file cut short",
    injected="the first half of a ds_config.json",
    expected=_THROUGH,
)
def _(folder: Path) -> str:
    text = json.dumps(CONFIG)
    given = folder / "ds_config.json"
    given.write_text(text[: len(text) // 2])
    return start(folder, str(given)).runs_untuned(str(given), "cut short")


@fault(
    area="config",
    name="a file that is no text",
    injected="bytes of a model's weights under the name of a configuration",
    expected=_THROUGH,
)
def _(folder: Path) -> str:
    given = folder / "ds_config.json"
    given.write_bytes(bytes(range(256)) * 64)
    return start(folder, str(given)).runs_untuned(str(given), "not UTF-8")


@fault(
    area="config",
    name="an empty file",
    injected="a ds_config.json of 0 bytes",
    expected=_THROUGH,
)
def _(folder: Path) -> str:
    given = folder / "ds_config.json"
    given.touch()
    return start(folder, str(given)).runs_untuned(str(given), "is empty")


@fault(
    area="config",
    name="a folder instead of a file",
    injected="the folder's path",
    expected=_THROUGH,
)
def _(folder: Path) -> str:
    return start(folder, str(folder)).runs_untuned(str(folder), "is a folder")


@fault(
    area="config",
    name="a key that stands twice",
    injected="train_batch_size twice in one file",
    expected="named, as DeepSpeed refuses it too",
)
def _(folder: Path) -> str:
    return refused('{"train_batch_size": 1, "train_batch_size": 2}', "train_batch_size", "twice")


@fault(
    area="config",
    name="damaged base64",
    injected="half of an encoded configuration",
    expected="called damaged, not a missing file",
)
def _(folder: Path) -> str:
    text = base64.urlsafe_b64encode(json.dumps(CONFIG).encode()).decode()
    return refused(text[: len(text) // 2 + 1], "base64", "damaged or cut short")


@fault(
    area="config",
    name="brackets nested 100,000 deep",
    injected="such a file",
    expected="refused in words within a second",
)
def _(folder: Path) -> str:
    return refused('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply")


@fault(
    area="config",
    name="a type that is no configuration",
    injected="initialize(config=7)",
    expected=_THROUGH,
)
def _(folder: Path) -> str:
    return start(folder, 7).runs_untuned(7, "cannot be a int", "pass")


@fault(
    area="config",
    name="a misspelt key in our block",
    injected='"autotune_offload": {"pth": "direct"}',
    expected="the run starts untuned; the nearest key is named",
)
def _(folder: Path) -> str:
    given = block(pth="direct")
    return start(folder, given).runs_untuned(given, '"path"')


@fault(
    area="config",
    name="our block is a list",
    injected='"autotune_offload": ["direct"]',
    expected="the run starts untuned; what was expected is named",
)
def _(folder: Path) -> str:
    given = {**CONFIG, "autotune_offload": ["direct"]}
    return start(folder, given).runs_untuned(given, "expected an object")


@fault(
    area="config",
    name="a budget that measures nothing",
    injected='"budget_seconds": 0.001',
    expected="the run starts untuned; the least budget is named",
)
def _(folder: Path) -> str:
    given = block(budget_seconds=0.001)
    return start(folder, given).runs_untuned(given, "at least 0.2 s")


@fault(
    area="config",
    name="strict with a failure",
    injected='"strict": true and a block that cannot be used',
    expected="the error is raised, and DeepSpeed is not called",
)
def _(folder: Path) -> str:
    seen = start(folder, block(strict=True, buffer_count=-3))
    assert isinstance(seen.error, ConfigError) and seen.config is None
    return f"raised: {shortened(str(seen.error))}"


@fault(
    area="config",
    name="offload sections outside zero_optimization",
    injected="offload_optimizer at the top level",
    expected="nothing is claimed to be tuned; one warning",
)
def _(folder: Path) -> str:
    given = {"train_batch_size": 1, "zero_optimization": {"stage": 3}, "offload_optimizer": {"device": "cpu"}}
    seen = start(folder, given, probe=answering())
    assert seen.error is None and seen.config == given and seen.report.profile is None
    assert len(seen.warnings) == 1
    return f"one warning: {shortened(seen.warnings[0])}"


def _tuned(config: dict[str, Any]) -> Any:
    return tune.tune(config, make_choice(), version="0.19.8", keep=(), carried=False)


@fault(
    area="config",
    name="numbers written as text",
    injected='"reduce_bucket_size": "5e8"',
    expected="left for DeepSpeed to refuse, and the key is named",
)
def _(folder: Path) -> str:
    config = {**CONFIG, "zero_optimization": {**CONFIG["zero_optimization"], "reduce_bucket_size": "5e8"}}
    tuned = _tuned(config)
    assert tuned.config["zero_optimization"]["reduce_bucket_size"] == "5e8"
    notice = next(n for n in tuned.notices if "reduce_bucket_size" in n)
    return shortened(notice)


@fault(
    area="config",
    name="a fraction where a whole number belongs",
    injected='"stage3_prefetch_bucket_size": 15099494.4',
    expected="left for DeepSpeed to refuse, and the key is named",
)
def _(folder: Path) -> str:
    zero = {**CONFIG["zero_optimization"], "stage3_prefetch_bucket_size": 15099494.4}
    tuned = _tuned({**CONFIG, "zero_optimization": zero})
    assert tuned.config["zero_optimization"]["stage3_prefetch_bucket_size"] == 15099494.4
    return shortened(next(n for n in tuned.notices if "prefetch" in n))


@fault(
    area="config",
    name="the deprecated switches",
    injected="cpu_offload and cpu_offload_use_pin_memory: false",
    expected="translated with the wish kept, or left with a notice; DeepSpeed's parser takes it",
)
def _(folder: Path) -> str:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    zero = {"stage": 3, "cpu_offload": True, "cpu_offload_use_pin_memory": False}
    tuned = _tuned({"train_batch_size": 1, "zero_optimization": zero})
    parsed = DeepSpeedZeroConfig(**tuned.config["zero_optimization"])
    assert parsed.offload_optimizer is not None
    changes = ", ".join(f"{c.key}: {c.before} -> {c.after}" for c in tuned.changes)
    return f"offload_optimizer.pin_memory {parsed.offload_optimizer.pin_memory}; {shortened(changes)}"


@fault(
    area="config",
    name="a misspelt offload section",
    injected='"offload_optimiser" inside zero_optimization',
    expected="not called tuned; named",
)
def _(folder: Path) -> str:
    given = {"train_batch_size": 1, "zero_optimization": {"stage": 3, "offload_optimiser": {"device": "cpu"}}}
    seen = start(folder, given, probe=answering())
    assert seen.config == given and seen.report.profile is None
    return f"one notice: {shortened(seen.report.notices[0])}"


@fault(
    area="config",
    name="apply on a file that is none",
    injected="autotune-offload apply on a text that holds no object",
    expected="exit 1 and one message",
)
def _(folder: Path) -> str:
    (folder / "ds_config.json").write_text("- a\n- yaml list\n")
    code, out, said = verb(folder, "apply", str(folder / "ds_config.json"))
    assert code == 1 and out == ""
    return f"exit {code}: {shortened(said)}"


@fault(
    area="config",
    name="bad usage of a verb",
    injected="autotune-offload probe --budget soon",
    expected="exit 2 and what was expected",
)
def _(folder: Path) -> str:
    code, out, said = verb(folder, "probe", "--budget", "soon")
    assert code == 2 and out == "" and "expected seconds" in said
    return f"exit {code}: {shortened(said.splitlines()[-1])}"
