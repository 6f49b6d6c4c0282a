"""The reasoned differences between our dumps and those of the existing tool.

Every rule has an id, one sentence and a predicate; docs/compatibility.md lists the same ids with the same sentences, and a test holds
the two together. A predicate is as narrow as it can be: what it does not name is a failure of the comparison.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from cells import Cell
from matching import Difference, RankDump, same_number

_FLOAT32 = "torch.float32"
_LOW = {"torch.bfloat16": 1.6e-2, "torch.float16": 2e-3}
_API = re.compile(r"^(?P<base>(?!Module\.).+\.[^.]+)\.(?P<n>\d+)\.(?P<direction>forward|backward)$")
_MODULE = re.compile(r"^Module\..+\.(?P<direction>forward|backward)\.\d+$")


@dataclass(frozen=True)
class Context:
    """Where a difference was found."""

    cell: Cell
    version: str
    ours: RankDump
    theirs: RankDump


Predicate = Callable[[Difference, Context], bool]


@dataclass(frozen=True)
class Rule:
    """One reasoned difference."""

    id: str
    sentence: str
    applies: Predicate


def explain(difference: Difference, context: Context) -> Rule | None:
    """The first rule that applies, None when the difference has no reason."""
    return next((rule for rule in RULES if rule.applies(difference, context)), None)


def _last(d: Difference) -> str:
    return d.place.rpartition(".")[2]


def _dtype(d: Difference) -> str:
    theirs = d.whole[1]
    return theirs["dtype"] if isinstance(theirs, dict) else ""


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _exact_kind(dtype: str) -> bool:
    return dtype == "torch.float64" or dtype.startswith(("torch.int", "torch.uint"))


def api_base(name: str) -> str:
    """``Torch.ones`` of ``Torch.ones.3.forward``, empty for other names."""
    found = _API.match(name)
    return found["base"] if found else ""


def _header(d: Difference, _: Context) -> bool:
    return d.kind == "header" and d.place in ("nonfinite_counts", "micro_steps") and d.theirs is None


def _counts(d: Difference, _: Context) -> bool:
    return d.kind == "key extra" and _last(d) in ("nan_count", "inf_count") and bool(d.ours)


def _no_integer_means(d: Difference, c: Context) -> bool:
    return c.version == "26.2.0" and d.kind == "null" and _last(d) in ("Mean", "Norm") and d.theirs is None and _exact_kind(_dtype(d))


def _through_float32(d: Difference, c: Context) -> bool:
    if c.version != "8.1.1" or d.kind != "value" or not _exact_kind(_dtype(d)) or not (_number(d.ours) and _number(d.theirs)):
        return False
    with np.errstate(over="ignore"):
        return math.isinf(d.theirs) or same_number(float(np.float32(d.ours)), d.theirs, 1e-5)


def _complex_norm(d: Difference, _: Context) -> bool:
    return d.kind == "null" and _last(d) == "Norm" and d.theirs is None and _dtype(d).startswith("torch.complex")


def _low_precision(d: Difference, _: Context) -> bool:
    return (
        d.kind == "value"
        and _last(d) in ("Mean", "Norm")
        and _dtype(d) in _LOW
        and same_number(d.ours, d.theirs, _LOW[_dtype(d)], _mean_scale(d))
    )


def _mean_scale(d: Difference) -> float:
    tensor = d.whole[1]
    return abs(tensor["Norm"]) / math.sqrt(max(math.prod(tensor["shape"]), 1)) if _last(d) == "Mean" else 0.0


def _scalar_norm(d: Difference, _: Context) -> bool:
    whole = d.whole[1]
    return d.kind == "value" and _last(d) == "Norm" and isinstance(whole, dict) and whole["shape"] == [] and d.ours == abs(d.theirs)


def _recompute_said(d: Difference, c: Context) -> bool:
    if c.version == "8.1.1":
        return d.kind == "key missing" and d.place == "is_recompute" and d.theirs is False
    return d.kind == "key extra" and d.place == "is_recompute" and d.ours is True


NOT_LISTED = frozenset(
    ["Autograd", "Torch.ones", "Torch.tensor", "Torch.zeros_like", "Torch.randint", "Torch.empty", "Torch.zeros", "Torch.full"]
    + ["Torch.rfft", "Tensor.__getitem__", "Tensor.detach", "Tensor.clone", "Torch._foreach_mul_", "Torch._foreach_add_"]
    + ["Torch._foreach_lerp_", "Torch._foreach_addcmul_", "Torch._foreach_sqrt", "Torch._foreach_div_", "Torch._foreach_addcdiv_"]
)
"""APIs of this training that are in no list of the existing tool."""


def _not_listed(d: Difference, c: Context) -> bool:
    base = api_base(d.record)
    return d.kind in ("extra", "node extra", "stack extra") and base in NOT_LISTED and not any(api_base(n) == base for n in c.theirs.data)


def _api_gradients(d: Difference, _: Context) -> bool:
    found = _API.match(d.record)
    return bool(found) and found["direction"] == "backward" and d.place.partition(".")[0] == "output"  # type: ignore[index]


def _stack_frames(d: Difference, _: Context) -> bool:
    if d.kind != "stack":
        return False
    theirs = [line for line in d.theirs if not line.startswith(("File /env/torch/nn/modules/module.py", "File /env/msprobe/"))]
    return d.ours == theirs


def _near(d: Difference, c: Context, most: int = 3) -> bool:
    """Is the record of an order difference close to its place?"""
    ours = [n for n in c.ours.data if n in c.theirs.data]
    theirs = [n for n in c.theirs.data if n in c.ours.data]
    return abs(ours.index(d.record) - theirs.index(d.record)) <= most


def _gradient_order(d: Difference, c: Context) -> bool:
    return d.kind == "order" and (".backward" in d.record or ".parameters_grad" in d.record) and _near(d, c)


def _no_input_gradient(d: Difference, c: Context) -> bool:
    """Theirs ends the backward record of a module without an input gradient before those of its children."""
    if d.kind == "order":
        return _MODULE.match(d.record) is not None and c.theirs.data[d.record].get("output") == []
    if d.kind == "parent" and isinstance(d.ours, str):
        outer, seen = d.ours, c.theirs.data
        while outer in seen and seen[outer].get("output") == [] and outer != d.theirs:
            outer = c.ours.construct.get(outer)
        return outer == d.theirs and d.ours != d.theirs
    return False


RULES: tuple[Rule, ...] = (
    Rule("header", "dump.json has further keys in front of `data`; readers of the existing format ignore them.", _header),
    Rule("counts", "Tensors that hold NaN or Inf say how many (`nan_count`, `inf_count`); the existing tool does not count.", _counts),
    Rule("integer-means", "26.2.0 writes null for Mean and Norm of integers and float64; ours are numbers.", _no_integer_means),
    Rule(
        "float32",
        "8.1.1 turns integers and float64 into float32 first, so large ones are rounded or infinite; ours are exact.",
        _through_float32,
    ),
    Rule("complex-norm", "Norm of complex tensors: null there, the norm of the absolute values here.", _complex_norm),
    Rule("low-precision", "Mean and Norm of float16 and bfloat16: computed in that dtype there, in double precision here.", _low_precision),
    Rule(
        "scalar-norm",
        "Norm of a tensor without dimensions: the value itself there, so it may be negative; its absolute value here.",
        _scalar_norm,
    ),
    Rule("recompute", "`is_recompute` is written where it is true (8.1.1: always, 26.2.0: never).", _recompute_said),
    Rule("not-listed", "Functions that are in no list of the existing tool are records here.", _not_listed),
    Rule(
        "api-gradients",
        "Gradients that an API call produces: one per argument, in order; there those of its last autograd node.",
        _api_gradients,
    ),
    Rule(
        "gradient-order",
        "A backward record comes when its last gradient is there: it may swap with records of the same module.",
        _gradient_order,
    ),
    Rule(
        "outer-backward",
        "A module whose inputs need no gradient: its backward record comes after its children, as their parent.",
        _no_input_gradient,
    ),
    Rule("stack-frames", "Stacks have no frames of the tool and of torch's module calls.", _stack_frames),
)
