"""Checkpoints of numpy arrays, and the arrays of stored tensors again: what the tests of names and cuts stand on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from msprobe_engine.formats.checkpoint.model import Box, Checkpoint, StoredTensor, whole
from msprobe_engine.formats.tensors.decoding import decoder

Array = np.ndarray[Any, np.dtype[Any]]


def stored(name: str, array: Array, file: Path, **more: Any) -> StoredTensor:
    """The array, appended to `file`, as a stored tensor."""
    with file.open("ab") as out:
        start = out.tell()
        out.write(np.ascontiguousarray(array).tobytes())
    return StoredTensor(name, array.shape, str(array.dtype), whole(array.shape, file, start), **more)


def checkpoint_of(arrays: Mapping[str, Array], file: Path, facts: Mapping[str, Any] | None = None, naming: str = "") -> Checkpoint:
    """A checkpoint of arrays; a name ``exp_avg|x`` is the optimizer's state ``exp_avg`` of ``x``."""
    checkpoint = Checkpoint(file, "numpy", facts=dict(facts or {}), naming=naming, files=[file])
    for key, array in arrays.items():
        state, _, name = key.rpartition("|")
        more = {"state": state, "group": "optimizer"} if state else {}
        checkpoint.add(stored(name, np.asarray(array), file, **more))
    return checkpoint


def array_of(tensor: StoredTensor) -> Array:
    """The values of a stored tensor; each element must be covered by one box."""
    known = decoder(tensor.dtype)
    assert known is not None
    words = np.dtype(known.words)
    result = np.zeros(tensor.shape, words)
    seen = np.zeros(tensor.shape, np.int32)
    for box in tensor.boxes:
        where = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes))
        result[where] = _of_box(box, words)
        seen[where] += 1
    assert (seen == 1).all(), f"{tensor.key}: covered {np.unique(seen)} times"
    return result if known.values is None else known.values(result)


def _of_box(box: Box, words: np.dtype[Any]) -> Array:
    last = sum((n - 1) * s for n, s in zip(box.sizes, box.strides))
    data = np.fromfile(box.file, words, count=last + 1, offset=box.start)
    return np.lib.stride_tricks.as_strided(data, box.sizes, tuple(s * words.itemsize for s in box.strides))


def fill(tensor: StoredTensor, values: Array) -> None:
    """Write values into where a stored tensor lies. Shapes must be the same; dtypes as numpy has them."""
    assert tensor.shape == values.shape, f"{tensor.key}: {tensor.shape} and {values.shape}"
    for box in tensor.boxes:
        dtype = np.dtype(tensor.dtype)
        last = sum((n - 1) * s for n, s in zip(box.sizes, box.strides))
        data = np.fromfile(box.file, dtype, count=last + 1, offset=box.start)
        where = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes))
        np.lib.stride_tricks.as_strided(data, box.sizes, tuple(s * dtype.itemsize for s in box.strides))[...] = values[where]
        with box.file.open("r+b") as out:
            out.seek(box.start)
            out.write(data.tobytes())
