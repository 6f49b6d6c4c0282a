"""The MindSpore side of `msprobe_engine.backend.Backend`: statistics of tensors by the engine's kernel, no operator is run."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator, Sequence
from ctypes import string_at
from pathlib import Path
from typing import Any

import mindspore
import numpy as np

from msprobe_engine import hostkernel, log
from msprobe_engine.guard import of_training
from msprobe_engine.records import TensorDescription, TensorRef
from msprobe_engine.rows import Rows
from msprobe_integrations.common.descriptions import LIMIT, intern
from msprobe_integrations.common.row_memory import ROW_BYTES, MemoryPool, RowBuffer
from msprobe_integrations.common.wanted import CHECKSUMS, Wanted
from msprobe_integrations.mindspore import dtypes, environment
from msprobe_integrations.mindspore.job import Job

Tensor: Any = mindspore.Tensor
TYPE = "mindspore.Tensor"
_new = tuple.__new__
_kernel_reduce, _kernel_reduce_strided = hostkernel.functions()
_FIRST_CAPACITY = 1024
_NO_CODE = -1


class Step:
    """The rows of one step. A late thread that still holds an old step writes where nobody else does."""

    def __init__(self, pool: MemoryPool, capacity: int) -> None:
        self.numbers: Iterator[int] = itertools.count()
        self.host = RowBuffer(pool, capacity)
        self.seen: dict[tuple[int, int, int], TensorRef] = {}
        self.lock = threading.Lock()


class HostRows:
    """`PendingRows` of rows that are on the host."""

    def __init__(self, step: Step, n: int) -> None:
        self._step, self._n = step, n

    def ready(self) -> bool:
        """Always: the rows are here."""
        return True

    def rows(self) -> Rows:
        """[n, 16] float64. The memory is not used again while the array, or a view of it, exists."""
        return self._step.host.rows(self._n)


class MindSporeBackend(Wanted, Job):
    """Statistics, files and ranks for MindSpore. One per process; `reduce` may be called from any thread.

    MindSpore counts no versions that tell of all changes (``x[i] = v``, ``ops.assign`` and the optimizers leave ``_version`` as it is), so
    every call of `reduce` reads the tensor. When it finds what it found before in the same memory it gives the former row.

    Attributes:
        unsupported: how often a tensor got no row, reason to count (``not initialised``, ``no kernel: <dtype>``, ...).
    """

    name = "mindspore"
    _step: Step

    def __init__(self, *, digest: bool = False) -> None:
        self._want = hostkernel.WANT_DIGEST if digest else 0
        self.unsupported: dict[str, int] = {}
        self._said: set[str] = set()
        self._known: dict[tuple[Any, ...], tuple[TensorDescription, int, int]] = {}
        self._pool = MemoryPool()
        self._capacity = _FIRST_CAPACITY
        self._step = Step(self._pool, self._capacity)

    @property
    def framework(self) -> str:
        """As dump files have it: ``mindspore``; ``mindtorch`` where torch's names stand for MindSpore (MSAdapter)."""
        return "mindtorch" if environment.adapter() else "mindspore"

    def is_tensor(self, value: Any) -> bool:
        """True for MindSpore tensors and parameters; sparse tensors are pairs of them, and no tensors."""
        return isinstance(value, Tensor)

    def describe(self, tensor: Any) -> TensorDescription:
        """Description without touching data; equal descriptions are the same object. Never waits, never raises."""
        try:
            return self._look(tensor)[0]
        except Exception:
            return intern(TYPE, str(getattr(tensor, "dtype", "")), (), None, "")

    def _look(self, tensor: Any) -> tuple[TensorDescription, int, int]:
        """Description, number of elements (-1 for a shape that is not known) and code for the kernel (-1: none)."""
        dtype, shape, device = tensor.dtype, tensor.shape, getattr(tensor, "device", "CPU")
        key = (dtype, shape, device)
        found = self._known.get(key)
        if found is None:
            if len(self._known) > LIMIT:
                self._known.clear()
            text = str(dtype)
            whole = tuple(int(n) for n in shape)
            numel = -1 if any(n < 0 for n in whole) else math.prod(whole)
            found = intern(TYPE, text, whole, None, str(device).lower()), numel, dtypes.KERNEL.get(text, _NO_CODE)
            self._known[key] = found
        return found

    def reduce(self, tensor: Any) -> TensorRef:
        """The statistics of one tensor as it is now; row -1 when it has no data to read. What the framework still computes for this tensor
        is waited for (its operators run in threads of their own).

        Raises:
            RuntimeError: an operator of the training has failed meanwhile. The framework reports that to whoever waits next, so it is
                given on as it is (`msprobe_engine.guard.of_training`): kept back here, the training would go on without it.
        """
        return self.reduce_for(tensor, self._want)

    def reduce_for(self, tensor: Any, want: int) -> TensorRef:
        """`reduce` with other words than all rows have (`msprobe_engine.hostkernel`)."""
        try:
            description, numel, code = self._look(tensor)
            if description.device != "cpu":
                tensor = on_host(tensor)
            pointer = tensor.data_ptr()
        except RuntimeError as error:
            raise of_training(error) from None
        except Exception as error:
            return self._without(self.describe(tensor), f"{type(error).__name__}: {str(error)[:80]}")
        if code < 0 or numel < 0 or not pointer:
            return self._without(description, _why(description, numel, pointer))
        step, row = self._step, -1
        try:
            row = next(step.numbers)
            first, end, base = step.host.window
            address = base + row * ROW_BYTES if first <= row < end else step.host.address(row)
            if tensor.is_contiguous():
                _kernel_reduce(pointer, numel, code, address, want, 0)
            else:
                _kernel_reduce_strided(pointer, description.shape, tuple(tensor.stride()), code, address, want, 0)
            key = (pointer, want, id(description))
            known = step.seen.get(key)
            if known is not None and string_at(step.host.address(known.row), ROW_BYTES) == string_at(address, ROW_BYTES):
                return known  # its own row stays behind, and nobody refers to it
            made: TensorRef = _new(TensorRef, (row, description))
            step.seen[key] = made
            return made
        except Exception as error:
            if row >= 0:
                step.host.clear(row)
            return self._without(description, f"{type(error).__name__}: {str(error)[:80]}")

    def _without(self, description: TensorDescription, why: str) -> TensorRef:
        self.unsupported[why] = self.unsupported.get(why, 0) + 1
        kind, is_fault, _ = why.partition(": ")
        if is_fault and kind not in self._said:
            self._said.add(kind)
            log.warn_once(f"statistics {kind}", f"some tensors have no statistics, their rows have no numbers: {why}; said once")
        return TensorRef(-1, description)

    def blank_row(self) -> int:
        """A row of this step without statistics, for a tensor that has bytes but no kernel that reads them."""
        row = next(self._step.numbers)
        self._step.host.clear(row)
        return row

    def forget(self, tensor: Any = None) -> None:
        """Nothing to do: no row is taken for the present value of a tensor without reading it."""

    def finish_step(self) -> HostRows:
        """Hand over the rows since the last call."""
        step = self._step
        n = next(step.numbers)
        self._capacity = max(_FIRST_CAPACITY, min(2 * n, n + 4096))
        self._step = Step(self._pool, self._capacity)
        step.seen.clear()
        return HostRows(step, n)

    def so_far(self) -> Rows:
        """A copy of the rows of the step in progress, [n, 16]."""
        step = self._step
        n = next(step.numbers)
        step.host.clear(n)  # this number is taken now
        return np.array(step.host.rows(n))

    def exchange(self, kept: Any = None) -> Any:
        """Put the rows of the step in progress aside and go on with `kept`, a former result of this call (None: with none)."""
        old, self._step = self._step, kept or Step(self._pool, self._capacity)
        return old

    def save(self, tensor: Any, path: Path) -> None:
        """Write a tensor as ``.npy``, mode 0640 (types numpy does not have: `dtypes.file_type`). Waits for the device."""
        from msprobe_integrations.mindspore.npy import write

        write(tensor, path)

    def load(self, path: Path) -> Any:
        """The tensor in a ``.npy`` file, of numpy's type. Executes nothing of the file.

        Raises:
            DumpFormatError: the file is not there or damaged.
        """
        from msprobe_engine.dump.savedfile import load_numpy

        return Tensor(load_numpy(Path(path)))

    def from_bytes(self, data: bytes | bytearray | memoryview, dtype: str, shape: Sequence[int]) -> Any:
        """A tensor from its bytes in C order.

        Args:
            dtype: as dump files have it, ``BFloat16``.

        Raises:
            DumpFormatError: there is no such type, or the bytes are not those of the shape.
        """
        from msprobe_integrations.mindspore.npy import from_bytes

        return from_bytes(data, dtype, shape)


def on_host(tensor: Any) -> Any:
    """A tensor of a device as one of the host, of the same type. Waits for the device."""
    return Tensor(tensor.asnumpy(), tensor.dtype)


def _why(description: TensorDescription, numel: int, pointer: int) -> str:
    if numel < 0:
        return "shape is not known"
    if not pointer:
        return "not initialised"
    return f"no kernel: {description.dtype}"


__all__ = ["CHECKSUMS", "HostRows", "MindSporeBackend", "Step"]
