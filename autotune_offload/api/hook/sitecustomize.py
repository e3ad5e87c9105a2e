"""Run by Python at its start where this folder is on PYTHONPATH, as `autotune-offload run` arranges it.

Waits for DeepSpeed to be imported, and then installs the wrappers. Until then it costs next to nothing, so
that launchers, compilers and everything else below the same command can carry it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_WAITED_FOR = "deepspeed"
_REACHED = "AUTOTUNE_OFFLOAD_REACHED"  # api.reached.VARIABLE


class WhenImported:
    """A finder that adds `_tune` to the end of DeepSpeed's import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """DeepSpeed's own spec with a longer `exec_module`; None for everything else."""
        if name != _WAITED_FOR:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:  # whoever only asks whether DeepSpeed is there asks before it is imported
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _tune()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _tune() -> None:
    """Fails open: whatever is wrong here costs one warning, and the script runs untuned."""
    import logging

    log = logging.getLogger("autotune_offload.api.install")
    try:
        from autotune_offload.api.install import install

        install()
        _say("imported")
    except Exception as error:
        log.warning(
            "autotune-offload: not tuned, %s: %s; is it installed for %s?",
            type(error).__name__,
            error,
            sys.executable,
        )
        return
    if os.environ.get("RANK", "0") == "0" and not log.handlers:
        # Nobody but `run` can say what was done: the script knows nothing of it.
        log.addHandler(logging.StreamHandler())
        log.setLevel(logging.INFO)
        log.propagate = False


def _say(word: str) -> None:
    """Leave a word for `autotune-offload run`, where it waits for the end of the command."""
    folder = os.environ.get(_REACHED)
    if folder:
        try:
            with open(os.path.join(folder, str(os.getpid())), "a", encoding="utf-8") as file:
                file.write(word + "\n")
        except OSError:  # another host, or a container of its own
            pass


def _run_the_next_one() -> None:
    """Python imports one `sitecustomize`; where this one hides another, that is run too."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder or os.curdir) != here]
    importlib.invalidate_caches()
    this = sys.modules.pop(__name__, None)
    try:
        importlib.import_module(__name__)
    except ImportError as error:
        if error.name != __name__:
            raise
    finally:
        if this is not None:
            sys.modules.setdefault(__name__, this)


def _switched_off() -> bool:
    """Asks the one file that reads the switch: the package itself may not be installed for this Python."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "switch.py")
    spec = importlib.util.spec_from_file_location("autotune_offload_switch", path)
    assert spec is not None and spec.loader is not None
    switch = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(switch)
    try:
        return bool(switch.is_off())
    except ValueError:  # refused in words where a run is decided on
        return False


if not _switched_off():
    sys.meta_path.insert(0, WhenImported())
    _say("started")
if __name__ == "sitecustomize":
    _run_the_next_one()
