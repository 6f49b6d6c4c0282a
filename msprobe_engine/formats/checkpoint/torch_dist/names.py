"""Keys of Megatron's distributed checkpoints as names of single parameters: layers and experts out of stacks, halves together.

Layers of one kind are one tensor ``decoder.layers.mlp.linear_fc1.weight`` [layers, ...], experts of a layer another dimension of it:
``decoder.layers.mlp.experts.experts.linear_fc1.weight`` [layers, experts, ...]. Layers that differ have their number in the key; with
``singleton_local_shards`` experts have too, and a gated layer is ``..._w`` (gate) and ``..._v`` (up). Sources: ``sharded_state_dict`` of
core/transformer/transformer_block.py, mlp.py and moe/experts.py (megatron-core 0.16.1).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import replace

from msprobe_engine.formats.checkpoint.cuts import width_of
from msprobe_engine.formats.checkpoint.model import Box, Index, StoredTensor, dropped, flat, joined, narrow

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
            found.append(replace(joined([pair["w"], pair["v"]]), name=name))
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
            boxes.append(replace(part, offsets=tuple(a + b for a, b in zip(origin, part.offsets))))
    return replace(tensor, shape=shape, boxes=tuple(boxes))


def _layers(tensor: StoredTensor) -> list[StoredTensor]:
    match = _STACK.fullmatch(tensor.name)
    if match is None or not tensor.shape:
        return [tensor]
    return _unstacked(tensor, [f"{match['head']}.{number}.{match['rest']}" for number in range(tensor.shape[0])])


def _experts(tensor: StoredTensor) -> list[StoredTensor]:
    numbered = _EXPERT.fullmatch(tensor.name)
    if numbered is not None:
        name = f"{numbered['head']}.local_experts.{int(numbered['number'])}.{numbered['rest']}"
        return [replace(tensor, name=name, origin=tensor.origin or tensor.name)]
    match = _EXPERTS.fullmatch(tensor.name)
    if match is None or not tensor.shape:
        return [tensor]
    return _unstacked(tensor, [f"{match['head']}.local_experts.{number}.{match['rest']}" for number in range(tensor.shape[0])])


def _unstacked(tensor: StoredTensor, names: list[str]) -> list[StoredTensor]:
    """The members of a stack along dimension 0. Most boxes lie in one member: each is looked at once."""
    width = width_of(tensor)
    members: list[list[Box]] = [[] for _ in names]
    for box in tensor.boxes:
        for number in range(box.offsets[0], box.offsets[0] + box.sizes[0]):
            members[number] += dropped(narrow((box,), 0, number, 1, width), 0)
    origin = tensor.origin or tensor.name
    return [replace(tensor, name=name, shape=tensor.shape[1:], boxes=tuple(boxes), origin=origin) for name, boxes in zip(names, members)]
