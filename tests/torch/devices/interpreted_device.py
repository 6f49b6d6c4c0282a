"""A device of the tests: the CPU, whose rows are written by the Triton kernels in Triton's interpreter, started as on a GPU.

`install` makes CPU tensors take the way of a device. Compiled kernels are replaced by `interpreted`: called with addresses as a compiled
kernel is, it runs the interpreted kernel on the memory there. Everything else is the product's. Run as a program it prints what the cases
found, as JSON; for that ``TRITON_INTERPRET`` has to be set.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from msprobe_engine.core.statistics import histograms, host_kernel, pairs, rows
from msprobe_integrations.torch import backend as backend_module
from msprobe_integrations.torch.backend import TorchBackend
from msprobe_integrations.torch.statistics import derived
from msprobe_integrations.torch.statistics import pair_kernels as pairkernels
from msprobe_integrations.torch.statistics.device import check as device_check
from msprobe_integrations.torch.statistics.device import kernel as device_kernel
from msprobe_integrations.torch.statistics.device import launch as device_launch
from msprobe_integrations.torch.statistics.device import trust as device_trust

calls: list[str] = []
"""Kernels started by addresses."""
_held: dict[int, Any] = {}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def at(address: int, dtype: torch.dtype, n: int) -> torch.Tensor:
    """The memory at an address."""
    raw = (ctypes.c_char * (n * dtype.itemsize)).from_address(address)
    return torch.frombuffer(raw, dtype=dtype, count=n)


def interpreted(_compiled: Any, constants: dict[str, Any]) -> Callable[..., None]:
    """`device.launch.bind` of a kernel that is interpreted."""

    def row(programs: int, data: int, out: int, n: int, *numbers: int) -> None:
        bits, words = at(data, _BITS[constants["SIZE"]], n), at(out, torch.int64, programs * rows.WORDS)
        device_kernel._row_kernel[(programs,)](bits, words, n, *numbers, **constants)

    def pair(programs: int, first: int, second: int, out: int, n: int, *numbers: int) -> None:
        data = [at(one, _BITS[getattr(torch, constants[kind]).itemsize], n) for one, kind in ((first, "KIND"), (second, "KIND_B"))]
        device_kernel._pair_kernel[(programs,)](*data, at(out, torch.int64, programs * rows.WORDS), n, *numbers, **constants)

    def many(programs: int, table: int, limit: int) -> None:
        kernel, width = (device_kernel._many_pairs_kernel, 9) if "OP" in constants else (device_kernel._many_kernel, 4)
        kernel[(programs,)](at(table, torch.int64, programs * width), limit, **constants)

    def merge(programs: int, *arguments: int) -> None:
        if len(arguments) == 1:
            device_kernel._merge_many_kernel[(programs,)](at(arguments[0], torch.int64, programs * 3), **constants)
            return
        parts, out, count = arguments
        words, one = at(parts, torch.int64, count * rows.WORDS), at(out, torch.int64, rows.WORDS)
        device_kernel._merge_kernel[(programs,)](words, one, count, **constants)

    start = merge if "KIND" not in constants else many if "ALIGNED" in constants else pair if "OP" in constants else row

    def run(programs: int, _stream: int, *arguments: int) -> None:
        calls.append(start.__name__)
        start(programs, *arguments)

    return run


def _allocate(nbytes: int, _stream: int) -> int:
    memory = np.zeros(nbytes + 128, np.uint8)
    address = memory.ctypes.data
    address += -address % 128
    _held[address] = memory
    return address


def _free(address: int) -> None:
    del _held[address]


def install() -> None:
    """For the rest of the process."""
    stub = device_launch.Runtime(lambda: None, lambda _: 0, lambda: False, _allocate, _free)  # type: ignore[arg-type,return-value]
    device_launch.runtime = lambda _: stub  # type: ignore[assignment]
    device_launch.bind = interpreted
    device_trust.DEVICES = ("cpu",)
    host_kernel.available = False
    derived.on_host = lambda _: False
    backend_module.FIRST_CAPACITY = 20
    device_check.ELEMENTS = 8300


def bits(dtype: torch.dtype, n: int, seed: int) -> torch.Tensor:
    """Random bits; float64 of a size whose squares are finite."""
    random = np.random.default_rng(seed)
    if dtype == torch.float64:
        return torch.from_numpy(random.standard_normal(n))
    if dtype == torch.bool:
        return torch.from_numpy(random.integers(0, 2, n).astype(bool))
    return torch.from_numpy(random.integers(0, 256, n * dtype.itemsize, np.uint8)).view(dtype)


def words_of(row: Any) -> list[int]:
    """A row without COUNT and FLAGS, as exact words."""
    return [int(word) for index, word in enumerate(row.view(np.int64)) if index not in (rows.COUNT, rows.FLAGS)]


def single(tensor: torch.Tensor, want: int) -> list[int]:
    """The row by Triton's own call."""
    row = torch.zeros(rows.WORDS, dtype=torch.float64)
    device_launch.reduce(tensor, row, want)
    return words_of(row.numpy())


def direct() -> dict[str, Any]:
    """Tensors of several types, whole and from an odd address on, twice: the second time by addresses, with the same row."""
    backend = TorchBackend(digest=True)
    found: dict[str, Any] = {"unequal": [], "kernels": {}}
    for dtype in (torch.bfloat16, torch.float64, torch.uint64, torch.bool):
        for n in (1, 9001) if dtype is torch.bfloat16 else (700,):
            whole = bits(dtype, n + 1, n)
            for name, tensor in (("aligned", whole[:n]), ("odd", whole[1:])):
                backend.reduce(tensor)
                calls.clear()
                backend.forget()
                ref = backend.reduce(tensor)
                found["kernels"].setdefault(f"{n} {name}", []).append(calls.copy())
                data = backend.so_far()[ref.row]
                if words_of(data) != single(tensor, host_kernel.WANT_DIGEST) or data.view(np.int64)[rows.COUNT] != n:
                    found["unequal"].append(f"{dtype} {n} {name}")
    found["unsupported"] = backend.unsupported
    return found


def batched() -> dict[str, Any]:
    """Tensors of several types and sizes (none, one, one program, several; from an odd address on), a few hundred more than a chunk of
    rows holds, in a batch and each by itself."""
    backend = TorchBackend(digest=True)
    found: dict[str, Any] = {"unequal": [], "kernels": []}
    tensors = []
    for dtype, sizes in ((torch.float32, [1, 1024]), (torch.bfloat16, [0, 1, 8192, 8193]), (torch.float64, [9000]), (torch.int8, [3])):
        whole = bits(dtype, 10_000, 5)
        tensors += [whole[first : first + n] for n in sizes for first in (0, 1)]
        tensors += [whole[64 * i : 64 * i + 3] for i in range(8 if dtype.is_floating_point else 1)]
    for _ in range(3):  # by Triton's own call, a batch by it, by address
        backend.forget()
        calls.clear()
        with backend.batched():
            refs = [backend.reduce(tensor) for tensor in tensors]
            started = calls.copy()
    found["kernels"], found["early"] = calls.copy(), started
    data = backend.so_far()
    for tensor, ref in zip(tensors, refs):
        row = data[ref.row]
        expected = single(tensor, host_kernel.WANT_DIGEST) if tensor.numel() else words_of(rows.empty(1)[0])
        if words_of(row) != expected or row.view(np.int64)[rows.COUNT] != tensor.numel():
            found["unequal"].append(f"{tensor.dtype} {tensor.numel()} {tensor.storage_offset()}")
    found["rows"], found["unsupported"] = len(tensors), backend.unsupported
    return found


def paired() -> dict[str, Any]:
    """Every operation on several types, alone and in a batch, against numpy; the number of steps on the host and on the device."""
    backend, found = TorchBackend(), {"wrong": [], "batched": [], "alone": []}
    random = np.random.default_rng(0)
    backend.want_moments, backend.below = True, 0.25
    float32, bfloat16 = torch.float32, torch.bfloat16
    cases = [(pairs.AGREE, bfloat16, float32, 0), (pairs.RATIO, float32, float32, 3), (pairs.RATIO, torch.float64, float32, 0)]
    cases += [(pairs.RATIO, float32, torch.float16, 0), (pairs.LINEAR, float32, bfloat16, 0), (pairs.SIGN, float32, float32, 0)]
    for op, first, second, steps in cases:
        n = 8200 if steps else 400
        a, b = (torch.from_numpy(random.standard_normal(n + 3)).to(kind) for kind in (first, second))
        b = b.abs() if op == pairs.RATIO else b
        a[:4], b[:4] = torch.tensor([0.0, float("nan"), 1.0, float("inf")]), torch.tensor([0.0, 1.0, 0.0, float("nan")])
        numbers: Any = (1 / (1 - 0.9**steps), (1 - 0.999**steps) ** -0.5, 0.001) if steps else (0.75, -1.25, 0.001)
        c, count = numbers, torch.tensor(float(steps))
        if steps:
            c = (pairkernels.Correction(count, 0.9, -1.0), pairkernels.Correction(count, 0.999, -0.5), 0.001)
        refs = []
        for how, begins in (("alone", (0, 1)), ("alone", (0, 1)), ("batched", (0,) * 3 + (1,) * 3), ("batched", (0,) * 3 + (1,) * 3)):
            calls.clear()
            with backend.batched() if how == "batched" else contextlib.nullcontext():
                refs += [(i, backend.reduce_pair(derived.Pair(op, a[i : n + i], b[i : n + i], c))) for i in begins]
            found[how].append(calls.copy())
        data = backend.so_far()
        for begin, ref in refs:
            x, y = (t[begin : n + begin].to(float32 if t.dtype.itemsize == 2 else t.dtype).numpy() for t in (a, b))
            made = pairs.values(op, x, y, numbers)
            code = host_kernel.CODES[made.dtype.name]
            expected = host_kernel.row_of(np.ascontiguousarray(made).view(np.uint8), code, backend._want, 0)
            if ref.row < 0 or (wrong := device_check.compare(data[ref.row], expected)):
                found["wrong"].append(f"{op} {first} {second} {begin}: {wrong if ref.row >= 0 else backend.unsupported}")
    found["unsupported"] = backend.unsupported
    return found


def counted() -> dict[str, Any]:
    """Histograms of every type, of one program and of several, dense and not, against numpy; and what was done without the kernel."""
    backend, found = TorchBackend(), {"wrong": []}
    for dtype in device_kernel.KINDS:
        several = dtype in (torch.bfloat16, torch.uint64)
        for n in (700, 9000) if several else (700,):
            whole = bits(dtype, 2 * n, n).view(2, -1)
            layouts = {"dense": whole[0], "transposed": whole.t(), "slice": whole.t()[3:, 1], "one for all": whole[:1, :1].expand(3, n)}
            for name, tensor in layouts.items() if several else [("dense", whole[0])]:
                firsts = {kind: backend.histogram(tensor, kind) for kind in histograms.BINS}
                data = backend.so_far()
                raw = tensor.contiguous().view(-1).view(torch.uint8).numpy()
                with np.errstate(invalid="ignore"):
                    values = host_kernel.real_values(raw, host_kernel.CODES[device_kernel.KINDS[dtype]])
                    for kind, first in firsts.items():
                        row = data[first : first + histograms.row_count(kind)]
                        expected = histograms.to_rows(histograms.count_values(values, kind), tensor.numel())
                        if first < 0 or not np.array_equal(row.view(np.int64), expected.view(np.int64)):
                            found["wrong"].append(f"{dtype} {n} {name} {kind}")
    found["without kernel"] = [str(name) for name, trusted in device_trust.TRUSTED.items() if name[1] == "histogram" and not trusted]
    found["kernels"] = sum(name[1] == "histogram" for name in device_trust.TRUSTED)
    found["unsupported"] = backend.unsupported
    return found


def of_any_strides() -> dict[str, Any]:
    """Tensors that no kernel reads where they lie, a few pieces of them at a time: rows, histograms and pairs against the C kernel, and
    the largest new memory of torch."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from msprobe_integrations.torch.statistics import device_rows
    from msprobe_integrations.torch.statistics import rows as statistics

    statistics.PIECE = 1 << 9
    found: dict[str, Any] = {"wrong": [], "largest": 0, "limit": 6000}

    class Memory(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            given = {one.untyped_storage().data_ptr() for one in args if isinstance(one, torch.Tensor)}
            if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in given:
                found["largest"] = max(found["largest"], out.untyped_storage().nbytes())
            return out

    deep = torch.from_numpy(np.random.default_rng(0).standard_normal((3, 4, 6, 7, 20)).astype(np.float32))[:, :3, :5, :6, ::3]
    other = torch.from_numpy(np.random.default_rng(1).standard_normal(deep.numel()).astype(np.float32)).view(7, -1).t().reshape_as(deep)
    for mode in (contextlib.nullcontext, Memory):  # kernels are tried on known numbers first
        for want in (0, host_kernel.WANT_DIGEST, host_kernel.WANT_MOMENTS):
            shape = device_rows.DeviceRows(deep, 40)
            out, expected = rows.empty(1), rows.empty(1)
            with mode():
                statistics.reduce_device(deep, device_rows.Taker(shape, deep, 0, statistics.host_flags(deep.dtype, want)), want)
            shape.scatter(shape.join_rows().numpy(), out)
            statistics.reduce_cpu(deep, expected.ctypes.data, want)
            found["wrong"] += [wrong for wrong in [device_check.compare(out[0], expected[0])] if wrong or out.shape != expected.shape]
            found["wrong"] += [f"{len(shape.places)} rows"] if len(shape.places) < 2 else []
        n = histograms.row_count("log2")
        shape, out = device_rows.DeviceRows(deep, 40), rows.empty(n)
        with mode():
            takers = [device_rows.Taker(shape, deep, place, rows.WRITTEN) for place in range(n)]
            pairkernels.histogram_device(deep, "log2", takers)
        shape.scatter(shape.join_rows().numpy(), out)
        if histograms.counts(out, 0, "log2").tolist() != pairkernels.histogram_cpu(deep, "log2").tolist():
            found["wrong"].append("histogram")
        shape, out, expected = device_rows.DeviceRows(deep, 40), rows.empty(1), rows.empty(1)
        with mode():
            pairkernels.pair_device(pairs.LINEAR, deep, other, (0.5, 2.0, 0.0), device_rows.Taker(shape, deep, 0, rows.WRITTEN), 0)
        shape.scatter(shape.join_rows().numpy(), out)
        pairkernels.pair_cpu(pairs.LINEAR, deep, other, (0.5, 2.0, 0.0), expected.ctypes.data, 0)
        found["wrong"] += [wrong for wrong in [device_check.compare(out[0], expected[0])] if wrong]
    found["trusted"] = all(device_trust.TRUSTED.values()) and len(device_trust.TRUSTED)
    return found


def main() -> None:
    """Print what the cases named on the command line found."""
    install()
    for name in sys.argv[1:]:
        print(json.dumps({name: globals()[name]()}))


if __name__ == "__main__":
    main()
