"""Waiting for a store that may never answer, while signals are heard."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from autotune_offload.errors import AgreementError

T = TypeVar("T")

_GRACE_SECONDS = 10.0
"""After a time-out, for a store that is slow to answer; then it counts as dead."""


class DeadStoreError(AgreementError):
    """The store does not answer."""


def bounded(step: Callable[[], T], seconds: float) -> T:
    """What `step` gives, from a thread of its own: a store on a frozen host would hold a request for ever.

    A signal is heard meanwhile, which the main thread could not do within torch's own code.

    Raises:
        AgreementError: no answer within so many seconds and a grace, or no connection.
    """
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(step())
        except BaseException as error:  # the calling thread's to raise
            failed.append(error)

    thread = threading.Thread(target=run, name="autotune-offload agreement", daemon=True)
    thread.start()
    thread.join(seconds + _GRACE_SECONDS)
    if done:
        return done[0]
    if not failed:
        raise DeadStoreError(f"the store of rank 0 gave no answer within {seconds + _GRACE_SECONDS:g} s")
    if isinstance(failed[0], RuntimeError):  # torch's DistError is one
        raise DeadStoreError(f"the store of rank 0 cannot be used: {failed[0]}") from failed[0]
    raise failed[0]
