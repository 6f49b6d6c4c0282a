"""Calls of the C modules on memory that is not aligned for its type, held against the same calls on aligned copies.

As a program (``python misaligned_sweep.py MODULE_DIRECTORY ROUNDS SEED``) it takes modules that were built with sanitizers and needs no
package but numpy, so that nothing else runs under them.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

ITEM = (4, 8, 2, 2, 1, 2, 4, 8, 1, 2, 4, 8, 1, 8, 16, 1, 1, 1, 1, 1)
"""Bytes of an element, by the dtype code of _rowstats."""
PAIRS = (0, 1, 2, 3)
DIFFED = 18
EVERYTHING = 1 | 4 | 8
SLOT = 4095  # of the kernel's limits: the last one, which nobody else of the process has
MOMENTS = 16 | 32 | SLOT << 8


def load(directory: Path, name: str) -> ModuleType:
    """A C module from the directory it was built in."""
    (path,) = directory.glob(f"{name}.*so")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def placed(data: np.ndarray, offset: int) -> tuple[Any, int]:
    """The bytes at an address that is `offset` more than a multiple of 64; what holds the memory, and the address."""
    room = np.zeros(len(data) + 128, np.uint8)
    start = -room.ctypes.data % 64 + offset
    room[start : start + len(data)] = data
    return room, room.ctypes.data + start


def elements(rng: np.random.Generator, code: int, n: int) -> np.ndarray:
    """Random bytes of `n` elements; bools are 0 and 1."""
    data = rng.integers(0, 256, n * ITEM[code], dtype=np.uint8)
    return data % 2 if code == 12 else data


def differences(rowstats: ModuleType, tensordiff: ModuleType, rng: np.random.Generator, code: int, n: int, offset: int) -> Iterator[str]:
    """Names of the calls whose result is another one at `offset`."""
    step = int(rng.integers(2, 5))
    data, other = elements(rng, code, n * step), elements(rng, code, n)
    kept, kept_other = [placed(data, at) for at in (0, offset)], [placed(other, at) for at in (0, offset)]
    (_, here), (_, there) = kept
    (_, second_here), (_, second_there) = kept_other

    def rows(call: Any) -> tuple[bytes, bytes]:
        made = []
        for address, second in ((here, second_here), (there, second_there)):
            out = np.zeros(64)
            call(address, second, out.ctypes.data)
            made.append(out.tobytes())
        return made[0], made[1]

    index = int(rng.integers(0, 3000))
    calls: dict[str, Any] = {
        "statistics and checksums": lambda p, _q, out: rowstats.reduce(p, n, code, out, EVERYTHING, index),
        "moments": lambda p, _q, out: rowstats.reduce(p, n, code, out, MOMENTS, 0),
        "strided": lambda p, _q, out: rowstats.reduce_strided(p, (n,), (step,), code, out, EVERYTHING, 0),
        "two dimensions": lambda p, _q, out: rowstats.reduce_strided(p, (step, n), (n, 1), code, out, EVERYTHING, 0),
        "histogram": lambda p, _q, out: rowstats.histogram(p, (n,), (1,), code, n % 2, out),
    }
    if code in PAIRS:
        op = int(rng.integers(0, 4))
        calls["two tensors"] = lambda p, q, out: rowstats.reduce_pair(op, p, code, q, code, n, out, 0, 0.9, 0.1, 1e-8)
    if code < DIFFED - 5:
        calls["difference"] = lambda p, q, out: tensordiff.diff(p, code, q, code, n, out)
    for name, call in calls.items():
        first, second = rows(call)
        if first != second:
            yield name
    if ITEM[code] <= 8 and n:
        turned = []
        for address in (here, there):
            holder, to = placed(np.zeros(n * step * ITEM[code], np.uint8), offset if address == there else 0)
            tensordiff.turn(address, step, to, n, n, step, ITEM[code])
            turned.append(holder[to - holder.ctypes.data :][: n * step * ITEM[code]].tobytes())
        if turned[0] != turned[1]:
            yield "turned"


def sweep(rowstats: ModuleType, tensordiff: ModuleType, rounds: int, seed: int) -> list[str]:
    """What differs in `rounds` random calls of each type."""
    rng = np.random.default_rng(seed)
    rowstats.set_limit(SLOT, 1e-3)
    found = []
    for _ in range(rounds):
        for code in range(len(ITEM)):
            n = int(rng.choice([0, 1, 7, 63, 257, 1025, 5000]))
            offset = int(rng.integers(0, 64))
            found += [
                f"{name}: code {code}, {n} elements, offset {offset}" for name in differences(rowstats, tensordiff, rng, code, n, offset)
            ]
    return found


if __name__ == "__main__":
    directory, number, begin = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    statistics = load(directory, "_rowstats")
    for isa in ("portable", "avx2", "avx512"):
        statistics.set_isa(isa)
        problems = sweep(statistics, load(directory, "_tensordiff"), number, begin)
        if problems:
            sys.exit("\n".join(problems))
    print("clean")
