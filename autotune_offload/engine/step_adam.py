"""DeepSpeed's CPU Adam for one sub-group by the compiled pass, and what of it is left to DeepSpeed's own operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor

from autotune_offload.machine import adam
from autotune_offload.paths.pieces import Pieces, Progress, Target
from autotune_offload.records import Record

Factor = float | Tensor
"""What DeepSpeed multiplies a gradient by: a number, or a tensor without a dimension."""


def in_fp32(factor: Factor) -> float | None:
    """What a multiplication of fp32 memory by `factor` takes it as; None for a form that is not known here.

    A tensor of no dimension on the host does not widen what it multiplies: it is rounded to fp32 first.
    """
    if isinstance(factor, Tensor):
        known = factor.dim() == 0 and factor.device.type == "cpu" and factor.is_floating_point()
        return float(factor.to(torch.float32)) if known else None
    return float(torch.tensor(factor, dtype=torch.float32, device="cpu"))


class Call(Record, frozen=True, kw_only=True):
    """One call of `adam_update` that DeepSpeed's optimizer makes."""

    setting: adam.Setting
    memory: adam.Memory
    own: Callable[[adam.Memory], Any]
    """DeepSpeed's operation with the same setting on other memory. It counts its calls."""


def call_of(operation: Any, arguments: tuple[Any, ...]) -> Call:
    """The call that `arguments` of `adam_update` are."""
    number, step, rate, beta1, beta2, epsilon, weight_decay, corrects, *tensors = arguments
    setting = adam.Setting(
        step=step,
        rate=rate,
        beta1=beta1,
        beta2=beta2,
        epsilon=epsilon,
        weight_decay=weight_decay,
        corrects_bias=bool(corrects),
    )
    weights, gradients, first, second = tensors
    memory = adam.Memory(weights=weights, gradients=gradients, first=first, second=second)

    def own(other: adam.Memory) -> Any:
        return operation.adam_update(
            number, step, rate, beta1, beta2, epsilon, weight_decay, corrects, *other.tensors()
        )

    return Call(setting=setting, memory=memory, own=own)


class Guess(msgspec.Struct):
    """One history that DeepSpeed's operation may have had before it was watched."""

    powers: adam.KeptPowers
    now: tuple[float, float] = (1.0, 1.0)


class FusedAdam:
    """The pass in place of `mul_`, `adam_update` and `copy_`.

    DeepSpeed's operation is called once for each sub-group, as it would be without: it computes the elements after
    the last whole block, in the scalar order of its compiler, and its own count of steps goes on.
    """

    def __init__(self, pieces: Pieces, guesses: list[Guess], *, decoupled: bool) -> None:
        """`guesses` has one history, or several of which `settle` leaves those that are right."""
        self.pieces = pieces
        self.guesses = guesses
        self.decoupled = decoupled

    def advance(self, setting: adam.Setting) -> None:
        """DeepSpeed's operation is called, by whomever."""
        for guess in self.guesses:
            guess.now = guess.powers.at(setting)

    def constants(self, setting: adam.Setting, scale: float, guess: Guess) -> adam.Constants:
        """What the pass computes with in the call that was advanced to."""
        return adam.constants(setting, guess.now, scale, decoupled=self.decoupled)

    def update(
        self, call: Call, factor: Factor, scale: float, to: Target, threads: int
    ) -> BaseException | None:
        """Scale, step and round one whole sub-group.

        Args:
            call: that DeepSpeed's optimizer made, `advance` told of it.
            factor: of the gradients.
            scale: the same in fp32, see `in_fp32`.
            to: where rounded weights go.
            threads: of the host.

        Returns:
            None, or what has failed: then fp32 memory is as after a whole step nevertheless, computed by DeepSpeed's
            operation from where the pass stood, and rounded weights are not what they should be.
        """
        memory, failure = call.memory, None
        body = memory.elements - memory.elements % adam.BLOCK_ELEMENTS
        progress = self.pieces.progress(body)
        try:
            values = self.constants(call.setting, scale, self.guesses[0])
            self.pieces.run(memory.part(0, body), values, to.part(0, body), threads, progress)
        except BaseException as error:
            failure = error
        self._finish(call, progress, factor, scale)
        if failure is None and body < memory.elements:
            to.memory[body:].copy_(memory.weights[body:])
        return failure

    def _finish(self, call: Call, progress: Progress, factor: Factor, scale: float) -> None:
        """By DeepSpeed's operation in one call: from the first piece that is not whole to the end.

        Older operations raise beta to the step anew in every further call, which rounds otherwise: hence one. Whole
        pieces in between, at most as many as there are threads and buffers, are put back afterwards.
        """
        memory, begin = call.memory, progress.first_undone
        whole = [memory.part(*bounds) for bounds in progress.later(done=True)]
        kept = [tuple(tensor.clone() for tensor in part.tensors()) for part in whole]
        if scale != 1.0:
            for bounds in (*progress.later(done=False), (progress.elements, memory.elements)):
                memory.part(*bounds).gradients.mul_(factor)
        call.own(memory.part(begin, memory.elements))
        for part, copies in zip(whole, kept, strict=True):
            for tensor, copy in zip(part.tensors(), copies, strict=True):
                tensor.copy_(copy)


class Operation:
    """`ds_opt_adam` as DeepSpeed's optimizer sees it: its own, but for the call that a step makes."""

    def __init__(self, own: Any, update: Callable[..., Any]) -> None:
        """`own` is DeepSpeed's."""
        self.own = own
        self.adam_update = update

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)
