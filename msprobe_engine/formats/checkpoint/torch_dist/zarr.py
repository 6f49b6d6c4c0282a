"""Distributed checkpoints of Megatron's old ``zarr`` backend: a directory per tensor, with ``.zarray`` and a file per chunk.

A chunk ``i.j`` begins at element ``(i * chunks[0], j * chunks[1])`` and is stored whole, in C order, uncompressed; objects are
``{key}/shard_*.pt``. Sources: zarr storage specification version 2; strategies/zarr.py of megatron-core 0.9 (removed in 0.16).
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from msprobe_engine.core.dtypes import item_size
from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.core.io.json_text import parse_json
from msprobe_engine.core.text.words import some
from msprobe_engine.formats.checkpoint.files.small_files import read_text
from msprobe_engine.formats.checkpoint.model import Box, Index, StoredTensor, strides_of
from msprobe_engine.formats.tensors.torch_file import UnknownNameError, read_torch

_KINDS = {"f": "float", "i": "int", "u": "uint"}
_MAX_CHUNKS = 10_000_000


def read_arrays(path: Path, problems: list[str]) -> tuple[dict[str, StoredTensor], list[Path]]:
    """The tensors of a checkpoint by key, and the files they are in.

    Args:
        path: directory of the checkpoint.
        problems: takes in what is missing or cannot be read.
    """
    found: dict[str, StoredTensor] = {}
    files: list[Path] = []
    for directory in sorted(entry for entry in path.iterdir() if os.path.lexists(entry / ".zarray")):
        try:
            tensor = _array(directory, problems)
        except DumpFormatError as error:
            problems.append(str(error))
        else:
            found[directory.name] = tensor
            files += [directory / ".zarray", *dict.fromkeys(box.file for box in tensor.boxes)]
    return found, files


def _array(directory: Path, problems: list[str]) -> StoredTensor:
    file = directory / ".zarray"
    try:
        head = parse_json(read_text(file, 1 << 20))
    except ValueError as error:
        raise DumpFormatError(f"{file}: is no JSON ({error}); was it cut off?") from None
    head = head if isinstance(head, dict) else {}
    shape, chunks, dtype = _index(head.get("shape")), _index(head.get("chunks")), _dtype(head.get("dtype"))
    if shape is None or chunks is None or len(shape) != len(chunks) or 0 in chunks or not dtype:
        raise DumpFormatError(f"{file}: describes no array that is known ({str(head)[:200]})")
    if head.get("compressor") is not None or head.get("filters") or head.get("order", "C") != "C":
        raise DumpFormatError(f"{file}: is compressed, filtered or not in C order, as Megatron writes none; it cannot be read in pieces")
    width = item_size(dtype) or 1
    counts = [-(-size // chunk) for size, chunk in zip(shape, chunks)]
    if math.prod(counts) > _MAX_CHUNKS:
        raise DumpFormatError(f"{file}: describes {math.prod(counts)} chunks; it is damaged")
    separator = head.get("dimension_separator", ".")
    boxes: list[Box] = []
    lost: list[str] = []
    for place in itertools.product(*map(range, counts)):
        chunk = directory / (str(separator).join(map(str, place)) if place else "0")
        if not chunk.is_file() or chunk.stat().st_size != math.prod(chunks) * width:
            lost.append(chunk.name)
            continue
        offsets = tuple(i * n for i, n in zip(place, chunks))
        sizes = tuple(min(n, size - offset) for n, size, offset in zip(chunks, shape, offsets))
        boxes.append(Box(offsets, sizes, chunk, 0, strides_of(chunks)))
    if lost:
        problems.append(f"{directory}: of its {math.prod(counts)} chunks {some(lost, 4)} are missing or of another size")
    return StoredTensor(directory.name, shape, dtype, tuple(boxes))


def _index(value: Any) -> Index | None:
    ok = (
        isinstance(value, list)
        and len(value) <= 32
        and all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 60 for n in value)
    )
    return tuple(value) if ok else None


def _dtype(value: Any) -> str:
    """Plain name of an element type (``<f4``, ``|u1``, ``bfloat16``); "": not known, or big-endian."""
    if value == "bfloat16":
        return "bfloat16"
    if value == "|b1":
        return "bool"
    if not isinstance(value, str) or len(value) < 3 or value[0] not in "<|" or value[1] not in _KINDS or not value[2:].isdigit():
        return ""
    name = f"{_KINDS[value[1]]}{8 * int(value[2:])}"
    return name if item_size(name) == int(value[2:]) else ""


def read_shards(path: Path, trust: Collection[str], problems: list[str]) -> dict[str, Any]:
    """The objects that are no tensors by key (``rng_state/shard_0.0_1.2``), each in a list as ``torch_dist`` has it.

    Raises:
        UnknownNameError: a pickle names what is not known.
    """
    found: dict[str, Any] = {}
    for file in sorted(path.glob("*/shard_*.pt")):
        if "_extra_state" in file.parent.name:
            continue
        try:
            found[f"{file.parent.name}/{file.name.removesuffix('.pt')}"] = [read_torch(file, trust).tree]
        except UnknownNameError:
            raise
        except DumpFormatError as error:
            problems.append(str(error))
    return found
