"""Loads a saved tensor of a dump, whatever the format of its file: ``.pt`` (PyTorch) or ``.npy`` (MindSpore)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from msprobe_engine.backend import load_backend
from msprobe_engine.dump.dtypes import Array
from msprobe_engine.dump.ptfile import read_pt
from msprobe_engine.errors import DumpFormatError, MissingExtraError, UsageError


def load_numpy(path: Path) -> Array:
    """The tensor in a file as numpy array; bfloat16 and float8 as float32, which holds all their values.

    Raises:
        DumpFormatError: the file is not there, damaged, or of a type numpy cannot hold.
    """
    return _read_npy(path) if path.suffix == ".npy" else read_pt(path).values


def load_torch(path: Path) -> Any:
    """The tensor in a file as ``torch.Tensor`` of the very type that was saved, on the CPU.

    Raises:
        DumpFormatError: the file is not there or damaged.
        MissingExtraError: torch is not installed.
        UsageError: the file is a numpy array (MindSpore).
    """
    if path.suffix == ".npy":
        raise UsageError(f"{path}: was saved as a numpy array; load() gives it, torch.from_numpy() makes a torch tensor of it")
    if not path.is_file():
        raise DumpFormatError(f"{path}: is not there or no regular file")
    try:
        backend = load_backend("torch")
    except ImportError:
        raise MissingExtraError("torch", "torch", "loading a tensor as torch.Tensor") from None
    try:
        return backend.load(path)
    except Exception as error:  # whatever the framework says of a damaged file
        raise DumpFormatError(f"{path}: cannot be loaded ({type(error).__name__}: {str(error).splitlines()[0][:200]})") from None


def _read_npy(path: Path) -> Array:
    try:
        if path.exists() and not path.is_file():
            raise DumpFormatError(f"{path}: is no regular file")
        # Mapped first: a header that promises more than the file holds is refused before memory is taken.
        return np.array(np.load(path, mmap_mode="r", allow_pickle=False))
    except FileNotFoundError:
        raise DumpFormatError(f"{path}: is not there; it was removed or never written (disk full, killed run)") from None
    except OSError as error:
        raise DumpFormatError(f"{path}: cannot be read ({error.strerror or error}); check owner and mode") from None
    except (ValueError, EOFError, SyntaxError, OverflowError) as error:
        raise DumpFormatError(f"{path}: is no numpy file or is damaged ({error})") from None
