"""Host threads that take turns as a draw says: one runs at a time, and each may be left in the middle of its work.

Each task has a thread of its own that runs only while it is let, until its next call of the device or its end. So
what another thread sees of it is drawn, and is the same again for the same seed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


class DrawnTask(Future[Any]):
    """Work of one of the threads; whoever waits for it lets it go on until it is done."""

    def __init__(self, threads: DrawnThreads, work: Callable[[], Any]) -> None:
        super().__init__()
        self._threads, self._work = threads, work
        self._goes_on, self._stands = threading.Semaphore(0), threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        lock: Any = self._condition
        self._acquire = lock.acquire
        lock.acquire = self._awaited

    def _awaited(self, *args: Any) -> Any:
        """`concurrent.futures.wait` begins with it, and nothing else does."""
        self.force()
        return self._acquire(*args)

    @property
    def begun(self) -> bool:
        """Whether it is among those that a thread has taken."""
        return self._thread is not None

    def go_on(self) -> None:
        """Run until it stands again; whoever calls stands meanwhile."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="host thread", daemon=True)
            self._thread.start()
        self._goes_on.release()
        self._stands.acquire()
        if self.done():
            self._thread.join()

    def _run(self) -> None:
        self._goes_on.acquire()
        self._threads.running.task = self
        try:
            if self.set_running_or_notify_cancel():
                self.set_result(self._work())
        except BaseException as error:
            self.set_exception(error)
        self._stands.release()

    def stand(self) -> None:
        """Called by the task itself: others go on."""
        self._stands.release()
        self._goes_on.acquire()

    def force(self) -> None:
        """Be done, after whatever must come before."""
        while not self.done():
            self._threads.first(self).go_on()

    def result(self, timeout: float | None = None) -> Any:
        """When it is done."""
        del timeout
        self.force()
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The same."""
        del timeout
        self.force()
        return super().exception(0)

    def cancel(self) -> bool:
        """Where no thread has taken it."""
        if self.begun:
            return self.cancelled()
        before = self.cancelled()
        return before or (super().cancel() and not self.set_running_or_notify_cancel())


class DrawnThreads(Executor):
    """`count` threads that take work in the order in which it came, and finish it in any.

    Args:
        count: how many.
        tick: lets time pass.
        running: of each thread, `task` is what it runs.
    """

    def __init__(self, count: int, tick: Callable[[], None], running: threading.local) -> None:
        self._count, self._tick, self.running = count, tick, running
        self._waiting: list[DrawnTask] = []

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """For later."""
        task = DrawnTask(self, lambda: work(*args, **kwargs))
        self._waiting.append(task)
        self._tick()
        return task

    def candidates(self) -> list[DrawnTask]:
        """Who may go on next."""
        self._waiting = [task for task in self._waiting if not task.done()]
        return self._waiting[: self._count]

    def first(self, task: DrawnTask) -> DrawnTask:
        """Who goes on, so that this one is done some time: itself where a thread has it or is free."""
        candidates = self.candidates()
        return task if task in candidates else candidates[0]

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """After what was submitted."""
        del wait, cancel_futures
        while candidates := self.candidates():
            candidates[0].force()
