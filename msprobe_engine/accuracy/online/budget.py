"""Memory for messages on their way in: taken before it is used, first come first served."""

from __future__ import annotations

import threading
from collections import deque

import numpy as np

from msprobe_engine.accuracy.online.tcp.channel import Waker

_KEPT = 256 << 20
_MOST = 256
_LEAST = 4096
_WASTE = 4
"""A buffer is used for what needs at least this part of it."""


class Budget:
    """So many bytes for all connections together; one message alone may be larger. `memory` is where they come from."""

    def __init__(self, limit: int) -> None:
        self.memory = Memory()
        self._limit = limit
        self._used = 0
        self._lock = threading.Lock()
        self._waiting: deque[Waker] = deque()

    @property
    def used(self) -> int:
        """Bytes taken now."""
        return self._used

    def acquire(self, size: int, waker: Waker) -> bool:
        """Take `size` bytes; False: not now, `waker` is woken when it is worth another try."""
        with self._lock:
            first = not self._waiting or self._waiting[0] is waker
            if first and (self._used + size <= self._limit or self._used == 0):
                if self._waiting:
                    self._waiting.popleft()
                self._used += size
                return True
            if waker not in self._waiting:
                self._waiting.append(waker)
            return False

    def release(self, size: int) -> None:
        """Give back what `acquire` took."""
        with self._lock:
            self._used -= size
            first = self._waiting[0] if self._waiting else None
        if first is not None:
            first.wake()

    def leave(self, waker: Waker) -> None:
        """This one waits no more."""
        with self._lock:
            if waker in self._waiting:
                self._waiting.remove(waker)
            first = self._waiting[0] if self._waiting else None
        if first is not None:
            first.wake()


class Memory:
    """Buffers, used again because memory that is new costs more than what is put into it. At most 256 MiB are kept."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: deque[memoryview] = deque()
        self._kept = 0

    def get(self, size: int) -> tuple[memoryview, memoryview]:
        """A view of `size` bytes, and what to give back with `put`."""
        with self._lock:
            for i, whole in enumerate(self._free):
                if size <= len(whole) <= _WASTE * max(size, _LEAST):
                    del self._free[i]
                    self._kept -= len(whole)
                    return whole[:size], whole
        whole = np.empty(max(size, _LEAST), np.uint8).data
        return whole[:size], whole

    def put(self, whole: memoryview) -> None:
        """Nobody looks at it any more. What is too small for what comes now makes room for it."""
        with self._lock:
            self._free.append(whole)
            self._kept += len(whole)
            while self._kept > _KEPT or len(self._free) > _MOST:
                self._kept -= len(self._free.popleft())
