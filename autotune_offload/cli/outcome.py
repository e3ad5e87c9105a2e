"""How the program ends: exit 0 done, 1 could not, 2 bad usage, 130 interrupted, 143 terminated."""

from __future__ import annotations

import errno
from typing import Any

import click

from autotune_offload.cli.output import drop_results
from autotune_offload.errors import AutotuneError
from autotune_offload.interruption import Terminated, raising

SAVED = "autotune_offload.saved"
"""Key in the context's `meta` of the file that the verb has written."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Verbs(click.Group):
    """A group whose verbs end in a message, never in a traceback, for what a user can mend."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb; our own errors become one message and exit 1."""
        try:
            with raising():
                return super().invoke(ctx)
        except AutotuneError as error:
            raise click.ClickException(str(error)) from error
        except BrokenPipeError:  # whoever read has read enough, as `head` does: no failure of ours
            drop_results()
            ctx.exit(0)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            drop_results()  # what is still buffered would follow the message to stderr at exit
            raise click.ClickException(
                f"cannot write: {error.strerror}; make room and run it again"
            ) from error
        except (KeyboardInterrupt, Terminated) as signalled:
            saved = ctx.meta.get(SAVED)
            kept = f"{saved} was saved before that" if saved else "nothing was saved"
            by_hand = isinstance(signalled, KeyboardInterrupt)
            click.echo(f"{'interrupted' if by_hand else 'terminated'}; {kept}", err=True)
            ctx.exit(130 if by_hand else 143)
