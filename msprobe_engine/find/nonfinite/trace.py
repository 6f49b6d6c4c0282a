"""From the columns of one rank to a `Trace`: what each call takes in and gives out, and when."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from msprobe_engine.core.names import forward_twin, is_collective, node_parents
from msprobe_engine.core.operator_traits import OVERWRITES, normal_op
from msprobe_engine.find.nonfinite.flags import NONFINITE, Call, Trace, row_flags
from msprobe_engine.formats.dump.dump_table import INPUT, OUTPUT, PARAMETERS, PARAMETERS_GRAD, DumpTable

_ROLES = 5

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


_OVERWRITES = OVERWRITES | {"copy_", "set_", "resize_"}
"""Tensor methods that write all of their first argument and read none of it: a gradient buffer that holds the NaN of the step before
is no origin when it is zeroed."""


def _parse_name(name: str) -> tuple[str, str, str]:
    """(kind, direction, op) of a record name."""
    head, _, last = name.rpartition(".")
    if last in ("forward", "backward"):
        parts = head.split(".")
        op = parts[-2] if len(parts) >= 2 else head
        kind = "collective" if is_collective(name) else "api"
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
    kind, _, _ = _parse_name(name)
    parts = name.split(".")
    if parts[0] not in ("Module", "Cell"):
        return ""
    if kind == "gradient":
        cut = parts.index("parameters_grad")
        return ".".join(parts[1 : cut - 1])
    return ".".join(parts[1:-3]) if kind == "module" else ""


def only_written(kind: str, op: str, tags: Mapping[str, Any]) -> tuple[str, ...]:
    """Places of the argument that a call only writes to (by position, by name): what it holds before is no input.

    Args:
        kind, op: of the call.
        tags: further keys of the record.
    """
    # our own observer records real inputs only and tags its records; the existing tool records the arguments as they come
    own = tags.get("tags")
    foreign = kind == "collective" and not (isinstance(own, dict) and "group_ranks" in own)
    skip = WRITE_ONLY.get(normal_op(op)) if foreign else (0, "self") if kind == "api" and op in _OVERWRITES else None
    return () if skip is None else (str(skip[0]), skip[1])


def trace(dump: DumpTable, *, step: int, rank: int, complete: bool = True) -> Trace:
    """Build the trace of one rank. `complete`: the step was not cut off."""
    parents = node_parents(dump.construct)
    calls = list(_calls(dump, parents))
    if any(call.kind == "gradient" for call in calls):
        calls = _place_gradients(calls)
    for index, call in enumerate(calls):
        call.index = index
    result = Trace(step, rank, calls, dump, complete, str(dump.path.parent))
    result.parents = _with_backward_parents(calls, parents)
    return result


def _calls(dump: DumpTable, parents: Mapping[str, str | None]) -> Iterator[Call]:
    """The records in the order of the file; their place in time is not known yet."""
    flags = row_flags(dump)
    keys = np.array(dump.op, np.int64) * _ROLES + np.frombuffer(bytes(dump.role), np.uint8)
    united = np.zeros(len(dump.ops) * _ROLES, np.uint8)
    np.bitwise_or.at(united, keys, flags)
    counts = np.bincount(keys, minlength=len(united)).reshape(-1, _ROLES).tolist()
    sides = united.reshape(-1, _ROLES).tolist()
    for record, name in enumerate(dump.ops):
        if name.endswith(".debug"):
            continue
        kind, direction, op = _parse_name(name)
        rows, of_record, number = dump.rows(record), sides[record], counts[record]
        if kind == "gradient":
            yield Call(
                record, record, name, kind, direction, op, (), (), rows,
                0, 0, of_record[PARAMETERS_GRAD] | of_record[OUTPUT], parents.get(name), dump, flags,
            )  # fmt: skip
            continue
        ins: Sequence[int] = rows[: number[INPUT]]
        in_flags = of_record[INPUT]
        if direction == "forward" and (written := only_written(kind, op, dump.tags.get(record, {}))):
            begin = len(name) + len(".input.")
            ins = [row for row in ins if dump.name[row][begin:].partition(".")[0] not in written]
            in_flags = int(np.bitwise_or.reduce(flags[ins], initial=0))
        end = number[INPUT] + number[PARAMETERS]
        yield Call(
            record, record, name, kind, direction, op, ins, rows[number[INPUT] : end], rows[end:],
            in_flags, of_record[PARAMETERS], of_record[OUTPUT], parents.get(name), dump, flags,
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
