"""The command line: exit codes, one JSON document on stdout, messages instead of tracebacks."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import math
import os
import signal
import subprocess
import sys
import time
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from autotune_offload import units
from autotune_offload.cli import cli, options
from autotune_offload.cli.output import finite
from autotune_offload.cli.progress import Reporter, time_left
from autotune_offload.cli.verify import model_of
from autotune_offload.engine import attach as engine_attach
from autotune_offload.engine import step_attach
from autotune_offload.engine.status import Status
from autotune_offload.engine.step import StepStatus
from autotune_offload.errors import ConfigError, DeviceError, ProfileError
from autotune_offload.profiles import outcomes
from autotune_offload.profiles.store import Miss, Store
from autotune_offload.records import Profile, Settings, from_plain, to_plain
from autotune_offload.reports.alternatives import alternatives, best_of_each, rejections, verdict
from tests import CHECKOUT
from tests.factories import make_choice, make_profile

training = importlib.import_module("autotune_offload.engine.verify")


class ProbeStub(types.ModuleType):
    """Stands in for `api.probe` and `profiles.lookup`: gives `profile`, and is as noisy as DeepSpeed."""

    replaces = ("autotune_offload.api.probe", "autotune_offload.profiles.lookup")

    def __init__(self) -> None:
        super().__init__(self.replaces[0])
        self.profile = make_profile()
        self.stored: Profile | Miss = Miss(reason="no profile is stored here")
        self.calls: list[dict[str, Any]] = []
        self.fixed: str | None = None
        self.error: BaseException | None = None

    def probe(self, **arguments: Any) -> Profile:
        """Record the arguments, report progress once, write to stdout."""
        sys.stdout.write("[INFO] deepspeed says this on stdout\n")
        arguments.pop("progress")("d2h pinned", 0.5)
        self.calls.append(arguments)
        if self.error is not None:
            raise self.error
        return self.profile

    def lookup(self, store: Store, workload: object, settings: Settings | None = None) -> Profile | Miss:
        """What the test put there."""
        self.fixed = settings.fixed if settings else None
        return self.stored


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """An empty store that the environment points at."""
    monkeypatch.setenv("AUTOTUNE_OFFLOAD_CACHE", str(tmp_path / "cache"))
    return Store()


@pytest.fixture
def stub(store: Store, monkeypatch: pytest.MonkeyPatch) -> ProbeStub:
    """The probe, replaced."""
    made = ProbeStub()
    for name in made.replaces:
        monkeypatch.setitem(sys.modules, name, made)
    return made


def run(*arguments: str) -> Result:
    """One verb in this process."""
    return CliRunner().invoke(cli, list(arguments), prog_name="autotune-offload")


def run_child(*arguments: str, cache: Path, source: str | None = None) -> subprocess.CompletedProcess[str]:
    """One verb in a process of its own; `source` is a script to run in place of the module."""
    command = ["-c", source] if source else ["-m", "autotune_offload"]
    return subprocess.run(
        [sys.executable, *command, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=child_environment(cache),
        check=False,
    )


def child_environment(cache: Path) -> dict[str, str]:
    """This environment with the repository importable and its own cache."""
    return {**os.environ, "PYTHONPATH": str(CHECKOUT), "AUTOTUNE_OFFLOAD_CACHE": str(cache)}


# -- the surface ----------------------------------------------------------------------------------


def test_help_loads_nothing_heavy(tmp_path: Path) -> None:
    """`--help` of every verb loads none of the packages that take long to import."""
    source = (
        "import sys\n"
        "from click.testing import CliRunner\n"
        "from autotune_offload.cli import cli\n"
        "for words in (['--help'], *([verb, '--help'] for verb in cli.commands)):\n"
        "    assert CliRunner().invoke(cli, words).exit_code == 0\n"
        "heavy = {'torch', 'deepspeed', 'optuna', 'numpy', 'rich', 'yaml', 'pydantic'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    assert run_child(cache=tmp_path, source=source).stdout == "[]\n"


def test_version_is_the_packages() -> None:
    """`--version` names the program and a version."""
    result = run("--version")
    assert (result.exit_code, result.output.split()[0]) == (0, "autotune-offload")


@pytest.mark.parametrize(
    "arguments",
    [
        ["prob"],
        ["probe", "--params", "7x"],
        ["probe", "--params", "0"],
        ["probe", "--params", "1e99"],
        ["probe", "--params", "7b", "--model", "."],
        ["probe", "--model", "no-such-file"],
        ["probe", "--budget", "0"],
        ["probe", "--budget", "nan"],
        ["probe", "--budget", "0.19"],
        ["simulate", "cpu", "--budget", "0.19"],
        ["probe", "--max-pinned", "4 bananas"],
        ["probe", "--world-size", "0"],
        ["probe", "--dtype", "int8"],
        ["verify", "--steps", "5"],
        ["verify", "--config", "no-such-file.json"],
        ["apply"],
        ["apply", "no-such-file.json"],
        ["profiles", "prune"],
        ["profiles", "prune", "--all"],
        ["profiles", "prune", "--all", "--yes", "--broken"],
    ],
)
def test_bad_usage_exits_with_2_and_says_why(stub: ProbeStub, arguments: list[str]) -> None:
    """A wrong argument costs one message on stderr, and nothing is measured or written."""
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Error: " in result.stderr
    assert not stub.calls


# -- probe ----------------------------------------------------------------------------------------


def test_probe_measures_saves_and_prints(stub: ProbeStub, store: Store) -> None:
    """Without a fitting profile it says why, measures with the standard plan, saves and shows the choice."""
    result = run("probe")
    assert result.exit_code == 0
    assert stub.calls == [
        {
            "workload": None,
            "plan": "standard",
            "budget_seconds": None,
            "max_pinned_bytes": None,
            "missed": stub.stored,
            "ranks_per_host": 1,
            "settings": Settings(),
        }
    ]
    assert "no profile is stored here" in result.stderr
    assert "Choice: staged, cast device" in result.stdout
    assert isinstance(store.lookup(stub.profile.fingerprint), Profile)
    assert [entry.problem for entry in store.entries()] == [None]


def test_probe_json_is_one_document_that_reads_back(stub: ProbeStub) -> None:
    """--json prints the profile itself, whatever else was printed meanwhile."""
    result = run("probe", "--json")
    assert from_plain(json.loads(result.stdout), Profile) == stub.profile
    assert "deepspeed says" in result.stderr


def test_probe_passes_its_options_on(stub: ProbeStub) -> None:
    """Model size, ranks, dtype, plan, budget, limit, path and cast reach the probe in its own units."""
    arguments = "--params 125M --world-size 4 --accumulation-steps 2 --dtype fp16 --plan quick --budget 2.5"
    fixing = ("--max-pinned", "4GiB", "--path", "pinned", "--cast", "host")
    result = run("probe", *arguments.split(), *fixing)
    assert result.exit_code == 0, result.stderr
    (call,) = stub.calls
    described = call.pop("workload")
    assert call.pop("ranks_per_host") == 1
    assert call == {
        "plan": "quick",
        "budget_seconds": 2.5,
        "max_pinned_bytes": 4 << 30,
        "settings": Settings(path="pinned", cast="host", max_pinned_bytes=4 << 30),
        "missed": stub.stored,
    }
    assert (described.world_size, described.accumulation_steps, described.dtype) == (4, 2, "float16")
    assert described.parameter_elements == pytest.approx(125e6, rel=0.2)


def test_probe_uses_a_stored_profile_and_says_so(stub: ProbeStub) -> None:
    """A fitting profile is used, and options that then have no effect are named."""
    stub.stored = stub.profile
    result = run("probe", "--budget", "3", "--json")
    assert from_plain(json.loads(result.stdout), Profile) == stub.profile
    assert not stub.calls
    assert "--budget had no effect; --refresh measures again" in result.stderr


def test_probe_measures_again_when_told_to(stub: ProbeStub, store: Store) -> None:
    """--refresh measures, whatever is stored."""
    stub.stored = stub.profile
    assert run("probe", "--refresh").exit_code == 0
    assert len(stub.calls) == 1


def test_a_pinned_limit_has_profiles_of_its_own(stub: ProbeStub, store: Store) -> None:
    """A profile that was measured under another limit does not answer."""
    stub.stored = stub.profile
    assert run("probe", "--max-pinned", "1GiB").exit_code == 0
    assert stub.fixed == "max_pinned_bytes=1073741824"


def test_probe_no_save_leaves_nothing(stub: ProbeStub, store: Store) -> None:
    """--no-save writes no file."""
    assert run("probe", "--no-save").exit_code == 0
    assert store.entries() == ()


def test_probe_survives_a_store_that_cannot_be_written(
    stub: ProbeStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was measured is printed although saving failed, with exit 0 and a notice."""

    def refuse(self: Store, profile: Profile) -> Path:
        raise ProfileError("cannot save the profile: the disk is full")

    monkeypatch.setattr(Store, "save", refuse)
    result = run("probe", "--json")
    assert result.exit_code == 0
    assert from_plain(json.loads(result.stdout), Profile) == stub.profile
    assert "not saved: cannot save the profile: the disk is full" in result.stderr


def test_a_cache_that_is_a_file_is_one_notice_before_measuring(
    stub: ProbeStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was measured is printed, with exit 0; the notice comes before the probe and not again after it."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AUTOTUNE_OFFLOAD_CACHE", str(tmp_path / "file"))
    result = run("probe", "--json")
    assert result.exit_code == 0
    assert from_plain(json.loads(result.stdout), Profile) == stub.profile
    assert result.stderr.count("measuring without a cache") == 1
    assert "not saved" not in result.stderr and str(stub.stored) not in result.stderr


def test_an_error_of_ours_is_one_message_and_exit_1(stub: ProbeStub) -> None:
    """What the user can mend never ends in a traceback."""
    stub.error = DeviceError("the accelerator is gone; expected cuda; restart the process")
    result = run("probe", "--json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.endswith("Error: the accelerator is gone; expected cuda; restart the process\n")


def test_numbers_that_json_cannot_hold_become_null(stub: ProbeStub) -> None:
    """An infinite gain is written as null, never as Infinity."""
    stub.profile = make_profile(choice=make_choice(gain=math.inf, noise=math.nan))
    choice = json.loads(run("probe", "--json").stdout, parse_constant=pytest.fail)["choice"]
    assert (choice["gain"], choice["noise"]) == (None, None)


CHILD = """\
import ctypes, os, sys, time
from tests.cli.test_verbs import ProbeStub
from autotune_offload.cli import main

class Noisy(ProbeStub):
    def probe(self, **arguments):
        os.write(1, b"noise of a descriptor\\n")
        ctypes.CDLL(None).puts(b"noise in the C library's buffer")
        os.system("echo noise of a child process")
        time.sleep(float(os.environ.get("SLEEP", "0")))
        return super().probe(**arguments)

sys.modules.update(dict.fromkeys(Noisy.replaces, Noisy()))
main()
"""


def test_stdout_holds_only_the_document_whatever_writes_to_it(tmp_path: Path) -> None:
    """Python, C code and child processes that write to stdout meanwhile end up on stderr."""
    done = run_child("probe", "--json", cache=tmp_path, source=CHILD)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["schema"] == 1
    for noise in ("of a descriptor", "in the C library's buffer", "of a child process"):
        assert f"noise {noise}" in done.stderr


def test_deprecations_of_libraries_are_not_shown(tmp_path: Path) -> None:
    """What a library will change is not told to whoever runs a verb; what is wrong now still is."""
    source = (
        "import warnings\n"
        "from autotune_offload.cli.output import stdout_set_aside\n"
        "with stdout_set_aside():\n"
        "    warnings.warn('later', FutureWarning)\n"
        "    warnings.warn('now', UserWarning)\n"
    )
    said = run_child(cache=tmp_path, source=source).stderr
    assert "later" not in said and "now" in said


def test_interrupt_ends_with_130_and_a_word(tmp_path: Path) -> None:
    """Ctrl-C says that nothing was saved; no traceback, no file."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, "probe"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**child_environment(tmp_path), "SLEEP": "30"},
    )
    assert child.stderr is not None
    for line in child.stderr:
        if "noise of a child process" in line:
            break
    time.sleep(0.2)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=30)
    assert (child.returncode, out) == (130, "")
    assert err.endswith("interrupted; nothing was saved\n")
    assert not list(tmp_path.iterdir())


def test_progress_is_silent_for_what_is_over_in_a_second(capsys: pytest.CaptureFixture[str]) -> None:
    """Quick work leaves nothing on stderr."""
    with Reporter("measuring") as progress:
        progress("d2h", 0.5)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("elapsed", "share", "said"),
    [(2.0, 0.5, "2 s left"), (9.0, 0.9, "1 s left"), (1.0, 0.05, ""), (5.0, 1.0, "")],
)
def test_progress_says_how_long_is_left(elapsed: float, share: float, said: str) -> None:
    """As the work so far went on; nothing while that is a guess, nothing when it is over."""
    assert time_left(elapsed, share) == said


def test_progress_elsewhere_than_on_a_terminal_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log file gets one line, however often progress is reported."""
    monkeypatch.setattr("autotune_offload.cli.progress.PATIENCE_SECONDS", 0.05)
    with Reporter("measuring") as progress:
        for share in (0.1, 0.5, 0.9):
            progress("d2h", share)
            time.sleep(0.1)
    assert capsys.readouterr() == ("", "measuring: d2h ...\n")


def test_progress_on_a_terminal_is_a_bar_that_leaves_again(tmp_path: Path) -> None:
    """A terminal shows what is being measured and how far it is; stdout stays clean."""
    pty = pytest.importorskip("pty", reason="pseudo-terminals are a POSIX feature")
    source = (
        "from autotune_offload.cli import progress\n"
        "import time\n"
        "progress.PATIENCE_SECONDS = 0.01\n"
        "with progress.Reporter('measuring') as report:\n"
        "    time.sleep(0.5)\n"
        "    report('d2h pinned', 0.25)\n"
    )
    terminal, stderr = pty.openpty()
    environment = {**child_environment(tmp_path), "TERM": "xterm", "COLUMNS": "80"}
    done = subprocess.run(
        [sys.executable, "-c", source], stdout=subprocess.PIPE, stderr=stderr, env=environment, check=True
    )
    os.close(stderr)
    shown = os.read(terminal, 1 << 16).decode()
    os.close(terminal)
    assert done.stdout == b""
    assert "25%" in shown
    assert "d2h pinned" in shown
    assert shown.endswith("\x1b[2K")


# -- show, explain, profiles ----------------------------------------------------------------------


@pytest.mark.parametrize("verb", [["show"], ["explain"], ["profiles", "show"]])
def test_an_empty_store_names_the_next_step(store: Store, verb: list[str]) -> None:
    """With nothing stored the message says where it looked and what to run."""
    result = run(*verb)
    assert (result.exit_code, result.stdout) == (1, "")
    assert str(store.folder) in result.stderr
    assert "autotune-offload probe" in result.stderr


@pytest.mark.parametrize("verb", [["show"], ["profiles", "show"]])
def test_show_finds_the_newest_by_path_and_by_key(store: Store, verb: list[str]) -> None:
    """A profile is named by its path, its file's name, the start of its key, or not at all."""
    path = store.save(make_profile())
    key = path.stem[-16:]
    for wanted in (
        [],
        [str(path)],
        [path.name],
        [path.stem],
        [key],
        [key[:6]],
        [key[:6].upper()],
        ["cuda-n"],
    ):
        shown = json.loads(run(*verb, *wanted, "--json").stdout)
        assert shown["fingerprint"] == make_profile().fingerprint


def test_show_says_what_a_wrong_name_could_have_been(store: Store) -> None:
    """A name that is neither a file nor a key leads to the list of keys."""
    store.save(make_profile())
    result = run("show", "zzz")
    assert result.exit_code == 1
    assert "'zzz' is neither a file nor the start of a key" in result.stderr


def test_show_refuses_an_ambiguous_key(store: Store) -> None:
    """Keys that share the given start are all named."""
    profiles = [make_profile(fingerprint={"device.name": str(number)}) for number in range(17)]
    keys = [store.save(profile).stem[-16:] for profile in profiles]
    first = next(digit for digit in "0123456789abcdef" if sum(key.startswith(digit) for key in keys) > 1)
    result = run("show", first)
    assert result.exit_code == 1
    assert all(key in result.stderr for key in keys if key.startswith(first))


def test_show_of_a_broken_profile_tells_its_own_fault_only(store: Store) -> None:
    """Named by key or by file; other broken files are none of its business."""
    path = store.save(make_profile())
    path.write_text("schema: 1\n")
    (store.folder / "other-broken.yaml").write_text("")
    for wanted in (path.stem[-16:], path.name, str(path)):
        result = run("profiles", "show", wanted)
        assert result.exit_code == 1
        assert f"{path} is truncated" in result.stderr
        assert "other-broken" not in result.stderr and "skipped" not in result.stderr


def test_show_skips_a_broken_file_with_a_notice(store: Store) -> None:
    """A file that cannot be read costs a line on stderr, not the verb."""
    store.save(make_profile())
    (store.folder / "broken.yaml").write_text("schema: 1\n")
    result = run("show", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["schema"] == 1
    assert "skipped" in result.stderr


@pytest.mark.parametrize("verb", ["show", "explain"])
def test_tables_fit_80_columns_without_colour(store: Store, verb: str) -> None:
    """On a pipe no line is wider than 80 columns and none carries an escape sequence."""
    store.save(make_profile())
    result = run(verb)
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "\x1b" not in result.stdout


def test_show_takes_brackets_literally(store: Store) -> None:
    """Text of the profile is never read as markup."""
    store.save(make_profile(warnings=("[bold]odd[/bold] :smile:",)))
    assert "[bold]odd[/bold] :smile:" in run("show").stdout


def test_show_prints_everything_that_was_measured(store: Store) -> None:
    """Environment, curves with spread, costs, candidates, choice, keys, warnings, place."""
    path = store.save(make_profile())
    text = " ".join(run("show").stdout.split())
    for expected in (
        "NVIDIA H200",
        "DeepSpeed 0.19.8",
        "pageable cold pageable warm pinned",
        "53.0 (3 %)",
        "event 5.40 us",
        "310 ms a GiB, largest block at least 1 GiB",
        "> staged, cast device 3 x 16 MiB",
        "= explicit_upcast >=0.16.3, pageable 410 ms 402 ms 2 %",
        "staged takes 0.146 s a backward pass",
        "reduce_bucket_size: 15099494",
        "bind it to the device's node",
    ):
        assert expected in text
    assert path.name in text.replace(" ", "")


def test_explain_compares_each_alternative_with_the_choice(store: Store) -> None:
    """Each path and each baseline has a cost against the chosen one and a rule that put it aside."""
    store.save(make_profile())
    document = json.loads(run("explain", "--json").stdout)
    verdicts = {row["name"]: row["verdict"] for row in document["alternatives"]}
    assert verdicts["staged, cast device"] == "chosen"
    assert verdicts["direct, cast host"].startswith("slower by 1")
    assert verdicts["pinned, cast host"].startswith("needs 34.4 GB of page-locked memory")
    assert [each["candidates"] for each in document["rejected"]] == [["pinned, cast host"]]


def test_explain_in_words_holds_reasons_and_limits(store: Store) -> None:
    """The readable form has the reasons, the gain with its noise, and the limit that rejected."""
    store.save(make_profile())
    text = " ".join(run("explain").stdout.split())
    assert "2.75x (noise of these trials: 2 %)" in text
    assert "beyond the noise of 2 %" in text
    assert "1 candidate (pinned, cast host): needs 34.4 GB of page-locked memory" in text


@pytest.mark.parametrize(
    ("times_chosen", "expected"),
    [
        (1.5, "slower by 50 %, beyond the noise of 2 %"),
        (1.01, "within the noise of 2 %"),
        (0.99, "within the noise of 2 %"),
        (None, "not tried"),
    ],
)
def test_a_verdict_follows_from_cost_and_noise(times_chosen: float | None, expected: str) -> None:
    """Slower beyond the noise, a tie, or never tried."""
    row = next(row for row in alternatives(make_profile()) if row.name == "direct, cast host")
    changed = dataclasses.replace(row, times_chosen=times_chosen)
    assert verdict(changed, make_profile()).startswith(expected)


def test_reasons_that_differ_in_numbers_only_are_told_once() -> None:
    """Dozens of candidates that one rule put aside make one group, quoted by its cheapest."""
    pruned = [
        structs.replace(
            each, measured_seconds=None, rejected=f"predicted {number} {unit} against 46 ms: not tried"
        )
        for number, unit, each in zip((130, 2.5), ("ms", "s"), make_profile().candidates[2:], strict=False)
    ]
    kept, limited = make_profile().candidates[:2]
    groups = rejections(make_profile(candidates=(kept, limited, *pruned)))
    assert sorted(len(rows) for rows in groups) == [1, 2]


def test_the_chosen_one_is_always_among_the_best() -> None:
    """The best of each kind holds the choice itself even where a tie rule took a slower one."""
    best = best_of_each(alternatives(make_profile()))
    assert [row.detail for row in best if row.chosen] == ["3 x 16 MiB"]
    assert len({row.group for row in best}) == len(best)


def test_a_choice_that_was_never_a_trial_is_still_shown(store: Store) -> None:
    """A profile without candidates, as on a host where nothing could be tried, prints."""
    profile = make_profile(candidates=(), baselines=(), transfers=(), casts=())
    store.save(profile)
    assert alternatives(profile) == []
    assert rejections(profile) == []
    assert run("show").exit_code == run("explain").exit_code == 0


def test_profiles_list_shows_good_and_broken_files(store: Store) -> None:
    """Each file is listed, with what is wrong with it."""
    path = store.save(make_profile())
    (store.folder / "broken.yaml").write_text("")
    listed = json.loads(run("profiles", "list", "--json").stdout)
    assert listed["folder"] == str(store.folder)
    assert {row["path"]: bool(row["problem"]) for row in listed["profiles"]} == {
        str(path): False,
        str(store.folder / "broken.yaml"): True,
    }
    text = run("profiles", "list").stdout
    assert path.stem[-16:][:8] in text
    assert "broken.yaml" in text


def test_profiles_list_of_an_empty_store_is_empty(store: Store) -> None:
    """Nothing stored is not an error: an empty list, and a notice for a person."""
    assert json.loads(run("profiles", "list", "--json").stdout)["profiles"] == []
    result = run("profiles", "list")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "no profile is stored" in result.stderr


def test_profiles_prune_removes_what_was_asked_for(store: Store) -> None:
    """--broken leaves good files, --older-than leaves young ones, --all --yes leaves none."""
    path = store.save(make_profile())
    broken = store.folder / "broken.yaml"
    broken.write_text("")
    assert json.loads(run("profiles", "prune", "--older-than", "1", "--json").stdout) == {"removed": []}
    assert run("profiles", "prune", "--broken").stdout == f"{broken}\n"
    assert path.exists()
    assert json.loads(run("profiles", "prune", "--all", "--yes", "--json").stdout) == {"removed": [str(path)]}
    assert store.entries() == ()


def test_what_runs_found_out_is_shown_and_forgotten(store: Store) -> None:
    """In the list and with the profile; afterwards nothing is known."""
    profile = make_profile()
    path = store.save(profile)
    way = outcomes.Way.of(profile.choice)
    wrong = outcomes.Wrong(way=way, kind="differs", why="1 of 5 values differ")
    outcomes.save(path, outcomes.Outcome(choice=way, wrong=(wrong,)))
    for verb in (["profiles", "list"], ["show"], ["profiles", "show"]):
        assert "1 of 5 values differ" in " ".join(run(*verb).stdout.split())
    (row,) = json.loads(run("profiles", "list", "--json").stdout)["profiles"]
    assert len(row["found"]) == 1
    assert json.loads(run("profiles", "forget", "--json").stdout) == {"forgotten": [str(path)]}
    assert run("profiles", "forget", "--all").stdout == ""
    assert "differ" not in run("profiles", "list").stdout and path.exists()
    assert run("profiles", "forget", "--all", path.stem).exit_code == 2


def test_explain_and_simulate_write_a_trace(store: Store, tmp_path: Path) -> None:
    """Beside what they print; a file that cannot be written is said in words."""
    store.save(make_profile())
    file = tmp_path / "trace.json"
    for verb in (["explain"], ["simulate", "gh200", "--params", "1m", "--budget", "1"]):
        result = run(*verb, "--json", "--trace", str(file))
        assert result.exit_code == 0 and json.loads(result.stdout)
        assert json.loads(file.read_text())["traceEvents"]
        file.unlink()
    assert "name another file" in run("explain", "--trace", str(tmp_path / "no" / "trace.json")).stderr


def test_profiles_path_prints_the_folder(store: Store, tmp_path: Path) -> None:
    """The folder comes from --cache, else from the environment."""
    assert run("profiles", "path").stdout == f"{store.folder}\n"
    assert json.loads(run("profiles", "path", "--cache", str(tmp_path), "--json").stdout) == {
        "folder": str(tmp_path)
    }


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_closed_pipe_is_no_failure(tmp_path: Path, form: list[str]) -> None:
    """A reader that stops early, as `head` does, causes no word on stderr and no exit status but 0."""
    Store(tmp_path).save(make_profile(warnings=tuple(f"warning {n} fills the pipe" for n in range(3_000))))
    child = subprocess.Popen(
        [sys.executable, "-m", "autotune_offload", "show", *form],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=child_environment(tmp_path),
    )
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.read(10)
    child.stdout.close()
    assert child.stderr.read() == b""
    assert child.wait(timeout=30) == 0
    child.stderr.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is a Linux device")
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_full_disk_is_a_message(tmp_path: Path, form: list[str]) -> None:
    """A result that cannot be written ends with 1 and a word, not with a traceback."""
    Store(tmp_path).save(make_profile())
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "autotune_offload", "show", *form],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=child_environment(tmp_path),
            check=False,
        )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("Error: cannot write: ")


def test_no_color_is_honoured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With NO_COLOR no colour is written even where colour is forced."""
    from autotune_offload.cli.output import console

    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert console().no_color


# -- apply ----------------------------------------------------------------------------------------

DS_CONFIG = """{
    // the user's own file
    "train_batch_size": 8,
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": true},
        "offload_param": {"device": "cpu"}
    }
}
"""


@pytest.fixture
def ds_config(tmp_path: Path) -> Path:
    """A user's ds_config with a comment in it."""
    file = tmp_path / "ds_config.json"
    file.write_text(DS_CONFIG)
    return file


def test_apply_writes_the_tuned_config_to_stdout_and_reasons_to_stderr(
    stub: ProbeStub, ds_config: Path
) -> None:
    """On stdout is the whole config with the choice in it; each change and its reason is on stderr."""
    stub.stored = stub.profile
    result = run("apply", str(ds_config))
    assert result.exit_code == 0
    tuned = json.loads(result.stdout)
    assert tuned["train_batch_size"] == 8
    assert tuned["zero_optimization"]["offload_optimizer"]["pin_memory"] is False
    assert tuned["zero_optimization"]["offload_param"]["pin_memory"] is True
    assert "zero_optimization.offload_optimizer.pin_memory: true -> false\n    " in result.stderr
    assert ds_config.read_text() == DS_CONFIG


def test_apply_json_holds_config_changes_and_profile(stub: ProbeStub, store: Store, ds_config: Path) -> None:
    """--json is one document with every change, its reason and where the choice came from."""
    path = store.save(stub.profile)
    document = json.loads(run("apply", str(ds_config), "--profile", str(path), "--json").stdout)
    assert document["profile"] == str(path)
    assert document["output"] is None
    changed = {change["key"]: (change["before"], change["after"]) for change in document["changes"]}
    assert changed["zero_optimization.offload_optimizer.pin_memory"] == (True, False)
    assert all(change["reason"] for change in document["changes"])
    assert document["config"]["zero_optimization"]["offload_param"]["pin_memory"] is True


def test_apply_writes_a_file_and_leaves_stdout_empty(
    stub: ProbeStub, ds_config: Path, tmp_path: Path
) -> None:
    """-o takes the config, in the indentation of the user's file."""
    stub.stored = stub.profile
    output = tmp_path / "tuned.json"
    result = run("apply", str(ds_config), "-o", str(output))
    assert (result.exit_code, result.stdout) == (0, "")
    assert json.loads(output.read_text())["zero_optimization"]["offload_optimizer"]["pin_memory"] is False
    assert '\n    "train_batch_size": 8' in output.read_text()
    assert f"written: {output}" in result.stderr


def test_apply_diff_shows_only_what_changes(stub: ProbeStub, ds_config: Path) -> None:
    """--diff is a unified diff between two texts of the same form."""
    stub.stored = stub.profile
    diff = [line for line in run("apply", str(ds_config), "--diff").stderr.splitlines() if line[:1] in "+-"]
    assert '+        "reduce_bucket_size": 15099494,' in diff
    assert '+            "pin_memory": false' in diff
    assert not any("train_batch_size" in line for line in diff)


def test_apply_never_rewrites_the_users_file(stub: ProbeStub, ds_config: Path, tmp_path: Path) -> None:
    """-o that leads to CONFIG, by a link too, is refused."""
    stub.stored = stub.profile
    link = tmp_path / "link.json"
    link.symlink_to(ds_config)
    for output in (ds_config, link):
        result = run("apply", str(ds_config), "-o", str(output))
        assert (result.exit_code, result.stdout) == (2, "")
        assert "never rewritten" in result.stderr
    assert ds_config.read_text() == DS_CONFIG


def test_apply_leaves_every_number_as_the_user_spelt_it(stub: ProbeStub, tmp_path: Path) -> None:
    """5e8 and 1.0 are no whole numbers afterwards; only what is listed as a change is another."""
    stub.stored = stub.profile
    file = tmp_path / "ds.json"
    before = """{
  "gradient_clipping": 1.0,
  "betas": [
    0.9,
    9.50e-1,
    2
  ],
  "zero_optimization": {
    "stage": 3,
    "sub_group_size": 1E+9,
    "reduce_bucket_size": 15099494.0,
    "stage3_prefetch_bucket_size": 5e8,
    "stage3_param_persistence_threshold": 1e5,
    "offload_optimizer": {
      "device": "cpu",
      "pin_memory": false
    }
  }
}
"""
    file.write_text(before)
    result = run("apply", str(file))
    assert result.stdout == before


def test_apply_without_a_profile_says_what_to_run(stub: ProbeStub, ds_config: Path) -> None:
    """No profile for this host: the reason, the next step, exit 1."""
    result = run("apply", str(ds_config))
    assert (result.exit_code, result.stdout) == (1, "")
    assert "no profile is stored here; run `autotune-offload probe` first" in result.stderr


def test_apply_says_where_the_config_fixes_something_else(stub: ProbeStub, tmp_path: Path) -> None:
    """A path that the user fixed and the stored choice does not have is named."""
    stub.stored = stub.profile
    file = tmp_path / "fixed.json"
    file.write_text('{"autotune_offload": {"path": "direct"}, "zero_optimization": {"stage": 3}}')
    assert "fixes path 'direct'; the stored choice, whose keys these are, has 'staged'" in (
        run("apply", str(file)).stderr
    )


def test_apply_honours_enabled_false(stub: ProbeStub, tmp_path: Path) -> None:
    """A config that switches the tool off comes back as it is, with a word."""
    stub.stored = stub.profile
    file = tmp_path / "off.json"
    config = {"autotune_offload": {"enabled": False}, "zero_optimization": {"stage": 3}}
    file.write_text(json.dumps(config))
    result = run("apply", str(file))
    assert (result.exit_code, json.loads(result.stdout)) == (0, config)
    assert "nothing was tuned" in result.stderr


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"autotune_offload": {"bogus": 1}}'])
def test_apply_refuses_what_is_no_config(stub: ProbeStub, tmp_path: Path, text: str) -> None:
    """A file that cannot be read as a ds_config is an error in words."""
    stub.stored = stub.profile
    file = tmp_path / "bad.json"
    file.write_text(text)
    result = run("apply", str(file))
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: ")


def test_apply_says_where_it_cannot_write(stub: ProbeStub, ds_config: Path, tmp_path: Path) -> None:
    """An output folder that is not there is a message, not a traceback."""
    stub.stored = stub.profile
    result = run("apply", str(ds_config), "-o", str(tmp_path / "none" / "tuned.json"))
    assert result.exit_code == 1
    assert "cannot write" in result.stderr


# -- verify ---------------------------------------------------------------------------------------


@dataclass
class VerifyStub:
    """Stands in for the training: keeps what it was asked for, and answers with made-up times."""

    arguments: dict[str, Any] = field(default_factory=dict)

    def __call__(self, variants: Any, **arguments: Any) -> Any:
        """A verification in which the second variant halves the gradient offload."""
        sys.stdout.write("[INFO] deepspeed says this on stdout\n")
        arguments.pop("progress")("training", 0.5)
        self.arguments = {"variants": variants, **arguments}
        first, tuned = (
            self._result(name, offload) for name, offload in (("deepspeed", 2e-3), ("tuned", 1e-3))
        )
        return training.Verification(
            variants=(first, tuned),
            control=self._result("control", 2e-3),
            device="cpu",
            parameters=19_000_000,
            steps=6,
            warmup=1,
            losses_identical=True,
            verdict=tuned.verdict,
            elapsed_seconds=12.0,
        )

    def _result(self, name: str, offload_seconds: float) -> Any:
        seconds = {"step": [0.05] * 6, "backward": [0.03] * 6, "gradient_offload": [offload_seconds] * 6}
        ratios = {name: training.Ratio.of([2e-3] * 6, each) for name, each in seconds.items()}
        timings = {name: training.Timing.of(each) for name, each in seconds.items()}
        verdict = f"{name} against deepspeed: gradient offload 2.00x faster."
        phases = {p: training.Timing.of([4e-3] * 6) for p in ("unscale", "adam", "copy_back")}
        return training.VariantResult(
            name=name, ratios=ratios, losses=(2.0,), verdict=verdict, phases=phases, **timings
        )


@pytest.fixture
def verify_stub(stub: ProbeStub, monkeypatch: pytest.MonkeyPatch) -> VerifyStub:
    """The training replaced, and a stored profile that fits."""
    stub.stored = stub.profile
    made = VerifyStub()
    monkeypatch.setattr(training, "verify", made)
    return made


def test_verify_compares_deepspeeds_own_config_with_the_tuned_one(verify_stub: VerifyStub) -> None:
    """Without a file: plain ZeRO-3 without pin keys against the keys of the stored choice."""
    result = run("verify", "--steps", "8", "--warmup", "2")
    assert result.exit_code == 0, result.output
    own, tuned = verify_stub.arguments["variants"]
    assert (verify_stub.arguments["steps"], verify_stub.arguments["warmup"]) == (8, 2)
    assert "pin_memory" not in own.config["zero_optimization"]["offload_optimizer"]
    assert tuned.config["zero_optimization"]["offload_optimizer"]["pin_memory"] is False
    text = " ".join(result.stdout.split())
    assert "tuned 50.0 ms (0 %) 30.0 ms (0 %) 1.00 ms (0 %)" in text
    assert "tuned against deepspeed: gradient offload 2.00x faster." in text
    assert "Losses: the same in every step." in text
    assert "zero_optimization.offload_optimizer.pin_memory: absent -> false" in text
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_verify_tells_the_phases_of_a_step(verify_stub: VerifyStub) -> None:
    """Of each variant, with the compiled pass and without."""
    text = " ".join(run("verify").stdout.split())
    assert "unscale Adam copy back" in text and "tuned 4.00 ms (0 %) 4.00 ms (0 %) 4.00 ms (0 %)" in text


@pytest.mark.parametrize("cpu_adam", [True, False])
def test_verify_carries_out_the_decided_step_where_the_optimizer_is_deepspeeds(
    verify_stub: VerifyStub, monkeypatch: pytest.MonkeyPatch, cpu_adam: bool
) -> None:
    """With as many threads as were decided on; with torch's AdamW there is no pass."""
    specs: list[Any] = []

    def attached(engine: Any, spec: Any, *, check: bool) -> StepStatus:
        specs.append(spec)
        return StepStatus()

    monkeypatch.setattr(step_attach, "attach_step", attached)
    monkeypatch.setattr(engine_attach, "attach", lambda engine, choice: Status())
    assert run("verify", *["--cpu-adam"] * cpu_adam).exit_code == 0
    own, tuned = verify_stub.arguments["variants"]
    tuned.prepare(object())
    assert own.config["optimizer"]["params"]["torch_adam"] is not cpu_adam and own.prepare is None
    assert [(s.step, s.threads, s.page_lock) for s in specs] == [("fused", 8, True)] * cpu_adam


def test_verify_says_why_a_decided_step_cannot_be_carried_out(
    verify_stub: VerifyStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What would be compared is not the choice."""
    monkeypatch.setattr(
        step_attach, "attach_step", lambda *args, **kwargs: StepStatus(why_not="no C compiler was found")
    )
    monkeypatch.setattr(engine_attach, "attach", lambda engine, choice: Status())
    assert run("verify", "--cpu-adam").exit_code == 0
    with pytest.raises(ConfigError, match="no C compiler was found"):
        verify_stub.arguments["variants"][1].prepare(object())


def test_verify_json_is_one_document(verify_stub: VerifyStub) -> None:
    """--json holds the times, the verdict and the keys that were compared."""
    document = json.loads(run("verify", "--json").stdout)
    assert [each["name"] for each in document["variants"]] == ["deepspeed", "tuned"]
    assert document["variants"][1]["gradient_offload"]["median_seconds"] == 1e-3
    assert document["changes"][0]["key"] == "zero_optimization.offload_optimizer.pin_memory"


def test_verify_takes_the_zero_section_of_a_file(verify_stub: VerifyStub, ds_config: Path) -> None:
    """--config replaces DeepSpeed's own ZeRO section; model and batch stay those of verify."""
    assert run("verify", "--config", str(ds_config)).exit_code == 0
    own, tuned = (variant.config for variant in verify_stub.arguments["variants"])
    assert own["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert tuned["zero_optimization"]["offload_optimizer"]["pin_memory"] is False
    assert "train_batch_size" not in own


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--params", "900b"], "give a smaller --params"),
        (["--config", "no-zero.json"], "expected one with stage 3"),
    ],
)
def test_verify_refuses_what_it_cannot_train(
    verify_stub: VerifyStub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    expected: str,
) -> None:
    """A model beyond the host's memory, or a config without a ZeRO section, is an error in words."""
    monkeypatch.chdir(tmp_path)
    Path("no-zero.json").write_text('{"train_batch_size": 1}')
    result = run("verify", *arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    assert expected in result.stderr


def test_verify_without_a_profile_says_what_to_run(stub: ProbeStub) -> None:
    """It trains nothing before there is a choice to verify."""
    result = run("verify")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "run `autotune-offload probe` first" in result.stderr


@pytest.mark.parametrize("params", [10**5, 10**6, 19 * 10**6, 125 * 10**6, 10**9, 7 * 10**9])
def test_the_model_has_about_the_size_asked_for(params: int) -> None:
    """A count becomes layers and width whose blocks hold it within a third."""
    spec = model_of(params)
    assert 12 * spec.layers * spec.width**2 == pytest.approx(params, rel=0.34, abs=5e4)


@pytest.mark.long
def test_verify_trains_for_real(tmp_path: Path) -> None:
    """A child process trains both variants, and stdout holds the document alone."""
    choice = make_choice(path="direct", cast="host", buffer_count=1)
    path = Store(tmp_path).save(make_profile(choice=choice))
    arguments = ("--profile", str(path), "--params", "100k", "--steps", "6", "--warmup", "1", "--json")
    command = [sys.executable, "-m", "autotune_offload", "verify", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env=child_environment(tmp_path), check=False
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["losses_identical"] is True
    assert document["variants"][0]["step"]["median_seconds"] > 0


# -- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [("7b", 7 * 10**9), ("7B", 7 * 10**9), ("7e9", 7 * 10**9), ("125M", 125 * 10**6), ("1.5k", 1500)],
)
def test_a_parameter_count_has_units(text: str, expected: int) -> None:
    """Counts are read as people write them."""
    assert options.parameter_count(text) == expected


@given(st.integers(min_value=1, max_value=10**15))
def test_a_parameter_count_is_exact(number: int) -> None:
    """Every whole number reads back, with and without separators."""
    assert options.parameter_count(str(number)) == options.parameter_count(f"{number:_}") == number


@given(st.text(max_size=12))
def test_any_text_is_a_count_or_a_usage_error(text: str) -> None:
    """No text makes the parser fail in another way."""
    with contextlib.suppress(click.BadParameter):
        assert 1 <= options.parameter_count(text) <= 10**15


@pytest.mark.parametrize(
    ("text", "expected"),
    [("4GiB", 4 << 30), ("512 MiB", 512 << 20), ("2GB", 2 * 10**9), ("1048576", 1 << 20), ("0", 0)],
)
def test_a_size_has_units(text: str, expected: int) -> None:
    """Binary and decimal units differ."""
    assert options.byte_size(text) == expected


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (units.size(4096), "4 KiB"),
        (units.size(1.5 * 2**30), "1.5 GiB"),
        (units.size(None), "-"),
        (units.duration(0.0123), "12.3 ms"),
        (units.duration(5.4e-6), "5.40 us"),
        (units.duration(0.9999), "1.00 s"),
        (units.duration(0), "0 s"),
        (units.duration(math.inf), "-"),
        (units.rate(53.04), "53.0 GB/s"),
        (units.percent(0.234), "23 %"),
        (units.percent(0.004), "0.4 %"),
        (units.times(2.754), "2.75x"),
        (units.count(7_000_000_000), "7 B"),
    ],
)
def test_numbers_are_written_with_their_unit(written: str, expected: str) -> None:
    """Three significant digits, a unit, a dash for what is missing."""
    assert written == expected


@given(st.floats(min_value=1e-9, max_value=1e15))
def test_three_significant_digits_are_kept(value: float) -> None:
    """What is written is within half a unit of the third digit."""
    assert float(units.significant(value)) == pytest.approx(value, rel=5.001e-3)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text(), inner),
)


@given(_JSON)
def test_every_document_can_be_written_as_strict_json(document: Any) -> None:
    """Infinities and not-a-numbers never reach the text."""
    json.dumps(finite(document), allow_nan=False)


def test_what_is_finite_stays_as_it_is() -> None:
    """Only floats that JSON cannot hold change."""
    plain = json.loads(json.dumps(to_plain(make_profile())))
    assert finite(plain) == plain
