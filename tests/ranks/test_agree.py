"""The protocol, by threads on a real c10d store: what is agreed, what is not, and how long it may take."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from torch._C._distributed_c10d import HashStore, TCPStore

from autotune_offload.config.equal_keys import sizes_digest
from autotune_offload.errors import AgreementError, UndecidedError
from autotune_offload.ranks import agree, patience
from autotune_offload.ranks import group as ranks_group
from autotune_offload.ranks.agreement import Agreement
from autotune_offload.ranks.ballots import ballot
from autotune_offload.ranks.group import Group
from autotune_offload.ranks.turns import turn_on_host
from autotune_offload.records import DeviceIdentity, Profile, ZeroSizes
from benchmarks.stores import CountingStore
from tests.factories import make_choice, make_profile

CUDA = make_profile().device
CONFIG: dict[str, Any] = {
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "sub_group_size": 1234}
}
WAIT_SECONDS = 0.6


Part = Callable[[Agreement], Any]


def together(ranks: int, part: Part, *, per_host: int = 2, wait_seconds: float = WAIT_SECONDS) -> list[Any]:
    """What `part` gives or raises on every rank; a rank for which `part` is not called gives None."""
    store = HashStore()

    def run(rank: int) -> Any:
        group = Group(store=store, rank=rank, world_size=ranks, host=f"host-{rank // per_host}")
        try:
            return part(Agreement(group, "test", wait_seconds))
        except AgreementError as error:
            return error

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))


def profile(rank: int, copying: int = 2, **choice: Any) -> Profile:
    """One that takes longer the higher the rank, with a buffer size that tells it apart."""
    made = make_profile(ranks_copying=copying)
    chosen = structs.replace(made.candidates[0], buffer_bytes=rank, measured_seconds=0.1 + rank / 100)
    own = make_choice(
        path=chosen.path, cast=chosen.cast, buffer_bytes=rank, buffer_count=chosen.buffer_count, **choice
    )
    return structs.replace(made, choice=own, candidates=(chosen,))


def decide(
    agreement: Agreement,
    found: Profile | None = None,
    measure: Callable[[int], Profile] | None = None,
    config: dict[str, Any] | None = None,
    device: DeviceIdentity = CUDA,
) -> agree.Agreed:
    """As `initialize` does it: gather, then confirm."""
    agreed = agree.agree(
        agreement,
        found,
        measure or (lambda ranks: profile(agreement.group.rank, ranks)),
        config=config or CONFIG,
        device=device,
        measure_seconds=0.1,
    )
    agreement.confirm(sizes_digest(agreed.config))
    return agreed


# -- what is agreed -------------------------------------------------------------------------------


def test_hosts_with_profiles_measure_nothing() -> None:
    """Each host takes the choice of its slowest rank, and nobody stores anything."""
    outcomes = together(5, lambda a: decide(a, profile(a.group.rank, 1 if a.group.rank == 4 else 2)))
    assert [o.profile.choice.buffer_bytes for o in outcomes] == [1, 1, 3, 3, 4]
    assert [(o.measured, o.keeper) for o in outcomes] == [(False, False)] * 5


def test_a_miss_on_one_rank_makes_its_host_measure_together() -> None:
    """All ranks of that host and no other; the number of them reaches the measurement."""
    measured: list[tuple[int, int]] = []

    def part(agreement: Agreement) -> agree.Agreed:
        rank = agreement.group.rank

        def measure(ranks: int) -> Profile:
            measured.append((rank, ranks))
            return profile(rank, ranks)

        return decide(agreement, None if rank == 1 else profile(rank), measure)

    outcomes = together(6, part)
    assert sorted(measured) == [(0, 2), (1, 2)]
    assert [o.measured for o in outcomes] == [True, True, False, False, False, False]
    assert [o.keeper for o in outcomes] == [False, True, False, False, False, False]
    assert outcomes[1].own == profile(1), "the profile that is kept is the one that was measured"


def test_a_profile_of_fewer_ranks_copying_is_a_miss() -> None:
    """Alone on the link, a rank is faster than in the job."""
    outcomes = together(2, lambda a: decide(a, profile(a.group.rank, copying=1)))
    assert all(o.measured and o.profile.ranks_copying == 2 for o in outcomes)


def test_sizes_are_one_value_for_the_job() -> None:
    """The smallest; a rank that asks for none takes it too."""
    asked = [400, None, 100, 300]

    def part(agreement: Agreement) -> agree.Agreed:
        sizes = ZeroSizes(reduce_bucket_elements=asked[agreement.group.rank])
        return decide(agreement, profile(agreement.group.rank, sizes=sizes))

    outcomes = together(4, part)
    assert {o.profile.choice.sizes.reduce_bucket_elements for o in outcomes} == {100}
    assert {o.profile.choice.sizes.prefetch_bucket_elements for o in outcomes} == {None}
    assert (
        "smallest that any of the 4 ranks"
        in outcomes[0].profile.choice.sizes.reasons["reduce_bucket_elements"]
    )


def test_the_reasons_say_who_decided() -> None:
    """And for whom."""
    outcomes = together(4, lambda a: decide(a, profile(a.group.rank)))
    first = outcomes[2].profile.choice.reasons[0]
    assert "4 ranks on 2 hosts" in first and "2 ranks copying at once" in first and "rank 3" in first
    assert all(reason.startswith("on rank 2: ") for reason in outcomes[2].profile.choice.reasons[1:])
    assert outcomes[3].profile.choice.reasons[1:] == make_choice().reasons


def test_sizes_that_the_user_wrote_differently_become_those_of_rank_0() -> None:
    """The job would hang; every rank is told."""

    def part(agreement: Agreement) -> agree.Agreed:
        given = {"stage": 3, "sub_group_size": 1234 if agreement.group.rank < 2 else 99}
        return decide(agreement, profile(agreement.group.rank), config={"zero_optimization": given})

    outcomes = together(4, part)
    assert {o.config["zero_optimization"]["sub_group_size"] for o in outcomes} == {1234}
    assert all("rank 2 was given differ from those of rank 0" in o.notices[0] for o in outcomes)
    assert all("sub_group_size 1234" in o.notices[0] for o in outcomes)


def test_agreements_follow_each_other() -> None:
    """A second one knows nothing of the first, and one of another purpose nothing of both."""
    store = HashStore()

    def run(rank: int) -> list[int]:
        group = Group(store=store, rank=rank, world_size=2, host="host")
        chosen = []
        for purpose, offset in (("a", 0), ("a", 10), ("b", 20)):
            agreed = decide(Agreement(group, purpose, 5.0), profile(rank + offset))
            chosen.append(agreed.profile.choice.buffer_bytes)
        return chosen

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, range(2))) == [[1, 11, 21]] * 2


# -- what is not ----------------------------------------------------------------------------------


def all_stopped(outcomes: list[Any], words: str) -> None:
    """No rank has anything, and everyone knows why."""
    for outcome in outcomes:
        assert isinstance(outcome, AgreementError), outcome
        assert words in str(outcome)


@pytest.mark.parametrize("missing", [0, 1, 2, 5])
def test_a_rank_that_never_comes_stops_all_in_time(missing: int) -> None:
    """Whether it leads the job, a host, or nobody; the others name it."""
    began = time.monotonic()
    outcomes = together(6, lambda a: None if a.group.rank == missing else decide(a, profile(a.group.rank)))
    assert outcomes.pop(missing) is None
    all_stopped(outcomes, f"1 of 6 ranks did not come within {WAIT_SECONDS:g} s (rank {missing})")
    assert time.monotonic() - began < WAIT_SECONDS + 2


def test_a_rank_that_comes_late_finds_that_it_is_over() -> None:
    """It does not wait, and it does not use what nobody else does."""
    waited: list[float] = []

    def part(agreement: Agreement) -> Any:
        if agreement.group.rank == 2:
            time.sleep(WAIT_SECONDS * 2)
            waited.append(-time.monotonic())
        try:
            return decide(agreement, profile(agreement.group.rank))
        finally:
            if agreement.group.rank == 2:
                waited.append(time.monotonic())

    all_stopped(together(4, part), "did not come within")
    assert sum(waited) < WAIT_SECONDS


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_rank_that_declines_stops_all_at_once(rank: int) -> None:
    """Nobody waits for the time-out, and all have its reason."""

    def part(agreement: Agreement) -> Any:
        if agreement.group.rank == rank:
            return agreement.decline("no room on this host")
        return decide(agreement, profile(agreement.group.rank))

    began = time.monotonic()
    outcomes = together(4, part, wait_seconds=60.0)
    outcomes.pop(rank)
    all_stopped(outcomes, "no room on this host")
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_that_fails_while_it_measures_stops_all(rank: int) -> None:
    """The others have measured for nothing."""

    def part(agreement: Agreement) -> Any:
        def measure(ranks: int) -> Profile:
            if agreement.group.rank == rank:
                agreement.decline("wrong bytes")
                raise AgreementError("wrong bytes")
            return profile(agreement.group.rank, ranks)

        return decide(agreement, None, measure)

    all_stopped(together(4, part), "wrong bytes")


def test_a_rank_that_dies_while_it_measures_stops_all_in_time() -> None:
    """It says nothing any more."""
    began = time.monotonic()

    def part(agreement: Agreement) -> Any:
        if agreement.group.rank != 1:
            return decide(agreement)
        agreement.gather(ballot(1, "cuda", CUDA.name, config="", given="", profile=None))
        return None

    outcomes = together(4, part)
    # rank 1 has another configuration in this test, which is a reason of its own
    assert all(outcome is None or isinstance(outcome, AgreementError) for outcome in outcomes)
    assert time.monotonic() - began < 4 * WAIT_SECONDS + 2


@pytest.mark.parametrize("rank", [0, 2])
def test_another_digest_on_one_rank_stops_all(rank: int) -> None:
    """Whatever the reason: no rank trains with other sizes than the rest."""

    def part(agreement: Agreement) -> Any:
        agreement.confirm("other" if agreement.group.rank == rank else "same")

    all_stopped(together(4, part), "would train with other ZeRO sizes than rank")


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_does_not_confirm_stops_all(rank: int) -> None:
    """It was there until then."""

    def part(agreement: Agreement) -> Any:
        if agreement.group.rank != rank:
            agreement.confirm("same")

    outcomes = together(4, part)
    outcomes.pop(rank)
    all_stopped(outcomes, "not all ranks confirmed within")


def test_all_or_none_whatever_the_order() -> None:
    """Ranks that confirm, decline or run out of time at the same moment end alike, every time."""
    for attempt in range(40):

        def part(agreement: Agreement, attempt: int = attempt) -> str:
            if agreement.group.rank == attempt % 4:
                time.sleep(0.0005 * (attempt % 7))
            if attempt % 5 == 0 and agreement.group.rank == 3:
                agreement.decline("changed its mind")
            agreement.confirm("same")
            return "go"

        outcomes = together(4, part, wait_seconds=0.002 * (attempt % 3) + 0.001)
        went = [outcome == "go" for outcome in outcomes]
        assert all(went) or not any(went), outcomes


def test_mixed_accelerators_are_loud() -> None:
    """Another kind stops the job's tuning; another model is a notice on every rank."""
    odd = structs.replace(CUDA, kind="hpu", name="GAUDI2")
    outcomes = together(
        4, lambda a: decide(a, profile(a.group.rank), device=odd if a.group.rank == 3 else CUDA)
    )
    all_stopped(outcomes, "mixed accelerators: rank 3 uses hpu, rank 0 cuda")
    odd = structs.replace(CUDA, name="NVIDIA A100")
    outcomes = together(
        4, lambda a: decide(a, profile(a.group.rank), device=odd if a.group.rank == 3 else CUDA)
    )
    assert all("mixed accelerators: rank 3 has NVIDIA A100" in o.notices[0] for o in outcomes)


def test_a_store_that_answers_no_more_is_an_error_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen host holds every request; before this rank has confirmed it may go on by itself."""
    monkeypatch.setattr(patience, "_GRACE_SECONDS", 0.2)
    frozen = threading.Event()

    class Frozen(CountingStore):
        def check(self, keys: list[str]) -> bool:
            frozen.wait(30)
            return False

    store = Frozen(HashStore())
    group = Group(store=store, rank=0, world_size=2, host="host")
    began = time.monotonic()
    with pytest.raises(AgreementError, match="gave no answer") as gathering:
        decide(Agreement(group, "test", 0.3), profile(0))
    assert not isinstance(gathering.value, UndecidedError)
    with pytest.raises(UndecidedError, match="this rank had confirmed"):
        Agreement(group, "test", 0.3).confirm("same")
    assert time.monotonic() - began < 10
    frozen.set()


def test_a_lost_connection_is_an_error_of_ours() -> None:
    """The first rank is gone, and its store with it."""
    server = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=5), wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=5), wait_for_workers=False)
    agreement = Agreement(Group(store=client, rank=1, world_size=2, host="host"), "test", WAIT_SECONDS)
    del server
    with pytest.raises(AgreementError, match="the store of rank 0 cannot be used"):
        decide(agreement, profile(1))


# -- what it costs --------------------------------------------------------------------------------


@pytest.mark.parametrize(("hosts", "per_host"), [(1, 8), (8, 8), (16, 4)])
def test_no_rank_moves_more_than_four_kilobytes_with_a_stored_profile(hosts: int, per_host: int) -> None:
    """Nor does any rank read more than its own host's ballots and the views of two hosts."""
    store = HashStore()
    ranks = hosts * per_host
    counted = [CountingStore(store) for _ in range(ranks)]

    def run(rank: int) -> None:
        group = Group(store=counted[rank], rank=rank, world_size=ranks, host=f"{rank // per_host:08x}")
        decide(Agreement(group, "initialize", 60.0), profile(rank, per_host))

    with ThreadPoolExecutor(ranks) as pool:
        list(pool.map(run, range(ranks)))
    assert max(each.bytes for each in counted) < 4096
    assert max(each.requests["get"] for each in counted) <= per_host - 1 + 2 + 1


# -- before there is a group ----------------------------------------------------------------------


HOLDER = """
import sys, time
from pathlib import Path
from autotune_offload.ranks.turns import turn_on_host
with turn_on_host(Path(sys.argv[1]), 5):
    print("held", flush=True)
    time.sleep(60)
"""


def holder(folder: Path) -> subprocess.Popen[str]:
    """A process that measures."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_turn_is_waited_for_and_no_longer(tmp_path: Path) -> None:
    """One that is killed leaves nothing to wait for."""
    process = holder(tmp_path)
    began = time.monotonic()
    with (
        pytest.raises(AgreementError, match=r"has been measuring for over 0\.3 s"),
        turn_on_host(tmp_path, 0.3),
    ):
        pytest.fail("two at once")
    assert 0.3 <= time.monotonic() - began < 5
    process.kill()
    process.wait()
    with turn_on_host(tmp_path, 5):
        pass
    assert process.stdout is not None
    process.stdout.close()


def test_a_folder_that_cannot_be_made_takes_no_turns(tmp_path: Path) -> None:
    """Nothing can be stored there either; the caller says that."""
    (tmp_path / "file").write_text("")
    with turn_on_host(tmp_path / "file" / "profiles", 1):
        pass


def test_what_launchers_announce(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torchrun and DeepSpeed, the MPIs and srun; a number that is none counts as one rank."""
    for name in ranks_group.ANNOUNCED:
        monkeypatch.delenv(name, raising=False)
    assert ranks_group.announced_ranks() == 1
    for name in ranks_group.ANNOUNCED:
        monkeypatch.setenv(name, "4")
        assert ranks_group.announced_ranks() == 4
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("RANK", "3")
    assert ranks_group.present_rank() == 3
    assert ranks_group.present_group() is None
