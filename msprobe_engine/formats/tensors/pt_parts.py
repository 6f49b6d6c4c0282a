"""What all readers of ``torch.save`` files need to know of the format: its archive, storages, views of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msprobe_engine.core.errors import ArchiveError, DumpFormatError
from msprobe_engine.core.io.archives import Limits
from msprobe_engine.core.io.damaged_files import guard_opening
from msprobe_engine.formats.tensors.pickle_machine import Wrong

ARCHIVE = Limits(member=1 << 62, total=1 << 62)
"""Members are not unpacked (`stored_begin`), so they are as large as their files at most."""
MAX_DIMENSIONS = 64


MOST_ELEMENTS = 1 << 62


def is_size(value: Any) -> bool:
    """Whether a value can be a number of elements or bytes."""
    return type(value) is int and 0 <= value < MOST_ELEMENTS


def is_view(offset: Any, shape: Any, strides: Any) -> bool:
    """Whether these can be the offset, shape and strides of a tensor."""
    sizes = isinstance(shape, tuple) and isinstance(strides, tuple) and len(shape) == len(strides) <= MAX_DIMENSIONS
    return sizes and is_size(offset) and all(map(is_size, (*shape, *strides)))


def format_parts(value: Any) -> str:
    """The first parts of what should be a tuple of sizes or names, for a message; it may be anything, nested without end."""
    parts = value if isinstance(value, (tuple, list)) else (value,)
    return ", ".join(str(part)[:40] if isinstance(part, (str, int)) else type(part).__name__ for part in parts[:8])


def reach(offset: int, shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements that a storage must have for a view of it."""
    return 0 if any(n == 0 for n in shape) else offset + sum((n - 1) * step for n, step in zip(shape, strides)) + 1


@contextmanager
def guard_torch_file(path: Path) -> Iterator[None]:
    """Names the file when reading it fails.

    Raises:
        DumpFormatError: it cannot be read or is damaged.
    """
    try:
        with guard_opening(path):
            yield
    except Wrong as error:
        raise error.named(f"{path}: {error}") from None
    except ArchiveError as error:
        raise DumpFormatError(f"{path}: is no torch file or is damaged: it {error}; was the process killed while it was written?") from None
    except (EOFError, RuntimeError, ValueError, KeyError, OverflowError, MemoryError) as error:
        text = f"{type(error).__name__}: {error}"[:120]
        raise DumpFormatError(f"{path}: is no torch file or is damaged ({text}); was the process killed while it was written?") from None
