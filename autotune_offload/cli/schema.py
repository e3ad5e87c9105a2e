"""`autotune-offload schema`: what the documents of this package hold, as JSON schemas."""

from __future__ import annotations

import click

from autotune_offload.cli import options
from autotune_offload.cli.output import emit_json, stdout_set_aside


@click.command("schema", short_help="JSON schemas of the documents, machine files and the config block.")
@click.argument("name", required=False)
@options.json_option
def command(*, name: str | None, as_json: bool) -> None:
    """Print the JSON schema NAME; without a name, which there are.

    `config` is for a ds_config: an editor that knows it completes the autotune_offload block. `machine` is
    for machine files, and each verb has its own for what it prints with --json.
    """
    with stdout_set_aside():
        from autotune_offload.cli import shapes

    if name is None and not as_json:
        for each, (what, _) in shapes.SCHEMAS.items():
            click.echo(f"{each:15} {what}")
        return
    if name is not None and name not in shapes.SCHEMAS:
        raise click.UsageError(f'no schema "{name}"; expected one of {", ".join(shapes.SCHEMAS)}')
    with stdout_set_aside():  # one of them loads torch, which may have something to say
        made = shapes.schema(name) if name else {each: shapes.schema(each) for each in shapes.SCHEMAS}
    emit_json(made)
