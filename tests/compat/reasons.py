"""Predicates of the rules: does this difference have that reason? Each is as narrow as it can be."""

from __future__ import annotations

import math
import re
from collections import Counter

import numpy as np
from matching import Context, Difference, RankDump, is_tensor, same_number

_LOW = {"torch.bfloat16": 1.6e-2, "torch.float16": 2e-3}
_API = re.compile(r"^(?P<base>(?!Module\.).+\.[^.]+)\.(?P<n>\d+)\.(?P<direction>forward|backward)$")
_MODULE = re.compile(r"^Module\..+\.(?P<direction>forward|backward)\.\d+$")


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


def header(d: Difference, _: Context) -> bool:
    facts = ("rank", "world_size", "dumped_ranks", "run_began", "step_ended")
    more = (*facts, "nonfinite_counts", "micro_steps", "summary_mode", "selection", "lost", "written_with", "tensor_wait_seconds")
    return d.kind == "header" and d.place in more and d.theirs is None


def counts(d: Difference, _: Context) -> bool:
    if d.kind == "key extra" and _last(d) == "true_count":
        return "bool" in _dtype(d).lower()
    return d.kind == "key extra" and _last(d) in ("nan_count", "inf_count") and bool(d.ours)


def no_integer_means(d: Difference, c: Context) -> bool:
    return c.version == "26.2.0" and d.kind == "null" and _last(d) in ("Mean", "Norm") and d.theirs is None and _exact_kind(_dtype(d))


def through_float32(d: Difference, c: Context) -> bool:
    if c.version != "8.1.1" or d.kind != "value" or not _exact_kind(_dtype(d)) or not (_number(d.ours) and _number(d.theirs)):
        return False
    with np.errstate(over="ignore"):
        return math.isinf(d.theirs) or same_number(float(np.float32(d.ours)), d.theirs, 1e-5)


def complex_values(d: Difference, _: Context) -> bool:
    if d.kind == "value" and _dtype(d).startswith("torch.complex"):
        return same_number(d.ours, d.theirs, 1e-6)
    return d.kind == "null" and _last(d) == "Norm" and d.theirs is None and _dtype(d).startswith("torch.complex")


def low_precision(d: Difference, _: Context) -> bool:
    return (
        d.kind == "value"
        and _last(d) in ("Mean", "Norm")
        and _dtype(d) in _LOW
        and same_number(d.ours, d.theirs, _LOW[_dtype(d)], _mean_scale(d))
    )


def _mean_scale(d: Difference) -> float:
    tensor = d.whole[1]
    return abs(tensor["Norm"]) / math.sqrt(max(math.prod(tensor["shape"]), 1)) if _last(d) == "Mean" else 0.0


def scalar_norm(d: Difference, _: Context) -> bool:
    whole = d.whole[1]
    return d.kind == "value" and _last(d) == "Norm" and isinstance(whole, dict) and whole["shape"] == [] and d.ours == abs(d.theirs)


def recompute_said(d: Difference, c: Context) -> bool:
    if c.version == "8.1.1":
        return d.kind == "key missing" and d.place == "is_recompute" and d.theirs is False
    return d.kind == "key extra" and d.place == "is_recompute" and d.ours is True


_TORCH = "ones tensor zeros_like randint empty zeros full rfft"
_FOREACH = "mul_ add_ lerp_ addcmul_ sqrt div_ addcdiv_"
NOT_LISTED = frozenset(
    [f"Torch.{name}" for name in _TORCH.split()]
    + [f"Torch._foreach_{name}" for name in _FOREACH.split()]
    + ["Tensor.__getitem__", "Tensor.detach", "Tensor.clone"]
)
"""APIs of this training that are in no list of the existing tool."""


def not_listed(d: Difference, c: Context) -> bool:
    base = api_base(d.record)
    return d.kind in ("extra", "node extra", "stack extra") and base in NOT_LISTED and not any(api_base(n) == base for n in c.theirs.data)


def gradient_places(d: Difference, c: Context) -> bool:
    """The same gradients at other places: theirs are those of the node, which has its inputs in an order of its own."""
    return _gradients_of_a_call(d) and _produced(c.theirs, d.record) <= _produced(c.ours, d.record)


def last_node(d: Difference, c: Context) -> bool:
    """Theirs are those of the last node of several that the call made."""
    return _gradients_of_a_call(d) and not _produced(c.theirs, d.record) <= _produced(c.ours, d.record)


def _gradients_of_a_call(d: Difference) -> bool:
    found = _API.match(d.record)
    return found is not None and found["direction"] == "backward" and d.place.partition(".")[0] == "output"


def _produced(dump: RankDump, record: str) -> Counter[str]:
    """The gradients a call produced, each as text that is equal for equal tensors; rounding is cut off."""
    tensors = [t for t in dump.data[record].get("output", []) if is_tensor(t)]
    return Counter(repr([t["shape"], t.get("md5") if "Max" not in t else [f"{t[k]:.5g}" for k in ("Max", "Min")]]) for t in tensors)


def positional_dtype(d: Difference, c: Context) -> bool:
    """``{}`` there."""
    if d.kind != "key extra" or not d.place.startswith("input_args.") or _last(d) not in ("type", "value"):
        return False
    node = c.theirs.data[d.record]
    for part in d.place.split(".")[:-1]:
        node = node[int(part)] if isinstance(node, list) else node[part]
    return node == {}


def collective_facts(d: Difference, _: Context) -> bool:
    return d.kind == "key extra" and d.record.startswith("Distributed.") and d.place in ("tags", "reduce", "async")


def unseen_collectives(d: Difference, _: Context) -> bool:
    return d.kind in ("extra", "node extra", "stack extra") and api_base(d.record).startswith("Distributed.c10d_")


def uninitialised(d: Difference, _: Context) -> bool:
    if d.kind == "key extra" and _last(d) in ("uninitialised", "ignored"):
        return bool(d.ours)
    ours = d.whole[0]
    if d.kind == "checksum":
        return d.ours is None and bool(ours.get("uninitialised"))
    if d.kind == "key missing" and _last(d) == "data_name":
        return "uninitialised" in ours
    return d.kind == "null" and d.ours is None and isinstance(ours, dict) and bool(ours.get("uninitialised") or ours.get("ignored"))


def scalar_xor(d: Difference, c: Context) -> bool:
    return c.cell.mode == "xor" and d.kind == "checksum" and d.whole[1]["shape"] == []


def rank_directory(d: Difference, c: Context) -> bool:
    return (
        c.version == "8.1.1" and d.kind == "header" and d.place == "dump_data_dir" and d.ours == str(d.theirs).replace("/rank/", "/proc/")
    )


def empty_files(d: Difference, _: Context) -> bool:
    return d.kind == "key extra" and _last(d) == "data_name" and 0 in d.whole[1]["shape"]


def inner_gradient(d: Difference, _: Context) -> bool:
    return (
        d.kind == "null" and d.theirs is None and _MODULE.match(d.record) is not None and re.fullmatch(r"input\.\d+", d.place) is not None
    )


def no_dropout(d: Difference, c: Context) -> bool:
    """Dropout with p = 0 makes no node of its own in the graph."""
    if api_base(d.record) != "Functional.dropout" or not d.record.endswith(".backward"):
        return False
    if d.kind == "parent":
        return c.version == "8.1.1" and c.ours.construct.get(d.ours) == d.theirs
    return c.version == "26.2.0" and d.kind in ("extra", "node extra")


def gradient_name(d: Difference, c: Context) -> bool:
    if c.version != "8.1.1" or ".parameters_grad" not in d.record:
        return False
    if d.kind == "file":
        return d.ours == str(d.theirs).replace(".parameters_grad.", f".parameters_grad.{d.record.rpartition('.')[2]}.")
    return d.kind in ("name", "order") or (d.kind == "extra" and d.record.rpartition(".")[0] in c.theirs.data)


def accumulated(d: Difference, c: Context) -> bool:
    """The last of several backward passes: its increment there, the sum here."""
    several = ".parameters_grad." in d.record and not d.record.endswith(".0")
    return c.version == "8.1.1" and several and d.kind in ("value", "checksum", "content")


def own_calls(d: Difference, c: Context) -> bool:
    return (
        c.version == "8.1.1"
        and d.kind in ("missing", "node missing", "stack missing")
        and api_base(d.record) in ("Tensor.view_as", "Torch.ones_like")
    )


def late_checksum(d: Difference, c: Context) -> bool:
    """Tensors that are written in place soon after they were recorded: by an operation in place, a collective, or DDP."""
    if c.version != "26.2.0" or d.kind != "checksum":
        return False
    base, (ours, theirs) = api_base(d.record), d.whole
    shared = ("Distributed.", "Torch.full", "Torch.arange", "Tensor.clone", "Tensor.reshape")
    written = base.endswith("_") or (c.cell.ranks > 1 and (base.startswith(shared) or ".parameters_grad." in d.record))
    return written and all(key not in theirs or same_number(ours[key], theirs[key], 1e-5) or theirs[key] is None for key in ("Max", "Min"))


def wide_checksum(d: Difference, c: Context) -> bool:
    return c.version == "8.1.1" and d.kind == "checksum" and _dtype(d) == "torch.bfloat16"


def late_scalar(d: Difference, c: Context) -> bool:
    """A tensor without dimensions in the input of a call, after which it was written in place."""
    return c.version == "8.1.1" and d.kind == "value" and _last(d) in ("Max", "Min", "Mean", "Norm") and d.whole[1]["shape"] == []


def written_buffers(d: Difference, c: Context) -> bool:
    place = r"input_args\.0|input_args\.1|input_kwargs\.tensor"
    return (
        c.version == "8.1.1"
        and d.kind == "null"
        and d.ours is None
        and d.record.startswith("Distributed.")
        and re.fullmatch(place, d.place) is not None
    )


def without_record(d: Difference, c: Context) -> bool:
    return d.kind in ("node missing", "stack missing") and c.cell.task != "structure" and d.record not in c.theirs.data


def core_linear(d: Difference, c: Context) -> bool:
    return c.cell.variant == "core_risk" and d.kind in ("extra", "stack extra", "node extra") and api_base(d.record) == "Functional.linear"


def scope_end(d: Difference, c: Context) -> bool:
    if c.cell.variant != "scope":
        return False
    last = dict(c.cell.kind.section)["scope"][1]
    if d.kind in ("extra", "stack extra", "node extra"):
        node: str | None = d.record
        while node is not None and node != last:
            node = c.ours.construct.get(node)
        return node == last or d.record == c.ours.construct.get(last)
    outer = c.ours.construct.get(last)
    return d.kind in ("key extra", "order") and d.record in (last, outer)


def input_only(d: Difference, c: Context) -> bool:
    if c.cell.variant != "forward_input":
        return False
    return d.kind == "order" if c.version == "26.2.0" else d.kind == "key missing" and d.place == "parameters"


def in_place(d: Difference, c: Context) -> bool:
    """The activation in place and the module in front of it."""
    if c.cell.variant != "inplace":
        return False
    if d.kind in ("extra", "node extra"):
        return (d.record.endswith(".backward") and api_base(d.record) == "Functional.linear") or d.record.startswith("Module.head.")
    if d.kind == "parent":
        return str(d.theirs).startswith("Module.head.Head.backward.")
    if d.kind == "order":
        return d.record.startswith("Module.head.Head.backward.")
    return (
        c.version == "8.1.1"
        and d.kind == "value"
        and d.record.startswith("Module.head.relu.ReLU.forward.")
        and d.place.startswith("input_args.0.")
    )


def inside_batch(d: Difference, c: Context) -> bool:
    """The calls that batch_isend_irecv makes overwrite records of theirs that have their numbers."""
    if c.cell.variant != "p2p":
        return False
    base = api_base(d.record)
    if base in ("Distributed.isend", "Distributed.irecv"):
        return d.kind == "order" or d.place.startswith("output")
    if d.kind == "order":
        return c.theirs.data[d.record] == c.ours.data[d.record]  # it stands between them
    return base == "Distributed.batch_isend_irecv" and d.kind == "value" and d.place.startswith("output.") and ".tensor." in d.place


_PLUMBING = tuple(
    f"File /env/{path}"
    for path in (
        "msprobe/",
        "torch/_compile.py",
        "torch/_dynamo/",
        "torch/_tensor.py",
        "torch/autograd/function.py",
        "torch/nn/modules/module.py",
    )
)


def stack_frames(d: Difference, _: Context) -> bool:
    """Ours are theirs without frames that call on: of the tool, of module calls, of autograd functions and wrappers."""
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


def gradient_order(d: Difference, c: Context) -> bool:
    return d.kind == "order" and (".backward" in d.record or ".parameters_grad" in d.record) and near(d, c)


def no_input_gradient(d: Difference, c: Context) -> bool:
    """Theirs ends the backward record of a module without an input gradient before those of its children."""
    if d.kind == "order":
        return _MODULE.match(d.record) is not None and c.theirs.data[d.record].get("output") == []
    outer = d.ours if d.kind == "parent" else None
    while isinstance(outer, str) and outer != d.theirs and _takes_no_gradient(outer, c):
        outer = c.ours.construct.get(outer)
    return d.kind == "parent" and outer == d.theirs


def _takes_no_gradient(record: str, c: Context) -> bool:
    """Is this the backward record of a module whose inputs need no gradient? Task structure has no records: told by the class."""
    if c.cell.task == "structure":
        return re.search(r"\.(Embedding|Transformer)\.backward\.\d+$", record) is not None
    return c.theirs.data.get(record, {}).get("output") == []


def shapes_file(d: Difference, c: Context) -> bool:
    return c.cell.task == "structure" and d.kind == "layout" and d.place == "shapes.json" and bool(d.ours)


def settings_pack(d: Difference, _: Context) -> bool:
    return d.kind == "layout" and d.place == "config_check_pack.zip" and bool(d.ours)
