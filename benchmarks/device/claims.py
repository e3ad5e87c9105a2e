"""What README and docs say about accelerators, each held against what was measured.

A claim quotes the sentence that it stands for, and a test finds the quotation in the file. Its rule looks at what the
parts have found: nothing found, or nothing of the kind on this machine, is "not measurable here" with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.device import link_rules, rules
from benchmarks.device.answers import UNKNOWN, Answer, Found, Word


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One sentence, where it stands, in words of its own, and the rule that judges it."""

    where: str
    quotation: str
    claim: str
    rule: Callable[[Found], Answer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of one claim."""

    claim: str
    where: str
    verdict: Word
    measured: str


def judged(found: Found) -> list[Verdict]:
    """Every claim; a rule that fails on what it finds is no verdict on the claim, and says so."""
    verdicts = []
    for claim in CLAIMS:
        try:
            word, measured = claim.rule(found)
        except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
            word, measured = UNKNOWN, f"what was found cannot be judged: {type(error).__name__}: {error}"
        verdicts.append(Verdict(claim=claim.claim, where=claim.where, verdict=word, measured=measured))
    return verdicts


CLAIMS: tuple[Claim, ...] = (
    Claim(
        where="docs/extending.md",
        quotation="A device that DeepSpeed drives should need nothing",
        claim="The probe works on whatever accelerator DeepSpeed drives.",
        rule=rules.works,
    ),
    Claim(
        where="docs/paths.md",
        quotation="All paths give the same bits",
        claim="Every path gives the bits of DeepSpeed's own code, in training with overlap.",
        rule=rules.same_bits,
    ),
    Claim(
        where="docs/step.md",
        quotation="Its results are DeepSpeed's to the last bit",
        claim="The optimizer step gives the bits of DeepSpeed's own.",
        rule=rules.same_bits_of_steps,
    ),
    Claim(
        where="README.md",
        quotation="the choice against the best of an exhaustive sweep",
        claim="The choice takes at most 1.05 times the best of an exhaustive sweep.",
        rule=rules.best_choice,
    ),
    Claim(
        where="README.md",
        quotation="autotune-offload measures how the machine it runs on really copies",
        claim="Our copy rates are 0.9 to 1.1 of a plain loop's.",
        rule=rules.plain_rates,
    ),
    Claim(
        where="docs/report.md",
        quotation="The dotted line is the link's ceiling",
        claim="No copy is faster than the ceiling that the page draws.",
        rule=rules.below_ceiling,
    ),
    Claim(
        where="docs/machines.md",
        quotation="A pageable copy blocks the host, whatever `non_blocking` says; a pinned one costs",
        claim="A pageable copy blocks the host; a pinned one costs a call.",
        rule=rules.pageable_blocks,
    ),
    Claim(
        where="docs/paths.md",
        quotation="copies into page-locked memory hide behind the backward pass",
        claim="Copies into page-locked memory hide behind the backward pass, half at least of what can.",
        rule=link_rules.hides,
    ),
    Claim(
        where="docs/paths.md",
        quotation="copies that the training thread waits for do not",
        claim="Copies that the training thread waits for hide less.",
        rule=link_rules.waited_for_hides_less,
    ),
    Claim(
        where="docs/paths.md",
        quotation="**A slow synchronize, a fast link:** `pinned`, which waits for nothing.",
        claim="`pinned` with the cast on the device does not wait for its copies.",
        rule=link_rules.pinned_waits_not,
    ),
    Claim(
        where="docs/how-it-decides.md",
        quotation="half the bytes cross the link",
        claim="A bf16 gradient crosses the link with 2 bytes a parameter (cast on the host) or 6 (on the device).",
        rule=link_rules.bytes_of_paths,
    ),
    Claim(
        where="docs/paths.md",
        quotation="each of DeepSpeed's own sequences copies 2*ln*: into the buffer, and from there back",
        claim="DeepSpeed's own code sends 6 bytes a parameter and fetches 2 back.",
        rule=link_rules.stock_bytes,
    ),
    Claim(
        where="autotune_offload/api/report.py",
        quotation="of the bytes that DeepSpeed would move over the link",
        claim="The report's count of bytes over the link is the profiler's.",
        rule=link_rules.bytes_reported,
    ),
    Claim(
        where="docs/step.md",
        quotation="each is copied on while later pieces are computed",
        claim="Weights go to the device beside the computing of later ones, half at least of what can.",
        rule=link_rules.pass_hides,
    ),
    Claim(
        where="docs/step.md",
        quotation="fp32 over the link with the cast on the device, which sends twice the bytes",
        claim="A step sends 2 bytes a weight to the device.",
        rule=link_rules.weights_two_bytes,
    ),
    Claim(
        where="README.md",
        quotation="and the fastest stays",
        claim="What is chosen is no slower in training than DeepSpeed's own code.",
        rule=link_rules.faster_where_chosen,
    ),
    Claim(
        where="docs/how-it-decides.md",
        quotation="what is page-locked, DeepSpeed's and ours",
        claim="The page-locked bytes that a report tells are the driver's, each block rounded up.",
        rule=link_rules.locks_counted,
    ),
    Claim(
        where="docs/paths.md",
        quotation="What a path keeps from its first use to its end is scratch",
        claim="A destroyed engine leaves nothing page-locked and nothing on the device.",
        rule=link_rules.all_given_back,
    ),
    Claim(
        where="docs/paths.md",
        quotation="Tests hold peak and standing bytes against both",
        claim="A path takes no more of the device than DeepSpeed's own code and its stated scratch.",
        rule=link_rules.device_scratch,
    ),
)
