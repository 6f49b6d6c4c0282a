"""Takes copies of tensors in the hook: the bytes as they are at this moment, without waiting for the disk or for a device.

What is saved is what the statistics are of (`describe`): the elements of the tensor itself in C order, without the rest of the storage
that a view looks at; conjugation and negation applied; the local shard of a DTensor; the stored values of a sparse tensor; the values
of a nested one; the dequantized values of a quantized one; the inner tensor of a functorch wrapper. bfloat16 and float8 keep their
bits. Memory that holds no values yet, meta and fake tensors, and results that are not there yet have no file.

CPU tensors are copied at once. From a device the copy goes to pinned memory in the order of the current stream, so that later
changes do not matter, and a writer thread waits for its event.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch

from msprobe_engine.core.guard import Faults, raise_of_training
from msprobe_engine.core.records import TensorRef
from msprobe_engine.formats.dump.writing.host_memory import PINNED, PLAIN
from msprobe_engine.formats.dump.writing.pt_template import PtTemplate, Sample, split_sample
from msprobe_engine.formats.dump.writing.step_files import NOT_COPIED, Payload, StepFiles
from msprobe_engine.formats.dump.writing.tensors import TensorStore
from msprobe_integrations.common.dump.tensor_saver import NO_DIRECTORY, BaseTensorSaver
from msprobe_integrations.torch.backend import TorchBackend
from msprobe_integrations.torch.statistics.pending import quiet
from msprobe_integrations.torch.statistics.streams import host_memory, record_event, wait_for
from msprobe_integrations.torch.tensors import describe as _describe
from msprobe_integrations.torch.tensors.slices import Slices
from msprobe_integrations.torch.tensors.stretches import stretch

_modes = torch._C._len_torch_function_stack
_no_function = torch._C.DisableTorchFunction
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SMALL_SAMPLE = 4096
_PIECE = 1 << 25
"""Bytes of a strided tensor that are made contiguous at a time on a device."""


def template(dtype: str, shape: tuple[int, ...]) -> PtTemplate:
    """Makes files as ``torch.save`` writes them."""
    return PtTemplate(sample(dtype, shape))


class TensorSaver(BaseTensorSaver):
    """See `BaseTensorSaver`; `backend` takes the statistics, and `slices` cuts before anything is taken of a tensor."""

    template = staticmethod(template)

    def __init__(
        self, backend: TorchBackend, store: TensorStore, faults: Faults, lose: Callable[[str], None], slices: Slices | None = None
    ) -> None:
        super().__init__(store, faults, lose)
        self._backend = backend
        self._cut = None if slices is None else slices.cut_tensor
        self._reduce = backend.reduce_unshielded if slices is None else slices.reduce
        store.memory.allocators[PINNED] = _allocate_pinned

    def reduce(self, tensor: torch.Tensor) -> TensorRef:
        if _modes():
            with _no_function():
                return self._save_tensor(tensor)
        return self._save_tensor(tensor)

    def _save_tensor(self, tensor: torch.Tensor) -> TensorRef:
        ref = self._reduce(tensor)
        files = self._files
        if files is None:
            if self._step_open and ref.row >= 0:
                self._lose(NO_DIRECTORY)
            return ref
        if ref.row in files.kept or self._redact_tensor(files, ref):
            return ref
        try:
            description = ref.description
            if (
                self._cut is None
                and ref.row >= 0
                and type(tensor) in _PLAIN_TYPES
                and not description.extra
                and description.type == "torch.Tensor"
                and tensor.is_cpu
                and tensor.is_contiguous()
                and not tensor.is_neg()
                and not tensor.is_conj()
            ):
                self._copy_bytes(files, ref.row, description.dtype, description.shape, tensor.data_ptr(), tensor.nbytes)
                return ref
            return self._take_any(files, tensor, ref)
        except Exception as error:
            raise_of_training(error)
            self._lose(NOT_COPIED)
            self._faults.fail("tensor copies", error, disable=False, hint="the tensor has no file, its statistics are there")
            return ref

    def _take_any(self, files: StepFiles, tensor: torch.Tensor, ref: TensorRef) -> TensorRef:
        with quiet():
            data, _, why = _describe.resolve(tensor)
            if data is None or why or not self._backend.has_bytes(data):
                return ref
            if self._cut is not None:
                data = self._cut(data)
            if ref.row < 0:
                ref = TensorRef(self._backend.blank_row(), ref.description)
            host = data.device.type == "cpu" and not getattr(type(data), "probe_device", False)
            if host and data.is_contiguous():
                self._copy_bytes(files, ref.row, str(data.dtype), tuple(data.shape), data.data_ptr(), data.nbytes)
            else:
                self._copy_elements(files, ref.row, data)
        return ref

    def _copy_elements(self, files: StepFiles, row: int, data: torch.Tensor) -> None:
        """Strided memory, and memory of a device."""
        module = None if data.device.type == "cpu" else getattr(torch, data.device.type, None)
        if module is not None and not hasattr(module, "Event"):
            self._lose(f"tensors on {data.device.type}, which has no copy without a wait")
            return
        nbytes = data.numel() * data.element_size()
        payload = self.store.place(files, row, str(data.dtype), tuple(data.shape), nbytes, PLAIN if module is None else PINNED)
        if payload.slab is None:
            self._lose(payload.lost)
            return
        try:
            target = _tensor_of(payload)
            if not data.dtype.is_complex and data.element_size() in _WORDS:  # some types have no copy of their own
                data = data.view(_WORDS[data.element_size()])
            _copy(data, target.view(data.dtype), whole=module is None and not getattr(type(data), "probe_device", False))
            if module is not None:
                payload.ready = _Event(data.device)
        except BaseException as error:
            self.store.spoil(files, payload, f"{type(error).__name__}: {str(error)[:120]}")
            raise
        self.store.add(files, payload)


class _Event:
    """A copy that the current stream of a device makes."""

    def __init__(self, device: torch.device) -> None:
        self._event = record_event(device, blocking=True)  # the writer sleeps meanwhile

    def wait(self) -> None:
        wait_for(self._event)


def _copy(data: torch.Tensor, target: torch.Tensor, *, whole: bool) -> None:
    """To flat memory of the host, in C order. `whole` False: a device makes a strided tensor contiguous first, in pieces here."""
    n, size = data.numel(), max(1, _PIECE // data.element_size())
    if whole or n <= size or data.is_contiguous():
        target.view(data.shape).copy_(data, non_blocking=True)
        return
    for at in range(0, n, size):
        target[at : at + size].copy_(stretch(data, at, min(at + size, n)), non_blocking=True)


def _tensor_of(payload: Payload) -> torch.Tensor:
    slab = payload.slab
    assert slab is not None
    with torch.inference_mode(False):
        if slab.tensor is None:
            slab.tensor = torch.frombuffer(slab.view, dtype=torch.uint8)
        made: torch.Tensor = slab.tensor[payload.offset : payload.offset + payload.nbytes]
        return made


def _allocate_pinned(nbytes: int) -> tuple[memoryview, int, object]:
    with quiet(), torch.inference_mode(False):
        memory = host_memory((nbytes,), torch.uint8)
    return memory.numpy().data, memory.data_ptr(), memory


def sample(dtype: str, shape: tuple[int, ...]) -> Sample:
    """What ``torch.save`` writes for a tensor of this kind. Large ones are saved without their bytes where torch can do that (2.6 and
    later); they are not touched, so they take no memory."""
    kind = getattr(torch, dtype.removeprefix("torch."))
    item = torch.empty(0, dtype=kind, device="cpu")
    numel = torch.Size(shape).numel()
    strides = torch.empty(shape, dtype=torch.uint8, device="meta").stride()
    nbytes = numel * item.element_size()
    tensor = item.set_(torch.UntypedStorage(nbytes, device="cpu"), 0, shape, strides)
    skip = getattr(torch.serialization, "skip_data", None)
    if skip is None or nbytes <= _SMALL_SAMPLE:
        whole = io.BytesIO()
        torch.save(tensor, whole)
        return split_sample(whole.getvalue())
    sink = _WithoutBytes()
    with skip():
        torch.save(tensor, sink)  # type: ignore[arg-type]  # whatever can write
    return Sample(b"".join(sink.head), sink.skipped, b"".join(sink.tail))


class _WithoutBytes:
    """A file that remembers what is written to it, and how much is skipped."""

    def __init__(self) -> None:
        self.head: list[bytes] = []
        self.tail: list[bytes] = []
        self.skipped = -1

    def write(self, data: Any) -> int:
        (self.head if self.skipped < 0 else self.tail).append(bytes(data))
        return len(data)

    def seek(self, distance: int, whence: int = 0) -> int:
        """torch leaves the bytes out by one step forward."""
        if whence != 1 or self.skipped >= 0:
            raise OSError("only the bytes of one tensor can be left out")
        self.skipped = distance
        return 0

    def flush(self) -> None:
        """Nothing is held back."""
