"""A device of the tests: the CPU, whose rows are written by the Triton kernels in Triton's interpreter, started as on a GPU.

`install` makes CPU tensors take the way of a device. Compiled kernels are replaced by `interpreted`: called with addresses as a compiled
kernel is, it runs the interpreted kernel on the memory there. Everything else is the product's. Run as a program it prints what the cases
found, as JSON; for that ``TRITON_INTERPRET`` has to be set.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from msprobe_engine import hostkernel, rows
from msprobe_integrations.torch import backend as backend_module
from msprobe_integrations.torch import derived, device_kernel, device_launch, device_trust
from msprobe_integrations.torch.backend import TorchBackend

calls: list[str] = []
"""Kernels started by addresses."""
_held: dict[int, Any] = {}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def at(address: int, dtype: torch.dtype, n: int) -> torch.Tensor:
    """The memory at an address."""
    raw = (ctypes.c_char * (n * dtype.itemsize)).from_address(address)
    return torch.frombuffer(raw, dtype=dtype, count=n)


def interpreted(kernel: Any, constants: dict[str, Any]) -> Callable[..., None]:
    """`device_launch.bind` of a kernel that is interpreted."""

    def row(programs: int, data: int, out: int, *numbers: int) -> None:
        bits, words = at(data, _BITS[constants["SIZE"]], numbers[0]), at(out, torch.int64, programs * rows.WORDS)
        device_kernel._row_kernel[(programs,)](bits, words, *numbers, **constants)

    def merge(programs: int, parts: int, out: int, count: int) -> None:
        words, row = at(parts, torch.int64, count * rows.WORDS), at(out, torch.int64, rows.WORDS)
        device_kernel._merge_kernel[(programs,)](words, row, count, **constants)

    start = {"row": row, "merge": merge}[kernel]

    def run(programs: int, _stream: int, *arguments: int) -> None:
        calls.append(kernel)
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
    device_launch.bind = lambda _, constants: interpreted("row" if "KIND" in constants else "merge", constants)
    device_trust.DEVICES = ("cpu",)
    hostkernel.available = False
    derived.on_host = lambda _: False
    backend_module._FIRST_CAPACITY = 100


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
    """Tensors of every type, whole and from an odd address on, twice: the second time by addresses, with the same row."""
    backend = TorchBackend(digest=True)
    found: dict[str, Any] = {"unequal": [], "kernels": {}}
    for dtype in device_kernel.KINDS:
        for n in (1, 9001) if dtype in (torch.bfloat16, torch.float64) else (700,):
            whole = bits(dtype, n + 1, n)
            for name, tensor in (("aligned", whole[:n]), ("odd", whole[1:])):
                backend.reduce(tensor)
                calls.clear()
                backend.forget()
                ref = backend.reduce(tensor)
                found["kernels"].setdefault(f"{n} {name}", []).append(calls.copy())
                data = backend.so_far()[ref.row]
                if words_of(data) != single(tensor, hostkernel.WANT_DIGEST) or data.view(np.int64)[rows.COUNT] != n:
                    found["unequal"].append(f"{dtype} {n} {name}")
    found["unsupported"] = backend.unsupported
    return found


def main() -> None:
    """Print what the cases named on the command line found."""
    install()
    for name in sys.argv[1:]:
        print(json.dumps({name: globals()[name]()}))


if __name__ == "__main__":
    main()
