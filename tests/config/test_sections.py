"""Sections of a ds_config, whatever stands in their place."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given

from autotune_offload.config import block, equal_keys, mistakes, sections
from autotune_offload.config.sections import section
from autotune_offload.config.tune import tune
from autotune_offload.errors import ConfigError
from tests.config.test_tune import a_choice
from tests.odd_configs import ODD, ORDINARY, PLACES, odd_configs, with_odd

VERSIONS = ("0.14.5", "0.19.8")


def read_all(config: dict[str, Any]) -> None:
    """Everything that is read from a configuration, and what is written into it."""
    for version in VERSIONS:
        tuned = tune(config, a_choice(), version=version)
        assert tune(tuned.config, a_choice(), version=version).changes == ()
        sections.page_locks(config, version)
    for ask in (sections.offloads, sections.offloads_parameters):
        assert isinstance(ask(config), bool)
    assert sections.why_no_path(config) != ""
    assert all(mistake.sentence for mistake in mistakes.mistakes(config))
    mistakes.still_auto(config)
    assert equal_keys.sizes_digest(equal_keys.with_sizes(config, {})) and equal_keys.rest_digest(config)
    with contextlib.suppress(ConfigError):
        block.settings(config)


@pytest.mark.parametrize("odd", [None, True, 3, "auto", [], [{"device": "cpu"}]], ids=repr)
def test_what_is_no_mapping_is_an_empty_section(odd: Any) -> None:
    """At each depth, and for the configuration itself."""
    assert section(odd, "zero_optimization") == {}
    assert section({"zero_optimization": odd}, "zero_optimization", "offload_param") == {}
    assert section({"zero_optimization": {"offload_param": odd}}, "zero_optimization", "offload_param") == {}


def test_a_section_is_what_the_file_has_there() -> None:
    """Two levels down, and the whole where no name is given."""
    assert section(ORDINARY, "optimizer", "params", "betas") == {}
    assert section(ORDINARY, "scheduler", "params") == {"warmup_num_steps": 10}
    assert section(ORDINARY) is ORDINARY


@pytest.mark.parametrize("place", PLACES, ids=".".join)
def test_every_place_takes_every_odd_value(place: tuple[str, ...]) -> None:
    """Nothing but ConfigError is raised for it, and only for our own block."""
    for odd in ODD:
        read_all(with_odd(ORDINARY, place, odd))


@given(config=odd_configs())
def test_several_odd_values_are_no_error_either(config: dict[str, Any]) -> None:
    """Drawn JSON in several places at once, one within another."""
    read_all(config)
