"""Real processes that train together on the CPU: agreement, and everything that can be wrong with one of them.

What each rank does is in `tests/rank_processes.py`; a launch serves many tests, since a rank takes seconds to start.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import CHECKOUT
from tests import rank_processes as ranks
from tests.ports import free_port

SCRIPT = CHECKOUT / "tests" / "rank_processes.py"
LIMIT_SECONDS = 200
Results = dict[str, list[dict[str, Any]]]
"""What every rank wrote, by scenario, in the order of the ranks."""

pytestmark = pytest.mark.slow


def environment(folder: Path, **more: object) -> dict[str, str]:
    """Of a rank: one thread, this checkout, a cache of its own, no launcher's leftovers."""
    kept = {
        k: v for k, v in os.environ.items() if k not in {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE"}
    }
    own = {
        "PYTHONPATH": CHECKOUT,
        "AUTOTUNE_OFFLOAD_CACHE": folder / "profiles",
        "OMP_NUM_THREADS": 1,
        "DS_ACCELERATOR": "cpu",
        "TORCHINDUCTOR_COMPILE_THREADS": 1,  # no pool of workers where nothing is compiled
    }
    return kept | {name: str(value) for name, value in (own | more).items()}


def finished(processes: list[subprocess.Popen[str]]) -> None:
    """All of them in time and with success, or their words."""
    said = []
    try:
        for process in processes:
            said.append(process.communicate(timeout=LIMIT_SECONDS)[0])
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):  # a launcher's children too
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    for process, words in zip(processes, said, strict=True):
        assert process.returncode == 0, f"{process.args!r}: exit {process.returncode}\n{words[-6000:]}"


def start(command: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
    """With both outputs in one pipe."""
    return subprocess.Popen(
        command,
        env=env,
        cwd=CHECKOUT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def results(folder: Path, count: int) -> Results:
    """What the ranks wrote."""
    found: Results = {}
    for rank in range(count):
        for line in (folder / f"rank-{rank}.jsonl").read_text().splitlines():
            result = json.loads(line)
            found.setdefault(result["scenario"], []).append(result)
    return found


def bare(folder: Path, count: int, *scenarios: str) -> Results:
    """Processes with nothing but RANK, WORLD_SIZE and an address."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    env = environment(folder, FORK=count, RANK=0, WORLD_SIZE=count, **address)
    finished([start([sys.executable, str(SCRIPT), str(folder), *scenarios], env)])
    return results(folder, count)


def trained_like_stock(found: Results, scenario: str) -> None:
    """Every rank has the same sizes, and the losses of DeepSpeed alone, bit for bit."""
    assert len({result["hash"] for result in found[scenario]}) == 1
    assert [r["losses"] for r in found[scenario]] == [r["losses"] for r in found["stock"]]


def tuned(found: Results, scenario: str) -> list[bool]:
    """By rank."""
    return [result["tuned"] for result in found[scenario]]


# -- two ranks, and everything that can be wrong with one of them ---------------------------------

ALONE = (
    "tune_before",
    "stock",
    "plain",
    "miss_on_one",
    "other_sizes_on_one",
    "other_stage_on_one",
    "pinning_differs",
)
WRONG = (
    "kept_on_one",
    "auto_sizes",
    "disabled_on_one",
    "switched_off_on_one",
    "bad_block_on_one",
    "fails_in_the_probe",
    "slow_link_on_one",
    "slow_start_on_one",
    "dies_in_the_probe",
)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """One launch of two bare processes, all scenarios."""
    return bare(tmp_path_factory.mktemp("two"), 2, *ALONE, *WRONG)


@pytest.mark.parametrize("scenario", [*ALONE, *WRONG[:-1]])
def test_no_rank_trains_with_other_sizes_than_the_rest(two: Results, scenario: str) -> None:
    """Whatever is wrong with one of them, and all train as DeepSpeed alone does."""
    trained_like_stock(two, scenario)


@pytest.mark.parametrize(
    ("scenario", "expected"),
    {
        **dict.fromkeys(
            ("plain", "miss_on_one", "other_sizes_on_one", "pinning_differs", "auto_sizes"), True
        ),
        **dict.fromkeys(("slow_link_on_one", "slow_start_on_one", "tune_before"), True),
        **dict.fromkeys(
            ("other_stage_on_one", "kept_on_one", "disabled_on_one", "switched_off_on_one"), False
        ),
        **dict.fromkeys(("bad_block_on_one", "fails_in_the_probe", "dies_in_the_probe"), False),
    }.items(),
)
def test_all_ranks_are_tuned_or_none_is(two: Results, scenario: str, expected: bool) -> None:
    """A rank that cannot take part makes all of them use the user's own configuration."""
    expected_of_all = [expected] * len(two[scenario])
    assert tuned(two, scenario) == expected_of_all


@pytest.mark.parametrize(
    ("scenario", "words"),
    {
        "other_sizes_on_one": "rank 1 was given differ from those of rank 0",
        "other_stage_on_one": "rank 1 has another zero_optimization than rank 0",
        "kept_on_one": "would train with other ZeRO sizes than rank",
        "disabled_on_one": "rank 1: switched off",
        "switched_off_on_one": "rank 1: switched off",
        "bad_block_on_one": 'rank 1: in "autotune_offload": unknown key "pth"',
        "fails_in_the_probe": "rank 1: wrong bytes",
        "dies_in_the_probe": "1 of 2 ranks did not come within",
    }.items(),
)
def test_the_first_rank_says_what_is_wrong_with_another(two: Results, scenario: str, words: str) -> None:
    """Once, and no other rank warns."""
    (warning,) = two[scenario][0]["warnings"]
    assert words in warning
    assert all(result["warnings"] == [] for result in two[scenario][1:])


def test_nothing_waits_beyond_its_time(two: Results) -> None:
    """Not even for a rank that is dead; the others' own time is what the probe takes."""
    for scenario in WRONG:
        for result in two[scenario]:
            assert result["decided_seconds"] < 3 * ranks.WAIT_SECONDS + 10


def test_ranks_measure_together_and_the_profile_says_so(two: Results) -> None:
    """Both ranks copied, and one of them stored what the next start finds."""
    first, second = two["plain"]
    assert first["copying"] == second["copying"] == 2
    sources = [line for r in two["plain"] for line in r["text"].splitlines() if "measured now" in line]
    assert sum("stored in" in line for line in sources) == 1 and len(sources) == 2
    assert all("stored profile of" in result["text"] for result in two["pinning_differs"])


def test_a_miss_on_one_rank_is_measured_by_all(two: Results) -> None:
    """Hit or miss is agreed first: the rank with a profile measures again, beside the one without."""
    assert all("measured now" in result["text"] for result in two["miss_on_one"])


def test_the_slowest_rank_decides_for_the_host(two: Results) -> None:
    """Rank 1, whose buffers were marked."""
    assert [result["choice"][2] for result in two["slow_link_on_one"]] == [8 << 10] * 2
    assert all("its slowest, rank 1, decides" in result["text"] for result in two["slow_link_on_one"])


def test_the_sizes_are_the_smallest_that_any_rank_asks_for(two: Results) -> None:
    """Rank 0 asked for 2,000 and rank 1 for 2,500."""
    assert [r["sizes"]["reduce_bucket_size"] for r in two["auto_sizes"]] == [2000, 2000]


def test_tune_config_before_the_group_gives_one_answer_on_a_host(two: Results) -> None:
    """One rank measures, alone; the sizes stay open until `initialize`, whose ranks measure together."""
    first, second = two["tune_before"]
    assert first["tune_config"] == second["tune_config"]
    assert first["tune_config"]["reduce_bucket_size"] == "auto"
    assert first["tune_config"]["offload_optimizer"]["pin_memory"] is False
    alone = [1 in result["measured_with"] for result in two["tune_before"]]
    assert sorted(alone) == [False, True]
    assert all(result["measured_with"][-1] == 2 for result in two["tune_before"])
    assert [result["sizes"]["reduce_bucket_size"] for result in two["tune_before"]] == [2500, 2500]


# -- launchers ------------------------------------------------------------------------------------


@pytest.mark.long
def test_torchrun_launches_ranks_that_agree(tmp_path: Path) -> None:
    """Also when one of them never comes: the others name it, and train untuned."""
    port = free_port()
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(port),
    ]
    command = [*launcher, str(SCRIPT), str(tmp_path), "stock", "plain", "never_comes"]
    finished([start(command, environment(tmp_path))])
    found = results(tmp_path, 2)
    assert tuned(found, "plain") == [True, True] and tuned(found, "never_comes") == [False, False]
    trained_like_stock(found, "plain")
    trained_like_stock(found, "never_comes")
    assert "1 of 2 ranks did not come within 4 s (rank 1)" in found["never_comes"][0]["warnings"][0]
    assert found["never_comes"][0]["decided_seconds"] < ranks.WAIT_SECONDS + 5


@pytest.mark.long
def test_deepspeed_launches_ranks_that_agree(tmp_path: Path) -> None:
    """Its launcher adds an argument and sets LOCAL_SIZE."""
    deepspeed = Path(sys.executable).with_name("deepspeed")
    options = ["--num_gpus", "2", "--master_port", str(free_port())]
    command = [sys.executable, str(deepspeed), *options, str(SCRIPT), str(tmp_path), "stock", "plain"]
    finished([start(command, environment(tmp_path))])
    found = results(tmp_path, 2)
    assert tuned(found, "plain") == [True, True]
    trained_like_stock(found, "plain")


def test_probe_under_a_launcher_prints_one_document(tmp_path: Path) -> None:
    """Of all ranks, and keeps the profile of each where it was told to."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    verb = ["probe", "--params", "2M", "--budget", "0.5", "--collect", str(tmp_path / "all"), "--json"]
    done = subprocess.run(
        [*launcher, str(free_port()), "-m", "autotune_offload", *verb],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    document = json.loads(done.stdout)
    assert [member["rank"] for member in document["members"]] == [0, 1]
    assert all(member["facts"]["ranks copying"] == "2" for member in document["members"])
    assert len(list((tmp_path / "all").rglob("*.yaml"))) == 2
    assert len(list((tmp_path / "profiles").glob("*.yaml"))) == 1


@pytest.mark.long
def test_four_ranks_agree(tmp_path: Path) -> None:
    """With a stored profile on the second time."""
    found = bare(tmp_path, 4, "stock", "plain", "pinning_differs")
    assert tuned(found, "plain") == tuned(found, "pinning_differs") == [True] * 4
    assert {result["copying"] for result in found["plain"]} == {4}
    trained_like_stock(found, "plain")
    trained_like_stock(found, "pinning_differs")


@pytest.mark.long
def test_eight_ranks_agree(tmp_path: Path) -> None:
    """One of them slow, and one host for all."""
    found = bare(tmp_path, 8, "stock", "slow_link_on_one")
    assert tuned(found, "slow_link_on_one") == [True] * 8
    assert {result["choice"][2] for result in found["slow_link_on_one"]} == {8 << 10}
    trained_like_stock(found, "slow_link_on_one")


# -- two hosts ------------------------------------------------------------------------------------

HOSTS = {"0": "10.97.31.1", "1": "10.97.31.2"}


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def namespaces() -> Iterator[dict[str, str]]:
    """Two network namespaces joined by a cable, with their addresses; skipped where they cannot be made."""
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("needs the commands ip and unshare")
    mark = f"ato{os.getpid()}"
    made = {f"{mark}h{number}": address for number, address in HOSTS.items()}
    try:
        for name in made:
            _ip("netns", "add", name)
        one, other = made
        _ip("link", "add", "cable0", "netns", one, "type", "veth", "peer", "name", "cable0", "netns", other)
        for name, address in made.items():
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable0")
            for link in ("cable0", "lo"):
                _ip("-n", name, "link", "set", link, "up")
        subprocess.run(["unshare", "--uts", "true"], check=True, capture_output=True)
        yield made
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr!r}")
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.mark.long
def test_two_hosts_agree(tmp_path: Path, namespaces: dict[str, str]) -> None:
    """Each with its own address, name and cache, two ranks on each: sizes for all, the path for each."""
    processes = []
    for number, name in enumerate(namespaces):
        inside = f"hostname host-{number} && exec {sys.executable} {SCRIPT} {tmp_path} stock plain auto_sizes plain"
        address = {"MASTER_ADDR": HOSTS["0"], "MASTER_PORT": 29517, "GLOO_SOCKET_IFNAME": "cable0"}
        env = environment(tmp_path / name, FORK=2, RANK=2 * number, WORLD_SIZE=4, **address)
        command = ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", inside]
        processes.append(start(command, env))
    finished(processes)
    found = results(tmp_path, 4)
    assert tuned(found, "plain") == [True] * 8 and tuned(found, "auto_sizes") == [True] * 4
    measured, stored = found["plain"][0::2], found["plain"][1::2]
    assert {result["copying"] for result in measured + stored} == {2}
    assert all("measured now" in result["text"] for result in measured)
    assert all("4 ranks on 2 hosts" in result["text"] for result in measured + stored)
    assert all("stored profile of" in result["text"] for result in stored)
    assert [result["losses"] for result in measured] == [result["losses"] for result in stored]
    assert [result["losses"] for result in measured] == [result["losses"] for result in found["stock"]]
    assert {result["sizes"]["reduce_bucket_size"] for result in found["auto_sizes"]} == {2000}
    trained_like_stock(found, "auto_sizes")
    for name in namespaces:
        assert list((tmp_path / name / "profiles").glob("*.yaml")), "each host keeps its own profile"
