"""Gradient paths that an installed package brings: named, timed, checked, carried out, missed where they are not."""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from autotune_offload import packaged
from autotune_offload.api.probe import probe
from autotune_offload.cli import shapes
from autotune_offload.config import block
from autotune_offload.engine.trainee import single_process_environment
from autotune_offload.errors import ConfigError
from autotune_offload.profiles.store import Miss, Store
from autotune_offload.records import Candidate, Profile, Settings
from autotune_offload.workload import from_parameter_count
from tests import CHECKOUT
from tests.factories import make_choice, make_profile
from tests.ports import free_port

BLOCKS = re.findall(
    r"```python\n(.*?)```", (CHECKOUT / "docs" / "extending.md").read_text("utf-8"), re.DOTALL
)
(PARKED,) = (each for each in BLOCKS if "ParkedPath" in each)
"""The module of docs/extending.md, as it stands there."""

MODULES = {
    "parked": PARKED,
    "wrong": PARKED.replace("self.device.h2h(destination, kept)", "destination.fill_(1.0)"),
    "broken": "raise RuntimeError('no driver')",
    "typed": "PATH = 3",
}
NAMES = {
    "parked": "parked",
    "wrong": "wrong",
    "broken": "broken",
    "typed": "typed",
    "direct": "parked",
    "No!": "parked",
}


def install(folder: Path) -> None:
    """A package with the modules, and an entry point for each name."""
    info = folder / "our_paths-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / "our_paths").mkdir()
    (folder / "our_paths" / "__init__.py").touch()
    for name, source in MODULES.items():
        (folder / "our_paths" / f"{name}.py").write_text(source)
    entries = "".join(f"{name} = our_paths.{module}:PATH\n" for name, module in NAMES.items())
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: our_paths\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{packaged.ENTRY_POINTS}]\n{entries}")


def forget() -> None:
    """As if the process had just started."""
    packaged._entries.cache_clear()
    packaged.load.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "our_paths"]:
        del sys.modules[name]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the package installed."""
    install(tmp_path / "site")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(tmp_path / "site"))
        importlib.invalidate_caches()
        forget()
        yield tmp_path / "site"
    importlib.invalidate_caches()
    forget()
    assert packaged.names() == (), "the package is still found"


def candidate(path: str) -> Candidate:
    """With one piece for everything."""
    return Candidate(path=path, cast="host", buffer_bytes=1 << 18, buffer_count=1)


@pytest.mark.usefixtures("site")
def test_paths_are_known_by_their_names_and_none_replaces_ours(caplog: pytest.LogCaptureFixture) -> None:
    """Names that are taken, or no names, are passed over with a warning; nothing is imported for it."""
    with caplog.at_level(logging.WARNING):
        assert packaged.names() == ("broken", "parked", "typed", "wrong")
    assert "no path 'direct'" in caplog.text and "no path 'No!'" in caplog.text
    assert not [name for name in sys.modules if name.startswith("our_paths")]


@pytest.mark.usefixtures("site")
def test_what_cannot_be_loaded_is_no_candidate(caplog: pytest.LogCaptureFixture) -> None:
    """Each costs a warning that says why."""
    with caplog.at_level(logging.WARNING):
        assert packaged.usable() == ("parked", "wrong")
    assert "RuntimeError: no driver" in caplog.text and "is int; expected PackagedPath" in caplog.text
    with pytest.raises(ConfigError, match="known are direct, pinned, staged, broken, parked"):
        packaged.load("nowhere")


@pytest.mark.usefixtures("site")
def test_the_block_and_its_schema_take_the_name() -> None:
    """And refuse another with all that there are."""
    assert block.settings({block.BLOCK: {"path": "parked"}}).path == "parked"
    with pytest.raises(ConfigError, match="staged, deepspeed, broken, parked"):
        block.settings({block.BLOCK: {"path": "nowhere"}})
    assert "parked" in shapes.schema("config")["properties"][block.BLOCK]["properties"]["path"]["enum"]


def test_without_the_package_the_name_is_refused() -> None:
    """As any other word."""
    with pytest.raises(ConfigError, match="expected one of auto, direct, pinned, staged, deepspeed"):
        block.settings({block.BLOCK: {"path": "parked"}})


def probed(path: str) -> Profile:
    """This host, with that path or with all of them."""
    return probe(
        workload=from_parameter_count(200_000), plan="quick", budget_seconds=0.5, settings=Settings(path=path)
    )


@pytest.mark.usefixtures("site")
def test_it_is_predicted_timed_and_compared_like_ours() -> None:
    """Among the candidates by itself; alone where it is asked for. One with other bits is put aside."""
    every = {each.path for each in probed("auto").candidates}
    assert {"direct", "parked", "wrong"} <= every
    alone = probed("parked")
    assert alone.choice.path == "parked"
    timed = [each for each in alone.candidates if each.measured_seconds is not None]
    assert timed and all(each.path == "parked" and each.predicted_seconds for each in timed)
    wrong = [each for each in probed("auto").candidates if each.path == "wrong"]
    assert all(each.measured_seconds is None and each.rejected for each in wrong)


def test_a_stored_choice_whose_package_is_gone_is_a_miss(site: Path, tmp_path: Path) -> None:
    """With the package it is found; without, it is measured anew, and the file can still be read and shown."""
    store = Store(tmp_path / "profiles")
    profile = make_profile(choice=make_choice(path="parked"))
    saved = store.save(profile)
    assert isinstance(store.lookup(profile.fingerprint), Profile)
    sys.path.remove(str(site))  # in place: what the fixture puts back is the list's content
    importlib.invalidate_caches()
    forget()
    found = store.lookup(profile.fingerprint)
    assert (
        isinstance(found, Miss) and "no installed package brings the gradient path 'parked'" in found.reason
    )
    assert store.load(saved).choice.path == "parked"


TRAINING = """
import json, sys
import deepspeed, torch
from autotune_offload.engine.attach import attach
from autotune_offload.records import Candidate

torch.set_num_threads(1)
found = {}
for path in (None, *sys.argv[1:]):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32, bias=False) for _ in range(2)))
    engine, *_ = deepspeed.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}, "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    })
    status = path and attach(engine, Candidate(path=path, cast="host", buffer_bytes=1 << 18, buffer_count=1))
    for step in range(4):
        batch = torch.randn(4, 32, generator=torch.Generator().manual_seed(step)).bfloat16()
        engine.backward(engine(batch).float().pow(2).mean())
        engine.step()
    flat = [each.detach().view(torch.int32) for each in engine.optimizer.fp32_partitioned_groups_flat]
    found[str(path)] = {
        "weights": torch.cat(flat).tolist(), "why": status and (status.why_not or status.ended),
        "by_path": status and status.tally.since_start.path.partitions,
    }
    engine.destroy()
print("FOUND " + json.dumps(found))
"""


@pytest.mark.long
@pytest.mark.slow
def test_it_carries_gradients_in_training_to_the_same_bits(site: Path) -> None:
    """One with other bits is found by the self-check, one that is not there is told, and DeepSpeed trains on."""
    with single_process_environment():
        rank = {**os.environ, "MASTER_PORT": str(free_port()), "PYTHONPATH": f"{CHECKOUT}{os.pathsep}{site}"}
    command = [sys.executable, "-c", TRAINING, "parked", "wrong", "missing"]
    done = subprocess.run(command, env=rank, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    found = json.loads(line.removeprefix("FOUND "))
    assert found["parked"]["by_path"] and found["parked"]["why"] is None
    assert "differ" in found["wrong"]["why"] and not found["wrong"]["by_path"]
    assert "no installed package brings the gradient path 'missing'" in found["missing"]["why"]
    weights = [each["weights"] for each in found.values()]
    assert all(each == weights[0] for each in weights)
    assert torch.tensor(weights[0]).numel() > 0
