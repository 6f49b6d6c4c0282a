"""What is known of compiled code when it is compiled: the arguments of each call as far as they are constant, and where its tensors are.

A compiled graph hands nothing but tensors and plain numbers to Python. So everything else is written down while the graph is compiled, by
functions that the compiler runs (``ops.constexpr``), and gets a number that the graph passes on when it runs. Equal notes have the same
number, so compiling again changes nothing.
"""
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import math
import threading
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from mindspore import ops

from msprobe_engine.core.records import Opaque, TensorRef
from msprobe_integrations.mindspore.capture.structure import convert

INPUT, OUTPUT, GRAD_OF_INPUT, GRAD_OF_OUTPUT, PARAMETER = range(5)
"""What a place is part of. Its gradient is two further."""
GRADIENT = 2

NOT, AS_IS, WIDENED = range(3)
"""How a tensor goes to Python: not at all; as it is; as float32 (bfloat16 has no buffer that numpy could read)."""

_AS_IS = frozenset(
    ("Float16", "Float32", "Float64", "Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32", "UInt64", "Bool", "Complex64")
)
WITH_GRADIENT = frozenset(("Float16", "Float32", "Float64", "BFloat16", "Complex64"))
"""Element types of tensors that can have a gradient."""


class TensorNode(NamedTuple):
    """A tensor among the arguments. `shape` is that of the compilation; `missing` says why its values do not arrive."""

    dtype: str
    shape: tuple[int, ...]
    missing: str


class ContainerNode(NamedTuple):
    """A tuple, list or dict (which has `keys`); `members` are numbers of notes."""

    keys: tuple[str, ...] | None
    members: tuple[int, ...]


Node = TensorNode | ContainerNode | Opaque | None
Path = tuple[Any, ...]


class Place(NamedTuple):
    """Where in a call a tensor is: `part` of it, the `path` through nested containers, its element type, and whether it has no dimensions
    (it comes with one)."""

    part: int
    path: Path
    dtype: str
    scalar: bool = False


_nodes: list[Node] = [None]
_places: list[Place] = []
_known: dict[Hashable, int] = {}
_lock = threading.Lock()
_written = 0


def count_notes() -> int:
    """How often something was noted in this process, equal things too. It grows whenever a graph with probes is compiled."""
    return _written


def node(number: int) -> Node:
    """The note with this number; number 0 is what nothing is known of."""
    return _nodes[number]


def place_of(number: int) -> Place:
    return _places[number]


def _number(key: Hashable, made: Any, table: list[Any]) -> int:
    global _written
    with _lock:
        _written += 1
        number = _known.get(key)
        if number is None:
            number = _known[key] = len(table)
            table.append(made)
        return number


def _explain_missing(dtype: str, shape: Sequence[int]) -> str:
    if dtype != "BFloat16" and dtype not in _AS_IS:
        return f"no way out of a compiled graph for {dtype}"
    if any(n < 0 for n in shape):
        return "dynamic shape in a compiled graph"
    return "" if math.prod(shape) else "empty"  # the framework cannot hand an empty tensor to Python: its kernel would raise


@ops.constexpr
def way(dtype: Any, shape: Any) -> int:
    """How a tensor of this kind goes to Python: `NOT`, `AS_IS` or `WIDENED`."""
    text = str(dtype)
    return NOT if _explain_missing(text, shape) else WIDENED if text == "BFloat16" else AS_IS


@ops.constexpr
def has_gradient(dtype: Any) -> bool:
    """Can a tensor of this kind have a gradient?"""
    return str(dtype) in WITH_GRADIENT


@ops.constexpr
def tensor(dtype: Any, shape: Any) -> int:
    """Note a tensor. Its shape counts only where its values do not arrive: batches of other sizes are the same note."""
    text = str(dtype)
    missing = _explain_missing(text, shape)
    made = TensorNode(text, tuple(shape) if missing else (), missing)
    return _number(("tensor", made), made, _nodes)


@ops.constexpr
def constant(value: Any) -> int:
    """Note a value that is known when the graph is compiled."""
    if value is None:
        return 0
    made = convert(value, _no_tensor)
    return _number(("constant", repr(made)), made, _nodes)


@ops.constexpr
def sequence(members: Any) -> int:
    """Note a tuple or list whose members have these numbers."""
    made = ContainerNode(None, tuple(members))
    return _number(("container", made), made, _nodes)


@ops.constexpr
def note_mapping(keys: Any, members: Any) -> int:
    """Note a dict whose values have these numbers."""
    made = ContainerNode(tuple(str(key) for key in keys), tuple(members))
    return _number(("container", made), made, _nodes)


@ops.constexpr
def place(part: int, path: Any, dtype: Any, scalar: bool) -> int:
    """Number of the place of a tensor; that of its gradient is one more."""
    made = Place(part, tuple(path), str(dtype), scalar)
    with _lock:
        number = _known.get(made)
        if number is None:
            number = _known[made] = len(_places)
            _places.extend((made, made._replace(part=part + GRADIENT)))
        return number


@ops.constexpr
def note_gradient(parameter: int) -> int:
    """Number of a parameter whose gradient is handed on: its own."""
    global _written
    with _lock:
        _written += 1
    return parameter


def _no_tensor(_: Any) -> TensorRef:
    raise TypeError("a tensor is no constant")
