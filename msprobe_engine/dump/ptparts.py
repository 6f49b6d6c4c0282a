"""What all readers of ``torch.save`` files need to know of the format: storages, views of them, places of archive members."""

from __future__ import annotations

from collections.abc import Sequence
from io import RawIOBase
from typing import Any, BinaryIO

from msprobe_engine.dump.unpickle import Wrong

MAX_DIMENSIONS = 64
LOCAL_HEADER = 30  # bytes before the name of a member (APPNOTE.TXT 4.3.7)
ZIP_MEMBER = b"PK\x03\x04"
STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}
"""Types of storages and what their elements are."""
UNTYPED = "UntypedStorage"
"""A storage of bytes; the tensor has the type."""


def is_size(value: Any) -> bool:
    """Whether a value can be a number of elements or bytes."""
    return type(value) is int and 0 <= value < 1 << 62


def is_view(offset: Any, shape: Any, strides: Any) -> bool:
    """Whether these can be the offset, shape and strides of a tensor."""
    sizes = isinstance(shape, tuple) and isinstance(strides, tuple) and len(shape) == len(strides) <= MAX_DIMENSIONS
    return sizes and is_size(offset) and all(map(is_size, (*shape, *strides)))


def shown(value: Any) -> str:
    """The first parts of what should be a tuple of sizes or names, for a message; it may be anything, nested without end."""
    parts = value if isinstance(value, (tuple, list)) else (value,)
    return ", ".join(str(part)[:40] if isinstance(part, (str, int)) else type(part).__name__ for part in parts[:8])


def reach(offset: int, shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements that a storage must have for a view of it."""
    return 0 if any(n == 0 for n in shape) else offset + sum((n - 1) * step for n, step in zip(shape, strides)) + 1


def member_begin(file: BinaryIO | RawIOBase, header: int) -> int:
    """Byte at which the data of an archive's member begin, whose header is at byte `header`.

    Raises:
        Wrong: there is none.
    """
    file.seek(header)
    head = file.read(LOCAL_HEADER) or b""
    if len(head) < LOCAL_HEADER or head[:4] != ZIP_MEMBER:
        raise Wrong("has a member that begins where there is none; it is damaged")
    return header + LOCAL_HEADER + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
