"""Predicates of the rules on MindSpore: does this difference have that reason? What holds on torch alike is taken from there."""

from __future__ import annotations

import math
import re

import numpy as np
from matching import CANCELLED, ROUNDING, Context, Difference, Json, is_tensor, largest, same_number

_LOW = {"BFloat16": 1.6e-2, "Float16": 2e-3}
_API_BACKWARD = re.compile(r"^(?!Cell\.).+\.\d+\.backward$")
_CELL_BACKWARD = re.compile(r"^Cell\..+\.backward\.\d+$")


def _last(d: Difference) -> str:
    return d.place.rpartition(".")[2]


def _dtype(d: Difference) -> str:
    theirs = d.whole[1]
    return theirs["dtype"] if isinstance(theirs, dict) else ""


def no_xor(d: Difference, c: Context) -> bool:
    return c.cell.mode == "xor" and d.kind in ("checksum", "null") and d.theirs is None and isinstance(d.ours, str)


def through_float32(d: Difference, _: Context) -> bool:
    """Integers and float64 as float32 there."""
    if d.kind != "value" or not re.match(r"U?Int|Float64", _dtype(d)):
        return False
    with np.errstate(over="ignore"):
        return math.isinf(d.theirs) or same_number(float(np.float32(d.ours)), d.theirs, 1e-5)


def without_nan(d: Difference, _: Context) -> bool:
    """Max and Min pass over NaN there."""
    return d.kind == "value" and _last(d) in ("Max", "Min") and bool(d.whole[0].get("nan_count")) and d.ours != d.ours


def low_precision(d: Difference, _: Context) -> bool:
    """Rounded to the tensor's own dtype there."""
    if d.kind != "value" or _last(d) not in ("Mean", "Norm") or _dtype(d) not in _LOW:
        return False
    tensor = d.whole[1]
    scale = abs(tensor["Norm"]) / math.sqrt(max(math.prod(tensor["shape"]), 1)) if _last(d) == "Mean" else 0.0
    return same_number(d.ours, d.theirs, _LOW[_dtype(d)], scale)


def astype(d: Difference, _: Context) -> bool:
    part = {"missing": "Tensor.to.", "extra": "Tensor.astype."}.get(d.kind.removeprefix("node ").removeprefix("stack "), "?")
    return d.record.startswith(part)


def gradient_places(d: Difference, c: Context) -> bool:
    """The same gradients at other places: theirs come in the reversed order of the arguments, without places that have none."""
    found = _API_BACKWARD.match(d.record)
    section = d.place.partition(".")[0]
    if found is None or section not in ("input", "output"):
        return False
    ours, theirs = (dump.data[d.record] for dump in (c.ours, c.theirs))
    rest = [t for t in ours.get(section, []) if is_tensor(t)]
    # Another processor may round otherwise, down to what is zero but for round-off.
    rounding, scale = (ROUNDING, largest(theirs) * CANCELLED / ROUNDING) if c.other_machine else (1e-5, 0.0)
    for tensor in theirs.get(section, []):
        if not is_tensor(tensor):
            continue
        same = next((t for t in rest if _same_gradient(t, tensor, rounding, scale)), None)
        if same is None:
            return False
        rest.remove(same)
    return rest == []


def _same_gradient(ours: Json, theirs: Json, rounding: float, scale: float) -> bool:
    """Equal shapes, Max and Min. xor: there is nothing but shapes."""
    keys = [k for k in ("Max", "Min") if k in ours or k in theirs]
    return ours["shape"] == theirs["shape"] and all(same_number(ours.get(k), theirs.get(k), rounding, scale) for k in keys)


def inner_gradient(d: Difference, _: Context) -> bool:
    return (
        d.kind == "null"
        and d.theirs is None
        and _CELL_BACKWARD.match(d.record) is not None
        and re.fullmatch(r"input\.\d+", d.place) is not None
    )


_PLUMBING = tuple(
    f"File /env/{path}"
    for path in ("msprobe/", "mindspore/nn/cell.py", "mindspore/graph/", "mindspore/common/", "mindspore/ops/", "mindspore/_checkparam.py")
)


def stack_frames(d: Difference, _: Context) -> bool:
    """Ours are theirs without frames that call on: of the tool, of cell calls, of gradient functions and wrappers."""
    if d.kind != "stack":
        return False
    rest = list(d.ours)
    left_out = [line for line in d.theirs if not (rest and rest[0] == line and rest.pop(0))]
    return rest == [] and all(line.startswith(_PLUMBING) for line in left_out)


def near(d: Difference, c: Context, most: int = 3) -> bool:
    """Is the record of an order difference close to its place?"""
    ours = [n for n in c.ours.data if n in c.theirs.data]
    theirs = [n for n in c.theirs.data if n in c.ours.data]
    return d.record in c.theirs.data and abs(ours.index(d.record) - theirs.index(d.record)) <= most


def no_input_gradient(d: Difference, c: Context) -> bool:
    """Theirs ends the backward record of a Cell without an input gradient before those inside it."""
    if d.kind == "order":
        return _CELL_BACKWARD.match(d.record) is not None and c.theirs.data[d.record].get("output") == []
    if d.kind != "parent" or d.theirs is not None:
        return False
    if c.cell.task == "structure":  # no records: told by the class
        return re.search(r"\.Embedding\.backward\.\d+$", d.ours) is not None
    return c.theirs.data.get(d.ours, {"output": None}).get("output") == []


def gradient_order(d: Difference, c: Context) -> bool:
    return d.kind == "order" and (".backward" in d.record or ".parameters_grad" in d.record) and near(d, c)
