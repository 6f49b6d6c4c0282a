"""The tensors a module gets and returns, with the ends of their names.

As in the existing tool: ``input`` / ``output``, with ``_{i}`` when there is more than one. Inputs count tensors only, positional ones
first and then keywords; outputs count everything that is returned. Ours: a tensor inside of a list, tuple, dict or other container
has its place and the place inside, ``output_1_0``, ``input_mask_full``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from msprobe_integrations.torch.containers import opened

Found = list[tuple[str, torch.Tensor]]

MOST_NESTED = 256
"""Tensors inside of containers that are looked at, per call."""
_DEPTH = 6
_Tensor = torch.Tensor
_VALUES = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size))
_NUMBERS = tuple(f"_{i}" for i in range(64))


def _number(i: int) -> str:
    return _NUMBERS[i] if i < len(_NUMBERS) else f"_{i}"


def inputs_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Found:
    """End of the name and tensor of every input of a call."""
    if len(args) == 1 and not kwargs and isinstance(args[0], _Tensor):
        return [("", args[0])]
    tensors = [a for a in args if isinstance(a, _Tensor)]
    if kwargs:
        tensors += [a for a in kwargs.values() if isinstance(a, _Tensor)]
    found: Found = [("", tensors[0])] if len(tensors) == 1 else [(_number(i), t) for i, t in enumerate(tensors)]
    if len(tensors) < len(args) + len(kwargs):
        places: Iterator[tuple[str, Any]] = itertools.chain(
            ((_number(i), a) for i, a in enumerate(args)), ((f"_{key}", a) for key, a in kwargs.items())
        )
        inside = ((place, a) for place, a in places if not isinstance(a, _Tensor) and type(a) not in _VALUES)
        for place, value in inside:
            _inside(place, value, found, _DEPTH)
    return found


def outputs_of(result: Any) -> Found:
    """End of the name and tensor of every output of a call."""
    if isinstance(result, _Tensor):
        return [("", result)]
    found: Found = []
    if type(result) in _VALUES:
        return found
    if isinstance(result, (list, tuple)):
        for i, value in enumerate(result):
            place = _number(i) if len(result) > 1 else ""
            if isinstance(value, _Tensor):
                found.append((place, value))
            elif type(value) not in _VALUES:
                _inside(place, value, found, _DEPTH)
    else:
        _inside("", result, found, _DEPTH)
    return found


def _inside(place: str, value: Any, found: Found, depth: int) -> None:
    """Append the tensors inside of a container. Never raises."""
    members: Iterable[tuple[Any, Any]]
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        members = enumerate(value)
    else:
        try:
            members = (opened(value) or {}).items()
        except Exception:  # the object's own code
            return
    for key, member in itertools.islice(members, MOST_NESTED):
        if isinstance(member, _Tensor):
            if len(found) >= MOST_NESTED:
                return
            found.append((f"{place}_{key}", member))
        elif depth and type(member) not in _VALUES:
            _inside(f"{place}_{key}", member, found, depth - 1)
