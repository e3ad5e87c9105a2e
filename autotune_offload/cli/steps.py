"""The optimizer step of a profile, for `show`, `explain` and `simulate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autotune_offload import units

if TYPE_CHECKING:
    from rich.console import Console

    from autotune_offload.records import Profile

NOT_MEASURED = (
    "no step was measured: an older profile, or no optimizer state on the CPU at stage 3; "
    "`autotune-offload probe --refresh` measures it"
)


def print_steps(out: Console, profile: Profile, *, rates: bool) -> None:
    """The decision, its reasons, what it was compared with and where the time goes; with `rates`, what was timed."""
    from autotune_offload.cli.readable import bullets, heading, pairs, table
    from autotune_offload.paths.step_stages import words
    from autotune_offload.reports.steps import best_steps, measured_rates, step_parts

    decided = profile.step
    if decided is None:
        heading(out, "Optimizer step")
        bullets(out, (NOT_MEASURED,))
        return
    heading(out, f"Optimizer step: {words(decided.chosen)}")
    bullets(out, decided.reasons)
    grid = table("", folds="way", right=("predicted", "ratio"))
    for row in best_steps(profile):
        mark = ">" if row.chosen else "=" if row.own else ""
        seconds = "rejected" if row.way.rejected else units.duration(row.way.predicted_seconds)
        grid.add_row(mark, row.name, seconds, units.times(row.times_chosen))
    out.print(grid)
    for name, parts in step_parts(profile).items():
        said = ", ".join(f"{what} {units.duration(seconds)}" for what, seconds in parts.items())
        out.print(f"{name}: {said}")
    if rates:
        timed = pairs()
        for name, text in measured_rates(profile):
            timed.add_row(name, text)
        out.print(timed)


def step_document(profile: Profile) -> dict[str, Any] | None:
    """The same for `explain --json`; None where no step was decided."""
    from autotune_offload.records import to_plain
    from autotune_offload.reports.steps import step_parts, step_rows

    if profile.step is None:
        return None
    return {
        "way": profile.step.way,
        "threads": profile.step.threads,
        "back": profile.step.back,
        "gain": profile.step.gain,
        "reasons": list(profile.step.reasons),
        "alternatives": [
            {
                **to_plain(row.way),
                "name": row.name,
                "chosen": row.chosen,
                "times_chosen": row.times_chosen,
                "verdict": row.said,
            }
            for row in step_rows(profile)
        ],
        "parts_seconds": step_parts(profile),
    }
