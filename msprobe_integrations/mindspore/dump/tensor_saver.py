"""Takes copies of MindSpore tensors in the hook, for ``.npy`` files.

What is saved are the elements of the tensor in C order, as they are at this moment; writer threads make files of them (types that numpy
does not have: `msprobe_engine.formats.dump.writing.npy_template`). A tensor that comes again unchanged, told by the digest of its
elements, has one file with several names.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from msprobe_engine.core.dtypes import item_size
from msprobe_engine.core.guard import Faults, is_of_training
from msprobe_engine.core.records import TensorRef
from msprobe_engine.formats.dump.writing.npy_template import NpyTemplate
from msprobe_engine.formats.dump.writing.step_files import NOT_COPIED, StepFiles
from msprobe_engine.formats.dump.writing.tensors import TensorStore
from msprobe_integrations.common.dump.tensor_saver import NO_DIRECTORY, BaseTensorSaver
from msprobe_integrations.mindspore.backend import MindSporeBackend
from msprobe_integrations.mindspore.tensors.memory import Memory, memory_of


class TensorSaver(BaseTensorSaver):
    """See `BaseTensorSaver`; `backend` takes the statistics."""

    suffix = ".npy"

    @staticmethod
    def template(dtype: str, shape: tuple[int, ...]) -> NpyTemplate:
        return NpyTemplate(dtype, shape)

    def __init__(self, backend: MindSporeBackend, store: TensorStore, faults: Faults, lose: Callable[[str], None]) -> None:
        super().__init__(store, faults, lose)
        self._backend = backend

    def reduce(self, tensor: Any) -> TensorRef:
        """Statistics and a copy of a tensor. A tensor without a kernel for its type has a row without statistics.

        Raises:
            RuntimeError: see `MindSporeBackend.reduce`.
        """
        backend, files = self._backend, self._files
        if files is None:
            ref = backend.reduce(tensor)
            if self._step_open and ref.row >= 0:
                self._lose(NO_DIRECTORY)
            return ref
        ref = backend.reduce_exactly(tensor)
        if ref.row in files.kept or self._redact_tensor(files, ref):
            return ref
        try:
            return self._copy_tensor(files, tensor, ref)
        except Exception as error:
            if is_of_training(error):
                raise
            self._lose(NOT_COPIED)
            self._faults.fail("tensor copies", error, disable=False, hint="the tensor has no file, its statistics are there")
            return ref

    def _copy_tensor(self, files: StepFiles, tensor: Any, ref: TensorRef) -> TensorRef:
        description = ref.description
        size = item_size(description.dtype)
        if size is None:
            return ref
        memory = memory_of(tensor)
        if not memory.pointer or memory.numel < 0:
            return ref  # not initialised
        if ref.row < 0:
            ref = TensorRef(self._backend.blank_row(), description)
        if memory.strides is None or not memory.numel:
            self._copy_bytes(files, ref.row, description.dtype, description.shape, memory.pointer, size * memory.numel)
        else:
            self._copy_elements(files, ref.row, memory, size)
        return ref

    def _copy_elements(self, files: StepFiles, row: int, memory: Memory, size: int) -> None:
        """Views of other tensors, of at least one element."""
        dtype, shape = memory.description.dtype, memory.description.shape
        payload = self.store.place(files, row, dtype, shape, size * memory.numel)
        if payload.slab is None:
            self._lose(payload.lost)
            return
        try:
            word = f"V{size}"
            np.copyto(np.frombuffer(payload.view, word).reshape(shape), view_memory(memory.pointer, shape, memory.steps(), word))
        except BaseException as error:
            self.store.spoil(files, payload, f"{type(error).__name__}: {str(error)[:120]}")
            raise
        self.store.add(files, payload)


def view_memory(pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], word: str) -> np.ndarray[Any, Any]:
    """The elements at `pointer` as an array over their memory.

    Args:
        strides: counted in elements.
        word: numpy type of an element.
    """
    size = np.dtype(word).itemsize
    last = sum((n - 1) * stride for n, stride in zip(shape, strides)) + 1
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * (last * size)).from_address(pointer)).view(word)
    return np.lib.stride_tricks.as_strided(memory, shape, [stride * size for stride in strides])
