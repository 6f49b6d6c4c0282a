"""Which gradients a backward record has a place for.

As in the existing format a place belongs to a tensor, not to an argument: numbers, strings and index tensors have none. The order is
that of the arguments, containers opened, then that of keyword tensors that need a gradient (which the existing tool does not have).

| record | places of ``output`` (gradients of inputs) | places of ``input`` (gradients of outputs) |
| --- | --- | --- |
| API | floating-point and complex tensors; null where no gradient is needed | results that have a gradient |
| module | tensors that need a gradient | results that have a gradient |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

_VALUES = (int, float, bool, str, type(None))

EdgesOf = Callable[[Sequence[Any], Mapping[str, Any], bool], list[Any]]
Differentiable = Callable[[Any], list[Any]]


def finders(
    tensor: type,
    tensors_in: Callable[..., None],
    edge: Callable[[Any], Any],
    needs: Callable[[Any], bool],
    can: Callable[[Any], bool],
) -> tuple[EdgesOf, Differentiable]:
    """``edges_of(args, kwargs, every)``: the edges of the inputs of a call, taken before it, one per place; with `every` also places for
    tensors that could have a gradient and need none (APIs). ``differentiable(result)``: the tensors of a result that have a gradient.

    Args:
        tensor: class of the framework's tensors.
        tensors_in: see `containers.finder`.
        edge: where the gradient of a tensor goes.
        needs: does a tensor need a gradient?
        can: could it have one, by its type?
    """

    def edges_of(args: Sequence[Any], kwargs: Mapping[str, Any], every: bool, /) -> list[Any]:
        found: list[Any] = []
        for value in args:
            if isinstance(value, tensor):
                if needs(value):
                    found.append(edge(value))
                elif every and can(value):
                    found.append(None)
            elif type(value) not in _VALUES:
                for inner in flat(value):
                    if needs(inner):
                        found.append(edge(inner))
                    elif every and can(inner):
                        found.append(None)
        for value in kwargs.values():
            if isinstance(value, tensor):
                if needs(value):
                    found.append(edge(value))
            elif type(value) not in _VALUES:
                found.extend(edge(inner) for inner in flat(value) if needs(inner))
        return found

    def differentiable(result: Any, /) -> list[Any]:
        if isinstance(result, tensor):
            return [result] if needs(result) else []
        return [inner for inner in flat(result) if needs(inner)]

    def flat(value: Any) -> list[Any]:
        found: list[Any] = []
        tensors_in(value, found)
        return found

    return edges_of, differentiable
