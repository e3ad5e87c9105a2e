"""How much is said, and where: one line for a job by default, more or less as AUTOTUNE_OFFLOAD_LOG asks.

Whoever has set up `logging` decides alone, but for the level that the variable names. Nothing is set up at import.
"""

from __future__ import annotations

import logging
import os

from autotune_offload.api.notices import log, warn
from autotune_offload.api.report import Report
from autotune_offload.ranks import group as ranks_group

VARIABLE = "AUTOTUNE_OFFLOAD_LOG"
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}

_job = logging.getLogger("autotune_offload.job")
"""Of the one line alone, which is heard by default where nobody has set up logging."""

_refused: set[str] = set()
_said: set[str] = set()


def set_up() -> None:
    """Do as the variable says; what it says otherwise is refused in words, once, and training goes on."""
    written = os.environ.get(VARIABLE, "").strip()
    level = LEVELS.get(written.lower())
    if written and level is None and written not in _refused:
        _refused.add(written)
        warn(f'{VARIABLE} is "{written}": expected one of {", ".join(LEVELS)}; the default stays')
    if level is not None:
        log.setLevel(level)
    if log.hasHandlers():
        return
    handler = logging.StreamHandler()
    handler.addFilter(_is_ours_to_say)
    log.addHandler(handler)
    if level is None:
        _job.setLevel(logging.INFO)


def _is_ours_to_say(record: logging.LogRecord) -> bool:
    """Nothing that handlers which were set up since say too; and on one rank, but for what goes wrong on another."""
    if logging.getLogger().handlers:
        return False
    return record.levelno >= logging.WARNING or ranks_group.present_rank() == 0


def tell(report: Report) -> None:
    """The one line of a job, on one rank: what carries its gradients, whence the choice, how many keys were written."""
    if report.profile is None or ranks_group.present_rank() != 0:
        return  # whatever was the reason has been said
    choice, keys, path = report.profile.choice, len(report.changes), report.path
    who = f"the path {choice.path}, cast on the {choice.cast}"
    if path is None or path.why_not is not None:
        who = "DeepSpeed's own code" + (f" ({path.why_not})" if path is not None else "")
    line = (
        f"autotune-offload: gradients go by {who}; {keys} {'key' if keys == 1 else 'keys'} of the ds_config written "
        f"({report.source}); {VARIABLE}=info says why"
    )
    if line not in _said:
        _said.add(line)
        _job.info("%s", line)
