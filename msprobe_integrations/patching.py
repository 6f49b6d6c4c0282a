"""Functions of a framework replaced by ours, and put back: the one place where that is done.

* `replace`: one name of an object, a class or a module; what it returns puts it back.
* `Patches`: names that are replaced and put back together, also in modules that imported them by name.
* `FunctionPatch`, `FunctionPatches`: a function that several captures look through, which come and go in any order.

Whatever somebody else has put in our place meanwhile stays; ours only calls on inside of it.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable
from typing import Any

Around = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Called with the function in whose place we are, and the arguments; whatever it returns is the result."""
MARK = "__msprobe_wraps__"
"""Attribute of a function that `around` made: the function in whose place it is."""
_ABSENT: Any = object()
_OWN = ("msprobe", "msprobe_engine", "msprobe_integrations")


class Replacement:
    """`function` stands in place of ``owner.name``, and whether somebody looks there is told by who is in that place now.

    Args:
        owner: an object, a class or a module.
    """

    __slots__ = ("_before", "_function", "_name", "_owner")

    def __init__(self, owner: Any, name: str, function: Any) -> None:
        self._owner, self._name, self._function = owner, name, function
        self._before = _own(owner).get(name, _ABSENT)  # absent: inherited, or made by the owner's __getattr__
        setattr(owner, name, function)

    def undo(self) -> bool:
        """Put back exactly what was there; False: something else is in our place, which stays."""
        if _own(self._owner).get(self._name) is not self._function:
            return False
        if self._before is _ABSENT:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._before)
        return True


def _own(owner: Any) -> Any:
    return getattr(owner, "__dict__", {})


def around(owner: Any, name: str, call: Around) -> Any:
    """What to put in place of ``owner.name`` so that ``call(original, args, kwargs)`` is called instead. Methods of classes and static
    methods stay what they are: `call` gets the class as the first argument, as the function itself does."""
    kept = inspect.getattr_static(owner, name, None) if isinstance(owner, type) else None
    kind: Any = type(kept) if isinstance(kept, (classmethod, staticmethod)) else None
    original = kept.__func__ if isinstance(kept, (classmethod, staticmethod)) else getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return call(original, args, kwargs)

    setattr(wrapper, MARK, original)
    return wrapper if kind is None else kind(wrapper)


def replace(owner: Any, name: str, call: Around) -> Callable[[], None]:
    """``owner.name(...)`` calls ``call(original, args, kwargs)`` from now on, which has to call the original once. What `owner` lacks is
    left alone.

    Returns:
        What puts it back.
    """
    if getattr(owner, name, None) is None:
        return lambda: None
    on = [True]

    def call_if_on(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return call(original, args, kwargs) if on[0] else original(*args, **kwargs)

    replacement = Replacement(owner, name, around(owner, name, call_if_on))

    def undo() -> None:
        on[0] = False
        replacement.undo()

    return undo


class Patches:
    """Functions replaced together.

    A function is replaced where it is defined (``torch.rand``) and, by `early_imports`, in every module that took it by
    ``from torch import rand`` before.

    Args:
        packages: root modules that look functions up where they are replaced anyway; their modules are not searched.
    """

    def __init__(self, *packages: str) -> None:
        self._packages = {*packages, *_OWN}
        self._replacements: list[Replacement] = []
        self._wrappers: dict[int, tuple[Any, Any]] = {}

    def __bool__(self) -> bool:
        return bool(self._replacements)

    def wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Put ``make(function)`` in place of ``owner.name``; nothing happens where there is no such name."""
        original = getattr(owner, name, None)
        if original is not None:
            self._add_replacement(owner, name, original, make(original))

    def around(self, owner: Any, name: str, call: Around) -> None:
        """See `replace`. A name that is wrapped already, by us or by somebody around ours, is left alone."""
        original = getattr(owner, name, None)
        if original is not None and not hasattr(original, MARK):
            self._add_replacement(owner, name, original, around(owner, name, call))

    def _add_replacement(self, owner: Any, name: str, original: Any, wrapper: Any) -> None:
        self._replacements.append(Replacement(owner, name, wrapper))
        self._wrappers[id(original)] = (original, wrapper)
        self.handle_replacement(original, wrapper)

    def handle_replacement(self, original: Any, wrapper: Any) -> None:
        """`wrapper` stands in place of `original` now; for classes that have more to do then."""

    def early_imports(self) -> None:
        """Replace the same functions in modules that imported them by name."""
        for module, name, wrapper in self._find_imported_names(self._wrappers):
            self._replacements.append(Replacement(module, name, wrapper))

    def late_imports(self) -> None:
        """Before `undo`: modules that took a wrapper by name have the function again."""
        back = {id(wrapper): (wrapper, original) for original, wrapper in self._wrappers.values()}
        for module, name, original in self._find_imported_names(back):
            setattr(module, name, original)

    def _find_imported_names(self, changes: dict[int, tuple[Any, Any]]) -> list[tuple[Any, str, Any]]:
        """Module, name and what is to be there, where one of `changes` stands under a name of the program."""
        taken = []
        for module in list(sys.modules.values()) if changes else ():
            names = getattr(module, "__dict__", None)
            if not isinstance(names, dict) or str(names.get("__name__")).partition(".")[0] in self._packages:
                continue
            for name, value in list(names.items()):
                change = changes.get(id(value))
                if change is not None and change[0] is value and not name.startswith("__"):
                    taken.append((module, name, change[1]))
        return taken

    def undo(self) -> None:
        """Put the functions back, the last one first."""
        while self._replacements:
            self._replacements.pop().undo()
        self._wrappers.clear()


Handler = Callable[..., Any]
"""Called with the next function in line and the arguments; whatever it returns is the result."""


class FunctionPatch:
    """One function that handlers look through.

    Two wrappers of one function that are taken off in the order they were put on would leave the first one's wrapper inside the second, or
    bring it back when it is long over. So a name gets one function of ours, and handlers come and go behind it. An interrupt between any
    two lines leaves one that still works.

    Args:
        owner, name: where it is: a module or a class.
        kind: how a class keeps it (``classmethod``), None for a plain function.
        inherited: what is called where `owner` has no such name of its own; None: it has.
    """

    def __init__(self, owner: Any, name: str, kind: Any = None, inherited: Handler | None = None) -> None:
        self._owner = owner
        self._name = name
        self._inherited = inherited
        self._original: Any = inherited
        self._handlers: tuple[Handler, ...] = ()
        self._lock = threading.Lock()
        self._placed = False

        def call_handlers(*args: Any, **kwargs: Any) -> Any:
            following = self._original
            for handler in self._handlers:  # each costs one Python frame: modules lie deep in each other
                following = functools.partial(handler, following)
            return following(*args, **kwargs)

        self._patched = call_handlers
        self._function = call_handlers if kind is None else kind(call_handlers)

    def add(self, handler: Handler) -> None:
        """`handler` sees all calls from now on, before those that came earlier."""
        with self._lock:
            if handler not in self._handlers:
                self._handlers = (*self._handlers, handler)
            now = vars(self._owner).get(self._name)
            if now is self._function or self._placed:  # the latter: somebody's wrapper around ours leads here
                return
            if self._inherited is None:
                self._original = now
                self._patched.__wrapped__ = now  # type: ignore[attr-defined]  # MindSpore's graph compiler looks through what has this
            setattr(self._owner, self._name, self._function)
            self._placed = True

    def discard(self, handler: Handler) -> None:
        """`handler` sees no more calls; without any the function is what it was, unless somebody has put a wrapper around ours."""
        with self._lock:
            self._handlers = tuple(h for h in self._handlers if h != handler)
            if self._handlers or vars(self._owner).get(self._name) is not self._function:
                return
            if self._inherited is None:
                setattr(self._owner, self._name, self._original)
            else:
                delattr(self._owner, self._name)
            self._placed = False


_shared: dict[tuple[int, str], FunctionPatch] = {}


def shared_patch(owner: Any, name: str) -> FunctionPatch:
    """The one patch of a function of a module or class that lives as long as the process."""
    return _shared.setdefault((id(owner), name), FunctionPatch(owner, name))


class FunctionPatches:
    """Handlers of shared patches that come together and go together."""

    def __init__(self) -> None:
        self._handlers: list[tuple[FunctionPatch, Handler]] = []

    def __bool__(self) -> bool:
        return bool(self._handlers)

    def add(self, owner: Any, name: str, handler: Handler) -> None:
        """`handler` looks through this function from now on."""
        patch = shared_patch(owner, name)
        self._handlers.append((patch, handler))
        patch.add(handler)

    def close(self) -> None:
        """Take all handlers away."""
        while self._handlers:
            patch, handler = self._handlers.pop()
            patch.discard(handler)
