"""What the search for the first NaN/Inf looks at: calls with three flag words each, independent of how a dump is stored.

A flag word is the union over the tensors of one side of a call (inputs, parameters, outputs). Tensor facts are only built for
the few calls that hold something non-finite, so a clean call costs one walk over its JSON and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from msprobe_engine.formats.dump.record_rows import WORDS_OF_NUMBERS as _WORDS
from msprobe_engine.formats.tensors.dtypes import is_not_float

NAN, POS_INF, NEG_INF, UNKNOWN, FINITE, NOT_FLOAT, UNSEARCHED = 1, 2, 4, 8, 16, 32, 64
INF = POS_INF | NEG_INF
_INT = frozenset((int,))
_TENSORS = ("Tensor", "Parameter")
"""What the types of tensors end with."""
NONFINITE = NAN | INF
_NO_VALUES = frozenset(("ignored", "uninitialised"))
"""Keys of tensors of which a dump has no numbers, because they have no values yet or are not read."""


MOST_LEVELS = 200
"""Of modules within modules, more than Python can call. Without a bound a damaged file makes the work the square of its records."""


class OddTensorError(ValueError):
    """A tensor of a dump whose fields have types that no dump has."""


def tensor_flags(item: Mapping[str, Any]) -> int:
    """Flags of one tensor object of a dump file.

    Max and Min decide, not Mean and Norm: a norm taken in fp16 overflows for healthy tensors. Counts (`nan_count`, `inf_count`) win where
    they exist, because NaN hides Inf in Max and Min. `UNSEARCHED` stands for a tensor with elements that has neither.

    Raises:
        OddTensorError: its shape is no list of integers.
    """
    get = item.get
    shape = get("shape")
    if shape is not None and (type(shape) is not list or not _INT.issuperset(map(type, shape))):
        raise OddTensorError
    if is_not_float(str(get("dtype"))):
        return NOT_FLOAT
    top, low = get("Max"), get("Min")
    if type(top) is str or type(low) is str:
        top, low = _WORDS.get(str(top), top), _WORDS.get(str(low), low)
    nans, infs = get("nan_count"), get("inf_count")
    if nans or infs:
        if not infs:
            return NAN
        # with NaN in the tensor the signs are gone from Max and Min; then both are possible
        signs = (POS_INF if math.inf in (top, low) else 0) | (NEG_INF if -math.inf in (top, low) else 0)
        return (NAN if nans else 0) | (signs or INF)
    if not isinstance(top, (int, float)) or not isinstance(low, (int, float)):
        if (nans == 0 and infs == 0) or _is_empty(shape):
            return FINITE
        return UNKNOWN if not _NO_VALUES.isdisjoint(item) else UNKNOWN | UNSEARCHED
    if top - top == 0 and low - low == 0:
        return FINITE
    if top != top or low != low:
        return NAN
    return (POS_INF if math.inf in (top, low) else 0) | (NEG_INF if -math.inf in (top, low) else 0)


def _is_empty(shape: Any) -> bool:
    return isinstance(shape, list) and 0 in shape


def is_tensor(node: Mapping[str, Any]) -> bool:
    """A dict of the dump format that describes a tensor (or a numpy array), not a container of the user's."""
    return isinstance(node.get("type"), str) and "dtype" in node and "shape" in node


def flags_of(node: Any) -> int:
    """Union of the flags of all tensors in a nested structure of a dump file."""
    kind = type(node)
    flags = 0
    if kind is dict:
        if isinstance(node.get("type"), str):
            if "dtype" in node and "shape" in node:
                return tensor_flags(node)
            return UNKNOWN | UNSEARCHED if node["type"].endswith(_TENSORS) else 0
        for child in node.values():
            if type(child) is dict or type(child) is list:
                flags |= flags_of(child)
    elif kind is list:
        for child in node:
            flags |= flags_of(child)
    return flags


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) else None


class TensorFact(NamedTuple):
    """One tensor of a call: its place (``input.0``, ``kwargs.mask``, ``output.0``, ``parameters.weight``), flags and JSON object."""

    place: str
    flags: int
    raw: Mapping[str, Any]

    @property
    def nans(self) -> int | None:
        """Number of NaN elements; None when the dump has no counts."""
        return _whole(self.raw.get("nan_count"))

    @property
    def infs(self) -> int | None:
        """Number of infinite elements; None when the dump has no counts."""
        return _whole(self.raw.get("inf_count"))

    def fingerprint(self) -> tuple[str, ...]:
        """Text that is equal for two sightings of the same values: dtype, shape and every number the dump has."""
        keys = ("dtype", "shape", "Max", "Min", "Mean", "Norm", "md5", "digest", "nan_count", "inf_count")
        return tuple(repr(self.raw.get(key)) for key in keys)

    def describe(self) -> dict[str, Any]:
        """JSON-ready summary."""
        keys = ("dtype", "shape", "Max", "Min", "Mean", "Norm")
        return {"place": self.place, "what": what(self.flags), "nans": self.nans, "infs": self.infs} | {
            k: self.raw[k] for k in keys if k in self.raw
        }


def what(flags: int) -> str:
    """``NaN``, ``Inf``, ``-Inf``, ``NaN and Inf``, or ``finite``."""
    inf = "-Inf" if flags & INF == NEG_INF else "Inf" if flags & INF else ""
    return " and ".join(word for word in ("NaN" if flags & NAN else "", inf) if word) or "finite"


def tensors(place: str, node: Any) -> Iterator[TensorFact]:
    """All tensors of a nested structure with their places."""
    if isinstance(node, dict):
        if is_tensor(node):
            yield TensorFact(place, tensor_flags(node), node)
        elif not isinstance(node.get("type"), str):
            for key, child in node.items():
                yield from tensors(f"{place}.{key}", child)
    elif isinstance(node, list):
        for i, child in enumerate(node):
            yield from tensors(f"{place}.{i}", child)


@dataclass(slots=True)
class Call:
    """One call (or one gradient, or one monitor sample) of one rank.

    Attributes:
        index: position in execution order.
        name: record name, ``Functional.linear.0.forward``.
        kind: ``module``, ``api``, ``collective``, ``gradient`` (a parameters_grad record) or ``sample``.
        direction: ``forward`` or ``backward``.
        op: API name (``linear``) or class name of the module.
        ins, parameters, outs: (place, JSON structure) pairs; buffers that are only written to are left out of ``ins``.
        in_flags, parameter_flags, out_flags: union of tensor flags per side.
        parent: record name of the enclosing call, None at the top or when unknown.
        raw: the record as the file has it.
    """

    index: int
    name: str
    kind: str
    direction: str
    op: str
    ins: list[tuple[str, Any]]
    parameters: Any
    outs: list[tuple[str, Any]]
    in_flags: int
    parameter_flags: int
    out_flags: int
    parent: str | None
    raw: Mapping[str, Any]

    def inputs(self) -> list[TensorFact]:
        return [fact for place, node in self.ins for fact in tensors(place, node)]

    def outputs(self) -> list[TensorFact]:
        return [fact for place, node in self.outs for fact in tensors(place, node)]

    def parameter_facts(self) -> list[TensorFact]:
        return list(tensors("parameters", self.parameters))

    def literals(self) -> list[tuple[str, float]]:
        """Plain Python or numpy numbers among the inputs that are NaN or infinite."""
        return [hit for place, node in self.ins for hit in _literals(place, node)]


def _literals(place: str, node: Any) -> Iterator[tuple[str, float]]:
    if isinstance(node, dict):
        if isinstance(node.get("type"), str):
            value = node.get("value")
            if isinstance(value, float) and not math.isfinite(value):
                yield place, value
        else:
            for key, child in node.items():
                yield from _literals(f"{place}.{key}", child)
    elif isinstance(node, list):
        for i, child in enumerate(node):
            yield from _literals(f"{place}.{i}", child)


@dataclass
class Trace:
    """What one rank did in one step.

    Attributes:
        calls: in execution order; ``calls[i].index == i``.
        stacks: forward record name to stack lines, innermost first.
        complete: False when the step was cut off.
        path: directory it was read from.
        left_out: names of records that hold what no dump has.
        unsearched: names of records with a tensor of which the dump has no number that could be searched.
        odd_stacks: how many stacks were left out, because they are no lists of text.
    """

    step: int
    rank: int
    calls: list[Call]
    stacks: Mapping[str, list[str]] = field(default_factory=dict)
    complete: bool = True
    path: str = ""
    left_out: Sequence[str] = ()
    unsearched: Sequence[str] = ()
    odd_stacks: int = 0
    _by_name: dict[str, Call] | None = None

    def named(self, name: str | None) -> Call | None:
        """The call with this record name, if it was recorded."""
        if self._by_name is None:
            self._by_name = {call.name: call for call in self.calls}
        return None if name is None else self._by_name.get(name)

    def ancestors(self, call: Call, parents: Mapping[str, str | None] | None = None) -> list[str]:
        """Record names from the direct parent outwards; recorded or not. Stops at a cycle of a damaged file, and after `MOST_LEVELS`."""
        chain: list[str] = []
        seen = {call.name}
        parent = call.parent
        links = self.parents if parents is None else parents
        while parent and parent not in seen and len(chain) < MOST_LEVELS:
            chain.append(parent)
            seen.add(parent)
            parent = links.get(parent)
        return chain

    parents: Mapping[str, str | None] = field(default_factory=dict)
