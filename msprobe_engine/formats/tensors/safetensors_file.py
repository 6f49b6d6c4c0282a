"""Reads the header of a safetensors file: which tensors it holds, and where.

The format (https://huggingface.co/docs/safetensors): 8 bytes little endian, length of the header; the header in JSON, ``{name: {"dtype":
"F32", "shape": [2, 3], "data_offsets": [begin, end]}, "__metadata__": {text: text}}``; the data, little endian, C order.
"""

from __future__ import annotations

import math
import os
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from msprobe_engine.core.dtypes import TYPES, item_size
from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.core.io.damaged_files import guard_opening
from msprobe_engine.core.io.input_files import open_input
from msprobe_engine.core.io.json_text import parse_json, unique_keys
from msprobe_engine.formats.checkpoint.model import strides_of
from msprobe_engine.formats.tensors.pt_parts import is_size
from msprobe_engine.formats.tensors.torch_pickle import FileTensor

_LARGEST_HEADER = 100_000_000  # what the safetensors library accepts
_DTYPES = {kind.safetensors: kind.name for kind in TYPES.values() if kind.safetensors}


class SafeFile(NamedTuple):
    """What a safetensors file holds.

    Attributes:
        tensors: by name, in the order of the header.
        metadata: texts that its writer left.
        raw: tensors of types that are not known here; they are compared as bytes.
        nobodys: bytes that are of no tensor; the format allows none.
    """

    tensors: dict[str, FileTensor]
    metadata: dict[str, str]
    raw: list[str]
    nobodys: int = 0


def read_safetensors(path: Path) -> SafeFile:
    """The header of a safetensors file.

    Raises:
        DumpFormatError: it cannot be read, is damaged or cut off.
    """
    header, start, size = read_header(path)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise DumpFormatError(f"{path}: has metadata that are no texts by name; it is damaged")
    tensors: dict[str, FileTensor] = {}
    raw: list[str] = []
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        tensors[name], nbytes, known = _tensor(path, name, entry, start, size)
        if not known:
            raw.append(name)
        if nbytes:
            spans.append((tensors[name].start, tensors[name].start + nbytes, name))
    spans.sort()
    for (_, end, lower), (begin, _, upper) in pairwise(spans):
        if begin < end:
            raise DumpFormatError(f"{path}: {lower!r} and {upper!r} lie over each other; it is damaged, or made to mislead")
    nobodys = size - start - sum(end - begin for begin, end, _ in spans)
    return SafeFile(tensors, {str(key): str(value) for key, value in metadata.items()}, raw, nobodys)


def read_header(path: Path, *, follow: bool = True) -> tuple[dict[str, Any], int, int]:
    """The header, the byte at which the data begin, and the bytes of the file.

    Args:
        follow: links, too.

    Raises:
        DumpFormatError: it cannot be read, is damaged or cut off.
    """
    with guard_opening(path), open_input(path, follow=follow) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _LARGEST_HEADER):
            raise DumpFormatError(
                f"{path}: has {size} bytes and should have a header of {length}; it is no safetensors file, or was cut off"
            )
        data = file.read(length)
    try:
        header = parse_json(data, unique_keys)
    except ValueError as error:
        raise DumpFormatError(f"{path}: has a damaged header ({str(error)[:100]}); it is no safetensors file, or was overwritten") from None
    if not isinstance(header, dict):
        raise DumpFormatError(f"{path}: has a header that is no JSON object; it is no safetensors file")
    return header, 8 + length, size


def _tensor(path: Path, name: str, entry: Any, start: int, size: int) -> tuple[FileTensor, int, bool]:
    """A tensor, its bytes, and whether its type is known."""
    fields = entry if isinstance(entry, dict) else {}
    kind, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(kind, str) or not _are_sizes(shape, 64) or not _are_sizes(offsets, 2) or len(offsets) != 2:
        raise DumpFormatError(f"{path}: has an entry {name[:80]!r} without a dtype, a shape and two data_offsets; it is damaged")
    begin, end = offsets
    if not begin <= end or start + end > size:
        raise DumpFormatError(
            f"{path}: {name[:80]!r} should lie in bytes {start + begin} to {start + end}, and the file has {size}; it was cut off"
        )
    dtype, sizes = _DTYPES.get(kind), tuple(shape)
    if dtype is None:
        dtype, sizes = "uint8", (end - begin,)
    elif math.prod(sizes) * (item_size(dtype) or 1) != end - begin:
        raise DumpFormatError(f"{path}: {name[:80]!r} is {kind} {shape} and has {end - begin} bytes; it is damaged")
    return FileTensor(dtype, sizes, strides_of(sizes), path, start + begin), end - begin, kind in _DTYPES


def _are_sizes(value: Any, most: int) -> TypeGuard[list[int]]:
    return isinstance(value, list) and len(value) <= most and all(map(is_size, value))
