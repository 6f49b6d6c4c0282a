"""Arguments and results as `Entry` structures: tensors become `TensorRef`, everything else what the dump format writes for it. What is
the same for every framework; `converter` makes a framework's own function."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from msprobe_engine.core import redaction
from msprobe_engine.core.guard import is_of_training
from msprobe_engine.core.records import Opaque, TensorRef
from msprobe_integrations.common.capture.containers import CLASS_KEY, Opened, class_text

MAX_DEPTH = 12
"""Deeper containers are written as null: nobody reads them, and a self-referring list must end."""

MAX_VALUES = 4096
"""Values of one argument that are written, tensors not counted; the rest is null. Lists of tokens would make dumps of their own,
and objects that refer to each other have no end in sight at any depth."""

_SIMPLE: dict[tuple[type, Any], Opaque] = {}

Reduce = Callable[[Any], TensorRef]
Other = Callable[[Any, Reduce], Any]


def converter(tensor: type, opened: Opened, other: Other) -> Callable[[Any, Reduce], Any]:
    """``convert(value, reduce)``: `value` as a structure of lists, dicts, `TensorRef`, `Opaque` and None. Total: never raises for an odd
    value.

    Args:
        tensor: class of the framework's tensors.
        opened: opens objects, like `containers.open_object`.
        other: objects of the framework and numpy arrays; None for what it does not know.
    """

    def convert(value: Any, reduce: Reduce) -> Any:
        if value is None:
            return None
        if isinstance(value, tensor):
            return reduce(value)
        if (hides := redaction.active()) is not None:
            return hides.values(convert_nested(value, reduce, 0, [MAX_VALUES]))
        kind = type(value)
        if kind in (int, float, bool, str):
            return simple(kind, value)
        return convert_nested(value, reduce, 0, [MAX_VALUES])

    def convert_nested(value: Any, reduce: Reduce, depth: int, left: list[int]) -> Any:
        """`convert` inside a container; `left` counts down."""
        if value is None:
            return None
        if isinstance(value, tensor):
            return reduce(value)
        left[0] -= 1
        if left[0] < 0:
            return None
        kind = type(value)
        if kind in (int, float, bool, str):
            return simple(kind, value)
        if depth >= MAX_DEPTH:
            return None
        try:
            if kind in (list, tuple):
                return members(value, reduce, depth, left)
            inside = opened(value)
            if inside is None:
                found = other(value, reduce)
                if found is not None:
                    return found
                if isinstance(value, (list, tuple, set, frozenset, deque)):  # torch.return_types are tuples
                    return members(value, reduce, depth, left)
                return _convert_known(value)
            opens = {k: convert_nested(v, reduce, depth + 1, left) for k, v in inside.items()}
            text = class_text(value)
            if text is not None:
                opens.setdefault(CLASS_KEY, Opaque(text))
            return opens
        except Exception as error:  # the argument's own code
            if is_of_training(error):
                raise
            return describe_unknown(value)

    def members(values: Iterable[Any], reduce: Reduce, depth: int, left: list[int]) -> list[Any]:
        out: list[Any] = []
        for value in values:
            if left[0] <= 0 and not isinstance(value, tensor):
                out.append(None)
                break
            out.append(convert_nested(value, reduce, depth + 1, left))
        return out

    def read_bound(value: Any) -> int | None:
        # a tensor bound would have to be read from the device: its presence is all we may know here
        return None if value is None or isinstance(value, tensor) else int(value)

    def _convert_known(value: Any) -> Any:
        if isinstance(value, slice):
            return Opaque({"type": "slice", "value": [read_bound(value.start), read_bound(value.stop), read_bound(value.step)]})
        if value is Ellipsis:
            return Opaque({"type": "ellipsis", "value": "..."})
        if isinstance(value, np.ndarray):
            return describe_foreign_array(value)
        if isinstance(value, np.generic):
            return Opaque({"type": type(value).__name__, "value": value.item()}) if value.dtype.kind in "biuf" else describe_unknown(value)
        if isinstance(value, (int, float, str)):  # subclasses: enums, symbolic names
            return Opaque({"type": type(value).__name__, "value": str(value)})
        return describe_unknown(value)

    return convert


def simple(kind: type, value: Any) -> Opaque:
    """A number, bool or string; cached while it is hashable and the cache is small."""
    key = (kind, value)
    found = _SIMPLE.get(key)
    if found is None or (kind is float and repr(found.json["value"]) != repr(value)):  # 0.0 == -0.0
        found = Opaque({"type": kind.__name__, "value": value})
        if len(_SIMPLE) < 4096 and (kind is not str or len(value) < 256):
            _SIMPLE[key] = found
    return found


def describe_unknown(value: Any) -> Opaque:
    """An object we know nothing about: its type is kept, its value is not."""
    return Opaque({"type": f"{type(value).__module__}.{type(value).__qualname__}", "value": None})


def describe_foreign_array(array: np.ndarray[Any, Any]) -> Opaque:
    """A numpy array of a type that the framework does not have (strings, objects): described, without statistics."""
    nothing = {"Max": None, "Min": None, "Mean": None, "Norm": None}
    return Opaque({"type": "numpy.ndarray", "dtype": str(array.dtype), "shape": list(array.shape), **nothing})


def group_id(ranks: list[int]) -> str:
    """Identity of a process group in dump files: CRC-32 of the text of its rank list, 8 hex digits."""
    return f"{zlib.crc32(str(ranks).encode()):08x}"
