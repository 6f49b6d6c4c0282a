"""The tensors a module gets and returns, with the ends of their names.

As in the existing tool: ``input`` / ``output``, with ``_{i}`` when there is more than one. Inputs count tensors only, positional ones
first and then keywords; outputs count everything that is returned. Ours: a tensor inside of a list, tuple, dict or other container
has its place and the place inside, ``output_1_0``, ``input_mask_full``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from msprobe_engine.core.guard import raise_of_training
from msprobe_engine.core.redaction import shown_key

Found = list[tuple[str, Any]]

MOST_NESTED = 256
"""Tensors inside of containers that are looked at, per call."""
_DEPTH = 6
_VALUES = frozenset((int, float, bool, str, type(None)))
_NUMBERS = tuple(f"_{i}" for i in range(64))


def _number(i: int) -> str:
    return _NUMBERS[i] if i < len(_NUMBERS) else f"_{i}"


def tensor_names(
    tensor: type, opened: Callable[[Any], dict[str, Any] | None], values: Iterable[type] = ()
) -> tuple[Callable[[tuple[Any, ...], Mapping[str, Any]], Found], Callable[[Any], Found]]:
    """The two functions that find the tensors of a call of a module: of its positional and keyword arguments, and of its result. Each gives
    end of the name and tensor.

    Args:
        tensor: class of the framework's tensors.
        opened: opens objects, like `containers.open_object`; may raise.
        values: further types that hold no tensor.
    """
    plain = _VALUES.union(values)

    def inputs_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Found:
        if len(args) == 1 and not kwargs and isinstance(args[0], tensor):
            return [("", args[0])]
        tensors = [argument for argument in args if isinstance(argument, tensor)]
        if kwargs:
            tensors += [argument for argument in kwargs.values() if isinstance(argument, tensor)]
        named: Found = [("", tensors[0])] if len(tensors) == 1 else [(_number(i), t) for i, t in enumerate(tensors)]
        if len(tensors) < len(args) + len(kwargs):
            places: Iterator[tuple[str, Any]] = itertools.chain(
                ((_number(i), argument) for i, argument in enumerate(args)),
                ((f"_{shown_key(key, n)}", argument) for n, (key, argument) in enumerate(kwargs.items())),
            )
            for place, value in places:
                if not isinstance(value, tensor) and type(value) not in plain:
                    inside(place, value, named, _DEPTH)
        return named

    def outputs_of(result: Any) -> Found:
        if isinstance(result, tensor):
            return [("", result)]
        named: Found = []
        if type(result) in plain:
            return named
        if isinstance(result, (list, tuple)):
            for i, value in enumerate(result):
                place = _number(i) if len(result) > 1 else ""
                if isinstance(value, tensor):
                    named.append((place, value))
                elif type(value) not in plain:
                    inside(place, value, named, _DEPTH)
        else:
            inside("", result, named, _DEPTH)
        return named

    def inside(place: str, value: Any, named: Found, depth: int) -> None:
        """Append the tensors inside of a container. Never raises."""
        members: Iterable[tuple[Any, Any]]
        if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
            members = enumerate(value)
        else:
            try:
                members = (opened(value) or {}).items()
            except Exception as error:  # the object's own code
                raise_of_training(error)
                return
        for n, (key, member) in enumerate(itertools.islice(members, MOST_NESTED)):
            key = shown_key(key, n)
            if isinstance(member, tensor):
                if len(named) >= MOST_NESTED:
                    return
                named.append((f"{place}_{key}", member))
            elif depth and type(member) not in plain:
                inside(f"{place}_{key}", member, named, depth - 1)

    return inputs_of, outputs_of
