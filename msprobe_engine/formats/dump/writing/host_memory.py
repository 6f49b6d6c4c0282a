"""Host memory for copies of tensors that wait to be written: bounded, and used again instead of given back and asked for.

Small copies share slabs of a few MiB, large ones have a slab each. A slab is free when every copy in it was written. Memory that was
touched before costs no page faults, which are dearer than the copy itself.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Callable
from typing import Any

PLAIN, PINNED = "plain", "pinned"
PATIENCE_SECONDS = 30.0
"""How long the training waits for memory while nothing at all is written (a hanging file system); then the tensor is given up."""
_ALIGN = 64
_PAGE = 4096
_LARGEST_SLAB = 4 << 20

Allocate = Callable[[int], tuple[memoryview, int, object]]
"""Makes memory of so many bytes: a view of it (which keeps it alive), its address, and the framework's own view or None."""


class Slab:
    """One piece of memory.

    Attributes:
        view: its bytes. address: where they are. capacity: how many.
        kind: `PLAIN` or `PINNED`.
        users: copies in it that were not written yet.
        offset: where the next small copy goes.
        tensor: the framework's own view of it, None until it is made.
    """

    __slots__ = ("address", "capacity", "kind", "offset", "tensor", "users", "view")

    def __init__(self, view: memoryview, address: int, tensor: object, kind: str) -> None:
        self.view, self.address, self.capacity, self.kind = view, address, len(view), kind
        self.users = self.offset = 0
        self.tensor: Any = tensor


def plain(nbytes: int) -> tuple[memoryview, int, object]:
    """Memory of this process, page-aligned.

    Raises:
        OSError: there is none.
    """
    memory = mmap.mmap(-1, nbytes)
    return memoryview(memory), ctypes.addressof(ctypes.c_char.from_buffer(memory)), None


class HostMemory:
    """Memory within a budget. Any thread may take and give.

    Args:
        budget: bytes of all slabs together, in use or kept for the next copy. One copy that is larger than all of it has to be alone.
        hurry: called when memory is short, before the wait: what is held back should be written now.
        patience: see `PATIENCE_SECONDS`.

    Attributes:
        allocators: how memory of each kind is made.
        held: bytes of all slabs.
        waiting: callers of `take` that wait now.
        waited: seconds that callers of `take` have waited.
    """

    def __init__(self, budget: int, hurry: Callable[[], None] = lambda: None, patience: float = PATIENCE_SECONDS) -> None:
        self.budget = budget
        self.allocators: dict[str, Allocate] = {PLAIN: plain}
        self.held = self.waiting = 0
        self.waited = 0.0
        self._hurry = hurry
        self._patience = patience
        self._slab_bytes = max(_PAGE, min(_LARGEST_SLAB, budget // 16) & -_PAGE)
        self._small = self._slab_bytes // 4
        self._open: dict[str, Slab] = {}
        self._free: list[Slab] = []
        self._in_use = 0
        self._given = 0
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)

    def allocate(self, nbytes: int, kind: str = PLAIN) -> tuple[Slab, int] | None:
        """Memory for `nbytes`: the slab, and the offset in it, a multiple of 64. Waits while the budget is used up.

        Returns None when nothing came free in time.

        Raises:
            OSError, RuntimeError: the system has no memory of this kind.
        """
        if nbytes <= self._small:
            with self._lock:
                if (found := self._fit(nbytes, kind)) is not None:
                    return found
        return self._allocate_slab(nbytes, kind)

    def _fit(self, nbytes: int, kind: str) -> tuple[Slab, int] | None:
        slab = self._open.get(kind)
        if slab is None or slab.offset + nbytes > slab.capacity:
            return None
        offset = slab.offset
        slab.offset = (offset + nbytes + _ALIGN - 1) & -_ALIGN
        if slab.users == 0:
            self._in_use += slab.capacity
        slab.users += 1
        return slab, offset

    def _allocate_slab(self, nbytes: int, kind: str) -> tuple[Slab, int] | None:
        small = nbytes <= self._small
        capacity = self._slab_bytes if small else _size_class(nbytes, kind)
        started = 0.0
        while True:
            with self._changed:
                if small and (found := self._fit(nbytes, kind)) is not None:
                    break
                if (slab := self._reuse(capacity, kind) or self._grow(capacity, kind)) is not None:
                    if small:
                        self._replace_open(slab)
                        found = self._fit(nbytes, kind)
                        break
                    self._in_use += slab.capacity
                    slab.users = 1
                    found = slab, 0
                    break
                given = self._given
                self.waiting += 1
            started = started or time.monotonic()
            try:
                self._hurry()
                with self._changed:
                    if not self._changed.wait_for(lambda: self._given != given, self._patience):  # noqa: B023 - called before it changes
                        found = None
                        break
            finally:
                with self._changed:
                    self.waiting -= 1
        if started:
            self.waited += time.monotonic() - started
        return found

    def _reuse(self, capacity: int, kind: str) -> Slab | None:
        """A free slab of about this size."""
        for i in range(len(self._free) - 1, -1, -1):
            slab = self._free[i]
            if slab.kind == kind and capacity <= slab.capacity <= 2 * capacity:
                del self._free[i]
                return slab
        return None

    def _grow(self, capacity: int, kind: str) -> Slab | None:
        """A new slab; free ones go when the budget asks for it."""
        if self.held + capacity > self.budget:
            self._drop(max(0, self.budget - capacity))
        if self.held + capacity > self.budget and self._in_use:
            return None
        view, address, tensor = self.allocators[kind](capacity)
        self.held += capacity
        return Slab(view, address, tensor, kind)

    def _replace_open(self, slab: Slab) -> None:
        old = self._open.get(slab.kind)
        if old is not None and old.users == 0:
            self._free.append(old)
        slab.offset = 0
        self._open[slab.kind] = slab

    def release(self, slab: Slab) -> None:
        """One copy in `slab` is not needed any more."""
        with self._lock:
            slab.users -= 1
            self._given += 1
            if slab.users == 0:
                self._in_use -= slab.capacity
                slab.offset = 0
                if self._open.get(slab.kind) is slab:
                    pass
                elif slab.capacity > self.budget:
                    self.held -= slab.capacity
                else:
                    self._free.append(slab)
            if self.waiting:
                self._changed.notify_all()

    def trim(self) -> None:
        """Give what is free back to the system."""
        with self._changed:
            self._drop(0)

    def _drop(self, keep: int) -> None:
        self._free += [slab for slab in self._open.values() if slab.users == 0]
        self._open = {kind: slab for kind, slab in self._open.items() if slab.users}
        while self._free and self.held > keep:
            self.held -= self._free.pop(0).capacity


def _size_class(nbytes: int, kind: str) -> int:
    """`nbytes` rounded up to a size that others use too: at most an eighth more, whole pages; pinned memory to a power of two, as
    frameworks give it out."""
    if kind == PINNED:
        return int(1 << (nbytes - 1).bit_length())
    step = max(_PAGE, 1 << max(0, nbytes.bit_length() - 4))
    return -(-nbytes // step) * step
