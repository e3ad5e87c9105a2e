"""What was measured of a drive, kept beside the profiles."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from msgspec import structs

from autotune_offload.errors import ProfileError
from autotune_offload.profiles import drives
from autotune_offload.profiles.store import Store
from autotune_offload.records import Drive
from tests.config.test_nvme import DRIVE


def of(folder: Path) -> Drive:
    """Measured where that folder lies."""
    number = folder.stat().st_dev
    return structs.replace(DRIVE, device=f"{os.major(number)}:{os.minor(number)}")


def test_it_is_found_by_any_folder_of_its_file_system(tmp_path: Path) -> None:
    """Also by one that is not there yet; on another host it is another drive."""
    store, drive = Store(tmp_path / "cache"), of(tmp_path)
    assert drives.measured(store, "host", tmp_path) is None
    path = drives.save(store, drive)
    assert path.stat().st_mode & 0o077 == 0 and store.files() == []
    assert drives.measured(store, "host", tmp_path / "not" / "yet") == drive
    assert drives.measured(store, "another", tmp_path) is None


@pytest.mark.parametrize("text", ["", "{}", "[1", '{"folder": 7}'])
def test_a_broken_file_is_a_miss(tmp_path: Path, text: str) -> None:
    """As with every stored file."""
    store = Store(tmp_path)
    drives.save(store, of(tmp_path)).write_text(text)
    assert drives.measured(store, "host", tmp_path) is None


def test_one_that_others_may_write_is_not_believed(tmp_path: Path) -> None:
    """As with profiles."""
    store = Store(tmp_path)
    drives.save(store, of(tmp_path)).chmod(0o666)
    assert drives.measured(store, "host", tmp_path) is None


def test_what_cannot_be_kept_says_so(tmp_path: Path) -> None:
    """A file stands where the folder would be."""
    (tmp_path / "cache").write_text("")
    with pytest.raises(ProfileError, match="name another folder with --cache"):
        drives.save(Store(tmp_path / "cache"), of(tmp_path))
