"""Loads saved tensors as numpy arrays without torch, or as torch tensors: ``.pt``, ``.npy`` (MindSpore) and packed ones."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from msprobe_engine.core.backend import load_backend
from msprobe_engine.core.errors import DumpFormatError, UsageError, needs_extra
from msprobe_engine.formats.tensors.decoding import Array, decoder
from msprobe_engine.formats.tensors.reader import NPY, SAFETENSORS, Loader, TensorFiles, load_numpy


def numpy_of(files: TensorFiles, name: str) -> Array:
    """The saved tensor of this ``data_name``, in any format, as `load_numpy` gives it.

    Raises:
        UsageError: there is no such tensor.
        DumpFormatError: as `load_numpy`.
    """
    source = files.source(name)
    if source.format != SAFETENSORS:
        return load_numpy(source.path)
    found = decoder(str(source.dtype))
    if found is None:
        raise DumpFormatError(f"{source.path}: '{name}' is of type {source.dtype}, for which numpy has no type; load it as a torch tensor")
    try:
        words = np.frombuffer(bytearray(files.read_bytes(name)), found.words).reshape(source.shape or ())
    except ValueError:
        raise DumpFormatError(f"{source.path}: '{name}' has {source.nbytes} bytes, which are not {source.dtype} of that shape") from None
    return words if found.values is None else found.values(words)


def torch_of(files: TensorFiles, name: str) -> Any:
    """The saved tensor of this ``data_name``, in any format, as ``torch.Tensor`` of the very type that was saved, on the CPU.

    Raises:
        UsageError: there is no such tensor, or it was saved as a numpy array (MindSpore).
        DumpFormatError: the file is damaged.
        MissingExtraError: torch is not installed.
    """
    path = files.source(name).path
    if files.source(name).format == NPY:
        raise UsageError(f"{path}: was saved as a numpy array; load() gives it, torch.from_numpy() makes a torch tensor of it")
    with needs_extra("torch", "torch", "loading a tensor as torch.Tensor"):
        backend = cast(Loader, load_backend("torch"))
    return files.load(name, backend)
