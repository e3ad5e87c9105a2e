"""The public names and their homes."""

from .api.initialize import initialize, load_profile, tune_config, zero_init
from .api.install import install, uninstall
from .api.probe import probe
from .api.report import report
from .errors import (
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
from .records import Choice, Profile, Workload

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

__version__: str
