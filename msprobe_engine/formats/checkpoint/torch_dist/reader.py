"""Megatron's distributed checkpoints: tensors of the whole model in files of ``torch.distributed.checkpoint`` (``torch_dist``) or zarr.

``metadata.json`` names the backend; ``common.pt`` has what is no tensor (newer versions: the object ``common_state/shard_0_1``); keys are
those of Megatron's sharded state dicts (`torch_dist_names`, `torch_dist_buffers`). Sources: core/dist_checkpointing/serialization.py and
strategies/torch.py of megatron-core 0.16.1 and 0.19; `torch_dist_zarr`.

Keys of Megatron's distributed checkpoints as names of single parameters: layers and experts out of stacks, halves together.

Layers of one kind are one tensor ``decoder.layers.mlp.linear_fc1.weight`` [layers, ...], experts of a layer another dimension of it:
``decoder.layers.mlp.experts.experts.linear_fc1.weight`` [layers, experts, ...]. Layers that differ have their number in the key; with
``singleton_local_shards`` experts have too, and a gated layer is ``..._w`` (gate) and ``..._v`` (up). Sources: ``sharded_state_dict`` of
core/transformer/transformer_block.py, mlp.py and moe/experts.py (megatron-core 0.16.1).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.core.io.json_text import parse_json
from msprobe_engine.formats.checkpoint.cuts import width_of
from msprobe_engine.formats.checkpoint.dcp.metadata import METADATA, Metadata, find_pieces, read_metadata, read_objects
from msprobe_engine.formats.checkpoint.files.small_files import read_text
from msprobe_engine.formats.checkpoint.flat_tables import plain
from msprobe_engine.formats.checkpoint.megatron.arguments import facts_of, find_padding_row, number
from msprobe_engine.formats.checkpoint.megatron.file import values_of
from msprobe_engine.formats.checkpoint.megatron.ranks import Sizes
from msprobe_engine.formats.checkpoint.megatron.states import groups_of, inner_of, parts_of, settings_of, step_of
from msprobe_engine.formats.checkpoint.model import (
    OPTIMIZER,
    RANDOM,
    Box,
    Checkpoint,
    Index,
    StoredTensor,
    concatenate_tensors,
    drop_dimension,
    flat,
    narrow,
    value_group,
    whole,
)
from msprobe_engine.formats.checkpoint.torch_dist.buffers import BucketKey, Buckets, bucket_key
from msprobe_engine.formats.checkpoint.torch_dist.zarr import read_arrays, read_shards
from msprobe_engine.formats.tensors.opaque_objects import attributes
from msprobe_engine.formats.tensors.torch_file import UnknownNameError, read_torch
from msprobe_engine.formats.tensors.torch_pickle import FileTensor

CONFIG, COMMON, COMMON_STATE = "metadata.json", "common.pt", "common_state/shard_0_1"
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?P<state>[A-Za-z0-9_]+)\.(?P<name>.+)")
_STATES = {"param": "master", "fp32_param": "master"}
_RANDOM = re.compile(r"rng_state/shard_(?P<pp>\d+)\.(?P<tp>\d+)_\d+\.\d+")
_SETTINGS = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.(?P<what>optimizer|grad_scaler)/shard_.*")
_SIZES_OF_BUCKETS = re.compile(r".*\.per_bucket_numel(_unpadded)?/shard_.*")


def read_checkpoint(path: Path, trust: Collection[str] = ()) -> Checkpoint:
    """What a directory with ``metadata.json`` holds.

    Args:
        path: ``iter_0000005``.
        trust: names (``module.Class``) that the files may hold beyond the known ones.

    Raises:
        DumpFormatError: its backend is not known, its description cannot be read, or it holds something that is not known.
    """
    backend = _backend(path)
    checkpoint = Checkpoint(path, f"Megatron {backend}", naming="megatron", files=[path / CONFIG])
    if backend == "torch_dist":
        metadata = read_metadata(path, trust)
        checkpoint.files.append(path / METADATA)
        checkpoint.problems += metadata.problems
        objects = _objects(metadata, trust, checkpoint)
        raw = _pieces(metadata, trust, checkpoint)
    elif backend == "zarr":
        raw, files = read_arrays(path, checkpoint.problems)
        objects = read_shards(path, trust, checkpoint.problems)
        checkpoint.files += files
    else:
        raise DumpFormatError(
            f"{path / CONFIG}: the sharded backend is {backend!r}; torch_dist and zarr are read. Load the checkpoint with the Megatron "
            "that wrote it and save it with --ckpt-format torch_dist"
        )
    common = _common(path, objects, trust, checkpoint)
    args = attributes(common.get("args"))
    checkpoint.facts = facts_of(args)
    _tensors(checkpoint, raw, args)
    _values(checkpoint, common, objects, args)
    return checkpoint


def _backend(path: Path) -> str:
    """The backend that ``metadata.json`` names.

    Raises:
        DumpFormatError: it cannot be read.
    """
    file = path / CONFIG
    try:
        found = parse_json(read_text(file, 1 << 20))
    except ValueError as error:
        raise DumpFormatError(f"{file}: is no JSON ({error}); was it cut off?") from None
    backend = found.get("sharded_backend") if isinstance(found, dict) else None
    if not isinstance(backend, str):
        raise DumpFormatError(f"{file}: names no sharded_backend; it is not that of a Megatron distributed checkpoint")
    return backend


def _objects(metadata: Metadata, trust: Collection[str], checkpoint: Checkpoint) -> dict[str, Any]:
    """What is no tensor, by key."""
    states = [key for key in metadata.objects if "_extra_state" in key]
    if states:
        checkpoint.notes.append(f"{len(states)} objects called _extra_state were passed over: states of low-precision recipes")
    wanted = [key for key in metadata.objects if "_extra_state" not in key and not _SIZES_OF_BUCKETS.fullmatch(key)]
    found, problems = read_objects(metadata, wanted, trust)
    checkpoint.problems += problems
    return found


def _pieces(metadata: Metadata, trust: Collection[str], checkpoint: Checkpoint) -> dict[str, StoredTensor]:
    pieces = find_pieces(metadata, metadata.tensors, trust)
    checkpoint.files += pieces.files
    checkpoint.problems += pieces.problems
    return {
        key: StoredTensor(key, entry.shape, entry.dtype, tuple(sorted(pieces.boxes[key], key=lambda box: box.offsets)))
        for key, entry in metadata.tensors.items()
    }


def _common(path: Path, objects: dict[str, Any], trust: Collection[str], checkpoint: Checkpoint) -> dict[str, Any]:
    """What all ranks have and is no tensor: of a file, or in newer versions one of `objects`, which is taken out."""
    found = _unwrap_single(objects.pop(COMMON_STATE, None))
    file = path / COMMON
    if found is None and file.exists():
        try:
            found = read_torch(file, trust).tree
            checkpoint.files.append(file)
        except UnknownNameError:
            raise
        except DumpFormatError as error:
            checkpoint.problems.append(str(error))
    elif found is None:
        checkpoint.problems.append(
            f"{file}: is missing, and there is no object {COMMON_STATE} in its place; arguments, iteration and schedule are in it"
        )
    if found is not None and not isinstance(found, dict):
        checkpoint.problems.append(f"{file}: holds a {type(found).__name__}, not what Megatron saves (args, iteration, ...)")
    return found if isinstance(found, dict) else {}


def _unwrap_single(value: Any) -> Any:
    """What an object holds: it is saved as a list of one."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _tensors(checkpoint: Checkpoint, raw: Mapping[str, StoredTensor], args: Mapping[str, Any]) -> None:
    model: list[StoredTensor] = []
    states: list[StoredTensor] = []
    buckets: dict[BucketKey, StoredTensor] = {}
    for key, tensor in raw.items():
        bucket = bucket_key(key)
        match = _STATE.fullmatch(key)
        if bucket is not None:
            buckets[bucket] = replace(tensor, group=OPTIMIZER)
        elif match is not None:
            state = _STATES.get(match["state"], match["state"])
            like = raw.get(match["name"])
            shaped = in_model_shape(tensor, like.shape) if like is not None and like.shape != tensor.shape else None
            states.append(replace(shaped or tensor, name=match["name"], state=state, group=OPTIMIZER, origin=key))
        elif key.startswith(("optimizer.", "chained_")):
            checkpoint.add(replace(tensor, group=OPTIMIZER))
            checkpoint.notes.append(f"{key} is a state of the optimizer in a form that is not known; it is compared as it is")
        elif "_extra_state" not in key:
            model.append(tensor)
    found = single(model)
    all_states = single(states)
    if buckets:
        held = Buckets(_sizes(args, buckets), {tensor.name: tensor for tensor in found}, buckets, bool(checkpoint.facts.get("tied")))
        all_states += held.tensors()
        checkpoint.problems += [f"{checkpoint.path}: {problem}" for problem in held.problems]
    for tensor in [*found, *all_states]:
        checkpoint.add(replace(tensor, padding=find_padding_row(args, tensor.name, tensor.shape)))


def _sizes(args: Mapping[str, Any], buckets: Collection[BucketKey]) -> Sizes:
    """Parallel sizes: of the arguments, else what the ranks of the buckets allow (no tensor parallelism)."""
    tp, ep = number(args, "tensor_model_parallel_size"), number(args, "expert_model_parallel_size") or 1
    ranks = 1 + max(key.rank for key in buckets if key.part == 0)
    pp = number(args, "pipeline_model_parallel_size") or max(1, ranks // (tp or 1))
    return Sizes(tp or 1, pp, ep, number(args, "expert_tensor_parallel_size") or tp or 1)


def _values(checkpoint: Checkpoint, common: Mapping[str, Any], objects: Mapping[str, Any], args: Mapping[str, Any]) -> None:
    checkpoint.values = values_of(args)
    tensors, values = plain({key: value for key, value in common.items() if key not in ("args", "optimizer", "model", "content_metadata")})
    checkpoint.values |= values
    _add(checkpoint, tensors)
    groups: list[dict[Any, Any]] = []
    steps: list[Any] = []
    for part in parts_of(common.get("optimizer")):
        inner = inner_of(part)
        groups += groups_of(inner)
        state = inner.get("state")
        if isinstance(state, dict) and "common_step" in state:
            steps.append(step_of(state["common_step"]))
        tensors, values = plain({"grad_scaler": part.get("grad_scaler")}, "optimizer")
        checkpoint.values |= {key: value for key, value in values.items() if value is not None}
        _add(checkpoint, tensors)
    for key, tree in objects.items():
        value = _unwrap_single(tree)
        random, settings = _RANDOM.fullmatch(key), _SETTINGS.fullmatch(key)
        if random is not None:
            tensors, values = plain(value, f"rng_state.tp{random['tp']}.pp{random['pp']}")
            checkpoint.values |= {name: item for name, item in values.items() if item is not None}
            _add(checkpoint, tensors, RANDOM)
        elif settings is not None and settings["what"] == "optimizer" and isinstance(value, dict):
            groups += groups_of(value)
        else:
            tensors, values = plain(value, "optimizer.grad_scaler" if settings is not None else key.partition("/shard_")[0])
            checkpoint.values |= values
            _add(checkpoint, tensors)
    found = settings_of(groups)
    if steps and "step" not in found:
        found["step"] = steps[0]
    checkpoint.values |= {f"optimizer.{key}": value for key, value in found.items()}


def _add(checkpoint: Checkpoint, tensors: Mapping[str, FileTensor], group: str = "") -> None:
    for name, tensor in tensors.items():
        if name not in checkpoint.tensors:
            boxes = whole(tensor.shape, tensor.file, tensor.start, tensor.strides)
            checkpoint.add(StoredTensor(name, tensor.shape, tensor.dtype, boxes, group=group or value_group(name)))


_STACK = re.compile(r"(?P<head>(?:[^.]+\.)*?layers)\.(?![0-9]+\.)(?P<rest>.+)")
_EXPERTS = re.compile(r"(?P<head>.*\.experts)\.experts\.(?P<rest>(?!\d+\.).+)")
_EXPERT = re.compile(r"(?P<head>.*\.experts)\.experts\.(?P<number>[0-9]{1,9})\.(?P<rest>.+)")
_HALF = re.compile(r"(?P<name>.*\.(?:weight|bias))_(?P<half>[wv])")


def single(tensors: Iterable[StoredTensor]) -> list[StoredTensor]:
    """The parameters (or their states) of single layers and experts.

    Args:
        tensors: by the checkpoint's keys, without what optimizers put before them.
    """
    found: list[StoredTensor] = []
    halves: dict[tuple[str, str], dict[str, StoredTensor]] = {}
    for tensor in tensors:
        for layer in _layers(tensor):
            for expert in _experts(layer):
                match = _HALF.fullmatch(expert.name)
                if match is None:
                    found.append(expert)
                else:
                    halves.setdefault((match["name"], expert.state), {})[match["half"]] = expert
    for (name, _), pair in halves.items():
        if len(pair) == 2:
            found.append(replace(concatenate_tensors([pair["w"], pair["v"]]), name=name))
        else:
            found += pair.values()
    return found


def in_model_shape(tensor: StoredTensor, shape: Index) -> StoredTensor | None:
    """A state that old versions saved as flat stretches of each rank's piece (``fully_sharded_model_space``), in the parameter's shape.

    Its dimensions are those of the parameter, with the number of pieces along each, and one of the elements of a piece
    (``nd_flattened_tensor_reformulated_global_shape``, strategies/resharding.py of megatron-core 0.7 to 0.15).

    Args:
        tensor: as it is stored.

    Returns:
        None: it is no such state of a parameter of this shape.
    """
    pieces = tensor.shape[:-1]
    if len(pieces) != len(shape) or any(count < 1 or size % count for size, count in zip(shape, pieces)):
        return None
    piece = tuple(size // count for size, count in zip(shape, pieces))
    if math.prod(piece) != tensor.shape[-1]:
        return None
    width = width_of(tensor)
    boxes: list[Box] = []
    for box in tensor.boxes:
        if any(size != 1 for size in box.sizes[:-1]) or box.strides[-1] != 1:
            return None
        origin = tuple(place * size for place, size in zip(box.offsets, piece))
        for part in flat(piece, box.offsets[-1], box.sizes[-1], box.file, box.start, width):
            boxes.append(replace(part, offsets=tuple(begin + offset for begin, offset in zip(origin, part.offsets))))
    return replace(tensor, shape=shape, boxes=tuple(boxes))


def _layers(tensor: StoredTensor) -> list[StoredTensor]:
    match = _STACK.fullmatch(tensor.name)
    if match is None or not tensor.shape:
        return [tensor]
    return _split_stack(tensor, [f"{match['head']}.{number}.{match['rest']}" for number in range(tensor.shape[0])])


def _experts(tensor: StoredTensor) -> list[StoredTensor]:
    numbered = _EXPERT.fullmatch(tensor.name)
    if numbered is not None:
        name = f"{numbered['head']}.local_experts.{int(numbered['number'])}.{numbered['rest']}"
        return [replace(tensor, name=name, origin=tensor.origin or tensor.name)]
    match = _EXPERTS.fullmatch(tensor.name)
    if match is None or not tensor.shape:
        return [tensor]
    return _split_stack(tensor, [f"{match['head']}.local_experts.{number}.{match['rest']}" for number in range(tensor.shape[0])])


def _split_stack(tensor: StoredTensor, names: list[str]) -> list[StoredTensor]:
    """The members of a stack along dimension 0. Most boxes lie in one member: each is looked at once."""
    width = width_of(tensor)
    members: list[list[Box]] = [[] for _ in names]
    for box in tensor.boxes:
        for place in range(box.offsets[0], box.offsets[0] + box.sizes[0]):
            members[place] += drop_dimension(narrow((box,), 0, place, 1, width), 0)
    origin = tensor.origin or tensor.name
    return [replace(tensor, name=name, shape=tensor.shape[1:], boxes=tuple(boxes), origin=origin) for name, boxes in zip(names, members)]
