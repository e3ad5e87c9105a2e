"""What it costs that ranks come to one decision.

    python -m benchmarks.agreement [--json] [--repeat TIMES] [--ranks N ...]

1. Real ranks, 2, 4 and 8 processes with a gloo group each: seconds from a common start until the last rank may
   go on with a stored profile (one gathering and the confirmation), and what each moved through the store. This
   is what an agreement adds to a start; the limit is 100 ms at 8 ranks.
2. 16, 32 and 64 ranks as threads of this process, hosts of 8, on a store in its memory: bytes and requests of
   every rank. Their seconds say nothing about a job and are not shown.
3. Larger jobs are reckoned from that, none of their ranks is started: hosts meet in a binary tree, so that each host
   more adds what one added from 2 hosts to 8. What 4 hosts moved tells how far that is off.
4. How many requests a second one TCPStore answers, asked by 4 processes at once, and from that how long the
   requests of a job would keep it busy.

Bytes are keys and values, without TCP's own. Asking again while waiting ("polls") depends on how long a rank
waits and is counted apart. With --json one JSON document and nothing else. The exit status is 1 where
a goal is missed, and the last lines say which and by how much.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from autotune_offload.api.probe import probe
from autotune_offload.config import equal_keys
from autotune_offload.ranks import agree
from autotune_offload.ranks import group as ranks_group
from autotune_offload.ranks.agreement import Agreement
from autotune_offload.ranks.group import Group
from autotune_offload.records import Profile, from_plain, to_plain
from autotune_offload.workload import from_parameter_count
from benchmarks.goals import Goal, judged
from benchmarks.output import add_output, reporting
from benchmarks.results import Number
from benchmarks.stores import CountingStore, SharedStore

REAL_RANKS = (2, 4, 8)
THREADED_RANKS = (16, 32, 64)
RECKONED_RANKS = (256, 1024, 4096, 8000)
RANKS_PER_HOST = 8
LIMIT_SECONDS = 0.100
LIMIT_BYTES = 4096
LIMIT_GROWTH, LIMIT_RECKONING = 1.05, 0.02
CLIENTS, REQUESTS = 4, 5000
CONFIG = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "sub_group_size": 10**9}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number of ranks; with processes, the seconds of each time until the last rank was done."""

    ranks: int
    hosts: int
    raw_seconds: tuple[float, ...]
    mean_bytes: float
    most_bytes: int
    mean_requests: float
    most_requests: int
    most_messages_read: int
    mean_polls: float
    total_bytes: int
    total_requests: int

    @property
    def median_seconds(self) -> float:
        """Until the last rank is done."""
        return statistics.median(self.raw_seconds)

    def __str__(self) -> str:
        """In one line."""
        timed = (
            f"{self.median_seconds * 1e3:.1f} ms (worst {max(self.raw_seconds) * 1e3:.1f}, "
            f"{len(self.raw_seconds)} times); "
            if self.raw_seconds
            else ""
        )
        return (
            f"{self.ranks:5d} ranks on {self.hosts:3d} hosts: {timed}a rank moves {self.mean_bytes:,.0f} bytes (most "
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
        raw_seconds=tuple(seconds),
        mean_bytes=statistics.fmean(bytes_),
        most_bytes=max(bytes_),
        mean_requests=statistics.fmean(requests),
        most_requests=max(requests),
        most_messages_read=max(count.get("get", 0) // times for count in counted),
        mean_polls=statistics.fmean(count.get("poll", 0) / times for count in counted),
        total_bytes=sum(bytes_),
        total_requests=sum(requests),
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

    with ThreadPoolExecutor(ranks) as pool:
        list(pool.map(run, range(ranks)))
    counted = [{"bytes": store.bytes, **store.requests} for store in stores]
    return figure(ranks, ranks // RANKS_PER_HOST, [], counted, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reckoned:
    """A job of so many ranks on hosts of RANKS_PER_HOST, none of which was started."""

    ranks: int
    total_bytes: int
    total_requests: int

    def __str__(self) -> str:
        """In one line."""
        return (
            f"{self.ranks:5d} ranks, reckoned: a rank moves {self.total_bytes / self.ranks:,.0f} bytes in "
            f"{self.total_requests / self.ranks:.1f} requests; {self.total_bytes / 1e6:.1f} MB and "
            f"{self.total_requests:,} requests to the store"
        )


def reckoned(ranks: int, measured: list[Figure]) -> Reckoned:
    """Each host more adds what one added between the fewest hosts that were measured and the most."""
    first, last = measured[0], measured[-1]
    share = (ranks / RANKS_PER_HOST - first.hosts) / (last.hosts - first.hosts)
    return Reckoned(
        ranks=ranks,
        total_bytes=round(first.total_bytes + share * (last.total_bytes - first.total_bytes)),
        total_requests=round(first.total_requests + share * (last.total_requests - first.total_requests)),
    )


def off_by(measured: list[Figure]) -> float:
    """How far a reckoning is from what was measured between its ends, in bytes, as a share."""
    return max(
        abs(reckoned(each.ranks, measured).total_bytes / each.total_bytes - 1) for each in measured[1:-1]
    )


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
    add_output(parser)
    parser.add_argument("--repeat", type=int, default=20, help="agreements of the real ranks (20)")
    parser.add_argument("--ranks", type=int, nargs="+", default=RECKONED_RANKS, help="of the reckoned jobs")
    options = parser.parse_args()
    if options.repeat < 1 or min(options.ranks) < THREADED_RANKS[-1]:
        parser.error(f"expected --repeat of at least 1 and --ranks of at least {THREADED_RANKS[-1]}")
    with reporting(options) as emit:
        profile = probe(workload=from_parameter_count(10**6), plan="quick", budget_seconds=1.0)
        processes = []
        for ranks in REAL_RANKS:
            processes.append(real(ranks, profile, options.repeat))
            print(processes[-1], flush=True)
        threads = []
        for ranks in THREADED_RANKS:
            threads.append(threaded(ranks, profile))
            print(threads[-1], flush=True)
        larger = [reckoned(ranks, threads) for ranks in options.ranks]
        print(*larger, sep="\n")
        rate, largest = requests_a_second(), larger[-1]
        print(
            f"one store answers {rate:,.0f} requests a second: {largest.ranks:,} ranks keep it busy for "
            f"{largest.total_requests / rate:.2f} s, without their polls"
        )
        goals = [
            Goal(
                name=f"until the last of {REAL_RANKS[-1]} ranks may go on",
                found=processes[-1].median_seconds * 1e3,
                most=LIMIT_SECONDS * 1e3,
                unit=" ms",
            ),
            Goal(
                name="the busiest rank moves",
                found=max(each.most_bytes for each in processes + threads),
                most=LIMIT_BYTES,
                unit=" bytes",
            ),
            Goal(
                name="messages that one rank reads",
                found=max(each.most_messages_read for each in threads),
                most=RANKS_PER_HOST + 2,
            ),
            Goal(
                name=f"bytes a rank at {largest.ranks:,} ranks over those at {THREADED_RANKS[-1]}",
                found=largest.total_bytes / largest.ranks / threads[-1].mean_bytes,
                most=LIMIT_GROWTH,
            ),
            Goal(name="the reckoning is off by a share of", found=off_by(threads), most=LIMIT_RECKONING),
        ]
        status = judged(goals)
        figures: dict[str, Sequence[Any]] = {"processes": processes, "threads": threads, "reckoned": larger}
        document = {name: [structs.asdict(one) for one in each] for name, each in figures.items()}
        emit(
            {**document, "requests_per_second": rate, "goals": [dataclasses.asdict(goal) for goal in goals]},
            [
                Number(what=g.name, value=g.found, unit=g.unit.strip(), least=g.least, most=g.most)
                for g in goals
            ],
        )
    return status


if __name__ == "__main__":
    sys.exit(main())
