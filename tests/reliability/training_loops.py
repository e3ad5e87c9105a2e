"""What a training loop may do with a path attached, and what is guaranteed in each: a table of docs/reliability.md."""

from __future__ import annotations

from tests.reliability.registry import cells

TITLE = "What a training loop may do"

_HEAD = f"""\
## {TITLE}

"The same" is: every loss, the accumulation buffer, the fp32 gradients, master weights, optimizer state, loss scale,
counters, the global norm and the factor of clipping are those of DeepSpeed alone, to the last bit. Two things are
excepted. The payload of a NaN is torch's own affair. The fp64 norm of a single partition is a sum in another order
than DeepSpeed's and may differ in its last bits; where such bits would change the fp32 sum of a sub-group, which is
all that goes on from there, the norms are computed again by DeepSpeed's own code. `python -m tests.engine.loops`
does all of this at random; `python -m tests.engine.known` runs the loops that once differed, as the package is and
without the part that holds each of them, where the difference must be found.

"""

ROWS: tuple[tuple[str, str, str], ...] = (
    (
        "one or several backward passes before a step: with a forward each, several forwards in one loss, or twice "
        "through one graph",
        "the same",
        "tests/engine/loops.py: batches, batch",
    ),
    (
        "a parameter whose first gradient of a step comes in a later pass",
        "the same: DeepSpeed adds to what an earlier step left in the accumulation buffer, which is always kept",
        "tests/engine/known.py: _late, _changed, _moved",
    ),
    (
        "accumulation changed (`set_train_batch_size`), or the boundary moved by hand",
        "the same; the first pass of the new kind is compared with DeepSpeed's own code",
        "tests/engine/loops.py: change_accumulation, move_boundary",
    ),
    (
        "activation checkpoints of either kind, a layer that several of them share",
        "the same: nothing is sent where something is still under way",
        "tests/engine/known.py: _shared",
    ),
    (
        "an exception in the backward pass is survived, with or without clearing the gradients",
        "the same, also what DeepSpeed itself makes of it: what was reduced before has arrived wherever a method of "
        "the optimizer's reads it. Reading its tensors past its methods, before the next epilogue, needs a wait on a "
        "device with streams, as it does with DeepSpeed alone",
        "tests/engine/known.py: _survived, _stepped, _dead",
    ),
    (
        "Ctrl-C while a path works",
        "every partition is whole, as before the pass or as after it; the path goes on",
        "tests/engine/test_attach.py: test_ctrl_c_leaves_every_partition_whole",
    ),
    (
        "unmanaged accumulation (`managed_gradient_accumulation: false`)",
        "the same: a path fills the accumulation buffer, and at the step DeepSpeed's own code takes it to fp32",
        "tests/engine/known.py: _finalized",
    ),
    (
        "a loss that runs through the module of another engine (GAN)",
        "the same for both, whether or not DeepSpeed runs the other engine's epilogue",
        "tests/engine/known.py: _gan, _theirs",
    ),
    (
        "gradients read or changed, by DeepSpeed's functions or in place, before the step or before another pass",
        "the same: later passes add to the accumulation buffer, which in-place changes do not reach, as in DeepSpeed",
        "tests/engine/loops.py: edit",
    ),
    (
        "`has_overflow()` by hand; infinities and NaNs in any dtype",
        "the same answer, the same skipped steps",
        "tests/engine/loops.py: ask_for_an_overflow",
    ),
    (
        "layers frozen and unfrozen; experts that are not used",
        "the same",
        "tests/engine/loops.py: freeze, batches",
    ),
    (
        "checkpoints saved and loaded",
        "the same",
        "tests/engine/loops.py: save, load",
    ),
    (
        "the accumulation buffer sent away and brought back (`offload_states`)",
        "the same",
        "tests/engine/loops.py: away_and_back",
    ),
    (
        "the path taken out and put in again, anywhere",
        "the same: what is under way arrives first",
        "tests/engine/loops.py: come_and_go",
    ),
    (
        "several paths and DeepSpeed's own code that take turns, a checkpoint or an overflow among them",
        "the same: a turn begins when everything that was sent has arrived",
        "tests/engine/test_confirming.py: test_training_is_the_same_to_the_bit_through_every_switch",
    ),
    (
        "gradients clipped, where the norm lies at a rounding of fp32",
        "the same factor, and so the same weights",
        "tests/engine/test_norms.py: test_at_a_rounding_the_norms_are_computed_in_deepspeeds_order",
    ),
    (
        "a path that fails, at once or late",
        "the same: what it was given is delivered from the accumulation buffer, and DeepSpeed's own code takes over, "
        "with one warning",
        "tests/engine/test_attach.py: test_a_copy_that_fails_late_is_made_good",
    ),
    (
        "the path taken out, a method replaced by somebody else, partitions that only DeepSpeed's own code moves",
        "`report(engine)` says so: who carries, who has carried how many partitions and bytes, what is page-locked",
        "tests/engine/counted.py: counts",
    ),
    (
        "the report read and copied by another thread while training goes on",
        "no value that it holds changes in place",
        "tests/api/test_report.py: test_the_report_may_be_read_and_copied_while_training_goes_on",
    ),
)


def section() -> str:
    """In Markdown."""
    lines = ["| a loop may | guaranteed | held by |", "|---|---|---|", *(cells(*row) for row in ROWS)]
    return _HEAD + "\n".join(lines) + "\n"
