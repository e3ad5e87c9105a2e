"""What every test runs under: kept builds, an own profile cache, the CPU where nothing better is there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import op_builds


def pytest_configure() -> None:
    """Sets the environment before any test module can import DeepSpeed."""
    os.environ.update(op_builds.environment())
    op_builds.remove_stale_locks(Path(os.environ["TORCH_EXTENSIONS_DIR"]))
    if "DS_ACCELERATOR" not in os.environ and not _accelerator_present():
        os.environ["DS_ACCELERATOR"] = "cpu"


def _accelerator_present() -> bool:
    import torch

    return torch.accelerator.is_available()


def _deepspeed_device() -> str:
    from deepspeed.accelerator import get_accelerator

    return str(get_accelerator().device_name())


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips tests marked `accelerator` where DeepSpeed would use the CPU."""
    if item.get_closest_marker("accelerator") is not None and _deepspeed_device() == "cpu":
        pytest.skip("DeepSpeed's accelerator is the CPU on this machine")


@pytest.fixture(scope="session", autouse=True)
def _own_profile_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOTUNE_OFFLOAD_CACHE", str(tmp_path_factory.mktemp("profiles")))
        yield
