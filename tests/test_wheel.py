"""The wheel that brings its compiled passes: what is in it, which one is loaded, and a machine without a compiler."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune_offload.machine import adam, compiled, host_pass, variants
from tests import CHECKOUT
from tests.built import built
from tests.ports import free_port

LEVELS = variants.LEVELS.get(platform.machine(), {})
ABLE = [level for level, needed in LEVELS.items() if needed <= variants.flags_of_processor()]
needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CC", "cc")) is None or not LEVELS,
    reason="no C compiler, or no wheel for this processor",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """With the passes."""
    folder = tmp_path_factory.mktemp("compiled")
    return zipfile.ZipFile(built("wheel", folder, AUTOTUNE_OFFLOAD_WHEEL="compiled"))


@pytest.fixture(scope="module")
def unpacked(wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the wheel's libraries lie."""
    folder = tmp_path_factory.mktemp("unpacked")
    wheel.extractall(folder)
    return folder / "autotune_offload" / "machine" / "shipped"


@pytest.fixture
def shipped(unpacked: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """This process has them as if it had been installed from the wheel, and no compiler."""
    monkeypatch.setattr(variants, "SHIPPED", unpacked)
    monkeypatch.setenv("CC", "/nonexistent/cc")
    forget()
    yield unpacked
    forget()


def forget() -> None:
    """As if the process had just started."""
    compiled.library.cache_clear()
    host_pass._one_pass.cache_clear()


@needs_compiler
def test_it_holds_every_pass_for_every_processor_and_nothing_else_besides_the_package(
    wheel: zipfile.ZipFile,
) -> None:
    """A tag of this architecture, and no other file than in the pure wheel."""
    assert re.search(rf"-py3-none-manylinux_2_17_{platform.machine()}\.whl$", str(wheel.filename))
    libraries = {name for name in wheel.namelist() if name.endswith(".so")}
    machine = CHECKOUT / "autotune_offload" / "machine"
    names = {variants.file_name(machine / source, level) for source in variants.PASSES for level in LEVELS}
    assert libraries == {f"autotune_offload/machine/shipped/{name}" for name in names}
    assert b"Root-Is-Purelib: false" in wheel.read(
        next(name for name in wheel.namelist() if name.endswith(".dist-info/WHEEL"))
    )


@needs_compiler
def test_the_widest_that_the_processor_has_is_loaded_and_told(shipped: Path) -> None:
    """Without a compiler."""
    assert host_pass.why_not_fused(torch.bfloat16) is None
    assert adam.why_not_compiled(torch.bfloat16) in (None, "this processor has no fused multiply-add")
    assert (
        compiled.used()["widen"] == compiled.used()["adam"] == f"came with the package, built for {ABLE[0]}"
    )
    library = compiled.library(host_pass._SOURCE)
    assert not isinstance(library, str) and Path(library._name).parent == shipped


@needs_compiler
@pytest.mark.parametrize("level", ABLE)
def test_every_level_gives_the_bits_of_the_pass_that_is_compiled_here(
    unpacked: Path, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    """Widening, squares, weights, moments and rounded weights, NaN and infinities among them."""
    forget()
    here = results()
    monkeypatch.setattr(variants, "SHIPPED", unpacked)
    monkeypatch.setattr(variants, "flags_of_processor", lambda: LEVELS[level])
    forget()
    try:
        there = results()
        assert compiled.used()["widen"].endswith(f"built for {level}")
    finally:
        forget()
    assert set(here) - set(there) in (set(), {"adam", "float16"})  # no multiply-add, no 16-bit conversion
    assert all(torch.equal(here[name], there[name]) for name in there)


def results() -> dict[str, torch.Tensor]:
    """What each pass leaves of the same data, as integers, by its name."""
    found = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        draw = torch.Generator().manual_seed(0)
        if host_pass.why_not_fused(dtype) is not None:
            continue
        patterns = torch.randint(-(1 << 15), 1 << 15, (40_003,), generator=draw, dtype=torch.int16)
        source = patterns.view(dtype) if dtype != torch.float32 else torch.randn(40_003, generator=draw)
        to, kept = torch.empty(source.numel()), torch.empty_like(source)
        squares = host_pass.widen(to, source, kept)
        bits = [to.view(torch.int32), kept.view(torch.int16 if dtype != torch.float32 else torch.int32)]
        total = torch.tensor([squares], dtype=torch.float64).view(torch.int64)
        finite = dtype == torch.float32  # which NaN a sum becomes is nobody's promise
        found[str(dtype).removeprefix("torch.")] = torch.cat(
            [each.long() for each in bits] + [total] * finite
        )
    if adam.why_not_compiled(torch.bfloat16) is None:
        found["adam"] = _stepped()
    return found


def _stepped() -> torch.Tensor:
    draw = torch.Generator().manual_seed(1)
    weights, gradients, first = (torch.randn(8192, generator=draw) for _ in range(3))
    second = torch.rand(8192, generator=draw)
    gradients[::97] = float("inf")
    memory = adam.Memory(weights=weights, gradients=gradients, first=first, second=second)
    setting = adam.Setting(
        step=7, rate=1e-3, beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.01, corrects_bias=True
    )
    values = adam.constants(setting, (0.4782969, 0.993), 0.37, decoupled=True)
    rounded = torch.empty(8192, dtype=torch.bfloat16)
    adam.piece_of(memory, values, torch.bfloat16, bytearray(1))(0, 8192, 0, rounded)
    return torch.cat(
        [each.view(torch.int32) for each in memory.tensors()] + [rounded.view(torch.int16).int()]
    )


@needs_compiler
def test_a_library_that_cannot_be_loaded_is_passed_over(
    shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next narrower one takes its place, and where none is left torch's operations do."""
    copied = tmp_path / "shipped"
    shutil.copytree(shipped, copied)
    monkeypatch.setattr(variants, "SHIPPED", copied)
    (copied / variants.file_name(host_pass._SOURCE, ABLE[0])).write_bytes(b"no library")
    assert not isinstance(compiled.library(host_pass._SOURCE), str) or len(ABLE) == 1
    for file in copied.glob("widen-*"):
        file.unlink()
    forget()
    assert "/nonexistent/cc" in str(host_pass.why_not_fused(torch.bfloat16))
    assert "torch's operations" in compiled.used()["widen"]


def test_a_library_of_another_source_or_other_flags_is_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name tells what a library was made of."""
    monkeypatch.setattr(variants, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(variants, "flags_of_processor", lambda: frozenset().union(*LEVELS.values()))
    (tmp_path / "shipped").mkdir()
    source = tmp_path / "widen.c"
    source.write_text("int one;")
    for level in LEVELS:
        (tmp_path / "shipped" / variants.file_name(source, level)).touch()
    assert [level for level, _ in variants.shipped(source, ())] == list(LEVELS)
    assert list(variants.shipped(source, ("-O1",))) == []
    source.write_text("int two;")
    assert list(variants.shipped(source, ())) == []


def test_what_every_processor_has_counts(tmp_path: Path) -> None:
    """Of cores that differ the common flags; nothing where none are told."""
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("flags\t\t: fpu avx2 fma\nmodel name : avx512f\n\nflags\t\t: fpu avx2\n")
    assert variants.flags_of_processor(cpuinfo) == {"fpu", "avx2"}
    assert variants.flags_of_processor(tmp_path / "missing") == frozenset()


def test_a_wheel_that_cannot_be_built_as_asked_is_an_error(tmp_path: Path) -> None:
    """No pure one in its place, and no word that means nothing."""
    with pytest.raises(AssertionError, match="nonexistent"):
        built("wheel", tmp_path, AUTOTUNE_OFFLOAD_WHEEL="compiled", CC="/nonexistent/cc")
    with pytest.raises(AssertionError, match="expected 'pure' or 'compiled'"):
        built("wheel", tmp_path, AUTOTUNE_OFFLOAD_WHEEL="yes")


TRAINING = """
import json
import deepspeed, torch
import autotune_offload
from autotune_offload.engine.attach import attach
from autotune_offload.machine import compiled
from autotune_offload.records import Candidate

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(3)))
engine, *_ = deepspeed.initialize(model=model, config={
    "train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}, "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
})
path = Candidate(path="direct", cast="host", buffer_bytes=1 << 20, buffer_count=1, host_threads=0)
status = attach(engine, path)
for step in range(4):
    batch = torch.randn(4, 64, generator=torch.Generator().manual_seed(step)).bfloat16()
    loss = engine(batch).float().pow(2).mean()
    engine.backward(loss)
    engine.step()
weights = torch.cat([flat.detach().view(torch.int32) for flat in engine.optimizer.fp32_partitioned_groups_flat])
print("FOUND " + json.dumps({
    "package": autotune_offload.__file__, "why_not": status.why_not or status.ended,
    "passes": compiled.used(), "told": autotune_offload.report(engine).text(),
    "by_path": status.tally.since_start.path.partitions, "weights": weights.tolist(),
}))
"""
"""Four ZeRO-3 steps with the path attached."""


def installed(wheel: zipfile.ZipFile, folder: Path) -> Path:
    """The Python of a fresh environment with the wheel in it, beside the libraries of this one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    wheel.extractall(packages)
    (packages / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python"


def launched() -> dict[str, str]:
    """What a launcher sets for one rank."""
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1", "OMP_NUM_THREADS": "1"}
    return {**rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


def said(python: Path, arguments: list[str], cache: Path, search: str, **more: str) -> str:
    """What it prints with that PATH and more variables; nothing else of this environment but two folders."""
    kept = {name: os.environ[name] for name in ("HOME", "TORCH_EXTENSIONS_DIR") if name in os.environ}
    own = {"PATH": search, "AUTOTUNE_OFFLOAD_CACHE": str(cache), "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [str(python), *arguments],
        cwd=python.parent,
        env={**kept, **own, **more},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def trained(python: Path, cache: Path, search: str) -> dict[str, Any]:
    """What the training tells."""
    (line,) = (
        line
        for line in said(python, ["-c", TRAINING], cache, search, **launched()).splitlines()
        if line.startswith("FOUND ")
    )
    found: dict[str, Any] = json.loads(line.removeprefix("FOUND "))
    return found


@needs_compiler
@pytest.mark.long
@pytest.mark.slow
def test_a_wheel_on_a_machine_without_a_compiler(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """It probes and trains with what it brought; without that by torch's operations, told, to the same bits."""
    python = installed(wheel, tmp_path / "environment")
    ninja = shutil.which("ninja")
    assert ninja is not None
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ninja").symlink_to(ninja)  # loads what DeepSpeed has built; no compiler is beside it
    search = str(tmp_path / "bin")
    with_one = trained(
        python, tmp_path / "first", os.environ["PATH"]
    )  # builds DeepSpeed's operation where need be

    profile = json.loads(
        said(python, ["-m", "autotune_offload", "probe", "--params", "1m", "--budget", "1", "--json"],
             tmp_path / "cache", search)
    )  # fmt: skip
    assert profile["step_rates"]["why_no_pass"] is None
    found = trained(python, tmp_path / "cache", search)
    assert Path(found["package"]).is_relative_to(tmp_path) and found["why_not"] is None
    assert found["passes"]["widen"] == f"came with the package, built for {ABLE[0]}"
    assert f"widen: {found['passes']['widen']}" in found["told"]
    assert found["by_path"] and found["weights"] == with_one["weights"]

    (libraries,) = (tmp_path / "environment").glob("lib/*/site-packages/autotune_offload/machine/shipped")
    shutil.rmtree(libraries)
    bare = trained(python, tmp_path / "cache", search)
    assert (
        "torch's operations" in bare["passes"]["widen"]
        and f"widen: {bare['passes']['widen']}" in bare["told"]
    )
    assert bare["by_path"] == found["by_path"] and bare["weights"] == found["weights"]
    told = json.loads(
        said(python, ["-m", "autotune_offload", "doctor", "--json"], tmp_path / "cache", search)
    )
    assert "torch's operations" in told["host_passes"]["widen"]
    assert "compiler" in {finding["id"] for finding in told["findings"]}
