"""Rows of records: what in a record of a dump file is a tensor or an argument, appended to the columns of a `DumpTable`.

Row names are those of the existing tool. Plain records go through `msprobe_engine/native/_siderows.c` where it was built, with the same
result.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from functools import lru_cache
from operator import itemgetter
from types import ModuleType
from typing import Any

import numpy as np

from msprobe_engine.core.names import is_collective
from msprobe_engine.formats.dump.dump_table import DEBUG, INPUT, OUTPUT, PARAMETERS, PARAMETERS_GRAD, WORDS_OF_NUMBERS, DumpTable, Value

_SECTIONS = {"input_args": INPUT, "input_kwargs": INPUT, "input": INPUT, "parameters": PARAMETERS, "output": OUTPUT}
_ORDER = ("input_args", "input_kwargs", "input", "parameters", "output")
_PLACES = {"input_args": ".input", "input_kwargs": ".input", "input": ".input", "parameters": ".parameters", "output": ".output"}
_RANKS = frozenset(("src", "dst", "group_src", "group_dst"))

_DEEPEST = 100
_LONGEST_SHAPE = 1000
"""Characters of a shape that is text."""


class RowReader:
    """Appends records to the columns of a side. Equal names of dtypes and equal shapes are one object.

    Attributes:
        at: index of the record that is being read.
        left_out: records and values that are damaged; `first_left_out` says which was the first.
    """

    def __init__(self, side: DumpTable) -> None:
        self._side = side
        self._texts: dict[Any, Any] = {}
        self.at = 0
        self.left_out = 0
        self.first_left_out = ""

    def block(self, records: dict[str, Any]) -> None:
        """Append the records of a part of the file."""
        rows = _load_native()
        if rows is not None and type(records) is dict:
            rows.block(records, self, self._side, self._texts)
            return
        for name, record in records.items():
            self.record(name, record)

    def record(self, name: str, record: Any) -> None:
        side = self._side
        self.at = len(side.ops)
        side.ops.append(name)
        if name.endswith(".debug"):
            self.walk(name, record, DEBUG, 0, False)
        elif not isinstance(record, dict):
            self._leave_out(f"{name[:120]!r}, which is a {type(record).__name__} and must be a JSON object")
        elif _is_gradients(name):
            for key, value in record.items():
                if isinstance(value, (list, dict)):
                    self.walk(f"{name}.{key}", value, PARAMETERS_GRAD, 0, True)
        else:
            for section in _ORDER:
                if section in record:
                    self.walk(name + _PLACES[section], record[section], _SECTIONS[section], 0, False)
            if is_collective(name):
                side.collectives[self.at] = record
            extra = {key: value for key, value in record.items() if key not in _SECTIONS}
            if extra:
                side.tags[self.at] = extra
        side.offsets.append(len(side.name))

    def walk(self, name: str, node: Any, role: int, depth: int, flat: bool) -> None:
        """`flat`: list positions do not show in row names (parameter gradients are wrapped in a list each)."""
        if node is None:
            self._row(name, role, None, None, (None, None, None, None), None, None, "")
        elif type(node) is dict:
            kind = node.get("type")
            if type(kind) is str:
                self._leaf(name, node, kind, role)
            elif node.get("class_type") == "torch.distributed.P2POp":
                self._peer(name, node, role)
            elif depth > _DEEPEST:
                self._leave_out(f"{name[:120]!r}, which is nested deeper than {_DEEPEST}")
            else:
                for key, child in node.items():
                    self.walk(f"{name}.{key}", child, role, depth + 1, flat)
        elif depth > _DEEPEST:
            self._leave_out(f"{name[:120]!r}, which is nested deeper than {_DEEPEST}")
        elif type(node) is list:
            for index, child in enumerate(node):
                self.item(name, index, child, role, depth, flat)

    def item(self, name: str, index: int, child: Any, role: int, depth: int, flat: bool) -> None:
        row = name if flat else f"{name}.{index}"
        if type(child) is dict and len(child) == 8 and self._tensor(row, child, role):
            return
        if type(child) is not dict and type(child) is not list and child is not None:
            self._leave_out(f"{name[:120]!r}, item {index}, which is {str(child)[:40]!r} and must be an object, a list or null")
        self.walk(row, child, role, depth + 1, flat)

    def _leave_out(self, what: str) -> None:
        self.left_out += 1
        self.first_left_out = self.first_left_out or what

    def _peer(self, name: str, node: Mapping[str, Any], role: int) -> None:
        """One operation of ``batch_isend_irecv``: its tensor, with the peer among the facts."""
        tensor = node.get("tensor")
        row = len(self._side.name)
        if isinstance(tensor, dict) and isinstance(tensor.get("type"), str):
            self._leaf(name, tensor, tensor["type"], role)
        else:
            self._row(name, role, None, None, (None, None, None, None), None, None, "")
        self._side.extra.setdefault(row, {}).update({key: node.get(key) for key in ("class_type", "op", "peer", "tag", "group_id")})

    def _leaf(self, name: str, node: Mapping[str, Any], kind: str, role: int) -> None:
        get = node.get
        dtype = get("dtype")
        data_name = get("data_name") or ""
        if type(data_name) is not str or data_name == "-1":
            data_name = ""
        if data_name:
            name = data_name.rpartition(".")[0]
        if not dtype:
            self._argument(name, node, kind, role, data_name)
            return
        if kind in _NO_TENSORS:
            self._leave_out(f"the type of {name[:120]!r}, which is {kind!r} and has a dtype")
        grad = get("requires_grad")
        md5 = get("md5")
        four = (get("Max"), get("Min"), get("Mean"), get("Norm"))
        row = self._row(
            name, role, str(dtype), get("shape"), four, None if md5 is None else str(md5), grad if type(grad) is bool else None, data_name
        )
        if len(node) > 8:
            self._facts(row, node)

    def _tensor(self, name: str, node: Mapping[str, Any], role: int) -> bool:
        """A tensor with statistics and nothing else, which nearly all nodes are: as `_leaf`, in less time. False: it is not."""
        try:
            kind, dtype, shape, largest, smallest, mean, norm, grad = _PLAIN(node)
            known = self._texts[tuple(shape)]
        except (KeyError, TypeError):
            return False
        if not (
            type(largest) is type(smallest) is type(mean) is type(norm) is float
            and type(kind) is type(dtype) is str
            and dtype
            and type(shape) is list
        ):
            return False
        if kind in _NO_TENSORS:
            return False
        side = self._side
        side.name.append(name)
        side.op.append(self.at)
        side.role.append(role)
        side.dtype.append(self._texts.setdefault(dtype, dtype))
        side.shape.append(known)
        side.numbers.extend((largest, smallest, mean, norm))
        side.md5.append(None)
        side.requires_grad.append(grad if type(grad) is bool else None)
        side.data_name.append("")
        return True

    def _facts(self, row: int, node: Mapping[str, Any]) -> None:
        side = self._side
        facts = {key: value for key, value in node.items() if key not in _COMMON}
        if not facts:
            return
        for key, counts in (("nan_count", side.nans), ("inf_count", side.infs)):
            count = facts.pop(key, 0)
            if type(count) is int and count > 0:
                counts[row] = count
        trues, shape = facts.pop("true_count", None), side.shape[row]
        count = math.prod(shape) if isinstance(shape, list) else 0
        if type(trues) is int and 0 <= trues <= count and count:  # mean and norm of ones and zeros: rows are measured and joined by them
            side.numbers[4 * row + 2], side.numbers[4 * row + 3] = trues / count, math.sqrt(trues)
        if facts:
            side.extra[row] = facts

    def _argument(self, name: str, node: Mapping[str, Any], kind: str, role: int, data_name: str) -> None:
        """An argument that is no tensor: the value stands in place of all four statistics."""
        value = node.get("value")
        redacted = node.get("redacted")
        if redacted is not None and value is None:  # equal where the keyed digests are; see diagnose.redacted
            value = f"redacted {node.get('digest', '')}"
        shape: Any = []
        dtype, shown, md5 = kind, value, node.get("md5")
        if kind == "torch.Size":
            shape, shown = str(value), None
        elif kind == "slice" and redacted is None:
            shape, shown = str(np.shape(np.array(value, dtype=object))), None
        elif kind == "ellipsis":
            pass
        elif name.rpartition(".")[2] in _RANKS:
            shown = md5 = str(value)
        elif kind == "torch.ProcessGroup":
            value = shown = md5 = str(node.get("group_ranks"))
        else:
            dtype = str(type(value))
        row = self._row(name, role, dtype, shape, (shown, shown, shown, shown), None if md5 is None else str(md5), None, data_name)
        self._side.values[row] = value
        if redacted is not None:
            self._side.extra[row] = {"redacted": redacted}
        elif kind == "torch.ProcessGroup":
            self._side.extra[row] = dict(node)
        elif dtype != kind and kind != type(value).__name__:  # text that stands for a dtype, a device, ...
            self._side.extra[row] = {"type": kind}

    def _row(
        self,
        name: str,
        role: int,
        dtype: str | None,
        shape: Any,
        four: tuple[Value, ...],
        md5: str | None,
        grad: bool | None,
        data_name: str,
    ) -> int:
        side = self._side
        row = len(side.name)
        side.name.append(name)
        side.op.append(self.at)
        side.role.append(role)
        texts = self._texts
        side.dtype.append(texts.setdefault(dtype, dtype))
        key = tuple(shape) if type(shape) is list else shape
        try:
            known = texts[key]
        except KeyError:
            known = texts[key] = _plausible(shape)
        except TypeError:  # lists in the list
            known = str(shape)[:_LONGEST_SHAPE]
        side.shape.append(known)
        largest, smallest, mean, norm = four
        if type(largest) is float and type(smallest) is float and type(mean) is float and type(norm) is float:
            side.numbers.extend(four)  # type: ignore[arg-type]
        else:
            side.numbers.extend((_number(largest), _number(smallest), _number(mean), _number(norm)))
            side.nonfloat_stats[row] = four  # type: ignore[assignment]
        side.md5.append(md5)
        side.requires_grad.append(grad)
        side.data_name.append(data_name)
        return row


@lru_cache(maxsize=1)
def _load_native() -> ModuleType | None:
    try:
        return importlib.import_module("msprobe_engine.native._siderows")
    except ImportError:
        return None


def _plausible(shape: Any) -> Any:
    """A shape as it is if it can be one, else as text, which equals no shape and has no size."""
    if shape is None or (type(shape) is str and len(shape) <= _LONGEST_SHAPE):
        return shape
    if type(shape) is list and all(type(n) is int and n >= 0 for n in shape) and math.prod(n or 1 for n in shape) < 1 << 63:
        return shape
    return str(shape)[:_LONGEST_SHAPE]


_NO_TENSORS = frozenset(("int", "float", "bool", "str", "complex", "NoneType"))
"""Types of arguments, which have no dtype; none is longer than ``LONGEST_ARGUMENT_TYPE`` of ``_siderows.c``."""
_PLAIN = itemgetter("type", "dtype", "shape", "Max", "Min", "Mean", "Norm", "requires_grad")
_COMMON = frozenset(("type", "dtype", "shape", "Max", "Min", "Mean", "Norm", "requires_grad", "md5", "data_name"))


def _number(value: Any) -> float:
    if type(value) is float:
        return value
    if isinstance(value, (int, bool)):
        try:
            return float(value)
        except OverflowError:
            return float("inf") if value > 0 else -float("inf")
    return WORDS_OF_NUMBERS.get(value, float("nan")) if type(value) is str else float("nan")


def _is_gradients(name: str) -> bool:
    """``X.parameters_grad`` (8.1.1) or ``X.parameters_grad.<n>`` (26.2.0)."""
    return ".parameters_grad" in name and "parameters_grad" in name.split(".")[-2:]
