"""Measures how this machine moves ZeRO offload data, and sets DeepSpeed up accordingly.

Every folder is one stage of "measure, decide, write, carry out", and imports only from lower floors
(docs/architecture.md). The flat files are the vocabulary that all of them share. What the package itself offers is
listed once, in `__init__.pyi`, and loaded on first use: importing it loads neither torch nor DeepSpeed.
"""

import lazy_loader

_load, _, _names = lazy_loader.attach_stub(__name__, __file__)
__all__ = [*_names, "__version__"]


def __getattr__(name: str) -> object:
    """Gives a public name from its module, on its first use (PEP 562)."""
    if name == "__version__":
        return _installed_version()
    return _load(name)


def __dir__() -> list[str]:
    """The public names, loaded or not."""
    return sorted(__all__)


def _installed_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("autotune-offload")
    except PackageNotFoundError:  # imported from a source tree that was never installed
        return "0+unknown"
