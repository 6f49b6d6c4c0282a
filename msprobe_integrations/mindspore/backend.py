"""The MindSpore side of `msprobe_engine.core.backend.Backend`: statistics of tensors by the engine's kernel on the host, else by
operators where they are."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from ctypes import c_uint64, string_at
from pathlib import Path
from typing import Any

import mindspore
import numpy as np

from msprobe_engine.core.guard import is_of_training, raise_of_training
from msprobe_engine.core.records import TensorDescription, TensorRef
from msprobe_engine.core.statistics import host_kernel
from msprobe_engine.core.statistics.rows import DIGEST, FLAGS, HAS_DIGEST, Rows
from msprobe_integrations.common.capture.descriptions import intern
from msprobe_integrations.common.statistics.row_memory import ROW_BYTES
from msprobe_integrations.common.statistics.row_options import CHECKSUMS
from msprobe_integrations.common.statistics.step_backend import StepBackend
from msprobe_integrations.mindspore import environment
from msprobe_integrations.mindspore.ranks.job import Job
from msprobe_integrations.mindspore.statistics import device_rows
from msprobe_integrations.mindspore.statistics.derived import PairRows
from msprobe_integrations.mindspore.statistics.pending import MindSporePendingRows, Step
from msprobe_integrations.mindspore.tensors import npy
from msprobe_integrations.mindspore.tensors.memory import attribute_error, describe, describe_memory, place_of

_new = tuple.__new__
_kernel_reduce, _kernel_reduce_strided = host_kernel.functions()


class MindSporeBackend(PairRows, StepBackend, Job):
    """Statistics, files and ranks for MindSpore. One per process; `reduce` may be called from any thread.

    MindSpore counts no versions that tell of all changes (``x[i] = v``, ``ops.assign`` and the optimizers leave ``_version`` as it is), so
    every call of `reduce` reads the tensor. When it finds what it found before in the same memory it gives the former row.
    """

    name = "mindspore"
    step_type = Step

    @property
    def framework(self) -> str:
        """As dump files have it: ``mindspore``; ``mindtorch`` where torch's names stand for MindSpore (MSAdapter)."""
        return "mindtorch" if environment.adapter() else "mindspore"

    def is_tensor(self, value: Any) -> bool:
        """True for MindSpore tensors and parameters; sparse tensors are pairs of them, and no tensors."""
        return isinstance(value, mindspore.Tensor)

    def describe(self, tensor: Any) -> TensorDescription:
        """Description without touching data; equal descriptions are the same object. Raises what `reduce` raises, and nothing else."""
        return describe(tensor)

    def reduce(self, tensor: Any) -> TensorRef:
        """The statistics of one tensor as it is now; row -1 when it has no data to read. On the host, what the framework still computes
        for this tensor is waited for (its operators run in threads of their own); a device is not waited for, unless digests or
        checksums are wanted or the type is one that not every device computes with.

        Raises:
            Exception: an operator of the training has failed meanwhile. The framework reports that once, to whoever waits next, so it is
                given on as it is, marked (`memory.training_errors`).
        """
        return self._reduce_for(tensor, self._want)

    def reduce_exactly(self, tensor: Any) -> TensorRef:
        """`reduce`, where tensors have one row only when their digests are the same too; the row has the digest only when it is wanted."""
        return self._reduce_for(tensor, self._want | host_kernel.WANT_DIGEST)

    def _reduce_for(self, tensor: Any, want: int) -> TensorRef:
        try:
            description, numel, code = describe_memory(tensor)
            if numel > 0 and device_rows.takes(tensor, description.device, description.dtype, want):
                return self._reduce_there(tensor, description, numel, want)
            _owner, pointer, strides = place_of(tensor, description.device)
        except Exception as error:
            raise_of_training(error)
            return self._mark_unreadable(tensor, error)
        if code < 0 or numel < 0 or not (pointer or numel == 0):
            return self._without(description, _why(description, numel, pointer))
        step, row = self._step, -1
        try:
            row = next(step.numbers)
            first, end, base = step.host.window
            address = base + row * ROW_BYTES if first <= row < end else step.host.address(row)
            if strides is None:
                _kernel_reduce(pointer, numel, code, address, want, 0)
            else:
                _kernel_reduce_strided(pointer, description.shape, strides, code, address, want, 0)
            key = (pointer, want, id(description))
            words, known = string_at(address, ROW_BYTES), step.seen.get(key)
            if want & ~self._want & host_kernel.WANT_DIGEST:
                c_uint64.from_address(address + 8 * DIGEST).value = 0
                c_uint64.from_address(address + 8 * FLAGS).value &= ~HAS_DIGEST
            if known is not None and known[1] == words:
                return known[0]  # the new row stays behind, and nobody refers to it
            made: TensorRef = _new(TensorRef, (row, description))
            step.seen[key] = (made, words)
            return made
        except Exception as error:
            raise_of_training(error)
            if row >= 0:
                step.host.clear(row)
            return self._without(description, f"{type(error).__name__}: {str(error)[:80]}")

    def _reduce_there(self, tensor: Any, description: TensorDescription, numel: int, want: int) -> TensorRef:
        """The row of a tensor on a device, made there. Nothing is waited for, and no row is shared."""
        step = self._step
        row = next(step.numbers)
        step.host.clear(row)
        step.devices.start_reduction(tensor, row, description.dtype, numel, want)
        return TensorRef(row, description)

    def _mark_unreadable(self, tensor: Any, error: Exception) -> TensorRef:
        if tensor is None:
            return TensorRef(-1, intern("NoneType", "", (), None, ""))
        error = attribute_error(tensor, error)
        if is_of_training(error):
            raise error from None
        return self._without(describe(tensor), f"not readable: {type(error).__name__}: {str(error).strip()[:80]}")

    def batched(self) -> AbstractContextManager[None]:
        """Rows are written when they are asked for: the block changes nothing."""
        return nullcontext()

    def forget(self, tensor: Any = None, *, views: bool = True) -> None:
        """Nothing to do: no row is taken for the present value of a tensor without reading it."""

    def finish_step(self) -> MindSporePendingRows:
        """Hand over the rows since the last call: one copy from the device, which is not waited for here."""
        return MindSporePendingRows(*self._end_step())

    def so_far(self) -> Rows:
        """A copy of the rows of the step in progress, [n, 16]. Waits for devices."""
        step, out = self._step, self._host_rows_so_far()
        if step.devices:
            step.devices.send()
            step.devices.scatter(out)
        return out

    def save(self, tensor: Any, path: Path) -> None:
        """Write a tensor as ``.npy``, mode 0640 (types numpy does not have: `msprobe_engine.formats.dump.writing.npy_template`). Waits for
        the device."""
        npy.write(tensor, path)

    def host_array(self, tensor: Any) -> Any:
        """A tensor as a contiguous array; types that numpy has not as float32, which holds them exactly. Waits for the device."""
        plain = str(tensor.dtype) in ("BFloat16", "Float8E4M3FN", "Float8E5M2")
        array = (tensor.astype(mindspore.float32) if plain else tensor).asnumpy()
        return np.ascontiguousarray(array).reshape(array.shape)

    def load(self, path: Path) -> Any:
        """The tensor in a ``.npy`` file, of numpy's type. Executes nothing of the file.

        Raises:
            DumpFormatError: the file is not there or damaged.
        """
        return npy.load(path)

    def from_bytes(self, data: bytes | bytearray | memoryview, dtype: str, shape: Sequence[int]) -> Any:
        """A tensor from its bytes in C order.

        Args:
            dtype: as dump files have it, ``BFloat16``.

        Raises:
            DumpFormatError: there is no such type, or the bytes are not those of the shape.
        """
        return npy.from_bytes(data, dtype, shape)

    def script_dialect(self) -> Any:
        """How ``msprobe op_generate`` writes scripts for MindSpore."""
        from msprobe_integrations.mindspore.op_tools.accuracy.scripts.dialect import MindSporeDialect

        return MindSporeDialect()

    def precheck(self, work: Any) -> Any:
        """What a process of ``msprobe acc_check`` checks calls with; `work` is a `msprobe_engine.accuracy.precheck.options.Work`."""
        from msprobe_integrations.mindspore.op_tools.accuracy.precheck import make_check

        return make_check(work)


def _why(description: TensorDescription, numel: int, pointer: int) -> str:
    if numel < 0:
        return "shape is not known"
    if not pointer:
        return "not initialised"
    return f"no kernel: {description.dtype}"


__all__ = ["CHECKSUMS", "MindSporeBackend"]
