"""What it costs that ranks come to one decision.

    python -m benchmarks.agreement [--json] [--repeat TIMES] [--most RANKS]

1. Real ranks, 2, 4 and 8 processes with a gloo group each: seconds from a common start until the last rank may
   go on with a stored profile (one gathering and the confirmation), and what each moved through the store. This
   is what an agreement adds to a start; the limit is 100 ms at 8 ranks.
2. 64 to 4,096 ranks as threads of this process, hosts of 8, on a store in its memory: bytes and requests a rank.
   Its seconds say nothing about a job, since all ranks share one interpreter, and a poll there waits.
3. How many requests a second one TCPStore answers, asked by 4 processes at once, and from that how long the
   requests of a job would keep it busy.

Bytes are keys and values, without TCP's own. Asking again while waiting ("polls") depends on how long a rank
waits and is counted apart. With --json one JSON document and nothing else. The exit status is 1 where
a goal is missed.
"""

from __future__ import annotations

import argparse
import datetime
import math
import multiprocessing
import os
import socket
import statistics
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from autotune_offload.api.probe import probe
from autotune_offload.config import equal_keys
from autotune_offload.ranks import agree
from autotune_offload.ranks import group as ranks_group
from autotune_offload.ranks.agreement import Agreement
from autotune_offload.ranks.group import Group
from autotune_offload.records import Profile, from_plain, to_plain
from autotune_offload.workload import from_parameter_count
from benchmarks.output import reporting

REAL_RANKS = (2, 4, 8)
THREADED_RANKS = (64, 256, 1024, 4096)
RANKS_PER_HOST = 8
LIMIT_SECONDS = 0.100
LIMIT_BYTES = 4096
CLIENTS, REQUESTS = 4, 5000
CONFIG = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "sub_group_size": 10**9}}


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number of ranks. Seconds are until the last rank is done."""

    ranks: int
    hosts: int
    median_seconds: float
    worst_seconds: float
    samples: int
    mean_bytes: float
    most_bytes: int
    mean_requests: float
    most_requests: int
    most_messages_read: int
    mean_polls: float
    total_bytes: int

    def __str__(self) -> str:
        """In one line."""
        return (
            f"{self.ranks:5d} ranks on {self.hosts:3d} hosts: {self.median_seconds * 1e3:8.1f} ms (worst "
            f"{self.worst_seconds * 1e3:.1f}, {self.samples} times); a rank moves {self.mean_bytes:,.0f} bytes (most "
            f"{self.most_bytes:,}) in {self.mean_requests:.1f} requests (most {self.most_requests}) and "
            f"{self.mean_polls:.0f} polls, and reads {self.most_messages_read} messages at most"
        )


def decide(group: Group, profile: Profile) -> None:
    """What a start with a stored profile does."""
    agreement = Agreement(group, "initialize")
    agreed = agree.agree(
        agreement, profile, _never, config=CONFIG, device=profile.device, measure_seconds=5.0
    )
    agreement.confirm(equal_keys.sizes_digest(agreed.config))


def _never(ranks_per_host: int) -> Profile:
    raise AssertionError(f"measured with {ranks_per_host} ranks, though there is a profile")


def figure(ranks: int, hosts: int, seconds: list[float], counted: list[dict[str, int]], times: int) -> Figure:
    """Of what every rank counted in so many agreements."""
    bytes_ = [count["bytes"] // times for count in counted]
    requests = [
        sum(count.get(n, 0) for n in ("set", "get", "add", "compare_set")) // times for count in counted
    ]
    return Figure(
        ranks=ranks,
        hosts=hosts,
        median_seconds=statistics.median(seconds),
        worst_seconds=max(seconds),
        samples=len(seconds),
        mean_bytes=statistics.fmean(bytes_),
        most_bytes=max(bytes_),
        mean_requests=statistics.fmean(requests),
        most_requests=max(requests),
        most_messages_read=max(count.get("get", 0) // times for count in counted),
        mean_polls=statistics.fmean(count.get("poll", 0) / times for count in counted),
        total_bytes=sum(bytes_),
    )


# -- real ranks -----------------------------------------------------------------------------------


def _rank(rank: int, ranks: int, port: int, plain: Any, repeat: int, results: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    group = ranks_group.present_group()
    assert group is not None
    store = CountingStore(group.store)
    group = Group(store=store, rank=rank, world_size=ranks, host=group.host)
    profile = from_plain(plain, Profile)
    seconds = []
    for number in range(repeat + 1):
        if number == 1:  # the first one loads and warms
            store.bytes, store.requests = 0, Counter()
        dist.barrier()
        began = time.perf_counter()
        decide(group, profile)
        seconds.append(time.perf_counter() - began)
    results.put((rank, seconds[1:], {"bytes": store.bytes, **store.requests}))
    dist.barrier()
    dist.destroy_process_group()


def real(ranks: int, profile: Profile, repeat: int) -> Figure:
    """Processes on this host."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    port = _free_port()
    arguments = (ranks, port, _of_ranks(profile, ranks), repeat, results)
    processes = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(ranks)]
    for process in processes:
        process.start()
    found = [results.get(timeout=300) for _ in processes]
    for process in processes:
        process.join()
    slowest = [max(times) for times in zip(*(seconds for _, seconds, _ in found), strict=True)]
    return figure(ranks, 1, slowest, [counted for _, _, counted in found], repeat)


def _of_ranks(profile: Profile, ranks: int) -> Any:
    return {**to_plain(profile), "ranks_copying": ranks}


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


# -- many ranks -----------------------------------------------------------------------------------


def threaded(ranks: int, profile: Profile) -> Figure:
    """Threads of this process, hosts of RANKS_PER_HOST."""
    shared = SharedStore()
    mine = from_plain(_of_ranks(profile, RANKS_PER_HOST), Profile)
    stores = [CountingStore(shared) for _ in range(ranks)]

    def run(rank: int) -> None:
        host = f"{rank // RANKS_PER_HOST:08x}"
        decide(Group(store=stores[rank], rank=rank, world_size=ranks, host=host), mine)

    threading.stack_size(1 << 18)
    began = time.perf_counter()
    with ThreadPoolExecutor(ranks) as pool:
        list(pool.map(run, range(ranks)))
    seconds = time.perf_counter() - began
    counted = [{"bytes": store.bytes, **store.requests} for store in stores]
    return figure(ranks, ranks // RANKS_PER_HOST, [seconds], counted, 1)


def growth(figures: list[Figure]) -> float:
    """The power of the number of ranks that all bytes together grow with: 1 is so many for each rank."""
    first, last = figures[0], figures[-1]
    return math.log(last.total_bytes / first.total_bytes) / math.log(last.ranks / first.ranks)


# -- one store ------------------------------------------------------------------------------------


def _client(port: int, results: Any) -> None:
    from torch._C._distributed_c10d import TCPStore

    limit = datetime.timedelta(seconds=60)
    store = TCPStore("127.0.0.1", port, None, False, limit, wait_for_workers=False)
    began = time.perf_counter()
    for _ in range(REQUESTS):
        store.check(["absent"])
    results.put(REQUESTS / (time.perf_counter() - began))


def requests_a_second() -> float:
    """What a TCPStore in this process answers to CLIENTS others, who share its cores."""
    from torch._C._distributed_c10d import TCPStore

    server = TCPStore("127.0.0.1", 0, None, True, datetime.timedelta(seconds=60), wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    clients = [context.Process(target=_client, args=(server.port, results)) for _ in range(CLIENTS)]
    for client in clients:
        client.start()
    rates = [results.get(timeout=120) for _ in clients]
    for client in clients:
        client.join()
    return float(sum(rates))


def main() -> int:
    """Prints every figure; 1 where a goal is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON document and nothing else")
    parser.add_argument("--repeat", type=int, default=20, help="agreements of the real ranks (20)")
    parser.add_argument("--most", type=int, default=THREADED_RANKS[-1], help="ranks as threads at most")
    options = parser.parse_args()
    if options.repeat < 1 or options.most < THREADED_RANKS[1]:
        parser.error(
            f"expected --repeat of at least 1 and --most of at least {THREADED_RANKS[1]}, to see a growth"
        )
    with reporting(options.json) as emit:
        profile = probe(workload=from_parameter_count(10**6), plan="quick", budget_seconds=1.0)
        processes = []
        for ranks in REAL_RANKS:
            processes.append(real(ranks, profile, options.repeat))
            print(processes[-1], flush=True)
        threads = []
        for ranks in (ranks for ranks in THREADED_RANKS if ranks <= options.most):
            threads.append(threaded(ranks, profile))
            print(threads[-1], flush=True)
        power, rate = growth(threads), requests_a_second()
        largest = threads[-1]
        print(f"all bytes grow with the power {power:.2f} of the ranks")
        print(
            f"one store answers {rate:,.0f} requests a second: {largest.ranks:,} ranks keep it busy for "
            f"{largest.ranks * largest.mean_requests / rate:.2f} s, without their polls"
        )
        goals = {
            f"under {LIMIT_SECONDS * 1e3:.0f} ms at {REAL_RANKS[-1]} ranks": processes[-1].median_seconds
            < LIMIT_SECONDS,
            f"under {LIMIT_BYTES} bytes on every rank": max(f.most_bytes for f in processes + threads)
            < LIMIT_BYTES,
            "no rank reads more than its host": max(f.most_messages_read for f in threads)
            <= RANKS_PER_HOST + 2,
            "bytes a rank do not grow": power < 1.05,
        }
        for goal, met in goals.items():
            print(f"{goal}: {'ok' if met else 'MISSED'}")
        figures = {"processes": [*map(asdict, processes)], "threads": [*map(asdict, threads)]}
        emit({**figures, "growth": power, "requests_per_second": rate, "goals": goals})
    return 0 if all(goals.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
