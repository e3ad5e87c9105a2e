"""Tests of `autotune_offload.profiles.store`: profiles on disk, and every way in which one can be missed."""

from __future__ import annotations

import multiprocessing
import os
import pwd
import re
import stat
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from autotune_offload.documents import MAX_BYTES, MAX_PARTS
from autotune_offload.errors import ProfileError
from autotune_offload.places import CACHE_VARIABLE
from autotune_offload.profiles.store import Miss, Store
from autotune_offload.records import PinCost, Profile, Scalar, from_plain, to_plain
from tests import CHECKOUT
from tests.factories import make_choice, make_profile, make_workload


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store whose folder does not exist yet."""
    return Store(tmp_path / "cache" / "profiles")


def found(result: Profile | Miss) -> Profile:
    """The profile of a lookup that must hit."""
    assert isinstance(result, Profile), result
    return result


def missed(result: Profile | Miss) -> Miss:
    """The miss of a lookup that must not hit."""
    assert isinstance(result, Miss)
    assert result.reason
    assert "\n" not in result.reason
    return result


def with_fingerprint(**changes: Scalar) -> Profile:
    """A profile whose fingerprint differs; `software_torch` stands for the field `software.torch`."""
    dotted = {name.replace("_", ".", 1): value for name, value in changes.items()}
    return make_profile(fingerprint={**make_profile().fingerprint, **dotted})


def age(path: Path, days: float) -> None:
    """Makes a file this many days old."""
    then = time.time() - days * 86400
    os.utime(path, (then, then))


# -- round trip -----------------------------------------------------------------------------------


def test_a_saved_profile_is_found_as_it_was(store: Store) -> None:
    """Every field comes back, raw samples included."""
    profile = make_profile()
    path = store.save(profile)
    assert found(store.lookup(profile.fingerprint)) == profile
    assert store.load(path) == profile


def test_a_profile_from_before_steps_were_measured_is_read(store: Store) -> None:
    """Its file holds neither key; it is no miss, and says nothing of a step."""
    profile = make_profile(step=None, step_rates=None)
    path = store.save(profile)
    text = path.read_text()
    assert "\nstep_rates: null\nstep: null\n" in text
    path.write_text(text.replace("\nstep_rates: null\nstep: null\n", "\n"))
    assert store.load(path) == profile


def test_a_malformed_table_of_a_step_is_refused(store: Store) -> None:
    """As every other table."""
    path = store.save(make_profile())
    path.write_text(path.read_text().replace("columns: [threads, back,", "columns: [threads,"))
    with pytest.raises(ProfileError, match="malformed table"):
        store.load(path)


def test_the_name_says_the_device_and_the_key(store: Store) -> None:
    """Kind, name and the hash of the fingerprint; nothing in a name leaves the folder."""
    assert re.fullmatch(r"cuda-nvidia-h200-[0-9a-f]{16}\.yaml", store.save(make_profile()).name)
    strange = with_fingerprint(device_kind="../..", device_name="A/B \n ü" * 50)
    path = store.save(strange)
    assert path.parent == store.folder
    assert found(store.lookup(strange.fingerprint)) == strange


def test_a_fingerprint_without_a_device_is_stored_too(store: Store) -> None:
    """No field is required to be there."""
    profile = make_profile(fingerprint={"a": 1})
    assert store.save(profile).name.startswith("unknown-unknown-")
    assert found(store.lookup({"a": 1})) == profile


def test_the_order_of_the_fields_does_not_matter(store: Store) -> None:
    """The same fields in another order are the same environment."""
    profile = make_profile()
    store.save(profile)
    assert found(store.lookup(dict(reversed(profile.fingerprint.items())))) == profile


def test_a_person_can_read_the_file(store: Store) -> None:
    """A comment says what it is, the structure is in blocks, each row of a table is one flow sequence."""
    text = store.save(make_profile()).read_text()
    assert text.startswith("# A profile of autotune-offload")
    assert "fingerprint" in text.split("\n")[1]
    assert "\nhost:\n  name: node-17\n" in text
    assert "\n  - [d2h, pageable, cold, 4096, " in text
    assert max(map(len, text.splitlines())) < 130
    assert text.endswith("\n...\n")


def test_raw_samples_are_rounded_to_four_digits_and_medians_are_not(store: Store) -> None:
    """Raw samples lose digits beyond the fourth; the numbers that decide keep all of theirs."""
    first, *rest = make_profile().transfers
    exact = structs.replace(first, median_seconds=1.23456789e-5, raw_seconds=(1.23456789e-5, 0.0))
    store.save(make_profile(transfers=(exact, *rest)))
    read = found(store.lookup(make_profile().fingerprint)).transfers[0]
    assert read.median_seconds == 1.23456789e-5
    assert read.raw_seconds == (1.235e-5, 0.0)


def test_nothing_measured_is_stored_too(store: Store) -> None:
    """Empty tables come back empty."""
    profile = make_profile(transfers=(), casts=(), baselines=(), candidates=())
    store.save(profile)
    assert found(store.lookup(profile.fingerprint)) == profile


texts = st.text(max_size=40)
scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | texts
raw_samples = st.lists(st.floats(0, 1e4).map(lambda x: float(f"{x:.4g}")), max_size=5).map(tuple)


@given(
    fingerprint=st.dictionaries(texts, scalars, max_size=8),
    words=st.lists(texts, max_size=4).map(tuple),
    zero=st.dictionaries(texts, scalars | st.dictionaries(texts, scalars, max_size=3), max_size=4),
    raw=raw_samples,
    number=st.floats(allow_nan=False),
    per_gib=st.none() | st.floats(0),
)
def test_any_profile_comes_back_as_it_was(
    fingerprint: dict[str, Scalar],
    words: tuple[str, ...],
    zero: dict[str, Any],
    raw: tuple[float, ...],
    number: float,
    per_gib: float | None,
) -> None:
    """Whatever the strings, numbers and samples are: YAML's special words and signs change nothing."""
    base = make_profile()
    profile = make_profile(
        fingerprint=fingerprint,
        warnings=words,
        stability=words,
        zero_optimization=zero,
        elapsed_seconds=number,
        pin=PinCost(
            seconds_per_gib=per_gib, largest_bytes=0, capped=False, reason=words[0] if words else None
        ),
        choice=make_choice(reasons=words, gain=number),
        workload=make_workload(source="".join(words)),
        transfers=tuple(structs.replace(row, raw_seconds=raw) for row in base.transfers[:2]),
        candidates=tuple(structs.replace(row, raw_seconds=raw) for row in base.candidates[:2]),
    )
    with tempfile.TemporaryDirectory() as folder:
        here = Store(Path(folder))
        here.save(profile)
        assert found(here.lookup(fingerprint)) == profile


def test_without_libyaml_the_result_is_the_same(store: Store) -> None:
    """PyYAML built without its C part writes and reads the same profile."""
    profile = make_profile()
    store.save(profile)
    code = (
        "import sys, yaml\n"
        "del yaml.CSafeLoader, yaml.CSafeDumper\n"
        "from pathlib import Path\n"
        "from autotune_offload.profiles.store import Store\n"
        "store = Store(Path(sys.argv[1]))\n"
        "(entry,) = store.entries()\n"
        "store.save(entry.profile)\n"
        "assert store.lookup(entry.profile.fingerprint) == entry.profile\n"
    )
    subprocess.run([sys.executable, "-c", code, str(store.folder)], check=True, cwd=CHECKOUT)
    assert found(store.lookup(profile.fingerprint)) == profile


def test_a_typical_profile_is_found_within_25_ms(store: Store) -> None:
    """60 transfers and 41 candidates with 20 samples each; processor time, as the host is shared."""
    assert yaml.__with_libyaml__
    profile = make_profile()
    store.save(profile)
    seconds = []
    for _ in range(15):
        start = time.process_time()
        store.lookup(profile.fingerprint)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.025, f"best {min(seconds):.4f} s, median {statistics.median(seconds):.4f} s"


# -- where ----------------------------------------------------------------------------------------


def test_the_environment_variable_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read when a store is made, and an argument goes before it."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "here"))
    assert Store().folder == tmp_path / "here"
    assert Store(tmp_path).folder == tmp_path


def test_the_default_is_the_platforms_cache_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty variable counts as unset."""
    monkeypatch.setenv(CACHE_VARIABLE, "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = Store().folder
    assert folder.is_relative_to(tmp_path)
    assert folder.parts[-2:] == ("autotune-offload", "profiles")


def test_a_user_without_a_home_goes_without_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder named "~" appears in the working directory; the way out is named."""

    def nobody(uid: int) -> pwd.struct_passwd:
        raise KeyError(uid)

    for name in (CACHE_VARIABLE, "HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.chdir(tmp_path)
    homeless = Store()
    assert CACHE_VARIABLE in missed(homeless.lookup({})).reason
    assert "home" in missed(homeless.lookup({}, frozenset({"workload"}))).reason
    with pytest.raises(ProfileError, match=CACHE_VARIABLE):
        homeless.save(make_profile())
    assert homeless.entries() == ()
    assert list(tmp_path.iterdir()) == []


def test_files_and_folder_are_the_owners_alone(store: Store) -> None:
    """Mode 0600 and 0700."""
    path = store.save(make_profile())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700


# -- misses ---------------------------------------------------------------------------------------


def test_an_empty_store_misses(store: Store) -> None:
    """The reason names the folder, which is not made by asking."""
    miss = missed(store.lookup(make_profile().fingerprint))
    assert str(store.folder) in miss.reason
    assert miss.differs == ()
    assert not store.folder.exists()


def test_a_miss_names_the_fields_of_the_nearest_profile_with_both_values(store: Store) -> None:
    """Of two profiles the one with fewer differing fields is described."""
    store.save(with_fingerprint(software_torch="2.12.0", device_count=4, workload="00"))
    store.save(with_fingerprint(software_torch="2.12.0"))
    miss = missed(store.lookup(make_profile().fingerprint))
    assert miss.differs == ("software.torch",)
    assert "'2.12.0'" in miss.reason
    assert "'2.13.0+cu128'" in miss.reason


def test_a_field_that_only_one_side_has_differs(store: Store) -> None:
    """Absent is not the same as None."""
    store.save(make_profile())
    fingerprint = dict(make_profile().fingerprint)
    del fingerprint["device.mig_slice"]
    miss = missed(store.lookup({**fingerprint, "new": 1}))
    assert set(miss.differs) == {"device.mig_slice", "new"}
    assert "absent" in miss.reason


@pytest.mark.parametrize(("stored", "asked"), [(1, True), (1, 1.0), (1, "1"), (0, None)])
def test_values_of_another_type_differ(store: Store, stored: Scalar, asked: Scalar) -> None:
    """Python calls 1, 1.0 and True equal; a fingerprint does not."""
    store.save(with_fingerprint(device_count=stored))
    assert missed(store.lookup(with_fingerprint(device_count=asked).fingerprint)).differs == ("device.count",)


def write_over(change: Callable[[str], str]) -> Callable[[Path], object]:
    """A damage that edits the text."""
    return lambda path: path.write_text(change(path.read_text()))


def instead(make: Callable[[Path], object]) -> Callable[[Path], object]:
    """A damage that puts something else in the file's place."""

    def replace(path: Path) -> None:
        path.unlink()
        make(path)

    return replace


def nested_aliases(path: Path) -> None:
    """Nine levels of nine aliases each: 387 million elements in 400 bytes."""
    levels = ["a0: &a0 [1,1,1,1,1,1,1,1,1]"]
    levels += [f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
    path.write_text("\n".join(["schema: 1", *levels, "...", ""]))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda path: path.write_text(""), "empty"),
    "blank": (lambda path: path.write_text(" \n\n"), "empty"),
    "truncated in the middle": (write_over(lambda text: text[: len(text) // 2]), "truncated"),
    "truncated before the last field": (
        write_over(lambda text: text.split("\nwarnings:")[0] + "\n"),
        "truncated",
    ),
    "not YAML": (write_over(lambda text: text.replace("host:", "host: [", 1)), "not valid YAML"),
    "not text": (lambda path: path.write_bytes(b"\xff\xfe\x00\n...\n"), "cannot be read"),
    "binary zeros": (lambda path: path.write_bytes(bytes(4096) + b"\n...\n"), "no schema"),
    "a list": (lambda path: path.write_text("- 1\n...\n"), "no schema"),
    "a text": (lambda path: path.write_text("|\nschema: 1\n...\n"), "YAML"),
    "an older schema": (write_over(lambda text: text.replace("schema: 1\n", "schema: 0\n")), "schema 0"),
    "no schema": (write_over(lambda text: text.replace("schema: 1\n", "")), "no schema"),
    "a missing field": (write_over(lambda text: re.sub(r"\nplan: .*", "", text)), "plan"),
    "a wrong type": (write_over(lambda text: text.replace("count: 8", "count: many")), "count"),
    "a path that is no name": (
        write_over(lambda text: text.replace("path: staged", "path: Tele-port")),
        "path",
    ),
    "a short row": (write_over(lambda text: text.replace("- [d2h, pageable,", "- [d2h,", 1)), "table"),
    "no rows": (write_over(lambda text: text.replace("  rows:", "  lines:", 1)), "table"),
    "a sample that is no number": (write_over(lambda text: text.replace(" 1.021e-05", " fast", 1)), "fast"),
    "a tagged scalar": (
        write_over(lambda text: text.replace("count: 8", "count: !!int ''", 1)),
        "not valid YAML",
    ),
    "an object tag": (
        write_over(lambda text: text.replace("plan: standard", "plan: !!python/name:os.system")),
        "not valid YAML",
    ),
    "an impossible date": (
        write_over(lambda text: text.replace("plan: standard", "plan: 2026-99-99")),
        "YAML",
    ),
    "deep nesting": (
        lambda path: path.write_text("schema: 1\nx: " + "[" * 15_000 + "\n...\n"),
        "not valid YAML",
    ),
    "aliases": (nested_aliases, "aliases"),
    "large and no profile": (lambda path: path.write_bytes(b"a: 1\n" * 800_000 + b"...\n"), "no schema"),
    "too large": (lambda path: path.write_bytes(b"#" * (MAX_BYTES + 1)), "MB"),
    "a gigabyte of text": (lambda path: os.truncate(path, 1 << 30), "MB"),
    "many values": (
        lambda path: path.write_text("schema: 1\nx: [" + "1," * MAX_PARTS + "]\n...\n"),
        "values",
    ),
    "a number in base 60": (
        lambda path: path.write_text("schema: 1\nx: 1" + ":1" * (MAX_PARTS - 10) + "\n...\n"),
        "table",
    ),
    "a number of a million digits": (
        lambda path: path.write_text("schema: 1\nx: " + "1" * 1_000_000 + "\n...\n"),
        "not valid YAML",
    ),
    "block nesting": (
        lambda path: path.write_text("schema: 1\nx:\n " + "- " * (MAX_PARTS - 10) + "1\n...\n"),
        "not valid YAML",
    ),
    "two documents": (write_over(lambda text: text + "--- 1\n...\n"), "not valid YAML"),
    "a newer schema": (write_over(lambda text: text.replace("schema: 1\n", "schema: 2\n")), "schema 2"),
    "another user's": (lambda path: os.chown(path, 65534, -1), "belongs to another user (uid 65534"),
    "writable by everyone": (lambda path: path.chmod(0o666), "written by everyone (mode 0666)"),
    "a folder": (instead(Path.mkdir), "regular file"),
    "a FIFO": (instead(os.mkfifo), "regular file"),
    "a dangling link": (instead(lambda path: path.symlink_to("nowhere")), "no profile"),
}


DISTRUSTED = {"another user's", "writable by everyone"}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_a_miss_with_its_reason_and_is_replaced_by_the_next_save(
    store: Store, damage: str
) -> None:
    """Neither lookup raises, `load` and `entries` tell the same reason, all in under a second.

    Whose file it is counts where nobody named it, so not for `load`.
    """
    if damage == "another user's" and os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    profile = make_profile()
    path = store.save(profile)
    spoil, reason = DAMAGES[damage]
    spoil(path)
    start = time.process_time()
    assert reason in missed(store.lookup(profile.fingerprint)).reason
    missed(store.lookup(profile.fingerprint, frozenset({"workload"})))
    assert time.process_time() - start < 1
    if damage in DISTRUSTED:
        assert store.load(path) == profile
    else:
        with pytest.raises(ProfileError, match=re.escape(reason)):
            store.load(path)
    (entry,) = store.entries()
    assert entry.profile is None
    assert reason in (entry.problem or "")
    if not path.is_dir():
        store.save(profile)
        assert found(store.lookup(profile.fingerprint)) == profile


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_no_content_makes_a_lookup_raise(content: bytes) -> None:
    """Any bytes in the file's place are a miss, with and without the marks of a profile."""
    with tempfile.TemporaryDirectory() as folder:
        here = Store(Path(folder))
        for start, ending in ((b"", b""), (b"", b"\n...\n"), (b"schema: 1\n", b"\n...\n")):
            here.path_of({"a": 1}).write_bytes(start + content + ending)
            missed(here.lookup({"a": 1}))
            missed(here.lookup({"a": 1}, frozenset({"b"})))


@given(st.integers(0, 10_000))
def test_no_truncation_is_taken_for_a_profile(permille: int) -> None:
    """Cut anywhere before the end mark, the file is a miss."""
    with tempfile.TemporaryDirectory() as folder:
        here = Store(Path(folder))
        path = here.save(make_profile())
        whole = path.read_bytes()
        path.write_bytes(whole[: (len(whole) - 5) * permille // 10_000])
        missed(here.lookup(make_profile().fingerprint))


def test_a_file_with_another_fingerprint_than_its_name_is_a_miss(store: Store) -> None:
    """A copied or edited file is not believed, and the field is named."""
    other = with_fingerprint(software_torch="2.12.0")
    asked = make_profile().fingerprint
    store.save(other).rename(store.path_of(asked))
    miss = missed(store.lookup(asked))
    assert miss.differs == ("software.torch",)
    assert "'2.12.0'" in miss.reason


def test_a_star_in_a_text_is_no_alias(store: Store) -> None:
    """Only real aliases are refused."""
    profile = make_profile(warnings=("*not an alias*", "&nor an anchor", "* x"))
    store.save(profile)
    assert found(store.lookup(profile.fingerprint)) == profile


def test_equal_parts_are_written_without_aliases(store: Store) -> None:
    """One object that occurs twice is written twice."""
    shared = {"device": "cpu"}
    text = store.save(make_profile(zero_optimization={"a": shared, "b": shared})).read_text()
    assert not re.search(r"[&*]id\d", text)


def test_an_unreadable_neighbour_does_not_hide_the_nearest(store: Store) -> None:
    """Broken files are passed over when the nearest profile is looked for."""
    store.save(with_fingerprint(software_torch="2.12.0"))
    (store.folder / "cuda-nvidia-h200-0000.yaml").write_text("{")
    assert missed(store.lookup(make_profile().fingerprint)).differs == ("software.torch",)


# -- fields to ignore -----------------------------------------------------------------------------

WORKLOAD = frozenset({"workload"})


def test_with_a_field_ignored_the_newest_fitting_profile_is_found(store: Store) -> None:
    """Of two workloads on this host the later one, and never a profile that differs elsewhere."""
    older, newer = with_fingerprint(workload="old"), with_fingerprint(workload="new")
    age(store.save(older), 2)
    age(store.save(newer), 1)
    store.save(with_fingerprint(software_torch="2.12.0"))
    asked = {name: value for name, value in older.fingerprint.items() if name != "workload"}
    assert found(store.lookup(asked, WORKLOAD)) == newer
    age(store.path_of(newer.fingerprint), 3)
    assert found(store.lookup(asked, WORKLOAD)) == older


def test_a_broken_newest_profile_gives_way_to_an_older_one(store: Store) -> None:
    """A truncated file is passed over while another fits; alone, it is the reason."""
    older, newer = with_fingerprint(workload="old"), with_fingerprint(workload="new")
    age(store.save(older), 1)
    path = store.save(newer)
    path.write_text(path.read_text()[:-100])
    assert found(store.lookup(make_profile().fingerprint, WORKLOAD)) == older
    store.path_of(older.fingerprint).unlink()
    assert "truncated" in missed(store.lookup(make_profile().fingerprint, WORKLOAD)).reason


def test_an_ignored_field_is_not_named_as_differing(store: Store) -> None:
    """A miss names only what stood in the way."""
    store.save(with_fingerprint(software_torch="2.12.0", workload="x"))
    assert missed(store.lookup(make_profile().fingerprint, WORKLOAD)).differs == ("software.torch",)


def test_the_devices_name_can_be_ignored_too(store: Store) -> None:
    """Though it is part of the file's name."""
    profile = with_fingerprint(device_name="NVIDIA H100")
    store.save(profile)
    assert found(store.lookup(make_profile().fingerprint, frozenset({"device.name"}))) == profile


# -- writing --------------------------------------------------------------------------------------


def test_a_failed_rename_leaves_the_old_profile_and_no_litter(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The temporary file is removed, and the reason and the way out are told."""
    profile = make_profile()
    store.save(profile)

    def fail(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(ProfileError, match=rf"No space left on device.*{CACHE_VARIABLE}"):
        store.save(make_profile(plan="thorough"))
    assert found(store.lookup(profile.fingerprint)) == profile
    assert [path.name for path in store.folder.iterdir()] == [store.path_of(profile.fingerprint).name]


def test_a_process_killed_in_the_middle_of_writing_harms_nothing(store: Store) -> None:
    """The old profile stays whole; what the killed process left is no entry, and pruning removes it later."""
    profile = make_profile()
    store.save(profile)
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from autotune_offload.profiles.store import Store\n"
        "store = Store(Path(sys.argv[1]))\n"
        "(entry,) = store.entries()\n"
        "def kill_half_way(descriptor):\n"
        "    os.truncate(descriptor, 1000)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "os.fsync = kill_half_way\n"
        "store.save(entry.profile)\n"
    )
    child = subprocess.run([sys.executable, "-c", code, str(store.folder)], cwd=CHECKOUT)
    assert child.returncode == -9
    (litter,) = store.folder.glob(".*.tmp")
    assert litter.stat().st_size == 1000
    assert found(store.lookup(profile.fingerprint)) == profile
    assert [entry.profile for entry in store.entries()] == [profile]
    assert store.prune(only_broken=True) == ()
    age(litter, 1)
    assert store.prune(only_broken=True) == (litter,)
    assert found(store.lookup(profile.fingerprint)) == profile


def save_often(folder: Path, name: str) -> None:
    """Saves the same environment ten times, as one of several processes."""
    for _ in range(10):
        Store(folder).save(make_profile(plan=name))


def test_eight_processes_saving_at_once_leave_one_whole_file(store: Store) -> None:
    """Whoever comes last wins, and a reader beside them never sees a part."""
    spawn = multiprocessing.get_context("fork")
    writers = [spawn.Process(target=save_often, args=(store.folder, f"plan-{n}")) for n in range(8)]
    store.save(make_profile())
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        found(store.lookup(make_profile().fingerprint))
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * 8
    (path,) = store.folder.iterdir()
    assert store.load(path).plan in {f"plan-{n}" for n in range(8)}


def test_a_folder_that_cannot_be_made_is_an_error_with_a_way_out(tmp_path: Path) -> None:
    """A file stands where the folder should be: saving says so, looking up just misses."""
    (tmp_path / "file").write_text("")
    blocked = Store(tmp_path / "file" / "profiles")
    with pytest.raises(ProfileError, match=rf"cannot save.*{CACHE_VARIABLE}"):
        blocked.save(make_profile())
    missed(blocked.lookup(make_profile().fingerprint))
    missed(blocked.lookup(make_profile().fingerprint, WORKLOAD))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    """A read-only home."""
    tmp_path.chmod(0o500)
    with pytest.raises(ProfileError, match="cannot save"):
        Store(tmp_path / "profiles").save(make_profile())


# -- entries, load, prune -------------------------------------------------------------------------


def test_entries_are_newest_first_with_broken_ones_among_them(store: Store) -> None:
    """Each file is one entry: a profile or a problem."""
    first, last = with_fingerprint(workload="1"), with_fingerprint(workload="2")
    age(store.save(first), 3)
    age(store.save(last), 1)
    broken = store.folder / "cpu-x-0.yaml"
    broken.write_text("schema: 1\n")
    age(broken, 2)
    entries = store.entries()
    assert [entry.profile for entry in entries] == [last, None, first]
    assert entries[1].path == broken
    assert "truncated" in (entries[1].problem or "")


def test_loading_what_is_not_there_says_so(tmp_path: Path) -> None:
    """The path is in the message."""
    with pytest.raises(ProfileError, match=re.escape(str(tmp_path / "gone.yaml"))):
        Store(tmp_path).load(tmp_path / "gone.yaml")


def three_files(store: Store) -> tuple[Path, Path, Path]:
    """A profile of today, one of ten days ago, and a broken file of ten days ago."""
    new = store.save(with_fingerprint(workload="new"))
    old = store.save(with_fingerprint(workload="old"))
    broken = store.folder / "cpu-x-0.yaml"
    broken.write_text("")
    for path in (old, broken):
        age(path, 10)
    return new, old, broken


@pytest.mark.parametrize(
    ("arguments", "removed"),
    [
        ({}, {0, 1, 2}),
        ({"older_than_days": 5}, {1, 2}),
        ({"only_broken": True}, {2}),
        ({"older_than_days": 5, "only_broken": True}, {2}),
        ({"older_than_days": 20}, set()),
        ({"older_than_days": 20, "only_broken": True}, set()),
    ],
)
def test_prune_removes_what_was_asked_and_says_what(
    store: Store, arguments: dict[str, Any], removed: set[int]
) -> None:
    """Age and brokenness narrow it down together."""
    files = three_files(store)
    assert set(store.prune(**arguments)) == {files[n] for n in removed}
    assert {path for path in files if path.exists()} == {files[n] for n in range(3) if n not in removed}


def test_pruning_leaves_foreign_files_alone(store: Store) -> None:
    """Only profiles are removed."""
    store.save(make_profile())
    notes = store.folder / "notes.txt"
    notes.write_text("mine")
    store.prune()
    assert list(store.folder.iterdir()) == [notes]


def test_pruning_what_cannot_be_removed_is_an_error(store: Store) -> None:
    """A folder in a profile's place is named."""
    store.folder.mkdir(parents=True)
    (store.folder / "a.yaml").mkdir()
    with pytest.raises(ProfileError, match=re.escape("a.yaml")):
        store.prune(only_broken=True)


def test_the_factory_gives_what_a_probe_would(store: Store) -> None:
    """The profile that these tests rest on is valid by the records' own check."""
    profile = make_profile()
    assert from_plain(to_plain(profile), Profile) == profile
    assert len(profile.transfers) == 60
    assert len(profile.candidates) >= 40
    assert all(len(row.raw_seconds) == 20 for row in profile.transfers)
