"""What every test runs under: kept builds, an own profile cache, the CPU where nothing better is there.

Whatever the run was started with, tests and the processes that they start see the same: Ctrl-C at its default, the
usual umask, none of the variables below.

Variables for a run of the tests, none of which the package reads:
    AUTOTUNE_OFFLOAD_TEST_CACHE     a last-level cache of this size in this process, such as 480MiB
    AUTOTUNE_OFFLOAD_TEST_EXAMPLES  how many examples a property draws, at random; unset, it takes the same few
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from autotune_offload.config import block
from autotune_offload.machine import host
from autotune_offload.machine.procfs import ROOT
from tests import op_builds, shared_memory

FEW_EXAMPLES = 60

_TAKEN_OUT = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("AUTOTUNE_OFFLOAD", "DS_PIN_MEMORY_BACKEND", "DS_PIN_MEMORY_REGISTER_DEVICE"),
    *("OMP_NUM_THREADS", "OMP_THREAD_LIMIT", "MKL_NUM_THREADS"),
    *("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE"),
    *("PYTHONWARNINGS", "PYTHONOPTIMIZE", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED"),
)
"""What a shell or a launcher may have set, and what tests look at."""


def pytest_configure(config: pytest.Config) -> None:
    """Sets the environment before any test module can import DeepSpeed; at the end nothing is left in memory."""
    config.add_cleanup(functools.partial(shared_memory.remove_since, shared_memory.buffers()))
    set_environment()


def set_environment() -> None:
    """What tests and faults run under."""
    for name in _TAKEN_OUT:
        os.environ.pop(name, None)
    os.environ.update(op_builds.environment())
    op_builds.remove_stale_locks(Path(os.environ["TORCH_EXTENSIONS_DIR"]))
    if "DS_ACCELERATOR" not in os.environ and not _accelerator_present():
        os.environ["DS_ACCELERATOR"] = "cpu"
    # a machine of any number of cores; on a busy one a parallel region waits long for its last thread
    os.environ["OMP_NUM_THREADS"] = "1"
    os.umask(0o022)
    # `nohup`, and `&` in a script, start a run that ignores them, and every child would too
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    _choose_examples(os.environ.get("AUTOTUNE_OFFLOAD_TEST_EXAMPLES"))
    _fake_cache(os.environ.get("AUTOTUNE_OFFLOAD_TEST_CACHE"))


def _without_constants_of_the_code() -> None:
    """Examples hang on the test alone: Hypothesis would mix in constants of every module of ours that is loaded.

    Then any change anywhere, or another selection of tests, draws other examples, and a find stops somebody else.
    """
    from hypothesis.internal.conjecture import providers
    from hypothesis.internal.constants_ast import Constants

    if hasattr(providers, "_get_local_constants"):
        providers._get_local_constants = Constants


def _choose_examples(count: str | None) -> None:
    """The same few in every run, or so many that are drawn; a failure then prints what draws it again."""
    _without_constants_of_the_code()
    few = settings(derandomize=True, database=None, deadline=None, max_examples=FEW_EXAMPLES)
    settings.register_profile("few", few)
    if count is None:
        settings.load_profile("few")
        return
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    in_ci = (
        "CI" in os.environ
    )  # a find there would stop somebody else's change: it draws the same ones each time
    settings.register_profile(
        "drawn", few, derandomize=in_ci, max_examples=int(count), print_blob=True, suppress_health_check=slow
    )
    settings.load_profile("drawn")


def _fake_cache(size: str | None) -> None:
    """Puts a cache of this size in the place of this machine's own; made-up hosts keep theirs."""
    if size is None:
        return
    faked, read = (
        block.settings({block.BLOCK: {"buffer_bytes": size}}).buffer_bytes,
        host._last_level_cache_bytes,
    )
    host._last_level_cache_bytes = lambda root, cpus: int(faked) if root == ROOT else read(root, cpus)


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
