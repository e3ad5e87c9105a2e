"""Stores for ranks that agree: one that counts what passes through it, one in the memory of one process."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any


class CountingStore:
    """A store, and what passes through it."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.requests: Counter[str] = Counter()
        self.bytes = 0

    def _count(self, name: str, *texts: str | bytes) -> None:
        self.requests[name] += 1
        self.bytes += sum(map(len, texts))

    def set(self, key: str, value: Any) -> None:
        """Counts key and value."""
        self._count("set", key, value)
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        """Counts key and value."""
        value: bytes = self.store.get(key)
        self._count("get", key, value)
        return value

    def add(self, key: str, amount: int) -> int:
        """Counts the key and two numbers of 8 bytes."""
        self._count("add", key, bytes(16))
        return int(self.store.add(key, amount))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Counts the key, what is written, and what comes back."""
        found: bytes = self.store.compare_set(key, expected, desired)
        self._count("compare_set", key, desired, found)
        return found

    def check(self, keys: list[str]) -> bool:
        """Counts a poll."""
        self.requests["poll"] += 1
        return bool(self.store.check(keys))


class SharedStore:
    """In the memory of one process. A poll waits a moment, or thousands of threads would do nothing else."""

    _POLL_SECONDS = 0.5

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._written: dict[str, threading.Event] = {}
        self._lock = threading.Lock()

    def _write(self, key: str, value: Any) -> bytes:
        self._values[key] = value if isinstance(value, bytes) else str(value).encode()
        self._written.setdefault(key, threading.Event()).set()
        return self._values[key]

    def set(self, key: str, value: Any) -> None:
        """Write."""
        with self._lock:
            self._write(key, value)

    def get(self, key: str) -> bytes:
        """Read what is there."""
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        """Add, and give the sum."""
        with self._lock:
            return int(self._write(key, int(self._values.get(key, b"0")) + amount))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write where nothing is."""
        assert not expected
        with self._lock:
            return self._values[key] if key in self._values else self._write(key, desired)

    def check(self, keys: list[str]) -> bool:
        """Whether the one key is there, or comes in a moment."""
        (key,) = keys
        with self._lock:
            written = self._written.setdefault(key, threading.Event())
        return written.wait(self._POLL_SECONDS)
