"""One rank's ``model_optim_rng.pt`` of a Megatron ``torch`` checkpoint: its model chunks, its arguments, its optimizer."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msprobe_engine.core.dtypes import item_size
from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.formats.checkpoint.flat_tables import plain
from msprobe_engine.formats.checkpoint.megatron.ranks import Rank
from msprobe_engine.formats.checkpoint.megatron.states import RankStates
from msprobe_engine.formats.checkpoint.model import StoredTensor, whole
from msprobe_engine.formats.tensors.opaque_objects import attributes
from msprobe_engine.formats.tensors.torch_file import read_torch
from msprobe_engine.formats.tensors.torch_pickle import FileTensor

_CHUNK = re.compile(r"model(\d{0,3})")
_WIDE = re.compile(r"(?P<head>.*\.experts\.)weight(?P<number>[12])")


@dataclass
class RankFile:
    """What a rank wrote.

    Attributes:
        args: the run's arguments by name; {} where the file has none.
        chunks: tensors of each model chunk (one without virtual pipeline) by the name they have there.
        tree: the rest of the file: everything but the model.
        skipped: tensors that are passed over, by name: states of low-precision recipes.
    """

    path: Path
    rank: Rank
    args: dict[str, Any]
    chunks: list[dict[str, FileTensor]]
    tree: dict[str, Any]
    skipped: list[str] = field(default_factory=list)
    states: RankStates = field(default_factory=RankStates)


def read_rank(path: Path, rank: Rank, trust: Collection[str]) -> RankFile:
    """One rank's file.

    Raises:
        DumpFormatError: it cannot be read or holds no model.
    """
    tree = read_torch(path, trust).tree
    if not isinstance(tree, dict):
        raise DumpFormatError(f"{path}: holds a {type(tree).__name__}, not what Megatron saves (args, model, optimizer, ...)")
    found = {int(match[1] or 0): key for key in tree if isinstance(key, str) and (match := _CHUNK.fullmatch(key))}
    if not found or sorted(found) != list(range(len(found))):
        raise DumpFormatError(
            f"{path}: holds no `model` and no `model0`, `model1`, ...; its keys are {', '.join(map(str, list(tree)[:12]))}"
        )
    skipped: list[str] = []
    chunks = []
    for _, key in sorted(found.items()):
        if not isinstance(tree[key], dict):
            raise DumpFormatError(f"{path}: its `{key}` is no table of tensors")
        tensors, _ = plain(tree[key])
        skipped += [name for name in tensors if "_extra_state" in name]
        chunks.append({name: tensor for name, tensor in tensors.items() if "_extra_state" not in name})
    rest = {str(key): value for key, value in tree.items() if key not in found.values() and key != "args"}
    return RankFile(path, rank, attributes(tree.get("args")), chunks, rest, skipped)


def single_experts(name: str, tensor: StoredTensor, experts: int) -> Iterator[tuple[str, StoredTensor]]:
    """The experts in one matrix of all experts of a rank (``experts.weight1``, ``experts.weight2``), named as single ones; else the tensor.

    They lie one behind the other, each turned against the usual: [hidden, rows of the first layer], [columns of the second, hidden]
    (GroupedMLP of megatron-core, core/transformer/moe/experts.py; MindSpeed).

    Args:
        name: in the rank's file.
        tensor: a weight or a state of its shape.
        experts: how many a rank has.
    """
    match = _WIDE.fullmatch(name)
    width = item_size(tensor.dtype)
    if match is None or not experts or len(tensor.shape) != 2 or len(tensor.boxes) != 1 or width is None:
        yield name, tensor
        return
    first = match["number"] == "1"
    height, breadth = tensor.shape
    columns = breadth // experts if first else breadth
    lines = height if first else height // experts
    box = tensor.boxes[0]
    if lines * columns * experts != tensor.numel or box.strides != (breadth, 1):
        yield name, tensor
        return
    for expert in range(experts):
        start = box.start + expert * lines * columns * width
        yield (
            f"{match['head']}local_experts.{expert}.linear_fc{match['number']}.weight",
            _make_transposed(tensor, (columns, lines), box.file, start),
        )


def _make_transposed(tensor: StoredTensor, shape: tuple[int, int], file: Path, start: int) -> StoredTensor:
    return StoredTensor(
        tensor.name,
        shape,
        tensor.dtype,
        whole(shape, file, start, (1, shape[0])),
        state=tensor.state,
        group=tensor.group,
        origin=tensor.name,
    )


def values_of(args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as plain values: ``args.num_layers``."""
    _, values = plain(dict(args), "args")
    return values
