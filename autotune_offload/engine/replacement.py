"""Methods of one object that are replaced for a while: on the instance, never on the class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Method = Callable[..., Any]


class Replacement:
    """Puts methods into an object, and the former ones back."""

    def __init__(self, owner: Any) -> None:
        """Replaces nothing yet."""
        self._owner = owner
        self._ours: dict[str, Method] = {}
        self._former: dict[str, Method] = {}
        self._before: dict[str, Any] = {}

    @property
    def active(self) -> bool:
        """From `put` until `take_out`."""
        return bool(self._ours)

    def replaced(self, *names: str) -> tuple[str, ...]:
        """Those of ours in whose place somebody has put another since; from any thread."""
        ours, own = self._ours, vars(self._owner)
        return tuple(name for name in names if name in ours and own.get(name) is not ours[name])

    def former(self, name: str) -> Method:
        """What was called by that name before, and is again afterwards."""
        return self._former[name]

    def put(self, methods: Mapping[str, Method]) -> None:
        """Those that the object has; releases differ."""
        self._ours = {name: method for name, method in methods.items() if hasattr(self._owner, name)}
        self._former = {name: getattr(self._owner, name) for name in self._ours}
        own = vars(self._owner)
        self._before = {name: method for name, method in own.items() if name in self._ours}
        own.update(self._ours)

    def take_out(self) -> None:
        """A method that somebody has wrapped since stays."""
        ours, self._ours = self._ours, {}
        own = vars(self._owner)
        for name in [name for name, method in ours.items() if own.get(name) is method]:
            del own[name]
            own.update({name: self._before[name]} if name in self._before else {})
