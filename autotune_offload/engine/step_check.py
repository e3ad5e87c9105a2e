"""The self-check of the step: the compiled pass on copies, beside DeepSpeed's own step on the real thing."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from autotune_offload.engine.step_adam import Call, FusedAdam, Guess
from autotune_offload.machine import adam
from autotune_offload.paths.pieces import Target
from autotune_offload.records import Record

CHECKED_STEPS = 3
"""Moments are zero before the first step; the third is the first whose powers of beta can differ by rounding."""

CHECKED_ELEMENTS = 1 << 22
"""Of all sub-groups in one step; 80 MB of copies at most."""

_SHARES = 3

_WORDS = {2: torch.int16, 4: torch.int32}


class StepCheck(Record, frozen=True, kw_only=True):
    """How the pass compared with DeepSpeed's own step."""

    steps: int
    elements: int
    mismatch: str | None = None


def difference(what: str, ours: Tensor, stock: Tensor) -> str | None:
    """In words; None where the bits are the same, or both are NaN: torch itself is free with their payload."""
    word = _WORDS[stock.element_size()]
    differ = (ours.view(word) != stock.view(word)) & ~(ours.isnan() & stock.isnan())
    wrong = int(differ.sum())
    return f"{wrong:,} of {ours.numel():,} {what} differ" if wrong else None


def sampled(elements: int, most: int, turn: int) -> list[tuple[int, int]]:
    """Ranges of whole blocks: all of them if they are few, else the first, the last, and others in every turn."""
    block = adam.BLOCK_ELEMENTS
    whole = elements - elements % block
    share = max(most // _SHARES // block, 1) * block
    if whole <= _SHARES * share:
        return [(0, whole)] if whole else []
    between = range(share, whole - 2 * share + 1, block)
    middle = between[turn * 7919 % len(between)]
    return [(0, share), (middle, middle + share), (whole - share, whole)]


class Sample:
    """Some elements of one sub-group before the step, and what the pass makes of them."""

    def __init__(self, gradients: Tensor, most: int, turn: int) -> None:
        """Copies the gradients, which DeepSpeed scales first."""
        self._ranges = sampled(gradients.numel(), most, turn)
        self._gradients = self._of(gradients)
        self._before: adam.Memory | None = None

    def _of(self, tensor: Tensor) -> Tensor:
        return torch.cat([tensor[begin:end] for begin, end in self._ranges] or [tensor[:0]])

    @property
    def elements(self) -> int:
        """How many."""
        return self._gradients.numel()

    def before(self, memory: adam.Memory) -> None:
        """Copies the weights and moments, just before DeepSpeed's operation."""
        self._before = adam.Memory(
            weights=self._of(memory.weights),
            gradients=self._gradients,
            first=self._of(memory.first),
            second=self._of(memory.second),
        )

    def compare(self, call: Call, rounded: Tensor, fused: FusedAdam, scale: float) -> str | None:
        """What the pass makes of the copies against what DeepSpeed has left; None where they are the same.

        Guesses that are wrong are dropped while another one is right.
        """
        found = [self._found(call, rounded, fused, guess, scale) for guess in fused.guesses]
        right = [guess for guess, words in zip(fused.guesses, found, strict=True) if words is None]
        if not right:
            return found[0]
        fused.guesses[:] = right
        return None

    def _found(self, call: Call, rounded: Tensor, fused: FusedAdam, guess: Guess, scale: float) -> str | None:
        if self._before is None:
            return "DeepSpeed's optimizer left out a sub-group"
        ours = adam.Memory(
            **{name: t.clone() for name, t in zip(_NAMES, self._before.tensors(), strict=True)}
        )
        to = Target(memory=torch.empty(self.elements, dtype=rounded.dtype, device="cpu"), on_host=True)
        progress, values = fused.pieces.progress(self.elements), fused.constants(call.setting, scale, guess)
        fused.pieces.run(ours, values, to, fused.pieces.device.most_threads(), progress)
        pairs: list[tuple[str, Tensor, Tensor]] = [
            (word, mine, self._of(theirs))
            for word, mine, theirs in zip(_WORDS_OF, ours.tensors(), call.memory.tensors(), strict=True)
        ]
        pairs.append(("16-bit weights", to.memory, self._of(rounded).cpu()))
        return next(filter(None, itertools.starmap(difference, pairs)), None)


_NAMES = ("weights", "gradients", "first", "second")
_WORDS_OF = ("master weights", "gradients", "first moments", "second moments")


# -- before anything is trained -------------------------------------------------------------------


_PROBED_ELEMENTS = 16 * adam.BLOCK_ELEMENTS
_PROBED_STEPS = (*range(1, 13), 40, 41, 41, 42)
"""Several sub-groups a step, and a jump as after a checkpoint. Where beta^t is multiplied and where it is raised to the
power anew, it comes out differently rounded from the third step on."""


def repeats_powers(inner: Any, *, decoupled: bool) -> bool | str:
    """Whether DeepSpeed's operation keeps its powers of beta within a step; a text where it computes otherwise.

    Its build may be for other vectors than is known, or for none. An operation of its own number is run over data
    made up, and the compiled pass beside it.
    """
    for repeats in (True, False):
        if _computes_alike(inner, decoupled=decoupled, repeats=repeats):
            return repeats
    return "this build of DeepSpeed's CPU Adam rounds otherwise than the compiled pass"


def _computes_alike(inner: Any, *, decoupled: bool, repeats: bool) -> bool:
    operation, number = inner.ds_opt_adam, type(inner).optimizer_id
    type(inner).optimizer_id += 1
    operation.create_adam(number, 1.0, 0.9, 0.999, 1e-8, 0.01, decoupled, False)
    try:
        powers = adam.KeptPowers(0.9, 0.999, repeats=repeats)
        theirs, ours = (_made_up(seed=0) for _ in range(2))
        for turn, step in enumerate(_PROBED_STEPS):
            for half in range(2):
                fresh = _made_up(seed=2 * turn + half + 1).gradients
                theirs.gradients.copy_(fresh), ours.gradients.copy_(fresh)
                setting = adam.Setting(
                    step=step, rate=0.5, beta1=0.9, beta2=0.999 if step < 42 else 0.99, epsilon=1e-8,
                    weight_decay=0.01 * half, corrects_bias=True,
                )  # fmt: skip
                operation.adam_update(number, *_arguments(setting), *theirs.tensors())
                values = adam.constants(setting, powers.at(setting), 1.0, decoupled=decoupled)
                adam.piece_of(ours, values, None, bytearray(1))(0, ours.elements, 0, None)
        return all(
            difference("values", mine, other) is None
            for mine, other in zip(ours.tensors(), theirs.tensors(), strict=True)
        )
    finally:
        operation.destroy_adam(number)


def _arguments(setting: adam.Setting) -> tuple[Any, ...]:
    """As `adam_update` takes them, between its number and its tensors."""
    betas = setting.beta1, setting.beta2
    return setting.step, setting.rate, *betas, setting.epsilon, setting.weight_decay, setting.corrects_bias


def _made_up(seed: int) -> adam.Memory:
    random = torch.Generator().manual_seed(seed)
    weights, gradients = (
        torch.randn(_PROBED_ELEMENTS, generator=random, device="cpu") * 10.0**power for power in (0, -3)
    )
    return adam.Memory(
        weights=weights,
        gradients=gradients,
        first=torch.zeros(_PROBED_ELEMENTS, device="cpu"),
        second=torch.zeros(_PROBED_ELEMENTS, device="cpu"),
    )
