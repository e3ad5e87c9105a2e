"""The path that a choice or a candidate names."""

from __future__ import annotations

import torch

from autotune_offload import packaged
from autotune_offload.errors import ConfigError
from autotune_offload.machine.device import Device
from autotune_offload.paths.destination import DestinationPath
from autotune_offload.paths.path import GradientPath, Spec
from autotune_offload.paths.ring import StagedPath
from autotune_offload.records import Path

_PATHS: dict[Path, type[GradientPath]] = {
    "direct": DestinationPath,
    "pinned": DestinationPath,
    "staged": StagedPath,
}


def build(device: Device, spec: Spec, dtype: torch.dtype) -> GradientPath:
    """The path that `spec` names, with its buffers allocated, for gradients of `dtype`.

    Raises:
        ConfigError: buffers smaller than one element, or no buffers; a path of a package that is not installed.
        PinError: a staged path where page-locked memory cannot be had.
    """
    if spec.buffer_bytes < 4 or spec.buffer_count < 1 or spec.host_threads < 0:
        raise ConfigError(
            f"{spec.path} with {spec.buffer_count} buffers of {spec.buffer_bytes} bytes and "
            f"{spec.host_threads} host threads: expected at least one buffer of 4 bytes and no negative number"
        )
    made = _PATHS.get(spec.path) or packaged.load(spec.path).make
    path: GradientPath = made(device, spec, dtype)
    return path
