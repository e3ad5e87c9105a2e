"""`autotune-offload apply` on files with anything in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from msgspec import structs

from autotune_offload.cli import apply
from autotune_offload.config import reading
from autotune_offload.errors import ConfigError
from autotune_offload.machine import host
from autotune_offload.records import Profile
from tests.factories import make_profile
from tests.odd_configs import ODD, ORDINARY, PLACES, odd_configs, with_odd


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each configuration is written in turn."""
    return tmp_path_factory.mktemp("apply") / "ds_config.json"


@pytest.fixture(scope="module")
def profile() -> Profile:
    """A stored one."""
    return make_profile()


def applied(config: dict[str, Any], file: Path, profile: Profile) -> None:
    """As the verb does it: what it writes is a configuration again, or it says what is wrong in words."""
    text = json.dumps(config, indent=2)
    file.write_text(text, encoding="utf-8")
    try:
        before, tuned = apply._tune(file, profile)
        written = apply._dump(tuned.config, text)
    except ConfigError:
        return
    assert all(apply.written(change) for change in tuned.changes)
    assert before == reading.read(file)
    assert reading.read(written) == tuned.config


@pytest.mark.parametrize("place", PLACES, ids=".".join)
def test_every_place_of_a_file_takes_every_odd_value(
    place: tuple[str, ...], file: Path, profile: Profile
) -> None:
    """Tuned, or refused with a ConfigError."""
    for odd in ODD:
        applied(with_odd(ORDINARY, place, odd), file, profile)


def test_lost_gradients_are_the_first_note(
    file: Path, profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is tuned all the same."""
    software = structs.replace(host.software(), deepspeed="0.18.9")
    monkeypatch.setattr(host, "software", lambda: software)
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    file.write_text(json.dumps({"gradient_accumulation_steps": 3, "zero_optimization": zero}))
    _, tuned = apply._tune(file, profile)
    assert "loses gradients" in tuned.notices[0] and tuned.changes


@given(config=odd_configs())
def test_several_odd_values_in_a_file_are_tuned_or_refused(
    file: Path, profile: Profile, config: dict[str, Any]
) -> None:
    """Drawn JSON in several places at once."""
    applied(config, file, profile)
