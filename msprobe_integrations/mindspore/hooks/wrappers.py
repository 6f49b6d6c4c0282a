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

from msprobe_integrations.mindspore.capture.api_names import Api, apis
from msprobe_integrations.mindspore.hooks.frames import is_machinery

_frame = sys._getframe
_SEARCHED_NOT = {*sys.stdlib_module_names, "mindspore", "msprobe", "msprobe_engine", "msprobe_integrations", "numpy", "scipy"}
_SEARCHED_NOT.discard("__main__")


class Sees(Protocol):
    """What looks at calls."""

    def sees(self) -> bool: ...

    def begin_call(self, prefix: str, api: str, args: Any, kwargs: Mapping[str, Any], /) -> Any: ...

    def end_call(self, note: Any, result: Any, /, failed: bool = False) -> None: ...


class Takes(Protocol):
    """What makes calls itself."""

    def sees(self) -> bool: ...

    def make_call(self, api: Api, args: Any, kwargs: Mapping[str, Any], /) -> Any: ...


class Names:
    """The names of a module of the program, or the attributes of a Cell, and which of them are functions that are wrapped."""

    __slots__ = ("count", "names", "places")

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names
        self.count = -1
        self.places: list[tuple[str, Any, Any]] = []

    def search(self, table: Mapping[int, tuple[Any, Any]]) -> None:
        items = list(self.names.items())
        self.places = [(name, value, found[1]) for name, value in items if (found := table.get(id(value))) and found[0] is value]
        self.count = len(items)


class Wrappers:
    """All wrappers of the process; `users` is who looks."""

    def __init__(self) -> None:
        self._users: tuple[Sees, ...] = ()
        self._taker: Takes | None = None
        self._lock = threading.Lock()
        self._places: list[tuple[Any, dict[str, Any] | None, Any, str, Any]] = []
        """Owner, its dictionary if it is a module, function, name, wrapper."""
        self._inherited: set[tuple[Any, str]] = set()
        """What the class of tensors has from its base."""
        self._table: dict[int, tuple[Any, Any]] = {}
        """Identity of a function to the function and its wrapper."""
        self._loaded = 0
        self._modules: list[Names] = []
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

    def members(self, owners: Iterable[Names]) -> None:
        """Replace functions that these objects keep as attributes, until the last user goes."""
        for owner in owners:
            self._replace(owner)

    def _put_on(self) -> None:
        if not self._places:
            for api in apis():
                wrapper = self._wrap(api)
                module = vars(api.owner) if not isinstance(api.owner, type) else None
                if module is None and api.name not in vars(api.owner):
                    self._inherited.add((api.owner, api.name))
                self._places.append((api.owner, module, api.function, api.name, wrapper))
                if module is not None:
                    self._table.setdefault(id(api.function), (api.function, wrapper))
        for owner, own, function, name, wrapper in self._places:
            # what somebody else has replaced is theirs
            if own is None:
                if getattr(owner, name, None) is function:
                    setattr(owner, name, wrapper)
            elif own.get(name) is function:
                own[name] = wrapper
        self._early_imports()

    def _take_off(self) -> None:
        for owner, own, function, name, wrapper in self._places:
            if own is not None:
                if own.get(name) is wrapper:
                    own[name] = function
            elif vars(owner).get(name) is wrapper:
                if (owner, name) in self._inherited:
                    delattr(owner, name)
                else:
                    setattr(owner, name, function)
        for place, name, original, wrapper in reversed(self._elsewhere):
            if place.get(name) is wrapper:
                place[name] = original
        self._elsewhere.clear()
        self._late_imports()

    def _late_imports(self) -> None:
        """Modules that took a wrapper by name while it was there have the function from now on."""
        if len(sys.modules) == self._loaded and all(len(module.names) == module.count for module in self._modules):
            return
        wrappers = {id(wrapper): (function, wrapper) for _, _, function, _, wrapper in self._places}
        for names in self._program():
            for name, value in list(names.items()):
                found = wrappers.get(id(value))
                if found is not None and found[1] is value:
                    names[name] = found[0]

    def _program(self) -> list[dict[str, Any]]:
        """Names of all modules that may have functions of MindSpore by name."""
        found = ((key.partition(".")[0], getattr(module, "__dict__", None)) for key, module in list(sys.modules.items()))
        return list({id(names): names for root, names in found if type(names) is dict and root not in _SEARCHED_NOT}.values())

    def _early_imports(self) -> None:
        if len(sys.modules) != self._loaded:
            known = {id(module.names): module for module in self._modules}
            self._modules = [known.get(id(names)) or Names(names) for names in self._program()]
            self._loaded = len(sys.modules)
        for module in self._modules:
            self._replace(module)

    def _replace(self, owner: Names) -> None:
        names = owner.names
        if len(names) != owner.count:
            owner.search(self._table)
        for name, original, wrapper in owner.places:
            if names.get(name) is original:
                names[name] = wrapper
                self._elsewhere.append((names, name, original, wrapper))

    def _wrap(self, api: Api) -> Callable[..., Any]:
        function, prefix, name = api.function, api.prefix, api.name

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._taker is not None and self._taker.sees():
                return self._taker.make_call(api, args, kwargs)
            users = self._users
            if len(users) == 1:
                user = users[0]
                if not user.sees() or is_machinery(_frame(1).f_code):
                    return function(*args, **kwargs)
                note = user.begin_call(prefix, name, args, kwargs)
                try:
                    result = function(*args, **kwargs)
                except BaseException:
                    user.end_call(note, None, failed=True)
                    raise
                user.end_call(note, result)
                return result
            if is_machinery(_frame(1).f_code):
                return function(*args, **kwargs)
            return self._through([user for user in users if user.sees()], api, args, kwargs)

        # pickle keeps a function as the name under which it is found; what was kept in a window is the function itself outside of it
        owner = api.owner
        if isinstance(owner, type):
            call.__module__, call.__qualname__ = owner.__module__, f"{owner.__qualname__}.{name}"
        else:
            call.__module__, call.__qualname__ = owner.__name__, name
        return call

    def _through(self, users: list[Sees], api: Api, args: Any, kwargs: Any) -> Any:
        notes = [(user, user.begin_call(api.prefix, api.name, args, kwargs)) for user in users]
        try:
            result = api.function(*args, **kwargs)
        except BaseException:
            for user, note in reversed(notes):
                user.end_call(note, None, failed=True)
            raise
        for user, note in reversed(notes):
            user.end_call(note, result)
        return result


WRAPPERS = Wrappers()
"""Those of this process."""
