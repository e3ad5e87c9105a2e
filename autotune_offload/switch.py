"""The environment variable that switches everything off, for a run to compare with. Read here and nowhere else.

Needs nothing but the standard library: the start-up hook loads this file by its path.
"""

from __future__ import annotations

import os

NAME = "AUTOTUNE_OFFLOAD"

_OFF = frozenset({"0", "off", "false", "no"})
_ON = frozenset({"", "1", "on", "true", "yes"})


def is_off() -> bool:
    """Whether the variable says off, in any case of letters.

    Raises:
        ValueError: in words, where it says neither off nor on.
    """
    written = os.environ.get(NAME, "")
    word = written.strip().lower()
    if word not in _OFF | _ON:
        raise ValueError(
            f'{NAME} is "{written}": expected 0, off, false or no to switch off, or 1, on, true, yes or nothing'
        )
    return word in _OFF
