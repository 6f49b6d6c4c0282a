"""Starts the row kernels of `device.kernel`: through Triton the first time, then by the compiled kernel itself.

Triton's own call binds names, looks up a specialisation and hashes options, 15 to 25 microseconds of host time per launch. What it
arrives at depends on nothing but the device, the type, the words that are wanted and whether the address is a multiple of 16, so a
`Launcher` keeps the compiled kernel for these and calls its launcher with addresses. That call is the same in Triton 3.2 to 3.9; other
versions, and devices of which this module knows no such functions, keep to Triton's own call, as does a Triton whose direct call does not
give the known row (`device.check`).
"""

# mypy: allow-untyped-calls
# Triton has no types.

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton

from msprobe_engine.core.log import warn_once
from msprobe_engine.core.statistics import host_kernel
from msprobe_engine.core.statistics import rows as _rows
from msprobe_integrations.torch.statistics.device import kernel as _kernel
from msprobe_integrations.torch.statistics.rows import LAUNCHERS, host_flags

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHECKSUMS = host_kernel.WANT_CRC | host_kernel.WANT_XOR
ALIGNMENT = 16
"""Triton compiles an address that is a multiple of this another way: with loads of 16 bytes."""


class Runtime(NamedTuple):
    """What a launch without Triton's call has to ask of the device; none of it waits."""

    current_device: Callable[[], int]
    stream: Callable[[int], int]
    """Handle of the current stream of a device."""
    capturing: Callable[[], bool]
    """The current stream is recorded into a graph."""
    allocate: Callable[[int, int], int]
    """Bytes and stream to an address; of the caching allocator, in the order of the stream."""
    free: Callable[[int], None]


@lru_cache(None)
def runtime(kind: str) -> Runtime | None:
    """That of a device type; None where direct launches are not known to work."""
    of_torch: Any = torch._C
    if kind != "cuda" or not _same_call(str(triton.__version__)):
        return None
    try:
        return Runtime(
            of_torch._cuda_getDevice,
            of_torch._cuda_getCurrentRawStream,
            of_torch._cuda_isCurrentStreamCapturing,
            of_torch._cuda_cudaCachingAllocator_raw_alloc,
            of_torch._cuda_cudaCachingAllocator_raw_delete,
        )
    except AttributeError:
        return None


def _same_call(version: str) -> bool:
    """The launcher of a compiled kernel takes what `_Direct` gives it."""
    return _numbers(version) in {(3, minor) for minor in range(2, 10)}


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


class _Direct:
    """A compiled kernel, called as Triton's own call ends: grid, stream, function, metadata, no hooks, arguments. From Triton 3.3 on the
    compile-time arguments are passed too (and skipped there)."""

    __slots__ = ("_function", "_metadata", "_run", "_tail")

    def __init__(self, compiled: Any, constants: dict[str, Any]) -> None:
        self._run, self._function, self._metadata = compiled.run, compiled.function, compiled.packed_metadata
        self._tail = () if _numbers(str(triton.__version__)) < (3, 3) else tuple(constants.values())

    def __call__(self, programs: int, stream: int, *arguments: int) -> None:
        self._run(programs, 1, 1, stream, self._function, self._metadata, None, None, None, *arguments, *self._tail)


def bind(compiled: Any, constants: dict[str, Any]) -> Callable[..., None] | None:
    """The direct call of what Triton's call returned; `constants` in the order of the kernel's parameters. None: there is none."""
    return _Direct(compiled, constants) if hasattr(compiled, "packed_metadata") else None


_untrue: set[str] = set()
"""Device types whose direct call has failed."""
_made: list[Launcher] = []
Numbers = tuple[int, ...]


class Launcher:
    """Writes rows of the tensors, or pairs of tensors, of some types on one device, by the kernels of `device.kernel`.

    Attributes:
        key: of the step's `DeviceRows`.
        flags: FLAGS of the rows.
        direct: compiled kernels by which of the addresses of the data are multiples of `ALIGNMENT` (the first one: 1, the second: 2); None:
            not compiled yet, or only Triton's own call may be used.
    """

    kernel: Any
    many: Any
    """The kernel for a table of tensors."""
    whole: int
    """Index of `direct` when all addresses are multiples of `ALIGNMENT`."""
    fusion: bool
    """A product and a sum may be rounded once."""
    dtypes: tuple[torch.dtype, ...]

    def __init__(self, device: torch.device, size: int, flags: int, want: int, constants: dict[str, Any]) -> None:
        self.key = (None, device)
        self.device = device
        self.flags = flags
        self.want = want
        self.direct: list[Callable[..., None] | None] = [None] * 4
        self.part = _kernel.elements_per_program(size)
        self.limit = bits_of(host_kernel.limit_of(want)) if want & host_kernel.WANT_BELOW else 0
        self.constants = constants
        self.options = {"enable_fp_fusion": self.fusion} if device.type == "cuda" else {}
        self.runtime = runtime(device.type)
        self._index = device.index
        self._more_words = _kernel.more_words(want & _kernel.WORDS_WANTED)
        self._merge: Callable[..., None] | None = None
        self._many: dict[bool, Callable[..., None] | None] = {}
        self._merge_many: Callable[..., None] | None = None
        _made.append(self)

    def find(self, aligned: int, n: int) -> Callable[..., None] | None:
        """The compiled kernel of `direct` for `n` elements; None: `launch` has to do it."""
        return self.direct[aligned] if n <= self.part or self._merge is not None else None

    def stream(self) -> int:
        """Handle of the stream on which `start` may start a kernel now; -1: `start` may not be used (another device is the current one,
        the stream is captured)."""
        known = self.runtime
        if known is None or known.current_device() != self._index or known.capturing():
            return -1
        return known.stream(self._index)

    def start(self, direct: Callable[..., None], data: Numbers, n: int, row: int, numbers: Numbers, stream: int) -> None:
        """Start the kernels that write the row of `n` contiguous elements to the address `row`.

        Args:
            direct: of `find`.
            numbers: the kernel's arguments behind `n`.
            stream: of `stream`.
        """
        programs = self.programs(n)
        if programs == 1:
            direct(1, stream, *data, row, n, *numbers)
            return
        assert self.runtime is not None
        assert self._merge is not None
        parts = self.runtime.allocate(programs * _kernel.ROW_BYTES, stream)
        try:
            direct(programs, stream, *data, parts, n, *numbers)
            self._merge(1, stream, parts, row, programs)
        finally:
            self.runtime.free(parts)  # the next owner comes after these launches: memory is given out in the order of the stream

    def numbers(self, line: Numbers) -> Numbers:
        """Arguments of the kernel behind `n`, of a line of a `device.batch.Batch`."""
        raise NotImplementedError

    def current(self) -> Any:
        """Makes the device the current one, where it is not."""
        return current(self.device)

    def programs(self, n: int) -> int:
        """How many take part in the row of `n` elements."""
        return min(_kernel.MAX_PROGRAMS, -(-n // self.part))

    def launch(self, data: Sequence[torch.Tensor], row: torch.Tensor, numbers: Numbers, kernel: Any = None, **constants: Any) -> None:
        """As `start`, through Triton's own call.

        Args:
            data: as bits, contiguous; or `kernel` is told otherwise.
            row: [16] float64.
            kernel, constants: in place of `kernel`, and what it takes besides.
        """
        n, out = data[0].numel(), row.view(torch.int64)
        programs = self.programs(n)
        parts = out if programs == 1 else out.new_empty(programs * _rows.WORDS)
        with self.current():
            every = {**self.constants, **constants, **self.options}
            made = [((kernel or self.kernel)[(programs,)](*data, parts, n, *numbers, **every), self.constants)]
            if programs > 1:
                made.append((_kernel._merge_kernel[(1,)](parts, out, programs, **self._more_words, **self.options), self._more_words))
        if kernel is None and self.runtime is not None and self.device.type not in _untrue:
            aligned = alignment(*(one.data_ptr() for one in data))
            if self.find(aligned, n) is None:
                self.direct[aligned], *merge = [bind(*one) for one in made]
                self._merge = merge[0] if merge else self._merge

    def launch_many(self, table: torch.Tensor, merges: torch.Tensor, aligned: bool) -> None:
        """Write rows of many tensors on the present stream.

        Args:
            table: [programs, 4 or 9] int64, as `_many_kernel` or `_many_pairs_kernel` takes it.
            merges: [k, 3] int64, as `_merge_many_kernel` takes it; k may be 0.
            aligned: all addresses of data are multiples of `ALIGNMENT`.
        """
        stream, direct = self.stream(), self._many.get(aligned)
        if stream >= 0 and direct is not None and (self._merge_many is not None or not len(merges)):
            direct(len(table), stream, table.data_ptr(), self.limit)
            if len(merges):
                assert self._merge_many is not None
                self._merge_many(len(merges), stream, merges.data_ptr())
            return
        with self.current():
            constants = {**self.constants, "ALIGNED": aligned}
            made = self.many[(len(table),)](table, self.limit, **constants, **self.options)
            merged = None
            if len(merges):
                merged = _kernel._merge_many_kernel[(len(merges),)](merges, **self._more_words, **self.options)
        if self.runtime is not None and self.device.type not in _untrue and table.data_ptr() % ALIGNMENT == 0:
            self._many[aligned] = bind(made, constants)
            if len(merges) and merges.data_ptr() % ALIGNMENT == 0:
                self._merge_many = bind(merged, self._more_words)

    def note_failure(self, error: Exception) -> None:
        """A direct call has raised `error`: no launch is tried that way again, unless there was no memory."""
        if "out of memory" not in str(error):
            distrust(self.device.type, f"{type(error).__name__}: {str(error)[:200]}")

    def forget_direct(self) -> None:
        """From now on kernels are started by Triton's own call."""
        self.direct, self._merge, self._many, self._merge_many = [None] * 4, None, {}, None


class RowLauncher(Launcher):
    """For tensors of one type. For each `want` there is one, in `rows.LAUNCHERS`."""

    kernel = _kernel._row_kernel
    many = _kernel._many_kernel
    whole = 1
    fusion = True

    def __init__(self, device: torch.device, dtype: torch.dtype, want: int) -> None:
        constants = _kernel.constants(dtype, want & _kernel.WORDS_WANTED)
        super().__init__(device, dtype.itemsize, host_flags(dtype, want), want, constants)
        self.dtypes = (dtype,)

    def numbers(self, line: Numbers) -> Numbers:  # noqa: ARG002
        """For a whole tensor."""
        return 0, self.limit

    def reduce(self, tensor: torch.Tensor, row: torch.Tensor, index0: int) -> None:
        """Write the row of a tensor that `reads` to `row`, through Triton's own call."""
        data, digest = tensor.detach(), self.want & host_kernel.WANT_DIGEST
        if data.is_contiguous() or (not digest and torch.ops.aten.is_non_overlapping_and_dense.default(data)):
            self.launch([data.view(BITS[data.element_size()])], row, (index0, self.limit))
            return
        places = collapse(data.shape, data.stride(), in_order=bool(digest))
        padded = [(1, 0)] * (DIMENSIONS - len(places)) + places
        numbers = (index0, self.limit, *(size for size, _ in padded[1:]), *(stride for _, stride in padded))
        wide = data.numel() >= 2**31
        self.launch([data.view(BITS[data.element_size()])], row, numbers, _kernel._strided_kernel, DIMS=len(places), WIDE=wide)


DIMENSIONS = 4
"""That a tensor may have for `_strided_kernel`, after `collapse`."""


def reads(tensor: torch.Tensor, want: int) -> bool:
    """Can the kernel read a tensor where it lies?"""
    digest = bool(want & host_kernel.WANT_DIGEST)
    if tensor.is_contiguous() or (not digest and torch.ops.aten.is_non_overlapping_and_dense.default(tensor)):
        return True
    return len(collapse(tensor.shape, tensor.stride(), in_order=digest)) <= DIMENSIONS


def collapse(shape: Sequence[int], strides: Sequence[int], *, in_order: bool) -> list[tuple[int, int]]:
    """Sizes and strides of as few dimensions as walk over the same elements, at least one; in the same order, or in that of memory."""
    kept = [one for one in zip(shape, strides) if one[0] != 1]
    if not in_order:
        kept.sort(key=lambda one: -one[1])
    made: list[tuple[int, int]] = []
    for size, stride in kept:
        if made and made[-1][1] == size * stride:
            made[-1] = (made[-1][0] * size, stride)
        else:
            made.append((size, stride))
    return made or [(1, 1)]


def alignment(*addresses: int) -> int:
    """Of one address or two, for `Launcher.direct`."""
    return sum((address % ALIGNMENT == 0) << place for place, address in enumerate(addresses))


def launcher(device: torch.device, dtype: torch.dtype, want: int) -> RowLauncher:
    """The one for tensors of this type on this device; a checksum in `want` does not matter."""
    want &= ~_CHECKSUMS
    known = LAUNCHERS.setdefault((device, dtype), {})
    return known.get(want) or known.setdefault(want, RowLauncher(device, dtype, want))


def reduce(tensor: torch.Tensor, row: torch.Tensor, want: int, index0: int = 0) -> None:
    """Write the row of `tensor` to `row` ([16] float64 on the same device), on the current stream of that device.

    Args:
        tensor: plain, strided, of a type in `device.kernel.KINDS`, with at least one element; `reads` it.
        want: as in `host_kernel.reduce`; checksums are not taken here.
        index0: global index of the first element, for the digest of a shard.
    """
    launcher(tensor.device, tensor.dtype, want).reduce(tensor, row, index0)


def distrust(kind: str, why: str) -> None:
    """From now on launches on devices of this type go through Triton's own call."""
    _untrue.add(kind)
    for one in _made:
        if one.device.type == kind:
            one.forget_direct()
    warn_once(
        f"direct launch on {kind}",
        f"statistics of small tensors on '{kind}' take some 20 us more of host time each: the direct call of a kernel of Triton "
        f"{triton.__version__} cannot be used ({why}), so Triton's own call starts the kernels. The numbers are the same",
    )


def bits_of(number: float) -> int:
    """Of a float64, as an int64."""
    bits: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return bits


class _Nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


_nothing = _Nothing()


def current(device: torch.device) -> Any:
    """Makes `device` the current one, where Triton launches, when it is not."""
    module = getattr(torch, device.type)
    if device.type == "cpu" or device.index is None or module.current_device() == device.index:
        return _nothing
    return module.device(device)
