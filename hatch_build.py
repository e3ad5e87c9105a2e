"""Hatchling's hook: builds the C passes into the wheel where AUTOTUNE_OFFLOAD_WHEEL=compiled says so.

Without it the wheel is pure Python, and the passes are compiled on first use. The compiler is the one that CC names,
else `cc`; one that builds for another architecture makes a wheel for that. A wheel that was asked for and cannot be
built is an error: nobody publishes a pure one by mistake.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

VARIABLE = "AUTOTUNE_OFFLOAD_WHEEL"
GLIBC = (2, 17)
"""The oldest that the wheel's tag promises to run with (PEP 600)."""


class CompiledPasses(BuildHookInterface):  # type: ignore[type-arg]
    """Called by hatchling for every wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and add the libraries and the tag to what is built."""
        wanted = os.environ.get(VARIABLE) or "pure"
        if wanted not in ("pure", "compiled"):
            raise ValueError(f"{VARIABLE} is {wanted!r}; expected 'pure' or 'compiled'")
        if version == "editable" or wanted == "pure":
            return
        machine = Path(self.root) / "autotune_offload" / "machine"
        variants = _module(machine / "variants.py")
        compiler = shlex.split(os.environ.get("CC") or "cc")
        architecture = _said([*compiler, "-dumpmachine"]).split("-")[0]
        if architecture not in variants.LEVELS:
            raise ValueError(
                f"{compiler[0]} builds for {architecture}; expected one of {', '.join(variants.LEVELS)}"
            )
        self._folder = tempfile.TemporaryDirectory()
        for name, flags in variants.PASSES.items():
            for level in variants.LEVELS[architecture]:
                built = Path(self._folder.name) / variants.file_name(machine / name, level)
                own = ["-s", "-Wl,--build-id=none", "-o", str(built), str(machine / name)]
                _said([*compiler, *variants.FLAGS, f"-march={level}", *flags, *own])
                _require_old_glibc(built)
                build_data["force_include"][str(built)] = f"autotune_offload/machine/shipped/{built.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_{GLIBC[0]}_{GLIBC[1]}_{architecture}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled: it is in the wheel."""
        if hasattr(self, "_folder"):
            self._folder.cleanup()


def _module(file: Path) -> Any:
    """Loaded by itself: the package needs libraries that a build has not."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _said(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} failed: {done.stderr[-2000:]}")
    return done.stdout.strip()


def _require_old_glibc(library: Path) -> None:
    """The versions of symbols stand in the library as text."""
    found = re.findall(rb"GLIBC_(\d+)\.(\d+)", library.read_bytes())
    newest = max(((int(major), int(minor)) for major, minor in found), default=GLIBC)
    if newest > GLIBC:
        raise RuntimeError(f"{library.name} needs glibc {newest[0]}.{newest[1]}; the tag promises {GLIBC}")
