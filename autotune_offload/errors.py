"""Every exception that this package raises on purpose.

::

    AutotuneError
    ├── ConfigError        a ds_config, a probe plan or an argument that cannot be used
    ├── DeviceError        the accelerator cannot do what it was asked for
    │   └── PinError       page-locking failed or is not on offer
    ├── MeasurementError   a number that cannot be trusted: wrong bytes, a synchronize that waits for nothing
    ├── BudgetError        the time or memory budget is too small to measure anything
    ├── ProfileError       a stored profile that cannot be read, written or found
    └── AgreementError     ranks that did not come to one decision: none of them is tuned
        └── UndecidedError it cannot be known what the others do; the one error that is never passed over

Each message says what was found, what was expected and what to do.
"""

from __future__ import annotations


class AutotuneError(Exception):
    """Base of everything raised here on purpose; anything else that escapes is a bug of ours."""


class ConfigError(AutotuneError):
    """A configuration or argument of the user's that cannot be used."""


class DeviceError(AutotuneError):
    """The accelerator cannot do what it was asked for."""


class PinError(DeviceError):
    """Host memory could not be page-locked."""


class MeasurementError(AutotuneError):
    """A measurement that would be wrong."""


class BudgetError(AutotuneError):
    """The budget does not allow a single measurement."""


class ProfileError(AutotuneError):
    """A stored profile that cannot be read, written or found."""


class AgreementError(AutotuneError):
    """The ranks of a job did not come to one decision."""


class UndecidedError(AgreementError):
    """This rank cannot know whether the others use what was agreed, so it must not train."""


def in_words(error: BaseException) -> str:
    """Its kind and its message, for an exception of anybody's."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
