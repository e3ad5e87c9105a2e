"""A decision in words and numbers."""

from __future__ import annotations

from autotune_offload import units
from autotune_offload.decide.candidates import predicted
from autotune_offload.records import Baseline, Candidate

NOT_HERE = "page-locked memory is not on offer here"
PINS = {"direct": 0, "staged": 1, "pinned": 2}
OUT_OF_TIME = "not tried: out of time"


def by_time(candidate: Candidate) -> tuple[bool, float]:
    """Measured ones first."""
    if candidate.measured_seconds is not None:
        return False, candidate.measured_seconds
    return True, predicted(candidate)


def words(record: Candidate | Baseline) -> str:
    """A candidate or baseline in words, with the parameters that have an effect."""
    if isinstance(record, Baseline):
        return f"{record.name} into {record.memory} memory"
    said = f"{record.path} with the cast on the {record.cast}"
    if record.path == "staged":
        said += f" through {record.buffer_count} buffers of {units.size(record.buffer_bytes)}"
    elif record.cast == "device":
        said += f" in pieces of {units.size(record.buffer_bytes)}"
    if not record.host_threads:
        return said
    return said + f", {record.host_threads} host thread{'s' if record.host_threads > 1 else ''}"
