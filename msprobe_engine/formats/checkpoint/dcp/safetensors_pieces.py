"""Tensors that lie in pieces over several safetensors files, as torch's distributed checkpoint writes them for Hugging Face.

``HuggingFaceStorageWriter`` (``torch/distributed/checkpoint/hf_storage.py``) leaves in the metadata of each file where its pieces belong:
``DCP_SHARDING_INFO``, JSON text, ``{name: {"saved_offsets": [17, 0]}}``. The size of the whole is not written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.core.io.json_text import parse_json
from msprobe_engine.formats.checkpoint.model import MODEL, Box, Checkpoint, StoredTensor
from msprobe_engine.formats.tensors.pt_parts import is_size
from msprobe_engine.formats.tensors.safetensors_file import SafeFile

_KEY = "DCP_SHARDING_INFO"


def has_pieces(file: SafeFile) -> bool:
    """Whether the tensors of a file are pieces."""
    return _KEY in file.metadata


def add_pieces(out: Checkpoint, files: Mapping[Path, SafeFile]) -> None:
    """Take in the tensors whose pieces lie in `files`.

    Raises:
        DumpFormatError: what a file says of its pieces is damaged.
    """
    boxes: dict[str, list[Box]] = {}
    dtypes: dict[str, str] = {}
    for path, file in files.items():
        places = _places(path, file)
        for name, tensor in file.tensors.items():
            offsets = places[name]
            if len(offsets) != len(tensor.shape):
                raise DumpFormatError(f"{path}: {name} has {len(tensor.shape)} dimensions and begins at {list(offsets)}; it is damaged")
            boxes.setdefault(name, []).append(Box(offsets, tensor.shape, path, tensor.start, tensor.strides))
            if dtypes.setdefault(name, tensor.dtype) != tensor.dtype:
                raise DumpFormatError(f"{path}: {name} is {tensor.dtype}, in other files {dtypes[name]}; the files do not belong together")
    for name, found in boxes.items():
        if len({len(box.sizes) for box in found}) > 1:
            raise DumpFormatError(f"{out.path}: pieces of {name} have other numbers of dimensions; the files do not belong together")
        shape = tuple(max(box.offsets[d] + box.sizes[d] for box in found) for d in range(len(found[0].sizes)))
        if sum(box.numel for box in found) != math.prod(shape):
            out.problems.append(
                f"{out.path}: the {len(found)} pieces of {name} do not fill {list(shape)}; a file is missing or there twice"
            )
        found.sort(key=lambda box: box.offsets)
        out.add(StoredTensor(name, shape, dtypes[name], tuple(found), group=MODEL))


def _places(path: Path, file: SafeFile) -> dict[str, tuple[int, ...]]:
    try:
        said: Any = parse_json(file.metadata[_KEY])
    except ValueError:
        said = None
    found: dict[str, tuple[int, ...]] = {}
    for name in file.tensors:
        entry = said.get(name) if isinstance(said, dict) else None
        offsets = entry.get("saved_offsets") if isinstance(entry, dict) else None
        if not isinstance(offsets, list) or not all(map(is_size, offsets)):
            raise DumpFormatError(f"{path}: its {_KEY} does not say where the piece of {name} belongs; it is damaged")
        found[name] = tuple(offsets)
    return found
