"""Wrappers around MindSpore's functions while at least one capture looks at them; otherwise the functions are what they were.

A wrapper has ``__wrapped__`` (`functools.wraps`): MindSpore's graph compiler looks through it, so compiled code has none of it. They are
made once per process, and found too where a program has taken a function by ``from mindspore.ops import softmax`` before, or keeps it
as a member of a Cell.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from msprobe_integrations.mindspore.api_names import Api, apis
from msprobe_integrations.mindspore.frames import is_machinery

_ABSENT: Any = object()
_frame = sys._getframe
_OWN = ("mindspore", "msprobe", "msprobe_engine", "msprobe_integrations")


class Sees(Protocol):
    """What looks at calls."""

    def sees(self) -> bool: ...

    def begin(self, prefix: str, api: str, args: Any, kwargs: Mapping[str, Any], /) -> Any: ...

    def end(self, note: Any, result: Any, /, failed: bool = False) -> None: ...


class Takes(Protocol):
    """What makes calls itself."""

    def sees(self) -> bool: ...

    def take(self, api: Api, args: Any, kwargs: Mapping[str, Any], /) -> Any: ...


class Wrappers:
    """All wrappers of the process; `users` is who looks."""

    def __init__(self) -> None:
        self._users: tuple[Sees, ...] = ()
        self._taker: Takes | None = None
        self._lock = threading.Lock()
        self._apis: list[tuple[Api, Any, Any]] = []
        """API, what the owner has of its own (`_ABSENT`: it is inherited), wrapper."""
        self._table: dict[int, tuple[Any, Any]] = {}
        """Identity of a function to the function and its wrapper."""
        self._modules: dict[str, tuple[Any, int, list[tuple[str, Any, Any]]]] = {}
        """Module to itself, its size, and the names under which it has functions of the table."""
        self._elsewhere: list[tuple[dict[str, Any], str, Any, Any]] = []

    def add(self, user: Sees) -> None:
        """`user` sees all calls from now on."""
        with self._lock:
            if user in self._users:
                return
            if not self._users and self._taker is None:
                self._put_on()
            self._users = (*self._users, user)

    def discard(self, user: Sees) -> None:
        """`user` sees no more calls; without any the functions are what they were."""
        with self._lock:
            if user not in self._users:
                return
            self._users = tuple(known for known in self._users if known is not user)
            if not self._users and self._taker is None:
                self._take_off()

    def lend(self, taker: Takes) -> None:
        """`taker` makes the calls that it sees, in the place of the functions; those who look do not see them. One at a time."""
        with self._lock:
            if not self._users and self._taker is None:
                self._put_on()
            self._taker = taker

    def give_back(self, taker: Takes) -> None:
        """The functions are called again."""
        with self._lock:
            if self._taker is taker:
                self._taker = None
                if not self._users:
                    self._take_off()

    def members(self, owners: Iterable[Any]) -> None:
        """Replace functions that these objects keep as attributes, until the last user goes."""
        table = self._table
        for owner in owners:
            found = vars(owner)
            for name, value in found.items():
                known = table.get(id(value))
                if known is not None and known[0] is value:
                    self._elsewhere.append((found, name, value, known[1]))
            for place, name, _, wrapper in self._elsewhere[-len(found) :]:
                if place is found:
                    found[name] = wrapper

    def _put_on(self) -> None:
        if not self._apis:
            for api in apis():
                wrapper = self._wrap(api)
                own = vars(api.owner).get(api.name, _ABSENT)
                self._apis.append((api, own, wrapper))
                if api.prefix != "Tensor":
                    self._table.setdefault(id(api.function), (api.function, wrapper))
        for api, _, wrapper in self._apis:
            if getattr(api.owner, api.name, None) is api.function:  # what somebody else has replaced is theirs
                setattr(api.owner, api.name, wrapper)
        self._early_imports()

    def _take_off(self) -> None:
        for api, own, wrapper in self._apis:
            if vars(api.owner).get(api.name) is wrapper:
                if own is _ABSENT:
                    delattr(api.owner, api.name)
                else:
                    setattr(api.owner, api.name, own)
        for place, name, original, wrapper in reversed(self._elsewhere):
            if place.get(name) is wrapper:
                place[name] = original
        self._elsewhere.clear()

    def _early_imports(self) -> None:
        table = self._table
        for key, module in list(sys.modules.items()):
            names = getattr(module, "__dict__", None)
            if type(names) is not dict or key.partition(".")[0] in _OWN:
                continue
            known = self._modules.get(key)
            if known is None or known[0] is not module or known[1] != len(names):
                places = [
                    (name, value, found[1]) for name, value in list(names.items()) if (found := table.get(id(value))) and found[0] is value
                ]
                known = self._modules[key] = (module, len(names), places)
            for name, original, wrapper in known[2]:
                if names.get(name) is original:
                    names[name] = wrapper
                    self._elsewhere.append((names, name, original, wrapper))

    def _wrap(self, api: Api) -> Callable[..., Any]:
        function, prefix, name = api.function, api.prefix, api.name

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._taker is not None and self._taker.sees():
                return self._taker.take(api, args, kwargs)
            users = self._users
            if len(users) == 1:
                user = users[0]
                if not user.sees() or is_machinery(_frame(1).f_code):
                    return function(*args, **kwargs)
                note = user.begin(prefix, name, args, kwargs)
                try:
                    result = function(*args, **kwargs)
                except BaseException:
                    user.end(note, None, failed=True)
                    raise
                user.end(note, result)
                return result
            if is_machinery(_frame(1).f_code):
                return function(*args, **kwargs)
            return self._through([user for user in users if user.sees()], api, args, kwargs)

        return call

    def _through(self, users: list[Sees], api: Api, args: Any, kwargs: Any) -> Any:
        notes = [(user, user.begin(api.prefix, api.name, args, kwargs)) for user in users]
        try:
            result = api.function(*args, **kwargs)
        except BaseException:
            for user, note in reversed(notes):
                user.end(note, None, failed=True)
            raise
        for user, note in reversed(notes):
            user.end(note, result)
        return result


WRAPPERS = Wrappers()
"""Those of this process."""
