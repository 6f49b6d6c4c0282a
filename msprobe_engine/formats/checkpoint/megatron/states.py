"""Optimizer states in a rank's files of a Megatron ``torch`` checkpoint, by parameter, in the rank's own shapes.

``optimizer`` is the state dict of one optimizer or a list of them (dense parameters, experts): ``{"state", "param_groups"}`` of
FP32Optimizer; ``{"optimizer": {...}, "fp32_from_fp16_params": [[tensor]], "grad_scaler"}`` of Float16OptimizerWithFloat16Params; without
states for the distributed optimizer, whose flat buffers are in ``distrib_optim.pt``. Sources: core/optimizer/optimizer.py,
core/optimizer/distrib_optimizer.py of megatron-core 0.16.1.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msprobe_engine.core.dtypes import item_size, plain_name
from msprobe_engine.core.io.input_files import open_input
from msprobe_engine.formats.checkpoint.flat_tables import plain
from msprobe_engine.formats.checkpoint.megatron.buffers import find_layout
from msprobe_engine.formats.checkpoint.megatron.cuts import is_expert
from msprobe_engine.formats.checkpoint.megatron.groups import Parameter, label, members_of
from msprobe_engine.formats.checkpoint.model import OPTIMIZER, Index, StoredTensor, whole
from msprobe_engine.formats.tensors.opaque_objects import Named
from msprobe_engine.formats.tensors.torch_pickle import FileTensor

HALF = ("float16", "bfloat16")
_BUFFERS = ("expert_bias", "_extra_state", "tokens_per_expert", "inv_freq", "num_batches_tracked")
_NOT_SETTINGS = ("params", "param_names", "is_expert_parallel", "step")
Key = tuple[int, str]
"""Model chunk and name in it."""


@dataclass
class RankStates:
    """What the files of one rank hold of the optimizer.

    Attributes:
        tensors: by parameter and state.
        values: settings of the groups, steps, loss scale, by path below ``optimizer``.
        extra: tensors that belong to no parameter, by path.
        experts_apart: experts are cut over expert-parallel ranks and have groups and buffers of their own.
        problems: what could not be told or is damaged.
    """

    tensors: dict[tuple[Key, str], StoredTensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, FileTensor] = field(default_factory=dict)
    experts_apart: bool = False
    problems: list[str] = field(default_factory=list)

    def add_state(self, parameter: Parameter, state: str, tensor: FileTensor) -> None:
        """Take in a state that has the parameter's shape."""
        boxes = whole(tensor.shape, tensor.file, tensor.start, tensor.strides)
        self.tensors[parameter.key, state] = StoredTensor(parameter.name, tensor.shape, tensor.dtype, boxes, state=state, group=OPTIMIZER)


def parameters_of(chunks: Sequence[Mapping[str, FileTensor]]) -> list[Parameter]:
    """The parameters of a rank: all of its tensors but the known buffers."""
    return [
        Parameter((number, name), tensor.shape, tensor.dtype)
        for number, chunk in enumerate(chunks)
        for name, tensor in chunk.items()
        if not name.endswith(_BUFFERS) and (tensor.dtype.startswith(("float", "bfloat")) or tensor.dtype == "uint8")
    ]


def states_of(path: Path, tree: Any, chunks: Sequence[Mapping[str, FileTensor]]) -> RankStates:
    """What ``optimizer`` of a rank's file holds.

    Args:
        path: for messages.
        tree: the value of ``optimizer``.
        chunks: the rank's model.
    """
    out = RankStates()
    parts = list(parts_of(tree))
    if not parts:
        out.problems.append(f"{path}: its optimizer is in a form that is not known; optimizer states are not compared")
        return out
    inner = [inner_of(part) for part in parts]
    groups = [group for part in inner for group in groups_of(part)]
    for part in parts:
        _settings(part, out)
    out.experts_apart = any(group.get("is_expert_parallel") for group in groups)
    out.values |= settings_of(groups)
    states = [_dict(part.get("state")) for part in inner]
    if any(states) or any(_masters(part) for part in parts):
        _add_numbered_states(path, parts, inner, states, groups, chunks, out)
    return out


def settings_of(groups: Sequence[Mapping[Any, Any]]) -> dict[str, Any]:
    """Settings of parameter groups by path: ``param_groups.decayed.lr``; and the step, where groups have it."""
    found: dict[str, Any] = {}
    for group in groups:
        _, values = plain({key: value for key, value in group.items() if key not in _NOT_SETTINGS})
        path = f"param_groups.{label(group)}"
        if any(found.get(f"{path}.{key}", value) != value for key, value in values.items()):
            path += "_experts" if group.get("is_expert_parallel") else "_more"
        found.update({f"{path}.{key}": value for key, value in values.items()})
        if isinstance(group.get("step"), (int, float)):
            found["step"] = group["step"]
    return found


def parts_of(tree: Any) -> Iterator[dict[Any, Any]]:
    """The state dicts of the optimizers (one; or dense parameters and experts) in the value of ``optimizer``."""
    if isinstance(tree, (list, tuple)):
        for part in tree:
            yield from parts_of(part)
    elif isinstance(tree, dict):
        if tree and all(isinstance(key, int) for key in tree):
            for _, part in sorted(tree.items()):
                yield from parts_of(part)
        elif "param_groups" in tree or "optimizer" in tree or "optimizer_state_dict" in tree:
            yield tree


def inner_of(part: dict[Any, Any]) -> dict[Any, Any]:
    """The state dict of torch in an optimizer's part."""
    for key in ("optimizer", "optimizer_state_dict"):
        if isinstance(part.get(key), dict):
            return dict(part[key])
    return part


def groups_of(optimizer: Mapping[Any, Any]) -> list[dict[Any, Any]]:
    """The parameter groups in a state dict of torch."""
    return [group for group in _list(optimizer.get("param_groups")) if isinstance(group, dict)]


def _masters(part: dict[Any, Any]) -> list[Any]:
    for key in ("fp32_from_fp16_params", "fp32_from_fp16"):
        if isinstance(part.get(key), (list, tuple)):
            return list(part[key])
    return []


def _settings(part: dict[Any, Any], out: RankStates) -> None:
    kept = {
        k: v
        for k, v in part.items()
        if k not in ("optimizer", "optimizer_state_dict", "state", "param_groups", "fp32_from_fp16_params", "fp32_from_fp16")
    }
    tensors, values = plain(kept)
    out.extra |= tensors
    out.values |= values


def _add_numbered_states(
    path: Path,
    parts: Sequence[dict[Any, Any]],
    inner: Sequence[dict[Any, Any]],
    states: Sequence[dict[Any, Any]],
    groups: Sequence[dict[Any, Any]],
    chunks: Sequence[Mapping[str, FileTensor]],
    out: RankStates,
) -> None:
    """States by number: names follow from the groups and the order of the model."""
    owners = [(part, i) for part, tree in enumerate(inner) for i, _ in enumerate(groups_of(tree))]
    numbers = [[n if isinstance(n, (int, str)) else None for n in _list(group.get("params"))] for group in groups]
    shapes: list[list[Index | None]] = [
        [_shape(states[owner].get(number)) for number in some] for (owner, _), some in zip(owners, numbers, strict=True)
    ]
    members = members_of(parameters_of(chunks), groups, shapes)
    if members is None:
        out.problems.append(
            f"{path}: it does not follow from the groups of the optimizer ({', '.join(str(len(some)) for some in numbers)} parameters) and "
            f"the {len(parameters_of(chunks))} parameters of the model which state belongs to which; optimizer states are not compared"
        )
        return
    steps: dict[Any, list[str]] = {}
    for (owner, index), some, group in zip(owners, numbers, members, strict=True):
        for number, parameter in zip(some, group, strict=True):
            for what, value in _dict(states[owner].get(number)).items():
                if what == "step":
                    steps.setdefault(step_of(value), []).append(parameter.name)
                elif isinstance(value, FileTensor) and value.shape == parameter.shape:
                    out.add_state(parameter, str(what), value)
                elif isinstance(value, FileTensor):
                    out.problems.append(
                        f"{path}: state {what} of {parameter.name} has shape {list(value.shape)}, its parameter {list(parameter.shape)}; "
                        "not compared"
                    )
        masters = _masters(parts[owner])
        halves = [parameter for parameter in group if parameter.dtype in HALF]
        copies = _list(masters[index]) if index < len(masters) else []
        if copies and [getattr(copy, "shape", None) for copy in copies] != [parameter.shape for parameter in halves]:
            out.problems.append(
                f"{path}: the float32 copies of parameter group {index} do not have the shapes of its {len(halves)} parameters; not "
                "compared"
            )
        else:
            for parameter, copy in zip(halves, copies):
                out.add_state(parameter, "master", copy)
    if steps:
        common = max(steps, key=lambda step: len(steps[step]))
        out.values["step"] = common
        for step, names in steps.items():
            if step != common:
                out.values |= {f"steps.{name}": step for name in names}


def _shape(state: Any) -> Index | None:
    shapes = {value.shape for value in _dict(state).values() if isinstance(value, FileTensor) and value.shape}
    return shapes.pop() if len(shapes) == 1 else None


def step_of(value: Any) -> Any:
    """A step: a number, or a tensor of one element, which is read (4 or 8 bytes)."""
    if not isinstance(value, FileTensor):
        return value if isinstance(value, (int, float)) else None
    form = {"float32": "<f", "float64": "<d", "int64": "<q", "int32": "<i"}.get(value.dtype)
    if form is None or value.numel != 1:
        return None
    with open_input(value.file) as file:
        file.seek(value.start)
        data = file.read(struct.calcsize(form))
    return struct.unpack(form, data)[0] if len(data) == struct.calcsize(form) else None


def distributed_states(
    path: Path,
    tree: Any,
    chunks: Sequence[Mapping[str, FileTensor]],
    alone: Collection[Key],
    bucket_sizes: Sequence[int | None],
    out: RankStates,
) -> None:
    """States of ``distrib_optim.pt``: parameters out of flat buffers.

    Args:
        path: for messages.
        tree: of the file: ``{buffer: {(dtype, dtype of gradients): {"param", "exp_avg", "exp_avg_sq", "numel_unpadded"}}}``, or a list of
            these: dense parameters, experts.
        chunks: the rank's model.
        alone: embeddings that the first and the last stage share, which have a bucket of their own.
        bucket_sizes: that the run may have had, in elements; None: one bucket.
    """
    parts = list(tree) if isinstance(tree, (list, tuple)) else [tree]
    everything = parameters_of(chunks)
    for number, part in enumerate(parts):
        if part is None:  # another rank's file has them
            continue
        if not isinstance(part, dict):
            out.problems.append(f"{path}: holds a {type(part).__name__} where buffers of an optimizer should be; not compared")
            continue
        if not part.get("buckets_coalesced"):
            out.problems.append(
                f"{path}: was written before Megatron put the buckets of a buffer together; optimizer states are not compared"
            )
            continue
        own_parameters = [parameter for parameter in everything if not out.experts_apart or is_expert(parameter.name) == (number > 0)]
        expected = list(dict.fromkeys((parameter.key[0], parameter.dtype) for parameter in own_parameters))
        buffers = [
            (str(index), kinds, held)
            for index, by_kind in sorted((k, v) for k, v in part.items() if isinstance(k, int) and isinstance(v, dict))
            for kinds, held in by_kind.items()
        ]
        if len(expected) != len(buffers):
            out.problems.append(
                f"{path}: holds {len(buffers)} buffers, but the model has {len(expected)} (of {len(chunks)} chunks); optimizer states are "
                "not compared"
            )
            continue
        for (chunk, dtype), (index, kinds, held) in zip(expected, buffers, strict=True):
            members = [parameter for parameter in own_parameters if parameter.key[0] == chunk and parameter.dtype == dtype][::-1]
            _from_buffer(f"{path}: buffer {index}", dtype, kinds, held, members, alone, bucket_sizes, out)


def _from_buffer(
    where: str,
    dtype: str,
    kinds: Any,
    held: Any,
    members: Sequence[Parameter],
    alone: Collection[Key],
    bucket_sizes: Sequence[int | None],
    out: RankStates,
) -> None:
    kind = kinds[0] if isinstance(kinds, tuple) and kinds else None
    if not isinstance(kind, Named) or plain_name(kind.name) != dtype or not isinstance(held, dict):
        out.problems.append(f"{where} is of {kind}, but its parameters are of {dtype}; not compared")
        return
    flats = {str(key): value for key, value in held.items() if isinstance(value, FileTensor)}
    numels = [math.prod(parameter.shape) for parameter in members]
    for state, tensor in flats.items():
        width = item_size(tensor.dtype) or 0
        own = {i for i, parameter in enumerate(members) if parameter.key in alone}
        layout = find_layout(numels, tensor.numel, own, bucket_sizes)
        if layout is None or not width or tensor.strides != (1,):
            out.problems.append(
                f"{where} has {tensor.numel} elements of {state}, which {len(members)} parameters of {sum(numels)} elements do not fill "
                "in the way Megatron lays them out; not compared"
            )
            continue
        name = "master" if state == "param" else state
        for parameter, start in zip(members, layout.starts(), strict=True):
            boxes = whole(parameter.shape, tensor.file, tensor.start + start * width)
            out.tensors[parameter.key, name] = StoredTensor(
                parameter.name, parameter.shape, tensor.dtype, boxes, state=name, group=OPTIMIZER
            )


def _dict(value: Any) -> dict[Any, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else []
