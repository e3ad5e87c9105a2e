"""Measures how this machine moves ZeRO-3 offload data, and sets DeepSpeed up accordingly.

Everything here is loaded on first use: importing the package loads neither torch nor DeepSpeed.
"""

from __future__ import annotations

TYPE_CHECKING = False  # type checkers read it as true; the typing module is half of the cost of this import
if TYPE_CHECKING:
    from autotune_offload.api.initialize import initialize, load_profile, tune_config, zero_init
    from autotune_offload.api.install import install, uninstall
    from autotune_offload.api.probe import probe
    from autotune_offload.api.report import report
    from autotune_offload.errors import (
        AgreementError,
        AutotuneError,
        BudgetError,
        ConfigError,
        DeviceError,
        MeasurementError,
        PinError,
        ProfileError,
        UndecidedError,
    )
    from autotune_offload.records import Choice, Profile, Workload

    __version__: str

__all__ = [
    "AgreementError",
    "AutotuneError",
    "BudgetError",
    "Choice",
    "ConfigError",
    "DeviceError",
    "MeasurementError",
    "PinError",
    "Profile",
    "ProfileError",
    "UndecidedError",
    "Workload",
    "__version__",
    "initialize",
    "install",
    "load_profile",
    "probe",
    "report",
    "tune_config",
    "uninstall",
    "zero_init",
]

_HOME = {
    "initialize": "api.initialize",
    "install": "api.install",
    "load_profile": "api.initialize",
    "probe": "api.probe",
    "report": "api.report",
    "tune_config": "api.initialize",
    "AgreementError": "errors",
    "uninstall": "api.install",
    "zero_init": "api.initialize",
    "AutotuneError": "errors",
    "BudgetError": "errors",
    "ConfigError": "errors",
    "DeviceError": "errors",
    "MeasurementError": "errors",
    "PinError": "errors",
    "ProfileError": "errors",
    "UndecidedError": "errors",
    "Choice": "records",
    "Profile": "records",
    "Workload": "records",
}
"""Public name to the module that defines it."""


def _load(name: str) -> object:
    """Gives a public name from its module, on its first use (PEP 562)."""
    if name == "__version__":
        value: object = _installed_version()
    elif name in _HOME:
        from importlib import import_module

        value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


if not TYPE_CHECKING:  # seen by a type checker, it would let every misspelt name pass
    __getattr__ = _load


def __dir__() -> list[str]:
    """The public names, loaded or not."""
    return sorted(__all__)


def _installed_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("autotune-offload")
    except PackageNotFoundError:  # imported from a source tree that was never installed
        return "0+unknown"
