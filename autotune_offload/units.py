"""Numbers for people: one place that decides how a size, a time, a rate or a share is written."""

from __future__ import annotations

import math

MISSING = "-"
"""What stands for a number that is absent, infinite or not a number."""

_BINARY = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
_COUNTS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def significant(value: float, digits: int = 3) -> str:
    """`value` with `digits` significant digits and never in exponent form: 0.123, 1.23, 12.3, 123, 1234."""
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits - 1}e}")
    decimals = digits - 1 - math.floor(math.log10(abs(rounded)))
    return f"{value:.{max(0, decimals)}f}"


def size(size_bytes: float | None) -> str:
    """Bytes in the largest binary unit that keeps the number at 1 or above: ``4 KiB``, ``1.5 GiB``."""
    if size_bytes is None or not math.isfinite(size_bytes):
        return MISSING
    for factor, unit in _BINARY:
        if abs(size_bytes) >= factor:
            return f"{_trimmed(size_bytes / factor)} {unit}"
    return f"{size_bytes:.0f} B"


def duration(seconds: float | None) -> str:
    """Seconds as s, ms, us or ns with three significant digits: ``12.3 ms``."""
    if seconds is None or not math.isfinite(seconds):
        return MISSING
    for factor, unit in _TIMES:
        if float(f"{abs(seconds):.2e}") >= factor:
            return f"{significant(seconds / factor)} {unit}"
    return "0 s" if seconds == 0 else f"{significant(seconds / 1e-9)} ns"


def rate(gbps: float | None) -> str:
    """A bandwidth given in 1e9 bytes a second: ``12.3 GB/s``."""
    if gbps is None or not math.isfinite(gbps):
        return MISSING
    return f"{significant(gbps)} GB/s"


def percent(share: float | None) -> str:
    """A share of one in percent, with a decimal only below 1 %: ``23 %``, ``0.4 %``."""
    if share is None or not math.isfinite(share):
        return MISSING
    if share == 0:
        return "0 %"
    return f"{share * 100:.1f} %" if abs(share) < 0.00995 else f"{share * 100:.0f} %"


def times(ratio: float | None) -> str:
    """How many times: ``1.25x``."""
    if ratio is None or not math.isfinite(ratio):
        return MISSING
    return f"{significant(ratio)}x"


def count(number: int) -> str:
    """A number of elements or parameters: ``7 B``, ``125 M``, ``850``."""
    for factor, unit in _COUNTS:
        if abs(number) >= factor:
            return f"{_trimmed(number / factor)} {unit}"
    return str(number)


def threads(number: int) -> str:
    """``1 thread``, ``2 threads``."""
    return f"{number} thread{'' if number == 1 else 's'}"


def _trimmed(value: float) -> str:
    """Three significant digits without the zeros that say nothing: 4, 1.5, 1023."""
    text = significant(value)
    return text.rstrip("0").rstrip(".") if "." in text else text


def gigabytes(count: int) -> str:
    """Bytes in GB (1e9) with three significant digits."""
    gigabytes = count / 1e9
    return f"{gigabytes:,.0f} GB" if gigabytes >= 100 else f"{gigabytes:.3g} GB"
