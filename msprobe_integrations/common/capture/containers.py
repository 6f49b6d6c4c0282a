"""Objects that hold tensors and are no list, tuple or dict: how they are opened. Nothing is opened that has not said how it wants to be
read: a mapping, a named tuple, a dataclass; a framework's integration may know more."""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msprobe_engine.core.guard import raise_of_training

CLASS_KEY = "class_type"
"""Key under which the class of an opened object is written, as the existing tool does for point-to-point operations."""

MOST_ITEMS = 4096
_PLAIN = ("dict", "OrderedDict", "defaultdict", "mappingproxy")

Opened = Callable[[Any], "dict[str, Any] | None"]


def open_object(value: Any) -> dict[str, Any] | None:
    """The members of an object by name; None when it is not one of those that are opened. May raise what the object's code raises."""
    kind = type(value)
    if issubclass(kind, Mapping):  # of the type: script objects such as torch's Work have no class that isinstance could ask
        return {str(k): v for k, v in itertools.islice(value.items(), MOST_ITEMS)}
    if issubclass(kind, tuple):
        fields = getattr(value, "_fields", None)
        return None if fields is None else dict(zip(fields, value))
    if dataclasses.is_dataclass(kind):
        return {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
    return None


def class_text(value: Any) -> str | None:
    """The class of an opened object as text; None for plain dicts."""
    kind = type(value)
    return None if kind.__name__ in _PLAIN else f"{kind.__module__}.{kind.__qualname__}"


def finder(tensor: type, opened: Opened) -> Callable[..., None]:
    """``tensors_in(value, found)``: append the tensors inside a nested argument or result to the list `found`, in the order in which
    records have them. Never raises.

    Args:
        tensor: class of the framework's tensors.
        opened: opens objects, like `open_object`.
    """

    def tensors_in(value: Any, found: list[Any], left: int = 8) -> None:
        if isinstance(value, tensor):
            found.append(value)
            return
        kind = type(value)
        if left == 0 or value is None or kind in (int, float, bool, str):
            return
        members: Iterable[Any] | None
        if kind in (list, tuple):
            members = value
        else:
            try:
                inside = opened(value)
            except Exception as error:  # the object's own code
                raise_of_training(error)
                return
            if inside is not None:
                members = inside.values()
            else:
                members = value if isinstance(value, (list, tuple, set, frozenset, deque)) else None
        if members is not None:
            for member in itertools.islice(members, MOST_ITEMS):
                tensors_in(member, found, left - 1)

    return tensors_in
