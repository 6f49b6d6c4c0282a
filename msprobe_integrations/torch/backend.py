"""The torch side of `msprobe_engine.core.backend.Backend`: statistics of tensors without waiting for the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import mul
from typing import Any, NamedTuple
from weakref import ref as weak

import torch

from msprobe_engine.core.guard import raise_of_training
from msprobe_engine.core.records import TensorDescription, TensorRef
from msprobe_engine.core.statistics import host_kernel
from msprobe_engine.core.statistics import rows as _rows
from msprobe_engine.core.statistics.rows import Rows
from msprobe_integrations.common.capture.descriptions import intern
from msprobe_integrations.common.statistics.row_options import CHECKSUMS
from msprobe_integrations.common.statistics.step_backend import FIRST_CAPACITY, StepBackend
from msprobe_integrations.torch.offline_tools import OfflineTools
from msprobe_integrations.torch.ranks.job import Job
from msprobe_integrations.torch.statistics.checksums import Staging, xor_into
from msprobe_integrations.torch.statistics.derived import PairRows
from msprobe_integrations.torch.statistics.device.reduce import DeviceReduce
from msprobe_integrations.torch.statistics.device_rows import DeviceRows, Taker
from msprobe_integrations.torch.statistics.pending import LateScale, Seen, Step, TorchPendingRows, quiet
from msprobe_integrations.torch.statistics.rows import CODES, LAUNCHERS, MANY, host_flags, is_repeated, reduce_cpu, reduce_device
from msprobe_integrations.torch.tensors import describe as _describe
from msprobe_integrations.torch.tensors import quantized
from msprobe_integrations.torch.tensors.byte_forms import TensorBytes
from msprobe_integrations.torch.tensors.devices import is_capturing

_function_modes = torch._C._len_torch_function_stack
_NoFunction = torch._C.DisableTorchFunction
_new = tuple.__new__
_kernel_reduce, _kernel_reduce_strided = host_kernel.functions()
_sample = host_kernel.sample_function()
_PAGE = 1 << 16
_FAR = 1 << 40  # no offset reaches so far
_NO_FLOAT64 = ("mps",)


class Part(NamedTuple):
    """A part of all tensors of one shape, for `TorchBackend.reduce_part_of`."""

    cut: tuple[slice, ...]
    starts: tuple[int, ...]
    """First index along every dimension."""
    shape: tuple[int, ...]


PartOf = Callable[[Sequence[int]], Part | None]


def _is_freed(data: torch.Tensor) -> bool:
    return data.data_ptr() <= data.storage_offset() * data.element_size()


def _span(tensor: torch.Tensor) -> int:
    """Bytes between the first and the last element of a strided tensor, both counted."""
    steps = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))
    return (steps + 1) * tensor.element_size() if tensor.numel() else 0


def _has_version(tensor: torch.Tensor, data: torch.Tensor) -> bool:
    """Does a tensor get another version whenever it is written to? One that only holds others (a DTensor) does not: ``_foreach_mul_`` of a
    list of them, with which gradients are clipped, leaves it as it is."""
    return not tensor.is_inference() and (data is tensor or type(tensor) in _describe._PLAIN)


def _memory_of(tensor: torch.Tensor, data: torch.Tensor) -> tuple[int, int, int]:
    """Address, bytes and sample of a tensor that is its own data and lies on the host; zeros for any other: its version has to do."""
    if data is not tensor or data.device.type != "cpu" or getattr(type(data), "probe_device", False):
        return 0, 0, 0
    pointer, size = data.data_ptr(), _span(data)
    return pointer, size, _sample(pointer, size)


def _is_unwritten(tensor: torch.Tensor, seen: Seen) -> bool:
    """Has the memory of a tensor still what it had when its row was made, as far as a sample of it tells?"""
    pointer = seen[3]
    return not pointer or (tensor.data_ptr() == pointer and _sample(pointer, seen[4]) == seen[5])


class TorchBackend(DeviceReduce, PairRows, StepBackend, TensorBytes, Job, OfflineTools):
    """Statistics, files and ranks for torch. One per process; `reduce` may be called from any thread."""

    name = "torch"
    framework = "pytorch"
    step_type = Step

    def __init__(self, *, digest: bool = False) -> None:
        super().__init__(digest=digest)
        self._known: dict[tuple[Any, ...], tuple[TensorDescription, int, int, int]] = {}
        self._known_pairs = {}

    def is_tensor(self, value: Any) -> bool:
        """True for torch tensors, subclasses too."""
        return isinstance(value, torch.Tensor)

    def describe(self, tensor: Any) -> TensorDescription:
        """Description without touching data; equal descriptions are the same object."""
        return self._describe_tensor(tensor)

    def _describe_tensor(self, tensor: Any) -> TensorDescription:
        if _function_modes():
            with _NoFunction():
                return _describe.describe(tensor)
        return _describe.describe(tensor)

    def reduce(self, tensor: Any) -> TensorRef:
        """Start the reduction of one tensor; row -1 when it has no data to read. Never waits for a device, never raises.

        The same tensor object in the same version gives the same row within a step. Versions do not count everything: kernels that
        are handed a pointer (Triton, C++ extensions), writes through ``.data``, fused optimizers and most in-place collectives leave
        them as they are. On the CPU a sample of the memory tells most of that (`host_kernel.sample_function`); elsewhere, and for
        writes of a few elements, `forget` has to be called.
        """
        if _function_modes():
            with _NoFunction():
                return self.reduce_unshielded(tensor)
        return self.reduce_unshielded(tensor)

    def reduce_unshielded(self, tensor: Any) -> TensorRef:
        """`reduce` for callers that have taken torch function modes off themselves."""
        step = self._step
        try:
            found = step.seen.get(id(tensor))
            version = tensor._version
            # the last line is `_is_unwritten` without the price of a call
            if (
                found is not None
                and found[1] == version
                and found[0]() is tensor
                and (not found[3] or (tensor.data_ptr() == found[3] and _sample(found[3], found[4]) == found[5]))
            ):
                known = found[2]
                # checkpointing marks a tensor that was made without gradients, in the same version
                return known if known[1][3] is tensor.requires_grad else self._update_requires_grad(step, id(tensor), tensor)
            description, numel, code, size = self._known[(type(tensor), tensor.dtype, tensor.shape, tensor.requires_grad, tensor.device)]
            # raises for functorch wrappers and sparse tensors, is 0 for freed and functional ones: they look plain otherwise
            pointer = tensor.data_ptr()
            if numel < 0:
                return self._reduce_on_device(step, tensor, version, pointer, description)
            # of freed memory a view still has an address: its offset
            there = pointer > _FAR or pointer > tensor.storage_offset() * tensor.element_size()
            if there and not tensor.is_neg() and not (numel >= MANY and is_repeated(tensor)):
                row = next(step.numbers)
                first, end, base = step.host.window
                address = base + row * 128 if first <= row < end else step.host.address(row)
                if tensor.is_contiguous():
                    _kernel_reduce(pointer, numel, code, address, self._want, 0)
                else:
                    size = _span(tensor)
                    _kernel_reduce_strided(pointer, tensor.shape, tensor.stride(), code, address, self._want, 0)
                made: TensorRef = _new(TensorRef, (row, description))
                step.seen[id(tensor)] = (weak(tensor), version, made, pointer, size, _sample(pointer, size))
                return made
        except Exception as error:
            raise_of_training(error)
        return self._reduce_any(step, tensor)

    def _update_requires_grad(self, step: Step, key: int, tensor: Any) -> TensorRef:
        """The row of a tensor that is known, described with what ``requires_grad`` is by now."""
        weakly, version, (row, description), *memory = step.seen[key]
        made = TensorRef(row, intern(*description._replace(requires_grad=tensor.requires_grad)))
        step.seen[key] = (weakly, version, made, *memory)
        return made

    def reduce_part(self, part: torch.Tensor, index0: int) -> TensorRef:
        """`reduce` for a flat range of a plain tensor that starts at element `index0` of it: the digest is taken with positions in
        the whole, so that the digests of all parts add up to that of the whole. Every call gives a row of its own."""
        if not self.want_digest or index0 == 0:
            return self.reduce(part)
        step, row = self._step, -1
        with quiet():
            data, description, why = _describe.resolve(part)
            try:
                why = why if data is None else self._unfit(data)
                if data is None or why:
                    return self._without(description, why)
                row = next(step.numbers)
                self._launch(step, data, row, index0)
                return TensorRef(row, description)
            except Exception as error:
                raise_of_training(error)
                if row >= 0:
                    step.host.clear(row)
                return self._without(description, f"{type(error).__name__}: {str(error)[:80]}")

    def reduce_part_of(self, tensor: Any, part_of: PartOf) -> TensorRef:
        """`reduce` for a part of a tensor, cut from its data by what `part_of` gives for their shape (None: the whole). The
        description has the shape of the part, and ``full_shape``. Parts of the same tensor in the same version have the same row."""
        step = self._step
        key = ~id(tensor)  # not where the row of the whole is
        try:
            version = tensor._version
            found = step.seen.get(key)
            if found is not None and found[1] == version and found[0]() is tensor and _is_unwritten(tensor, found):
                return found[2] if found[2][1][3] is tensor.requires_grad else self._update_requires_grad(step, key, tensor)
            # plain CPU tensors, as in `reduce_unshielded`: the part is memory with other strides, no view is made
            whole, numel, code, size = self._known[(type(tensor), tensor.dtype, tensor.shape, tensor.requires_grad, tensor.device)]
            begin = pointer = tensor.data_ptr()  # raises for what only looks plain
            part = part_of(whole.shape)
            if part is None:
                return self.reduce_unshielded(tensor)
            if numel >= 0 and pointer > _FAR and not tensor.is_neg():
                strides = tensor.stride()
                pointer += tensor.element_size() * sum(map(mul, part.starts, strides))
                description = _describe.of_part(whole, part.shape)
                row = next(step.numbers)
                _kernel_reduce_strided(pointer, part.shape, strides, code, step.host.address(row), self._want, 0)
                made: TensorRef = _new(TensorRef, (row, description))
                size = size if tensor.is_contiguous() else _span(tensor)
                step.seen[key] = (weak(tensor), version, made, begin, size, _sample(begin, size))
                return made
        except Exception as error:
            raise_of_training(error)
        return self._reduce_any_part(step, tensor, part_of)

    def _reduce_any_part(self, step: Step, tensor: Any, part_of: PartOf) -> TensorRef:
        row = -1
        try:
            with quiet():
                data, description, why = _describe.resolve(tensor)
                part = part_of(description.shape if data is None else data.shape)
                if part is None:
                    return self.reduce_unshielded(tensor)
                if data is not None and data is tensor and type(data) in _describe._PLAIN:
                    self._learn(data, description)
                description = _describe.of_part(description, part.shape)
                if data is not None:
                    data = data[part.cut]
                    why = self._unfit(data)
                if data is None or why:
                    return self._without(description, why)
                row = next(step.numbers)
                self._launch(step, data, row)
                made = TensorRef(row, description)
                if _has_version(tensor, data):
                    step.seen[~id(tensor)] = (weak(tensor), tensor._version, made, *_memory_of(tensor, data))
                return made
        except Exception as error:
            raise_of_training(error)
            if row >= 0:
                step.host.clear(row)
            return self._without(self._describe_tensor(tensor), f"{type(error).__name__}: {str(error)[:80]}")

    def _reduce_any(self, step: Step, tensor: Any) -> TensorRef:
        """Every tensor that is not plain, contiguous and known; and the first of each kind that is."""
        if tensor is None:
            return TensorRef(-1, intern("NoneType", "", (), None, ""))
        row = -1
        try:
            with quiet():
                if quantized.is_quantized(type(tensor)):
                    return self._reduce_quantized(step, tensor)
                data, description, why = _describe.resolve(tensor)
                if data is not None:
                    why = self._unfit(data)
                if data is None or why:
                    return self._without(description, why)
                row = next(step.numbers)
                self._launch(step, data, row)
                made = TensorRef(row, description)
                if type(tensor) in _describe._PLAIN and data is tensor:
                    self._learn(tensor, description)
                if _has_version(tensor, data):
                    step.seen[id(tensor)] = (weak(tensor), tensor._version, made, *_memory_of(tensor, data))
                return made
        except Exception as error:
            raise_of_training(error)
            if row >= 0:
                step.host.clear(row)
            return self._without(self._describe_tensor(tensor), f"{type(error).__name__}: {str(error)[:80]}")

    def _reduce_quantized(self, step: Step, tensor: Any) -> TensorRef:
        """The row of the values, in blocks where they are large; and the scales, whose extremes are put into the description later."""
        blocks = 1 if self._want & (host_kernel.WANT_CRC | host_kernel.WANT_XOR) else quantized.blocks_of(tensor)
        if blocks > 1 and not is_capturing(tensor.device.type):
            description, row = _describe.describe(tensor), next(step.numbers)
            step.host.clear(row)
            like = tensor._data
            take, _ = self._device_rows(step, like, row, host_flags(tensor.dtype, self._want))
            quantized.reduce_blocks(tensor, blocks, take, self._want)
        else:
            data, description, why = _describe.resolve(tensor)
            why = why if data is None else self._unfit(data)
            if data is None or why:
                return self._without(description, why)
            row = next(step.numbers)
            step.host.clear(row)
            self._launch(step, data, row)
        scales = quantized.scales(tensor)
        if scales is not None and (scale_row := self._reduce_any(step, scales).row) >= 0:
            late = LateScale(min=None, max=None)
            step.scales.append((late, scale_row))
            description = description._replace(extra=(*description.extra, ("scale_inv", late)))
        return TensorRef(row, description)  # not remembered: its codes are written by kernels, without new versions

    def _unfit(self, data: torch.Tensor) -> str:
        if data.dtype not in CODES:
            return f"no kernel: {data.dtype}"
        if data.device.type in _NO_FLOAT64:
            return f"no float64: {data.device.type}"
        if data.device.type != "cpu" and is_capturing(data.device.type):
            return _describe.CAPTURE  # a replay would write to rows of a step long gone
        if data.device.type == "cpu" and data.numel() and _is_freed(data) and not getattr(type(data), "probe_device", False):
            return "no memory"
        return ""

    def _launch(self, step: Step, data: torch.Tensor, row: int, index0: int = 0) -> None:
        device_like = getattr(type(data), "probe_device", False)
        if data.device.type == "cpu" and not device_like and host_kernel.available:
            reduce_cpu(data, step.host.address(row), self._want, index0)
            return
        step.host.clear(row)
        want = self._want
        take, key = self._device_rows(step, data, row, host_flags(data.dtype, want & ~host_kernel.WANT_CRC))
        reduce_device(data, take, want, index0)
        if want & host_kernel.WANT_XOR and take.last is not None:
            xor_into(data, take.last[_rows.XOR])
        if want & host_kernel.WANT_CRC:
            self._take_crc(step, data, row, key)

    def _device_rows(self, step: Step, data: torch.Tensor, row: int, flags: int) -> tuple[Taker, Any]:
        """Gives rows of the device for row `row` of the step, to be written on the present stream; and the device's key."""
        key = (type(data) if getattr(type(data), "probe_device", False) else None, data.device)
        rows = step.devices.get(key)
        if rows is None:
            with step.lock:
                rows = step.devices.setdefault(key, DeviceRows(data, FIRST_CAPACITY))
        return Taker(rows, data, row, flags), key

    def _take_crc(self, step: Step, data: torch.Tensor, row: int, key: Any) -> None:
        """Without it the row is still good: what goes wrong here is counted."""
        try:
            if data.numel() == 0:
                step.crcs[row] = 0
            elif key == (None, torch.device("cpu")):
                packed = data.detach().contiguous()
                step.crcs[row] = host_kernel.crc32(packed.data_ptr(), packed.numel() * packed.element_size())
            else:
                with step.lock:
                    staging = step.staging.get(key) or step.staging.setdefault(key, Staging(data))
                staging.stage_bytes(data, row)
        except Exception as error:
            raise_of_training(error)
            why = f"checksum: {type(error).__name__}: {str(error)[:80]}"
            self.unsupported[why] = self.unsupported.get(why, 0) + 1

    def _learn(self, tensor: torch.Tensor, description: TensorDescription) -> None:
        """From now on tensors that look like this one take the fast path."""
        on_device = (tensor.device, tensor.dtype) in LAUNCHERS
        if on_device or (host_kernel.available and tensor.device.type == "cpu" and not tensor.dtype.is_complex):
            if len(self._known) > _PAGE:
                self._known.clear()
            key = (type(tensor), tensor.dtype, tensor.shape, tensor.requires_grad, tensor.device)
            nbytes = tensor.numel() * tensor.element_size()
            self._known[key] = (description, -1 if on_device else tensor.numel(), CODES[tensor.dtype], nbytes)

    def has_bytes(self, data: torch.Tensor) -> bool:
        """Can the bytes of a tensor that `describe.resolve` found be copied now?"""
        return self._unfit(data) not in (_describe.CAPTURE, "no memory")

    def forget(self, tensor: Any = None, *, views: bool = True) -> None:
        """Data may have changed without a new version (collective, ``.data``, fused optimizer): nothing reduced so far in this
        step is taken for the present value of any tensor. `tensor` says which one changed; `views` of it count too, so all go."""
        seen = self._step.seen
        if tensor is None or views:
            seen.clear()
        else:
            seen.pop(id(tensor), None)
            seen.pop(~id(tensor), None)

    def finish_step(self) -> TorchPendingRows:
        """Hand over the rows since the last call: one copy per device, started here and not waited for."""
        step, n = self._end_step()
        if not step.devices:
            return TorchPendingRows(step, n)
        with quiet():
            return TorchPendingRows(step, n)

    def so_far(self) -> Rows:
        """A copy of the rows of the step in progress, [n, 16]. Waits for the device."""
        step, out = self._step, self._host_rows_so_far()
        with quiet():
            for source in step.devices.values():
                if source.places:
                    for stream in source.streams:
                        stream.synchronize()
                    source.scatter(source.join_rows().cpu().numpy(), out)
        return out


__all__ = ["CHECKSUMS", "Part", "PartOf", "TorchBackend", "TorchPendingRows"]
