"""What a checkpoint holds, for people and as JSON. Nothing of a tensor is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from msprobe_engine.align.parameters.parameter_kinds import OTHER, kind_of, layer_of
from msprobe_engine.core.dtypes import item_size
from msprobe_engine.core.log import one_line
from msprobe_engine.core.text.words import size
from msprobe_engine.find.checkpoint.result import format_count, strict
from msprobe_engine.formats.checkpoint.model import MODEL, OPTIMIZER, Checkpoint, StoredTensor
from msprobe_engine.report.checkpoint.text import ranges

_SOME = 40


def describe_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "path": str(checkpoint.path),
        "format": checkpoint.format,
        "naming": checkpoint.naming,
        "facts": strict(checkpoint.facts),
        "files": [str(path) for path in checkpoint.files],
        "bytes": _nbytes(checkpoint.tensors.values()),
        "tensors": {
            key: {
                "shape": list(t.shape), "dtype": t.dtype, "group": t.group, "state": t.state, "layer": layer_of(t.name),
                "kind": _kind(t), "pieces": len(t.boxes), "copies": len(t.copies), "origin": t.origin, "bytes": _nbytes([t]),
            }
            for key, t in checkpoint.tensors.items()
        },
        "values": strict(checkpoint.values),
        "notes": checkpoint.notes,
        "problems": checkpoint.problems,
    }  # fmt: skip


def text(checkpoint: Checkpoint, tensors: bool = False, values: bool = False) -> str:
    """The same in lines.

    Args:
        tensors: list all of them; otherwise a line per kind and state.
        values: list all; otherwise the first ones.
    """
    held = checkpoint.tensors.values()
    parameters = sum(t.numel for t in held if t.group == MODEL)
    lines = [
        f"{checkpoint.format}: {one_line(str(checkpoint.path))}",
        f"{format_count(len(checkpoint.tensors), 'tensor')}, {parameters:,} elements of weights and buffers, {size(_nbytes(held))}, "
        f"{format_count(len(checkpoint.files), 'file')}; names: {checkpoint.naming or 'of no known scheme'}",
    ]
    layers = {layer for t in held if (layer := layer_of(t.name)) is not None}
    if layers:
        lines.append(f"layers: {ranges(layers)}")
    if checkpoint.facts:
        lines.append("facts: " + ", ".join(f"{name} {one_line(str(value))}" for name, value in sorted(checkpoint.facts.items())))
    lines += ["", *(_all(checkpoint) if tensors else _by_kind(held))]
    if checkpoint.values:
        lines += ["", f"values ({len(checkpoint.values)}):"]
        shown = list(checkpoint.values.items())
        for name, value in shown if values else shown[:_SOME]:
            lines.append(f"  {one_line(name)}: {one_line(repr(value))[:100]}")
        if not values and len(shown) > _SOME:
            lines.append(f"  and {len(shown) - _SOME} more (--values)")
    for title, items in (("problems", checkpoint.problems), ("notes", checkpoint.notes)):
        if items:
            lines += ["", f"{title}:", *(f"  {one_line(item)}" for item in items)]
    return "\n".join(lines)


def _kind(tensor: StoredTensor) -> str:
    return kind_of(tensor.name) if tensor.group in (MODEL, OPTIMIZER) else OTHER


def _nbytes(tensors: Iterable[StoredTensor]) -> int:
    return sum(t.numel * (item_size(t.dtype) or 0) for t in tensors)


def _all(checkpoint: Checkpoint) -> list[str]:
    lines = []
    for key, t in checkpoint.tensors.items():
        pieces = f", {len(t.boxes)} pieces" if len(t.boxes) != 1 else ""
        copies = f", {len(t.copies)} copies" if t.copies else ""
        origin = f" (there: {one_line(t.origin)})" if t.origin and t.origin != key else ""
        lines.append(f"  {one_line(key)}  {t.dtype} {list(t.shape)}{pieces}{copies}{origin}")
    return lines


def _by_kind(tensors: Iterable[StoredTensor]) -> list[str]:
    counts: Counter[tuple[str, str, str]] = Counter()
    nbytes: Counter[tuple[str, str, str]] = Counter()
    for t in tensors:
        key = (t.state or ("weight" if t.group == MODEL else t.group), _kind(t), t.dtype)
        counts[key] += 1
        nbytes[key] += _nbytes([t])
    rows = [(*key, format_count(count, "tensor"), size(nbytes[key])) for key, count in sorted(counts.items())]
    if not rows:
        return ["  no tensors"]
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
