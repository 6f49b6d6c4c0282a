"""Arguments and results as `Entry` structures: tensors become `TensorRef`, everything else what the dump format writes for it."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from msprobe_engine.records import Opaque, TensorRef
from msprobe_integrations.common.descriptions import intern
from msprobe_integrations.torch.containers import CLASS_KEY, class_text, opened
from msprobe_integrations.torch.pending import quiet

MAX_DEPTH = 12
"""Deeper containers are written as null: nobody reads them, and a self-referring list must end."""

_SIMPLE: dict[tuple[type, Any], Opaque] = {}

MAX_VALUES = 4096
"""Values of one argument that are written, tensors not counted; the rest is null. Lists of tokens would make dumps of their own,
and objects that refer to each other have no end in sight at any depth."""

Reduce = Callable[[torch.Tensor], TensorRef]


def convert(value: Any, reduce: Reduce) -> Any:
    """`value` as a structure of lists, dicts, `TensorRef`, `Opaque` and None. Total: never raises for an odd value."""
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        return reduce(value)
    kind = type(value)
    if kind in (int, float, bool, str):
        return simple(kind, value)
    return _nested(value, reduce, 0, [MAX_VALUES])


def _nested(value: Any, reduce: Reduce, depth: int, left: list[int]) -> Any:
    """`convert` inside a container; `left` counts down."""
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
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
            return _members(value, reduce, depth, left)
        inside = opened(value)
        if inside is None:
            return _other(value, reduce, depth, left)
        found = {k: _nested(v, reduce, depth + 1, left) for k, v in inside.items()}
        text = class_text(value)
        if text is not None:
            found.setdefault(CLASS_KEY, Opaque(text))
        return found
    except Exception:  # the argument's own code
        return _named(value)


def _members(values: Iterable[Any], reduce: Reduce, depth: int, left: list[int]) -> list[Any]:
    out: list[Any] = []
    for value in values:
        if left[0] <= 0 and not isinstance(value, torch.Tensor):
            out.append(None)
            break
        out.append(_nested(value, reduce, depth + 1, left))
    return out


def simple(kind: type, value: Any) -> Opaque:
    """A number, bool or string; cached while it is hashable and the cache is small."""
    key = (kind, value)
    found = _SIMPLE.get(key)
    if found is None or (kind is float and repr(found.json["value"]) != repr(value)):  # 0.0 == -0.0
        found = Opaque({"type": kind.__name__, "value": value})
        if len(_SIMPLE) < 4096 and (kind is not str or len(value) < 256):
            _SIMPLE[key] = found
    return found


def group_id(ranks: list[int]) -> str:
    """Identity of a process group in dump files: CRC-32 of the text of its rank list, 8 hex digits."""
    return f"{zlib.crc32(str(ranks).encode()):08x}"


def _other(value: Any, reduce: Reduce, depth: int, left: list[int]) -> Any:
    if isinstance(value, torch.Size):
        return Opaque({"type": "torch.Size", "value": [int(v) if isinstance(v, int) else str(v) for v in value]})
    if isinstance(value, (list, tuple, set, frozenset, deque)):  # torch.return_types are tuples
        return _members(value, reduce, depth, left)
    if isinstance(value, slice):
        return Opaque({"type": "slice", "value": [_bound(value.start), _bound(value.stop), _bound(value.step)]})
    if value is Ellipsis:
        return Opaque({"type": "ellipsis", "value": "..."})
    if isinstance(value, (torch.dtype, torch.device)):
        return Opaque({"type": f"torch.{type(value).__name__}", "value": str(value)})
    if isinstance(value, torch.memory_format):
        return Opaque({"type": "torch.memory_format", "format": str(value).removeprefix("torch.")})
    if isinstance(value, np.ndarray):
        return _array(value, reduce)
    if isinstance(value, np.generic):
        return Opaque({"type": type(value).__name__, "value": value.item()}) if value.dtype.kind in "biuf" else _named(value)
    if isinstance(value, (int, float, str)):  # subclasses: enums, symbolic names
        return Opaque({"type": type(value).__name__, "value": str(value)})
    if torch.distributed.is_available():
        if isinstance(value, torch.distributed.ProcessGroup):
            return process_group(value)
        if isinstance(value, torch.distributed.P2POp):
            return _message(value, reduce)
    if type(value).__name__ in ("ReduceOp", "RedOpType"):
        return Opaque({"type": "torch.distributed.ReduceOp", "value": str(value).removeprefix("<").removesuffix(">")})
    return _named(value)


def process_group(group: Any) -> Opaque:
    """A process group: global ranks of its members and their `group_id`."""
    ranks = torch.distributed.get_process_group_ranks(group)
    return Opaque({"type": "torch.ProcessGroup", "group_ranks": ranks, "group_id": group_id(ranks)})


def _message(op: Any, reduce: Reduce) -> dict[str, Any]:
    """A `P2POp`, one send or receive of ``batch_isend_irecv``; numbers and texts stand bare, as the existing tool writes them."""
    ranks = torch.distributed.get_process_group_ranks(op.group)  # of None: the default group
    return {
        "class_type": Opaque("torch.distributed.P2POp"),
        "tensor": reduce(op.tensor),
        "op": Opaque(op.op.__name__),
        "peer": Opaque(op.peer),
        "tag": Opaque(op.tag),
        "group_id": Opaque(group_id(ranks)),
    }


def _named(value: Any) -> Opaque:
    """An object we know nothing about: its type is kept, its value is not."""
    return Opaque({"type": f"{type(value).__module__}.{type(value).__qualname__}", "value": None})


def _bound(value: Any) -> int | None:
    # a tensor bound would have to be read from the device: its presence is all we may know here
    return None if value is None or isinstance(value, torch.Tensor) else int(value)


def _array(value: np.ndarray[Any, Any], reduce: Reduce) -> TensorRef | Opaque:
    """A numpy array is taken as a tensor over the same memory, so it has statistics and, where tensors are saved, a file. One of a
    type that torch does not have (strings, objects) is described only."""
    plain = value.flags.writeable and value.dtype.isnative and all(stride >= 0 for stride in value.strides)
    try:
        with quiet():
            tensor = torch.from_numpy(value if plain else value.astype(value.dtype.newbyteorder("=")))
    except TypeError:
        nothing = {"Max": None, "Min": None, "Mean": None, "Norm": None}
        return Opaque({"type": "numpy.ndarray", "dtype": str(value.dtype), "shape": list(value.shape), **nothing})
    ref = reduce(tensor)
    shown = ref.description
    return TensorRef(ref.row, intern("numpy.ndarray", str(value.dtype), shown.shape, None, "cpu", shown.extra))
