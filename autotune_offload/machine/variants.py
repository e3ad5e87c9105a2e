"""The C passes as a wheel brings them: which there are, for which processors, and which of them fits this one.

Needs nothing but the standard library, since the wheel's build hook (`hatch_build.py`) loads this file by itself.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable, Iterator
from pathlib import Path

SHIPPED = Path(__file__).with_name("shipped")
"""Where a wheel has the libraries; a checkout and a pure wheel have no such folder."""

FLAGS = ("-O3", "-std=gnu11", "-shared", "-fPIC")
"""Of every build; `-march` comes behind."""

PASSES: dict[str, tuple[str, ...]] = {
    "widen.c": (),
    "adam.c": ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
}
"""Sources, and the flags that each needs so that its bits are the same for every processor.

The compiler may fuse no operations of adam.c of its own accord; the other two change no value: they let it vectorize.
"""

_AVX2 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
LEVELS: dict[str, dict[str, frozenset[str]]] = {
    "x86_64": {"x86-64-v4": _AVX512, "x86-64-v3": _AVX2, "x86-64": frozenset()},
    "aarch64": {"armv8-a": frozenset()},
}
"""By architecture, widest first: what `-march` is told, and the flags of /proc/cpuinfo that a processor has to have.

Source: the x86-64 psABI, table 3.1 (micro-architecture levels), in the kernel's names; `abm` is LZCNT there.
"""


def file_name(source: Path, level: str) -> str:
    """Of the library: with a hash of what it is made of, so that another source never finds it."""
    made_of = (source.read_text(encoding="utf-8"), *FLAGS, *PASSES[source.name], level)
    digest = hashlib.sha256("\0".join(made_of).encode()).hexdigest()
    return f"{source.stem}-{level}-{digest[:16]}.so"


def shipped(source: Path, flags: Iterable[str]) -> Iterator[tuple[str, Path]]:
    """Level and library of what came with the package for this source and processor, the widest first."""
    if tuple(flags) != PASSES.get(source.name) or not SHIPPED.is_dir():
        return
    able = flags_of_processor()
    for level, needed in LEVELS.get(platform.machine(), {}).items():
        library = SHIPPED / file_name(source, level)
        if needed <= able and library.is_file():
            yield level, library


def flags_of_processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """What every processor here has, in the kernel's names; nothing where that cannot be read."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    each = [
        frozenset(line.partition(":")[2].split()) for line in lines if line.startswith(("flags", "Features"))
    ]
    return frozenset.intersection(*each) if each else frozenset()
