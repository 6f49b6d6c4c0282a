"""Training against inference (``--consistent_check`` of 26.2.0): modules are named and cut differently in the two.

Only the first forward pass of the training counts. Modules are paired by layer and by their name without what FSDP or Megatron put
before it, in the words of vLLM (``qkv_proj``, ``gate_up_proj``); modules that the other side has in one piece are joined. Dimensions of
size 1 are dropped, because one side has a batch and the other a list of tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from msprobe_engine.align.calls.call_tree import Tree
from msprobe_engine.align.calls.match import Matching
from msprobe_engine.align.calls.structure import Aligned, Structure
from msprobe_engine.core.errors import UsageError
from msprobe_engine.formats.dump.dump_table import INPUT, PARAMETERS, DumpTable, Value
from msprobe_engine.measure.tensors.mode import JOINED

FSDP, MEGATRON = "fsdp", "megatron"
_TO_INFERENCE = {
    FSDP: {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
        **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
    },
    MEGATRON: {
        "word_embeddings": "embed_tokens",
        "self_attention": "self_attn",
        "linear_qkv": "qkv_proj",
        "q_layernorm": "q_norm",
        "k_layernorm": "k_norm",
        "core_attention": "attn",
        "linear_proj": "o_proj",
        "router": "gate",
        "linear_fc1": "gate_up_proj",
        "linear_fc2": "down_proj",
    },
}
_RECORD = re.compile(r"(?:Module|Cell)\.(?P<path>.+)\.(?P<kind>[^.]+)\.(?P<way>forward|backward)\.(?P<call>\d+)")
_LAYER = re.compile(r"layers\.(\d+)")
_BEFORE = re.compile(r"^.*layers\.\d+\.")
_ROOT = re.compile(r"^.*?(?:module\.module\.|_fsdp_wrapped_module\.|model\.)")


class _Key(NamedTuple):
    """What rows have in common that belong together: layer (-1 outside), module, number of its call, place in the record."""

    layer: int
    module: str
    call: int
    place: str


def align(target: DumpTable, golden: DumpTable, backend: str | None) -> tuple[DumpTable, DumpTable, Matching]:
    """Both sides with the rows that can be compared, and which belong together; target: the training.

    Rows of several modules that the other side has in one are one row: its names and data names are joined by ``;``.

    Raises:
        UsageError: no backend is given.
    """
    if backend not in _TO_INFERENCE:
        raise UsageError(f"compare: a consistency check needs --backend, one of {', '.join(_TO_INFERENCE)}")
    target_keys, golden_keys = _keys(target, backend, True), _keys(golden, backend, False)
    common = target_keys.keys() & golden_keys.keys()
    groups: list[tuple[list[int], list[int]]] = [(rows, golden_keys.get(key, [])) for key, rows in target_keys.items()]
    positions = {key: place for place, key in enumerate(target_keys)}
    rest = [(key, rows) for key, rows in golden_keys.items() if key not in common]
    if rest and golden_keys:
        groups = _in_between(groups, rest, golden_keys, positions)
    target_copy, golden_copy = _Copy(target), _Copy(golden)
    pairs = [(target_copy.add(in_target), golden_copy.add(in_golden)) for in_target, in_golden in groups]
    target_rows, golden_rows = (np.array([pair[side] for pair in pairs], np.int64) for side in (0, 1))
    new_target, new_golden = target_copy.close(), golden_copy.close()
    matching = Matching(target_rows, golden_rows, {}, (np.array(new_target.op, np.int64), np.array(new_golden.op, np.int64)))
    records = [(in_target, in_golden) for in_target, in_golden in matching.ops.tolist() if in_target >= 0 and in_golden >= 0]
    matching.aligned = Aligned(Tree(new_target), Tree(new_golden), Structure(records))
    return new_target, new_golden, matching


def _in_between(
    groups: list[tuple[list[int], list[int]]],
    rest: list[tuple[_Key, list[int]]],
    golden_keys: dict[_Key, list[int]],
    positions: dict[_Key, int],
) -> list[tuple[list[int], list[int]]]:
    """Rows of the golden side alone, behind the row that stands before them there."""
    alone = dict(rest)
    after: dict[int, list[list[int]]] = {}
    place = -1
    for key, rows in golden_keys.items():
        if key in alone:
            after.setdefault(place, []).append(rows)
        else:
            place = positions[key]
    merged: list[tuple[list[int], list[int]]] = [([], rows) for rows in after.get(-1, [])]
    for number, group in enumerate(groups):
        merged.append(group)
        merged += [([], rows) for rows in after.get(number, [])]
    return merged


def _keys(side: DumpTable, backend: str, training: bool) -> dict[_Key, list[int]]:
    """Rows by key, in the order of the file; several rows when modules are to be joined."""
    rows_by_key: dict[_Key, list[int]] = {}
    calls: dict[str, int] = {}
    for op, name in enumerate(side.ops):
        record = _RECORD.fullmatch(name)
        if record is None:
            continue
        if record["way"] == "backward":
            if training:
                break
            continue
        path = record["path"]
        call = calls.get(path, 0) if training else int(record["call"])
        calls[path] = call + 1
        layer = _LAYER.search(path)
        number = int(layer[1]) if layer else -1
        module = _module(path, backend, training)
        for row in side.rows(op):
            rows_by_key.setdefault(_Key(number, module, call, side.name[row][len(name) + 1 :]), []).append(row)
    return rows_by_key


def _module(path: str, backend: str, training: bool) -> str:
    inner = _BEFORE.sub("", path)
    if inner == path:
        inner = _ROOT.sub("", path)
    inner = inner.rpartition("_fsdp_wrapped_module.")[2]
    words = _TO_INFERENCE[backend] if training or backend == MEGATRON else {}
    return words.get(inner.rpartition(".")[2], inner.rpartition(".")[2])


class _Copy:
    """A side with some rows of another, in another order, some of them joined."""

    def __init__(self, side: DumpTable) -> None:
        self._from = side
        self.made = DumpTable(side.path, dict(side.header))
        self.made.recovered = side.recovered
        self._last = -1

    def add(self, rows: Sequence[int]) -> int:
        """The new row of these; -1 of none."""
        if not rows:
            return -1
        side, made = self._from, self.made
        op = side.op[rows[0]]
        if op != self._last:
            if made.ops:
                made.offsets.append(len(made.name))
            made.ops.append(side.ops[op])
            self._last = op
        row = len(made.name)
        made.positions[row] = side.name[rows[0]][len(side.ops[op]) :]
        whole = len(rows) > 1 and side.role[rows[0]] != INPUT
        chosen = rows if whole else rows[:1]
        made.op.append(len(made.ops) - 1)
        made.role.append(side.role[rows[0]])
        made.name.append(f"{JOINED}  ".join(side.name[source_row] for source_row in rows))
        made.dtype.append(side.dtype[rows[0]])
        made.shape.append(_shape([side.shape[source_row] for source_row in chosen], 0 if side.role[rows[0]] == PARAMETERS else -1))
        four = _four(side, chosen)
        made.numbers.extend(float(v) if isinstance(v, (int, float)) else math.nan for v in four)
        if not all(type(v) is float for v in four):
            made.nonfloat_stats[row] = four
        made.md5.append(side.md5[rows[0]] if len(rows) == 1 else None)
        made.requires_grad.append(side.requires_grad[rows[0]])
        made.data_name.append(JOINED.join(side.data_name[source_row] for source_row in chosen))
        for source, into in ((side.nans, made.nans), (side.infs, made.infs)):
            count = sum(source.get(source_row, 0) for source_row in chosen)
            if count:
                into[row] = count
        if rows[0] in side.values:
            made.values[row] = side.values[rows[0]]
        return row

    def close(self) -> DumpTable:
        """The side, when all rows are there."""
        if self.made.ops:
            self.made.offsets.append(len(self.made.name))
        return self.made


def _shape(shapes: Sequence[Any], axis: int) -> Any:
    """Shapes joined along a dimension, those of size 1 dropped; the first when they do not fit."""
    if not all(isinstance(shape, list) for shape in shapes):
        return shapes[0]
    short = [[n for n in shape if n != 1] for shape in shapes]
    if len(short) > 1 and short[0]:
        short[0][axis] = sum(shape[axis] for shape in short if shape)
    return short[0]


def _four(side: DumpTable, rows: Iterable[int]) -> tuple[Value, Value, Value, Value]:
    """Max, Min, Mean, Norm of tensors joined."""
    known = [(side.stats_of(row), _count(side.shape[row])) for row in rows]
    if len(known) == 1:
        return known[0][0]
    numbers = [([float(v) for v in four if isinstance(v, (int, float))], n) for four, n in known]
    numbers = [(four, n) for four, n in numbers if len(four) == 4]
    if len(numbers) != len(known):
        return (None, None, None, None)
    total = sum(n for _, n in numbers) or 1
    mean = sum(four[2] * n for four, n in numbers) / total
    tops, bottoms = np.max([four[0] for four, _ in numbers]), np.min([four[1] for four, _ in numbers])
    return float(tops), float(bottoms), mean, math.hypot(*(four[3] for four, _ in numbers))


def _count(shape: Any) -> int:
    return math.prod(shape) if isinstance(shape, list) else 1
