"""Tensors that ATB (Ascend Transformer Boost) writes: lines ``name=value``, the last of them ``$End=1``, then the bytes in C order.

    $Version=1.0
    $Object.Count=1
    $Object.Length=24
    format=2
    dtype=0
    dims=2,3
    $Object.data=0,24
    $End=1

Numbers of dtypes are those of ``aclDataType`` in CANN's ``acl/acl_base.h``. The existing tool 26.2.0 knows seven of them.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

from msprobe_engine.core.dtypes import item_size
from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.formats.dump.reader import read_bytes

DTYPES = {
    0: "float32", 1: "float16", 2: "int8", 3: "int32", 4: "uint8", 6: "int16", 7: "uint16", 8: "uint32",
    9: "int64", 10: "uint64", 11: "float64", 12: "bool", 16: "complex64", 17: "complex128", 27: "bfloat16",
}  # fmt: skip
_LONGEST_HEADER = 1 << 16
_MOST_DIMENSIONS = 64


class Raw(NamedTuple):
    """A tensor as bytes in C order; `dtype` as dump files have it (``torch.bfloat16``)."""

    data: bytes
    dtype: str
    shape: tuple[int, ...]


def read_bin(path: Path) -> Raw:
    """The tensor in a ``.bin`` file.

    Raises:
        DumpFormatError: it cannot be read, is no such file, was cut off, or keeps its data in another file.
    """
    content = read_bytes(path)
    fields, start = _header(content, path)
    if "data" in fields:
        raise DumpFormatError(f"{path}: keeps its data in another file ({fields['data'][:120]!r}), which is not followed; give that file")
    number = _int(fields.get("dtype", "0"), "dtype", path)
    if number not in DTYPES:
        known = ", ".join(f"{n} {name}" for n, name in DTYPES.items())
        raise DumpFormatError(f"{path}: dtype={number} is unknown; known: {known}")
    shape = tuple(_int(n, "dims", path) for n in fields.get("dims", "").split(",") if n.strip())
    if len(shape) > _MOST_DIMENSIONS or any(n < 0 for n in shape):
        raise DumpFormatError(f"{path}: dims={fields['dims'][:120]} is no shape; the file is damaged")
    needed, data = math.prod(shape) * (item_size(DTYPES[number]) or 0), content[start:]
    if len(data) != needed:
        raise DumpFormatError(
            f"{path}: {DTYPES[number]} {list(shape)} takes {needed} bytes, {len(data)} follow the header; was it cut off?"
        )
    return Raw(data, f"torch.{DTYPES[number]}", shape)


def _header(content: bytes, path: Path) -> tuple[dict[str, str], int]:
    """Fields without those of the container (``$...``), and where the data begin."""
    fields: dict[str, str] = {}
    start = 0
    while (end := content.find(b"\n", start, _LONGEST_HEADER)) >= 0:
        name, found, value = content[start:end].decode("utf-8", "replace").partition("=")
        start = end + 1
        if not found:
            break
        if name == "$End":
            return fields, start
        if not name.startswith("$"):
            fields[name.strip()] = value.strip()
    raise DumpFormatError(f"{path}: has no header of lines name=value that ends with $End; it is no tensor file of ATB, or was cut off")


def _int(text: str, name: str, path: Path) -> int:
    try:
        return int(text)
    except ValueError:
        raise DumpFormatError(f"{path}: {name}={text[:120]!r} is no number; the file is damaged") from None
