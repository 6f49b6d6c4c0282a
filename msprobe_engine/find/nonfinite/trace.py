"""From the JSON of one rank (dump.json, stack.json, construct.json) to a `Trace`.

Formats of the existing tool 8.1.1 and 26.2.0 and of this project; record names follow `Module.path.Class.forward.N` and
`Prefix.api.N.forward`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msprobe_engine.core.names import forward_twin
from msprobe_engine.core.operator_traits import normal_op
from msprobe_engine.find.nonfinite.flags import NONFINITE, UNSEARCHED, Call, OddTensorError, Trace, flags_of
from msprobe_engine.formats.dump.stacks import stack_lines

WRITE_ONLY: dict[str, tuple[int, str]] = {
    "recv": (0, "tensor"),
    "irecv": (0, "tensor"),
    "recvanysource": (0, "tensor"),
    "allgather": (0, "tensor_list"),
    "gather": (1, "gather_list"),
    "scatter": (0, "tensor"),
    "reducescatter": (0, "output"),
    "reducescatterbase": (0, "output"),
    "allgatherbase": (0, "output_tensor"),
    "alltoall": (0, "output_tensor_list"),
    "alltoallsingle": (0, "output"),
    "alltoallbase": (0, "output"),
    "allgatherintotensor": (0, "output_tensor"),
    "allgathersingle": (0, "output_tensor"),
    "allgathercoalesced": (0, "output_tensor_lists"),
    "allgatherintotensorcoalesced": (0, "output_tensors"),
    "reducescattertensor": (0, "output"),
    "reducescattersingle": (0, "output"),
    "reducescattertensorcoalesced": (0, "outputs"),
}
"""Buffers that a communication call only writes to: argument position and keyword. What they hold before is not an input."""


OVERWRITES = frozenset(
    (
        *("zero_", "fill_", "copy_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "geometric_", "log_normal_"),
        *("cauchy_", "set_", "resize_"),
    )
)
"""Tensor methods that write all of their first argument and read none of it: a gradient buffer that holds the NaN of the step before
is no origin when it is zeroed."""


def _split(name: str) -> tuple[str, str, str]:
    """(kind, direction, op) of a record name."""
    head, _, last = name.rpartition(".")
    if last in ("forward", "backward"):
        parts = head.split(".")
        op = parts[-2] if len(parts) >= 2 else head
        kind = "collective" if parts[0] in ("Distributed", "MintDistributed") else "api"
        return kind, last, op
    rest, _, middle = head.rpartition(".")
    if middle in ("forward", "backward"):
        return "module", middle, rest.rpartition(".")[2]
    if last == "parameters_grad":
        return "gradient", "backward", head.rpartition(".")[2]
    if middle == "parameters_grad":
        return "gradient", "backward", rest.rpartition(".")[2]
    return "api", "forward", head or name


def module_path(name: str) -> str:
    """``Module.decoder.layers.0.mlp.MLP.forward.0`` -> ``decoder.layers.0.mlp``; "" for names that are no module."""
    kind, _, _ = _split(name)
    parts = name.split(".")
    if parts[0] not in ("Module", "Cell"):
        return ""
    if kind == "gradient":
        cut = parts.index("parameters_grad")
        return ".".join(parts[1 : cut - 1])
    return ".".join(parts[1:-3]) if kind == "module" else ""


def inputs_of(kind: str, op: str, record: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """(place, JSON structure) of what a call reads; buffers that it only writes to are left out."""
    pairs: list[tuple[str, Any]] = []
    # our own observer records real inputs only and tags its records; the existing tool records the arguments as they come
    tags = record.get("tags")
    foreign = kind == "collective" and not (isinstance(tags, dict) and "group_ranks" in tags)
    skip = WRITE_ONLY.get(normal_op(op)) if foreign else (0, "self") if kind == "api" and op in OVERWRITES else None
    for key, place in (("input_args", "input"), ("input", "input"), ("input_kwargs", "kwargs")):
        node = record.get(key)
        if node is None:
            continue
        if skip is not None:
            if isinstance(node, list) and key == "input_args" and len(node) > skip[0]:
                node = [None if i == skip[0] else child for i, child in enumerate(node)]
            elif isinstance(node, dict):
                node = {k: v for k, v in node.items() if k != skip[1]}
        pairs.append((place, node))
    return pairs


def _parent_of(value: Any) -> str | None:
    if isinstance(value, (list, tuple)):  # Megatron runs of 26.2.0: [parent, micro step]
        value = value[0] if value else None
    return value if isinstance(value, str) and value else None


def trace(
    data: Mapping[str, Mapping[str, Any]],
    construct: Mapping[str, Any] | None = None,
    stack: Mapping[str, Any] | None = None,
    *,
    step: int,
    rank: int,
    complete: bool = True,
    path: str = "",
) -> Trace:
    """Build the trace of one rank.

    Args:
        data: the ``data`` object of dump.json, in file order, which is order of completion.
        construct: construct.json, child to parent (or to ``[parent, micro step]``).
        stack: stack.json, either layout.
    """
    parents: dict[str, str | None] = {
        name: _parent_of(value) for name, value in (construct or {}).items() if name != "megatron_micro_step_number"
    }
    calls: list[Call] = []
    left_out: list[str] = []
    for name, record in data.items():
        try:
            if isinstance(record, dict):
                calls.append(_call(name, record, parents.get(name)))
        except OddTensorError:
            left_out.append(name)
    if any(call.kind == "gradient" for call in calls):
        calls = _place_gradients(calls)
    for index, call in enumerate(calls):
        call.index = index
    stacks, odd_stacks = stack_lines(stack or {})
    result = Trace(step, rank, calls, stacks, complete, path)
    result.left_out, result.odd_stacks = left_out, odd_stacks
    result.unsearched = [call.name for call in calls if (call.in_flags | call.parameter_flags | call.out_flags) & UNSEARCHED]
    result.parents = _with_backward_parents(calls, parents)
    return result


def _call(name: str, record: Mapping[str, Any], parent: str | None) -> Call:
    """One record; its place in time is not known yet."""
    kind, direction, op = _split(name)
    if kind == "gradient":
        return Call(0, name, kind, direction, op, [], None, [("", dict(record))], 0, 0, flags_of(record), parent, record)
    ins = inputs_of(kind, op, record)
    parameters = record.get("parameters")
    outs = [("output", record.get("output"))]
    in_flags = 0
    for _, node in ins:
        in_flags |= flags_of(node)
    return Call(
        0, name, kind, direction, op, ins, parameters, outs,
        in_flags, flags_of(parameters) if parameters else 0, flags_of(outs[0][1]), parent, record,
    )  # fmt: skip


def _place_gradients(calls: list[Call]) -> list[Call]:
    """Parameter gradients where they became known: not before the backward call of their module, whose inputs they share.

    8.1.1 puts their placeholder right after the module's forward and fills it later; 26.2.0 writes them in time.
    """
    backward: dict[str, int] = {}
    for place, call in enumerate(calls):
        if call.kind == "module" and call.direction == "backward":
            backward[call.name.partition(".backward")[0]] = place
    keys: list[tuple[int, int]] = []
    for place, call in enumerate(calls):
        key = (place, 0)
        if call.kind == "gradient":
            source = backward.get(call.name.partition(".parameters_grad")[0])
            if source is None:
                key = (len(calls), place)
            else:
                call.ins, call.in_flags = calls[source].ins, calls[source].in_flags
                key = (max(place, source), 1)
        keys.append(key)
    return [calls[i] for i in sorted(range(len(calls)), key=keys.__getitem__)]


def _with_backward_parents(calls: Sequence[Call], parents: Mapping[str, str | None]) -> dict[str, str | None]:
    """construct.json often has forward nodes only; a backward call then hangs under the backward of its forward's parent."""
    names = {call.name for call in calls}
    full = dict(parents)
    for call in calls:
        if call.parent is None and call.direction == "backward" and call.kind != "gradient" and call.name not in parents:
            up = parents.get(forward_twin(call.name))
            if up:
                twin = up.replace(".forward", ".backward", 1)
                call.parent = twin if twin in names else up
                full[call.name] = call.parent
    for name in list(full):
        if ".backward" in name and full[name] is None:
            up = parents.get(forward_twin(name))
            if up and up.replace(".forward", ".backward", 1) in names:
                full[name] = up.replace(".forward", ".backward", 1)
    for call in calls:
        if call.parent is None:
            call.parent = full.get(call.name)
    return full


def is_interesting(call: Call) -> bool:
    """Does the call hold anything non-finite?"""
    return bool((call.in_flags | call.out_flags | call.parameter_flags) & NONFINITE)
