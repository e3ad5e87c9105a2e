"""Faults that users have met, injected for real: what must happen, and whether it did.

`python -m tests.reliability --write docs/reliability.md` injects them all and writes the table.
"""

from __future__ import annotations

from tests.reliability import cache, config, device, limits, ranks, reports, signals
from tests.reliability.registry import FAULTS

__all__ = ["FAULTS", "cache", "config", "device", "limits", "ranks", "reports", "signals"]
