"""A rank's file of ZeRO's optimizer: ``*zero_pp_rank_{dp}_mp_rank_{mp}_optim_states.pt``.

Its keys are those of ``state_dict`` in ``deepspeed/runtime/zero/stage_1_and_2.py``, ``stage3.py`` and ``bf16_optimizer.py``.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.core.io.input_files import open_input
from msprobe_engine.formats.tensors.torch_file import FileTensor, Inert, attributes, plain

_FORMS = {"float32": "<f", "float64": "<d", "int64": "<q", "int32": "<i"}
_LAYOUT = (
    "group_paddings", "param_slice_mappings", "single_partition_of_fp32_groups", "fp32_flat_groups", "param_alignment_paddings",
    "ds_zero_partition_groups", "partition_count", "zero_stage", "ds_version", "universal_checkpoint_info",
)  # fmt: skip
"""Entries that say how the ranks have cut the states, and nothing of the training."""


@dataclass
class RankFile:
    """What a rank has of the optimizer.

    Attributes:
        stage: 1, 2 or 3; None: of DeepSpeed's bf16 optimizer, which cuts as stage 1 and has padding in its files.
        masters: flat float32 copies of the weights, one per group.
        states: of each group: name of a state -> flat tensor, or a tensor of one element, or a plain value.
        counts: partitions of each group.
        paddings: what fills up this rank's partition of each group.
        gaps: padding behind each parameter of each group (stages 1 and 2).
        fragments: of each group: name of a parameter -> first element in this rank's partition, elements (stages 1 and 2). With round robin
            gradients these are wrong (0.19.8), so they are only asked where the model's file does not name the parameters.
        places: of each group: number of this rank's partition, and the ranks that have the partitions; of groups that not all ranks
            share (stage 3 with experts).
        values: settings and counters, which all ranks have alike.
    """

    file: Path
    stage: int | None
    masters: list[FileTensor]
    states: list[dict[str, Any]]
    counts: list[int]
    paddings: list[int]
    gaps: list[list[int]]
    fragments: list[dict[str, tuple[int, int]]]
    places: list[tuple[int, tuple[int, ...]] | None] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)


def rank_file(tree: Mapping[str, Any], path: Path) -> RankFile:
    """Takes the tree of such a file apart.

    Raises:
        DumpFormatError: it has not the entries that DeepSpeed writes.
    """
    state = tree.get("optimizer_state_dict")
    if not isinstance(state, dict):
        raise DumpFormatError(f"{path}: has no entry 'optimizer_state_dict'; DeepSpeed's files of this name have one")
    stage = stage_of(state.get("zero_stage"))
    if "fp32_flat_groups" in state:
        masters, base = state["fp32_flat_groups"], state.get("optimizer_state_dict")
    else:
        masters, base = state.get("single_partition_of_fp32_groups"), state.get("base_optimizer_state")
    if not isinstance(masters, (list, tuple)) or not all(isinstance(part, FileTensor) and len(part.shape) == 1 for part in masters):
        raise DumpFormatError(f"{path}: has no flat float32 weights (fp32_flat_groups or single_partition_of_fp32_groups)")
    groups = len(masters)
    count = state.get("partition_count")
    counts = count if isinstance(count, list) else [count] * groups
    return RankFile(
        path,
        stage,
        list(masters),
        _states(base, groups),
        [n if type(n) is int and n > 0 else 0 for n in counts[:groups]] + [0] * (groups - len(counts)),
        _numbers(state.get("group_paddings"), groups),
        [_numbers(row, 0) for row in _per_group(state.get("param_alignment_paddings"), groups)],
        [_fragments(row) for row in _per_group(state.get("param_slice_mappings"), groups)],
        [_place(row) for row in _per_group(state.get("ds_zero_partition_groups"), groups)],
        settings(state, base),
    )


def stage_of(value: Any) -> int | None:
    """The number of a ``ZeroStageEnum``, as a number or as an object of a pickle."""
    if isinstance(value, Inert):
        value = value.args[0] if len(value.args) == 1 else None
    return value if type(value) is int and 0 <= value <= 3 else None


def scalar(tensor: FileTensor) -> float | int | None:
    """The value of a tensor of one element: a step. The only bytes of tensors that a reader looks at."""
    form = _FORMS.get(tensor.dtype)
    if form is None or tensor.numel != 1:
        return None
    try:
        with open_input(tensor.file) as file:
            data = os.pread(file.fileno(), struct.calcsize(form), tensor.start)
    except OSError:
        return None
    if len(data) < struct.calcsize(form):
        return None
    value: float | int = struct.unpack(form, data)[0]
    return int(value) if value == value and abs(value) < 1 << 53 and value == int(value) else value


def _states(base: Any, groups: int) -> list[dict[str, Any]]:
    """States by group: of a torch optimizer, whose parameters are the flat vectors, or a list of them (elastic checkpoints)."""
    if isinstance(base, list):
        found = [row if isinstance(row, dict) else {} for row in base]
    elif isinstance(base, dict) and isinstance(base.get("state"), dict):
        order = [
            number
            for group in as_list(base.get("param_groups"))
            if isinstance(group, dict)
            for number in as_list(group.get("params"))
            if isinstance(number, (int, str))
        ]
        states = base["state"]
        found = [states[n] if n in states and isinstance(states[n], dict) else {} for n in (order or sorted(states, key=str))]
    else:
        found = []
    return [{str(key): item for key, item in row.items()} for row in (*found, *({} for _ in range(groups)))][:groups]


def as_list(value: Any) -> list[Any]:
    """The elements of a list or a tuple; nothing of anything else."""
    return list(value) if isinstance(value, (list, tuple)) else []


def _per_group(value: Any, groups: int) -> list[Any]:
    return (as_list(value) + [None] * groups)[:groups]


def _numbers(value: Any, count: int) -> list[int]:
    found = [item if type(item) is int and item >= 0 else 0 for item in as_list(value)]
    return found + [0] * (count - len(found))


def _fragments(value: Any) -> dict[str, tuple[int, int]]:
    found = {}
    for name, address in value.items() if isinstance(value, dict) else ():
        place = attributes(address)
        if type(place.get("start")) is int and type(place.get("numel")) is int:
            found[str(name)] = place["start"], place["numel"]
    return found


def _place(value: Any) -> tuple[int, tuple[int, ...]] | None:
    if isinstance(value, dict):
        number, ranks = value.get("partition_rank"), value.get("partition_ranks")
        if (
            isinstance(ranks, (list, tuple))
            and all(type(rank) is int for rank in ranks)
            and type(number) is int
            and 0 <= number < len(ranks)
        ):
            return number, tuple(ranks)
    return None


def settings(state: Mapping[str, Any], base: Any) -> dict[str, Any]:
    """Plain values: of the optimizer by path below ``optimizer``, of its groups of parameters below ``optimizer.param_groups``."""
    inner = ("optimizer_state_dict", "base_optimizer_state", *_LAYOUT)
    _, values = plain({str(key): item for key, item in state.items() if key not in inner}, "optimizer")
    for number, group in enumerate(as_list(base.get("param_groups"))) if isinstance(base, dict) else ():
        if isinstance(group, dict):
            values |= plain({str(key): item for key, item in group.items() if key != "params"}, f"optimizer.param_groups.{number}")[1]
    return values
