"""Arguments and results of calls: nested tuples, lists and dicts with tensors in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Mapped = Callable[[Any, Callable[[Any], Any]], Any]


def mapper(tensor: type) -> Mapped:
    """``change_tensors(value, change)``: the structure with `change` of every tensor in it; other objects stay what they are.

    Args:
        tensor: class of the framework's tensors.
    """

    def change_tensors(value: Any, change: Callable[[Any], Any]) -> Any:
        if isinstance(value, tensor):
            return change(value)
        kind = type(value)
        if kind is dict:
            return {key: change_tensors(one, change) for key, one in value.items()}
        if kind in (list, tuple):
            return kind(change_tensors(one, change) for one in value)
        if isinstance(value, tuple):
            if hasattr(value, "_fields"):
                return kind(*(change_tensors(one, change) for one in value))
            if kind.__module__ == "torch.return_types":  # made of one sequence
                return kind([change_tensors(one, change) for one in value])
        return value

    return change_tensors


def lister(mapped: Mapped) -> Callable[[Any], list[Any]]:
    """``tensors_of(value)``: the tensors of a structure, in order."""

    def tensors_of(value: Any) -> list[Any]:
        found: list[Any] = []
        mapped(value, found.append)
        return found

    return tensors_of


def leaves_of(value: Any, whole: tuple[type, ...] = ()) -> Iterator[Any]:
    """Leaves of nested lists, tuples and dicts, in order.

    Args:
        whole: tuples that are values, as ``torch.Size``.
    """
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)) and not isinstance(value, whole):
        for child in value:
            yield from leaves_of(child, whole)
    else:
        yield value
