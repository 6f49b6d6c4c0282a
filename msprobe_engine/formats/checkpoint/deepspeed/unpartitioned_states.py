"""DeepSpeed's optimizer without ZeRO: states of a torch optimizer, and the float32 copies of weights in 16 bits beside them.

``FP16_UnfusedOptimizer`` and ``FP16_Optimizer`` (``deepspeed/runtime/fp16``) wrap a torch optimizer: ``optimizer_state_dict`` is its own
state, ``fp32_groups`` has the copies of each group, ``fp32_groups_flat`` one flat vector per group.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.dtypes import item_size
from msprobe_engine.core.io.input_files import open_input
from msprobe_engine.formats.checkpoint.deepspeed.zero_partitions import in_a_row, of_partitions
from msprobe_engine.formats.checkpoint.deepspeed.zero_rank_file import as_list
from msprobe_engine.formats.checkpoint.files.trainer_files import make_stored_tensor
from msprobe_engine.formats.checkpoint.model import OPTIMIZER, StoredTensor, whole
from msprobe_engine.formats.checkpoint.optimizer_names import Parameter, is_optimizer, optimizer_parts
from msprobe_engine.formats.tensors.decoding import decoder
from msprobe_engine.formats.tensors.torch_file import FileTensor, plain

_MASTER = "master"
_FEW = 256
"""Values by which two tensors of one shape are told apart."""


def read_unpartitioned_states(tree: Any, weights: Sequence[StoredTensor], values: dict[str, Any], notes: list[str]) -> list[StoredTensor]:
    """The states in an optimizer's entry, by parameter.

    Args:
        tree: the entry ``optimizer``.
        weights: parameters of the model in the order of the module, tied ones under each of their names.
        values: settings of the groups are added to these.
        notes: how names were found is added to these.
    """
    if not isinstance(tree, dict):
        return []
    inner: Any = tree.get("optimizer_state_dict")
    flat_states: list[StoredTensor] = []
    if is_optimizer(inner):
        rest = {str(key): item for key, item in tree.items() if key not in ("optimizer_state_dict", "fp32_groups", "fp32_groups_flat")}
        inner, flat_states = _taken_apart(inner, tree.get("fp32_groups_flat"), weights)
        inner = _with_masters(inner, tree.get("fp32_groups"), weights)
    elif is_optimizer(tree):
        inner, rest = tree, {}
    else:
        inner, rest = None, tree
    tensors, plain_values = plain(rest, "optimizer")
    values |= plain_values
    found = [make_stored_tensor(name, tensor, OPTIMIZER) for name, tensor in tensors.items()] + flat_states
    if inner is not None:
        parts = optimizer_parts(inner, _once(weights))
        values |= parts.values
        notes += parts.notes
        found += parts.tensors
    return found


def _taken_apart(optimizer: dict[Any, Any], vectors: Any, weights: Sequence[StoredTensor]) -> tuple[dict[Any, Any], list[StoredTensor]]:
    """The states of groups that are one flat vector each, by parameter; and the optimizer's state dict without them."""
    found: list[StoredTensor] = []
    states = dict(optimizer["state"])
    for group, vector in zip(optimizer["param_groups"], as_list(vectors)):
        numbers = as_list(group.get("params")) if isinstance(group, dict) else []
        run = _run_of(vector, weights) if isinstance(vector, FileTensor) else None
        if run is None or len(numbers) != 1 or not isinstance(numbers[0], int):
            continue
        slots, total = in_a_row({weight.name: weight.shape for weight in run})
        held = states.pop(numbers[0], None)
        for state, tensor in {_MASTER: vector, **(held if isinstance(held, dict) else {})}.items():
            if isinstance(tensor, FileTensor):
                for slot in slots:
                    if tensor.numel == total and tensor.strides == (1,):
                        boxes, shape = of_partitions(slot, {0: tensor}, total), slot.shape
                    else:  # the counter of steps
                        boxes, shape = whole(tensor.shape, tensor.file, tensor.start, tensor.strides), tensor.shape
                    found.append(StoredTensor(slot.name, shape, tensor.dtype, boxes, state=str(state), group=OPTIMIZER))
    return {**optimizer, "state": states}, found


def _run_of(vector: FileTensor, weights: Sequence[StoredTensor]) -> list[StoredTensor] | None:
    """The weights of a flat vector: while training they are slices of one, too, and ``torch.save`` keeps them side by side."""
    placed = sorted({w.boxes[0].start: w for w in reversed(weights) if len(w.boxes) == 1 and w.numel}.items())
    runs: list[list[StoredTensor]] = []
    end = -1
    for start, weight in placed:
        if start != end or weight.dtype != runs[-1][-1].dtype or weight.boxes[0].file != runs[-1][-1].boxes[0].file:
            runs.append([])
        runs[-1].append(weight)
        end = start + weight.numel * (item_size(weight.dtype) or 1)
    values = _first(vector.file, vector.start, vector.dtype, vector.numel)
    for run in runs:
        first = run[0].boxes[0]
        held = _first(first.file, first.start, run[0].dtype, sum(weight.numel for weight in run))
        if values is None or held is None or sum(weight.numel for weight in run) != vector.numel:
            continue
        if np.array_equal(_round_to_dtype(values, run[0].dtype), held, equal_nan=True):
            return run
    return None


def _with_masters(optimizer: dict[Any, Any], groups: Any, weights: Sequence[StoredTensor]) -> dict[Any, Any]:
    """A torch optimizer's state with the float32 copy of each parameter as one more state, and with names that follow from their values."""
    if not isinstance(groups, (list, tuple)):
        return optimizer
    states = dict(optimizer["state"])
    named = []
    for group, copies in zip(optimizer["param_groups"], groups):
        numbers = as_list(group.get("params")) if isinstance(group, dict) else []
        if numbers and isinstance(copies, (list, tuple)):
            for number, copy in zip(numbers, copies):
                if isinstance(copy, FileTensor) and isinstance(number, int):
                    held = states.get(number)
                    states[number] = {**(held if isinstance(held, dict) else {}), _MASTER: copy}
            names = _by_value(copies, weights)
            if names is not None and len(names) == len(numbers):
                group = {**group, "param_names": names}
        named.append(group)
    return {**optimizer, "state": states, "param_groups": named}


def _by_value(copies: Sequence[Any], weights: Sequence[StoredTensor]) -> list[str] | None:
    """The names of a group's parameters: of those with the shape of a copy, the one whose first values are the copy's in 16 bits."""
    found: list[str] = []
    for copy in copies:
        if not isinstance(copy, FileTensor) or (value := _first(copy.file, copy.start, copy.dtype, copy.numel)) is None:
            return None
        for weight in weights:
            if weight.shape == copy.shape and weight.name not in found and len(weight.boxes) == 1:
                held = _first(weight.boxes[0].file, weight.boxes[0].start, weight.dtype, weight.numel)
                if held is not None and np.array_equal(_round_to_dtype(value, weight.dtype), held, equal_nan=True):
                    found.append(weight.name)
                    break
        else:
            return None
    return found


def _first(file: Path, start: int, dtype: str, numel: int) -> npt.NDArray[np.float32] | None:
    """The first values of a tensor."""
    form, width = decoder(dtype), item_size(dtype)
    if form is None or width is None or dtype not in ("float32", "bfloat16", "float16"):
        return None
    try:
        with open_input(file) as opened:
            data = os.pread(opened.fileno(), min(numel, _FEW) * width, start)
    except OSError:
        return None
    words = np.frombuffer(data[: len(data) // width * width], form.words)
    return np.asarray(form.values(words) if form.values is not None else words, np.float32)


def _round_to_dtype(values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[np.float32]:
    """Float32 values after they were stored as `dtype`, rounded to the nearest, ties to even."""
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        bits = values.view(np.uint32).astype(np.uint64)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return values


def _once(weights: Sequence[StoredTensor]) -> list[Parameter]:
    """Each storage once: an optimizer has a tied parameter once, under its first name."""
    seen: set[Any] = set()
    found = []
    for tensor in weights:
        places = frozenset((box.file, box.start) for box in tensor.boxes) if tensor.numel else tensor.name
        if places not in seen:
            seen.add(places)
            found.append(Parameter(tensor.name, tensor.shape))
    return found
