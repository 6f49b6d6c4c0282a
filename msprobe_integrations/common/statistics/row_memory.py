"""Host memory for the statistics rows of one step, which kernels write to by address."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np

from msprobe_engine.core.statistics import rows as _rows
from msprobe_engine.core.statistics.rows import Rows

ROW_BYTES = 8 * _rows.WORDS


class _Memory:
    """One piece of host memory; its array holds no reference to it, so that the end of the array can be noticed."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.bytes = bytearray(capacity * ROW_BYTES + 64)
        address = np.frombuffer(self.bytes, np.uint8).ctypes.data
        self.offset = -address % 64
        self.address = address + self.offset

    def array(self) -> Rows:
        return np.frombuffer(self.bytes, np.float64, self.capacity * _rows.WORDS, self.offset).reshape(-1, _rows.WORDS)


class MemoryPool:
    """Row memory that comes back when the last array over it is gone: a frame kept by a ring or a sink is never overwritten."""

    def __init__(self) -> None:
        self._free: list[_Memory] = []

    def allocate(self, capacity: int) -> tuple[_Memory, Rows]:
        """Memory for at least `capacity` rows, and an array over it; the memory is reused when the array has been released."""
        memory = None
        while self._free and memory is None:
            memory = self._free.pop()
            if memory.capacity < capacity:
                memory = None
        memory = memory or _Memory(capacity)
        array = memory.array()
        weakref.finalize(array if array.base is None else _root(array), self._give, memory).atexit = False
        return memory, array

    def _give(self, memory: _Memory) -> None:
        if len(self._free) < 4:
            self._free.append(memory)


def _root(array: Rows) -> Any:
    """The array that all views of `array` keep alive."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


class RowBuffer:
    """Host rows of one step. Row numbers are given out by `take`; memory grows by pieces, rows never move."""

    def __init__(self, pool: MemoryPool, capacity: int) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._pieces: list[tuple[int, int, int, Rows]] = []  # first row, end row, address of row 0, array
        self.window: tuple[int, int, int] = (0, 0, 0)
        """First row, end row and the address row 0 would have, of the newest piece: rows inside are at address + row * 128."""
        self._add(0, capacity)

    def _add(self, first: int, capacity: int) -> None:
        memory, array = self._pool.allocate(capacity)
        base = memory.address - first * ROW_BYTES
        self._pieces.append((first, first + memory.capacity, base, array))
        self.window = (first, first + memory.capacity, base)

    def address(self, row: int) -> int:
        """Address of a row; memory is added when it lies behind the end."""
        first, end, base = self.window
        if first <= row < end:
            return base + row * ROW_BYTES
        with self._lock:
            while row >= self.window[1]:
                self._add(self.window[1], self.window[1] - self._pieces[0][0])
            for first, end, base, _ in self._pieces:
                if first <= row < end:
                    return base + row * ROW_BYTES
        raise AssertionError("unreachable")

    def clear(self, row: int) -> None:
        """Make a row that of an empty tensor: a reduction that failed half way."""
        self.write_rows(row, _rows.empty(1))

    def write_rows(self, row: int, words: Rows) -> None:
        """Write whole rows ([k, 16] float64), the first one to `row`."""
        behind = row + len(words)
        self.address(behind - 1)
        for first, end, _, array in self._pieces:
            low, high = max(row, first), min(behind, end)
            if low < high:
                array[low - first : high - first] = words[low - row : high - row]

    def consecutive(self, numbers: Iterator[int], n: int) -> int:
        """The first of `n` row numbers in a row. Other threads may take numbers in between: then those taken here stay empty rows."""
        taken = [next(numbers)]
        while len(taken) < n:
            number = next(numbers)
            if number != taken[-1] + 1:
                for unused in taken:
                    self.clear(unused)
                taken = []
            taken.append(number)
        return taken[0]

    def rows(self, n: int) -> Rows:
        """The first `n` rows: the memory itself when there is one piece, else a copy."""
        self.address(n - 1) if n else None
        if len(self._pieces) == 1:
            return self._pieces[0][3][:n]
        return np.concatenate([array for _, _, _, array in self._pieces])[:n]
