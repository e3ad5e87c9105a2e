"""Part: what has to be compiled once is compiled before anything is timed, DeepSpeed's CPU Adam above all."""

from __future__ import annotations

import os
import time
from pathlib import Path

from benchmarks.device.scene import Scene
from tests import op_builds


def run(scene: Scene) -> None:
    """DeepSpeed's CPU Adam, then the compiled passes of ours; what cannot be built is told, and is no failure."""
    op_builds.remove_stale_locks(Path(os.environ["TORCH_EXTENSIONS_DIR"]))
    began = time.monotonic()
    scene.keep(cpu_adam=_cpu_adam(), seconds=time.monotonic() - began)
    import torch

    from autotune_offload.machine import adam, host_pass

    scene.keep(pass_why_not=adam.why_not_compiled(torch.bfloat16))
    source, destination = torch.ones(1 << 10, dtype=torch.bfloat16), torch.empty(1 << 10)
    host_pass.widen(destination, source, None)


def _cpu_adam() -> str | None:
    """None where it is there, else why not."""
    try:
        from deepspeed.ops.op_builder import CPUAdamBuilder

        CPUAdamBuilder().load(verbose=False)
    except Exception as error:
        return f"{type(error).__name__}: {error}".strip().split("\n")[0][:300]
    return None
