"""Starts the row kernels of `device_kernel`: through Triton the first time, then by the compiled kernel itself.

Triton's own call binds names, looks up a specialisation and hashes options, 15 to 25 microseconds of host time per launch. What it
arrives at depends on nothing but the device, the type, the words that are wanted and whether the address is a multiple of 16, so a
`Launcher` keeps the compiled kernel for these and calls its launcher with addresses. That call is the same in Triton 3.2 to 3.9; other
versions, and devices of which this module knows no such functions, keep to Triton's own call, as does a Triton whose direct call does not
give the known row (`device_check`).
"""

# mypy: allow-untyped-calls
# Triton has no types.

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton

from msprobe_engine import hostkernel
from msprobe_engine import rows as _rows
from msprobe_engine.log import warn_once
from msprobe_integrations.torch import device_kernel as _kernel
from msprobe_integrations.torch.statistics import LAUNCHERS, host_flags

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHECKSUMS = hostkernel.WANT_CRC | hostkernel.WANT_XOR
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


class Launcher:
    """Writes rows of the tensors of one type on one device. For each `want` there is one, in `statistics.LAUNCHERS`.

    Attributes:
        key: of the step's `DeviceRows`.
        flags: FLAGS of the rows.
        direct: the compiled kernel for addresses that are no multiple of `ALIGNMENT`, and for those that are; None: not compiled yet, or
            only Triton's own call may be used.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, want: int) -> None:
        words = want & _kernel.WORDS_WANTED
        self.key = (None, device)
        self.flags = host_flags(dtype, want)
        self.direct: list[Callable[..., None] | None] = [None, None]
        self._device, self._index = device, device.index
        self._size = dtype.itemsize
        self._part = _kernel.elements_per_program(self._size)
        self._limit = bits_of(hostkernel.limit_of(want)) if want & hostkernel.WANT_BELOW else 0
        self._digest = bool(want & hostkernel.WANT_DIGEST)
        self._constants = _kernel.constants(dtype, words)
        self._more_words = _kernel.more_words(words)
        self._merge: Callable[..., None] | None = None
        self._runtime = runtime(device.type)

    def find(self, pointer: int, n: int) -> Callable[..., None] | None:
        """The compiled kernel for `n` elements at `pointer`, for `start`; None: `launch` has to do it."""
        return self.direct[pointer % ALIGNMENT == 0] if n <= self._part or self._merge is not None else None

    def stream(self) -> int:
        """Handle of the stream on which `start` may start a kernel now; -1: `start` may not be used (another device is the current one,
        the stream is captured)."""
        known = self._runtime
        if known is None or known.current_device() != self._index or known.capturing():
            return -1
        return known.stream(self._index)

    def start(self, direct: Callable[..., None], pointer: int, n: int, row: int, stream: int, index0: int = 0) -> None:
        """Start the kernels that write the row of `n` contiguous elements at `pointer` to the address `row`.

        Args:
            direct: of `find`.
            stream: of `stream`.
        """
        programs = self.programs(n)
        if programs == 1:
            direct(1, stream, pointer, row, n, index0, self._limit)
            return
        assert self._runtime is not None
        assert self._merge is not None
        parts = self._runtime.allocate(programs * _kernel.ROW_BYTES, stream)
        try:
            direct(programs, stream, pointer, parts, n, index0, self._limit)
            self._merge(1, stream, parts, row, programs)
        finally:
            self._runtime.free(parts)  # the next owner comes after these launches: memory is given out in the order of the stream

    def failed(self, error: Exception) -> None:
        """`start` has raised `error`: no launch is tried that way again, unless there was no memory."""
        if "out of memory" not in str(error):
            distrust(self._device.type, f"{type(error).__name__}: {str(error)[:200]}")

    def programs(self, n: int) -> int:
        """How many take part in the row of `n` elements."""
        return min(_kernel.MAX_PROGRAMS, -(-n // self._part))

    def launch(self, tensor: torch.Tensor, row: torch.Tensor, index0: int) -> None:
        """`reduce`, through Triton's own call."""
        data = tensor.detach()
        if not data.is_contiguous() and (self._digest or not torch.ops.aten.is_non_overlapping_and_dense.default(data)):
            data = data.contiguous()
        n = data.numel()
        bits, out = data.view(_BITS[self._size]), row.view(torch.int64)
        programs = self.programs(n)
        parts = out if programs == 1 else out.new_empty(programs * _rows.WORDS)
        with _current(tensor.device):
            made = [(_kernel._row_kernel[(programs,)](bits, parts, n, index0, self._limit, **self._constants), self._constants)]
            if programs > 1:
                made.append((_kernel._merge_kernel[(1,)](parts, out, programs, **self._more_words), self._more_words))
        if self._runtime is not None and self.find(bits.data_ptr(), n) is None and self._device.type not in _untrue:
            self.direct[bits.data_ptr() % ALIGNMENT == 0], *merge = [bind(*one) for one in made]
            self._merge = merge[0] if merge else self._merge


def launcher(device: torch.device, dtype: torch.dtype, want: int) -> Launcher:
    """The one for tensors of this type on this device; a checksum in `want` does not matter."""
    want &= ~_CHECKSUMS
    known = LAUNCHERS.setdefault((device, dtype), {})
    return known.get(want) or known.setdefault(want, Launcher(device, dtype, want))


def reduce(tensor: torch.Tensor, row: torch.Tensor, want: int, index0: int = 0) -> None:
    """Write the row of `tensor` to `row` ([16] float64 on the same device), on the current stream of that device.

    Args:
        tensor: plain, strided, of a type in `device_kernel.KINDS`, with at least one element; any strides.
        want: as in `hostkernel.reduce`; checksums are not taken here.
        index0: global index of the first element, for the digest of a shard.
    """
    launcher(tensor.device, tensor.dtype, want).launch(tensor, row, index0)


def distrust(kind: str, why: str) -> None:
    """From now on launches on devices of this type go through Triton's own call."""
    _untrue.add(kind)
    for (device, _), known in LAUNCHERS.items():
        if device.type == kind:
            for one in known.values():
                one.direct = [None, None]
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


def _current(device: torch.device) -> Any:
    """Makes `device` the current one, where Triton launches, when it is not."""
    module = getattr(torch, device.type)
    if device.type == "cpu" or device.index is None or module.current_device() == device.index:
        return _nothing
    return module.device(device)
