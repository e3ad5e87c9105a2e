"""What a user sees of a path where users look: events in DeepSpeed's monitor."""

from __future__ import annotations

import logging
from typing import Any

SECONDS = "Train/Offload/seconds"
GAIN = "Train/Offload/gain"
SWITCHES = "Train/Offload/switches"
"""Labels of the events: what the gradients of an accumulation took, DeepSpeed's own time over that of whoever was
committed to, and how often that was another than before."""

STEP_SECONDS = "Train/Offload/step_seconds"
STEP_GAIN = "Train/Offload/step_gain"
"""The same of the optimizer's step: its own work, without norms and overflow check."""

_LABELS = {
    "seconds": SECONDS,
    "gain": GAIN,
    "switches": SWITCHES,
    "step_seconds": STEP_SECONDS,
    "step_gain": STEP_GAIN,
}

_log = logging.getLogger("autotune_offload")


class Events:
    """Hands numbers to an engine's monitor, where one is switched on; whatever fails in that is not tried again."""

    def __init__(self) -> None:
        """Nothing has failed yet."""
        self._broken = False

    def write(self, engine: Any, **values: float | None) -> None:
        """`seconds`, `gain`, `switches`, `step_seconds` and `step_gain`: those that are known."""
        monitor = getattr(engine, "monitor", None)
        if self._broken or monitor is None or not getattr(monitor, "enabled", False):
            return
        try:
            samples = int(engine.global_samples)
            monitor.write_events(
                [(_LABELS[name], value, samples) for name, value in values.items() if value is not None]
            )
        except Exception:
            self._broken = True
            _log.debug("autotune-offload: the monitor takes no events", exc_info=True)
