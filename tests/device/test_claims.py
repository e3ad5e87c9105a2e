"""The claims: each quotes what is written, holds where it should, and fails where it should."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.device.answers import FAILS, HOLDS, UNKNOWN
from benchmarks.device.claims import CLAIMS, Claim, judged
from tests import CHECKOUT
from tests.device.found import ELEMENTS, GIB, good

Change = Callable[[dict[str, Any]], Any]


def _verdicts(found: dict[str, Any]) -> dict[str, str]:
    return {each.claim: each.verdict for each in judged(found)}


def _words(text: str) -> str:
    return re.sub(r"\s+", " ", text)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.claim)
def test_a_claim_stands_where_it_says(claim: Claim) -> None:
    """The quotation is in the file, so that a sentence that is rewritten takes its claim along."""
    assert _words(claim.quotation) in _words((CHECKOUT / claim.where).read_text(encoding="utf-8"))


def test_where_nothing_was_found_nothing_is_judged() -> None:
    """A run that was interrupted at once neither confirms nor denies."""
    assert set(_verdicts({}).values()) == {UNKNOWN}
    assert set(_verdicts({name: {} for name in good()}).values()) == {UNKNOWN}


def test_every_claim_can_hold() -> None:
    """On a device of which all is true."""
    assert {claim: word for claim, word in _verdicts(good()).items() if word != HOLDS} == {}


def _at(*keys: Any, value: Any) -> Change:
    def change(found: dict[str, Any]) -> None:
        place: Any = found
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value

    return change


PINNED, DIRECT = 1, 2
WRONG: dict[str, Change] = {
    "The probe works": _at("probes", "probes", value=[]),
    "Every path gives the bits": _at("identity", "cases", 0, "difference", value="loss of step 3"),
    "The optimizer step gives": _at("training", "steps", 0, "bit_identical", value=False),
    "The choice takes at most": _at("sweep", "median_ratio", value=1.2),
    "Our copy rates": _at("copies", "copies", 0, "ratio", value=0.8),
    "No copy is faster": _at("copies", "copies", 0, "plain_gbps", value=80.0),
    "A pageable copy blocks": _at("copies", "copies", 1, "call_share", value=0.9),
    "Copies into page-locked": _at(
        "profiled", "ways", PINNED, "gradients_to_host", "hidden_seconds", value=0.0041
    ),
    "Copies that the training thread": _at(
        "profiled", "ways", DIRECT, "gradients_to_host", "hidden_seconds", value=0.0095
    ),
    "`pinned` with the cast": _at(
        "training", "gradients", 1, "partition_grads_ours_seconds", "median", value=0.02
    ),
    "A bf16 gradient crosses": _at("profiled", "ways", DIRECT, "cast", value="device"),
    "DeepSpeed's own code sends": _at("profiled", "ways", 0, "sums_to_device", "bytes", value=0),
    "The report's count": _at("profiled", "ways", PINNED, "reported_link_bytes", value=7 * ELEMENTS),
    "Weights go to the device": _at(
        "profiled", "ways", PINNED, "weights_to_device", "hidden_seconds", value=0.001
    ),
    "A step sends 2 bytes": _at("profiled", "ways", DIRECT, "weights_to_device", "bytes", value=4 * ELEMENTS),
    "What is chosen is no slower": _at("training", "gradients", 0, "backward_ratio", value=0.8),
    "The page-locked bytes": _at("memory", "runs", 1, "counted_bytes", value=3 * GIB),
    "A destroyed engine": _at("memory", "runs", 1, "after", value={"host_bytes": GIB, "device_bytes": 0}),
    "A path takes no more": _at("memory", "runs", 1, "backward_peak_bytes", value=2 * GIB),
}


@pytest.mark.parametrize("beginning", WRONG)
def test_every_claim_can_fail(beginning: str) -> None:
    """One thing that is otherwise makes this claim fail, and no other."""
    found = copy.deepcopy(good())
    WRONG[beginning](found)
    failed = [claim for claim, word in _verdicts(found).items() if word == FAILS]
    assert len(failed) == 1 and failed[0].startswith(beginning), failed


def test_every_claim_was_made_to_fail() -> None:
    """A new claim needs its own line above."""
    assert [sum(claim.claim.startswith(each) for each in WRONG) for claim in CLAIMS] == [1] * len(CLAIMS)


def test_on_the_host_itself_nothing_is_said_of_a_link() -> None:
    """But a difference in bits is one anywhere."""
    found = copy.deepcopy(good())
    found["here"] |= {"kind": "cpu", "training_kind": "cpu"}
    verdicts = _verdicts(found)
    assert FAILS not in verdicts.values()
    assert [claim for claim, word in verdicts.items() if word == HOLDS] == [
        claim.claim for claim in CLAIMS if claim.claim.startswith("The choice takes")
    ]
    found["identity"]["cases"][0]["difference"] = "a loss"
    assert (
        _verdicts(found)["Every path gives the bits of DeepSpeed's own code, in training with overlap."]
        == FAILS
    )


def test_a_device_that_differs_from_itself_is_no_verdict() -> None:
    """Where DeepSpeed's own code gives other bits in a second run, nobody can tell whose fault a difference is."""
    found = copy.deepcopy(good())
    found["identity"]["control"] = "loss of step 4"
    found["identity"]["cases"][0]["difference"] = "loss of step 7"
    verdicts = _verdicts(found)
    assert {word for claim, word in verdicts.items() if "bits" in claim} == {UNKNOWN}


def test_a_profiler_that_counts_nothing_is_no_verdict() -> None:
    """Where no copy is in any trace, or none has its bytes."""
    found = copy.deepcopy(good())
    for way in found["profiled"]["ways"]:
        for what in ("gradients_to_host", "sums_to_device", "weights_to_device"):
            way[what]["bytes"] = None
    verdicts = _verdicts(found)
    counted = ("A bf16 gradient", "DeepSpeed's own code", "The report's count", "A step sends")
    assert {word for claim, word in verdicts.items() if claim.startswith(counted)} == {UNKNOWN}
    assert {word for claim, word in verdicts.items() if claim.startswith("Copies")} == {HOLDS}


def test_what_cannot_be_judged_says_why() -> None:
    """A part that left something of another form does not end the run."""
    found = copy.deepcopy(good())
    found["copies"]["copies"] = [{"kind": "d2h"}]
    told = {each.claim: each for each in judged(found)}["Our copy rates are 0.9 to 1.1 of a plain loop's."]
    assert told.verdict == UNKNOWN and "KeyError" in told.measured
