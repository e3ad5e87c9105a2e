"""The fused host pass: the bits, the norm, and where its compiled form may come from."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from autotune_offload import places
from autotune_offload.machine import compiled, host_pass
from tests import CHECKOUT

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(autouse=True)
def _compiled_anew() -> Iterator[None]:
    """No test sees the library of the one before."""
    forget()
    yield
    forget()


def forget() -> None:
    """As if the process had just started."""
    compiled.library.cache_clear()
    host_pass._one_pass.cache_clear()


def widened(source: Tensor) -> tuple[Tensor, float]:
    """What `widen` writes, in memory that held something else, and what it returns."""
    destination = torch.full((source.numel(),), 3.5)
    squares = host_pass.widen(destination, source)
    return destination, squares


def bits(tensor: Tensor) -> Tensor:
    """An fp32 tensor as integers."""
    return tensor.view(torch.int32)


def every_pattern(dtype: torch.dtype) -> Tensor:
    """All 65,536 values of a 16-bit dtype, signalling NaN among them."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)


def no_compiler(patch: pytest.MonkeyPatch) -> None:
    """A host without a C compiler."""
    patch.setenv("CC", "/nonexistent/cc")
    forget()


@pytest.fixture(params=["fused", "in pieces"])
def _either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "in pieces":
        no_compiler(monkeypatch)


@pytest.mark.usefixtures("_either_way")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_value_widens_to_the_bits_that_torch_gives(dtype: torch.dtype) -> None:
    """All 65,536 of them, with the payload of every NaN."""
    source = every_pattern(dtype)
    destination, _ = widened(source)
    assert torch.equal(bits(destination), bits(source.float()))


@pytest.mark.usefixtures("_either_way")
@pytest.mark.parametrize("dtype", DTYPES)
def test_tails_and_misaligned_starts_are_like_the_rest(dtype: torch.dtype) -> None:
    """Lengths 0 to 40 from every start within a vector; nothing beyond the end is written."""
    values = torch.randn(100, generator=torch.Generator().manual_seed(0)).to(dtype)
    for length in range(41):
        for start in range(17):
            guarded = torch.full((length + 2,), 7.0)
            source = values[start : start + length]
            kept = torch.full((length + 2,), 7.0, dtype=dtype)
            places = guarded[1 : 1 + length], source, kept[1 : 1 + length]
            squares = host_pass.widen(*places)
            assert torch.equal(bits(places[0]), bits(source.float())) and torch.equal(places[2], source)
            assert guarded[0] == guarded[-1] == 7.0 == kept[0] == kept[-1]
            assert squares == pytest.approx(float(source.double().pow(2).sum()), rel=1e-13)


@pytest.mark.usefixtures("_either_way")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("constant", [False, True])
def test_the_norm_is_that_of_fp64(dtype: torch.dtype, constant: bool) -> None:
    """To 1e-13 over a million elements, also where all are alike and every rounding goes the same way."""
    source = torch.full((1_000_003,), 0.1) if constant else torch.randn(1_000_003)
    source = source.to(dtype)
    _, squares = widened(source)
    exact = (
        torch.dot(source.double(), source.double()) if not constant else len(source) * source[0].double() ** 2
    )
    assert squares**0.5 == pytest.approx(float(exact) ** 0.5, rel=1e-13)


@given(
    values=st.lists(st.floats(width=16, allow_nan=False), max_size=70),
    dtype=st.sampled_from(DTYPES),
    start=st.integers(0, 20),
)
def test_fused_and_in_pieces_are_the_same(values: list[float], dtype: torch.dtype, start: int) -> None:
    """Infinities included: the fused pass is a matter of time, never of results."""
    source = torch.tensor(values, dtype=torch.float32).to(dtype)[start:]
    fused, squares = widened(source)
    pieces = torch.empty(source.numel())
    other = host_pass.in_pieces(pieces, source)
    assert torch.equal(bits(fused), bits(pieces))
    assert squares == pytest.approx(other, rel=1e-13)


def test_infinities_and_nan_show_in_the_norm() -> None:
    """DeepSpeed finds an overflow of bf16 and fp32 gradients by it."""
    for dtype in DTYPES:
        for value in (float("inf"), float("-inf")):
            assert widened(torch.tensor([1.0, value]).to(dtype))[1] == float("inf")
        assert str(widened(torch.tensor([1.0, float("nan")]).to(dtype))[1]) == "nan"
    assert widened(torch.full((100,), 3e38))[1] < float("inf")


def test_this_machine_has_the_fused_pass() -> None:
    """Every machine that builds DeepSpeed's operations has a compiler."""
    assert host_pass.why_not_fused(torch.bfloat16) is None
    assert host_pass.why_not_fused(torch.float32) is None


def test_no_compiler_is_said_and_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason names what was tried; results stay the same."""
    no_compiler(monkeypatch)
    assert "/nonexistent/cc" in str(host_pass.why_not_fused(torch.bfloat16))
    destination, squares = widened(torch.tensor([1.0, 2.0, -3.0]).bfloat16())
    assert destination.tolist() == [1.0, 2.0, -3.0] and squares == 14.0


def test_a_compiler_that_fails_is_said_with_what_it_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its last words are the reason."""
    broken = tmp_path / "cc"
    broken.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo broken 1.0 && exit\necho "out of ideas" >&2; exit 1\n'
    )
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    monkeypatch.setenv(places.CACHE_VARIABLE, str(tmp_path / "cache"))
    assert "out of ideas" in str(host_pass.why_not_fused(torch.float32))
    assert list((tmp_path / "cache" / "kernels").iterdir()) == []


def test_a_dtype_without_a_compiled_pass_is_said() -> None:
    """And still widened, by torch's operations."""
    assert "float64" in str(host_pass.why_not_fused(torch.float64))
    assert widened(torch.tensor([2.0], dtype=torch.float64))[1] == 4.0


@pytest.mark.parametrize(
    ("destination", "source"),
    [
        (torch.empty(4), torch.empty(5)),
        (torch.empty(8)[::2], torch.empty(4)),
        (torch.empty(4), torch.empty(8)[::2]),
        (torch.empty(4, dtype=torch.float64), torch.empty(4)),
        (torch.empty(2, 2), torch.empty(2, 2)),
        (torch.empty(4, device="meta"), torch.empty(4)),
    ],
    ids=["length", "strided destination", "strided source", "dtype", "two dimensions", "device"],
)
def test_memory_that_is_not_as_expected_is_refused(destination: Tensor, source: Tensor) -> None:
    """Before anything is written past its end."""
    with pytest.raises(ValueError, match="expected"):
        host_pass.widen(destination, source)


@pytest.mark.parametrize("kept", [torch.empty(3), torch.empty(4).bfloat16(), torch.empty(8)[::2]])
def test_memory_that_cannot_keep_the_values_as_they_are_is_refused(kept: Tensor) -> None:
    """Another length, another dtype, or with gaps."""
    with pytest.raises(ValueError, match="kept as they are"):
        host_pass.widen(torch.empty(4), torch.empty(4), kept)


# -- where the compiled form lies -----------------------------------------------------------------


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An own cache folder, not there yet."""
    monkeypatch.setenv(places.CACHE_VARIABLE, str(tmp_path / "profiles"))
    return tmp_path / "profiles"


def loaded_from() -> Path:
    """Where the compiled pass was put."""
    library = compiled.library(host_pass._SOURCE)
    assert not isinstance(library, str), library
    return Path(str(library._name))


def test_it_is_compiled_once_for_a_user(cache: Path) -> None:
    """Into a folder that nobody else may enter; the next process finds it."""
    path = loaded_from()
    assert path.parent == cache / "kernels"
    assert path.parent.stat().st_mode & 0o077 == 0
    before = path.stat().st_mtime_ns
    forget()
    assert loaded_from() == path and path.stat().st_mtime_ns == before


def test_a_compiler_that_is_killed_leaves_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had put into its folder for temporary files goes with it."""
    compiler = tmp_path / "cc"
    compiler.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exit\ntouch "$TMPDIR/half.s" {tmp_path}/ran\nkill -9 $$\n'
    )
    compiler.chmod(0o755)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setenv("CC", str(compiler))
    assert isinstance(compiled.library(host_pass._SOURCE), str)
    assert (tmp_path / "ran").exists()
    assert not list((cache / "kernels").iterdir()) and not list((tmp_path / "temporary").iterdir())


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_can_write_to_is_not_used(cache: Path, mode: int) -> None:
    """Whatever lies there might be somebody else's code."""
    (cache / "kernels").mkdir(parents=True)
    (cache / "kernels").chmod(mode)
    assert cache not in loaded_from().parents
    assert list((cache / "kernels").iterdir()) == []


def test_a_folder_of_another_user_is_not_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where it looks private."""
    (cache / "kernels").mkdir(parents=True, mode=0o700)
    mine = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    assert cache not in loaded_from().parents


def test_a_link_to_a_folder_is_not_used(cache: Path, tmp_path: Path) -> None:
    """Who can place the link can move it."""
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    cache.mkdir()
    (cache / "kernels").symlink_to(tmp_path / "elsewhere")
    assert tmp_path not in loaded_from().parents


def test_a_folder_that_others_can_swap_is_not_used(cache: Path) -> None:
    """A folder above it that everybody may write to, without the sticky bit of /tmp."""
    cache.mkdir()
    cache.chmod(0o777)
    assert cache not in loaded_from().parents
    cache.chmod(0o1777)
    forget()
    assert loaded_from().parent == cache / "kernels"


def test_a_cache_that_cannot_be_made_does_no_harm(cache: Path) -> None:
    """A file lies where the folder should be."""
    cache.write_text("in the way")
    assert cache not in loaded_from().parents


SCRIPT = """
import torch
from autotune_offload.machine import compiled, host_pass
destination = torch.empty(3)
assert host_pass.widen(destination, torch.tensor([1.0, 2.0, 3.0]).bfloat16()) == 14.0
print(host_pass.why_not_fused(torch.bfloat16))
"""


@pytest.mark.slow
def test_processes_that_compile_at_the_same_time_do_no_harm(cache: Path) -> None:
    """Each gets a working library, and one file stays."""
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), places.CACHE_VARIABLE: str(cache)}
    processes = [
        subprocess.Popen([sys.executable, "-c", SCRIPT], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [(process.communicate(timeout=120)[0].strip(), process.returncode) for process in processes] == [
        ("None", 0)
    ] * 2
    assert len(list((cache / "kernels").iterdir())) == 1


@pytest.mark.slow
def test_the_wheel_contains_the_source(tmp_path: Path) -> None:
    """An installed package compiles it as a checkout does."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=CHECKOUT,
        check=True,
        capture_output=True,
        timeout=120,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"autotune_offload/machine/widen.c", "autotune_offload/machine/adam.c"} <= set(names)
