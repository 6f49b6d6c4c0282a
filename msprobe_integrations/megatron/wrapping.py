"""Functions of Megatron are replaced everywhere they were imported to, and put back by identity."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

Around: TypeAlias = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
MARK = "__msprobe_wraps__"
_wrapped: list[tuple[Any, str, Callable[..., Any]]] = []


def wrap(place: Any, names: Mapping[str, Around]) -> None:
    """Replace ``place.name`` by a call of ``around(original, args, kwargs)``, also where it was imported by name earlier.

    A name that does not exist (another version) or is wrapped already is left alone.

    Args:
        place: a module or a class.
        names: name to `around`.
    """
    made: dict[int, tuple[Any, Any]] = {}
    for name, around in names.items():
        original = getattr(place, name, None)
        if original is None or hasattr(original, MARK):
            continue
        wrapper = _wrapper(original, around)
        made[id(original)] = original, wrapper
        _wrapped.append((place, name, wrapper))
        setattr(place, name, wrapper)
    if not isinstance(place, type):
        _replace(made)


def unwrap() -> None:
    """Put back everything, also where a wrapped function was imported to since."""
    for place, name, wrapper in _wrapped:
        if getattr(place, name, None) is wrapper:
            setattr(place, name, getattr(wrapper, MARK))
    _replace({id(wrapper): (wrapper, getattr(wrapper, MARK)) for _, _, wrapper in _wrapped})
    _wrapped.clear()


def _wrapper(original: Callable[..., Any], around: Around) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, args, kwargs)

    setattr(wrapper, MARK, original)
    return wrapper


def _replace(changes: Mapping[int, tuple[Any, Any]]) -> None:
    """In all modules: what is to be replaced, by its identity, to what is put there."""
    if not changes:
        return
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if names is None:
            continue
        for key, value in list(names.items()):
            change = changes.get(id(value))
            if change is not None and value is change[0] and not key.startswith("__"):
                setattr(module, key, change[1])
