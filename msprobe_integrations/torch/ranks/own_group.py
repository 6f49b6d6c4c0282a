"""A gloo group of the probe's own, which nobody else knows: no communicator of the training is used and no random number is drawn.

Why not `torch.distributed.new_group`: it names a group of some ranks after how many groups a rank is in. Ranks that are in different
numbers of groups (the stages of a pipeline are) would wait for each other in vain, in our groups and, counting ours, in the
training's.
"""

from __future__ import annotations

import ctypes
import os
import resource
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

_c10d: Any = distributed_c10d  # what is used is there under its name since torch 1.13, exported or not
CONNECTING = 15.0
"""Seconds that the ranks of a group, all of which have come, may take to connect."""
_SPARED = 256
"""Files that a group leaves to the training; less where few may be open."""
_open: set[OwnGroup] = set()
"""A group that nobody closes lives on: its end would break off what is under way on the other ranks."""
_closing: list[_Parts] = []
"""What groups were made of that have been closed while exchanges of theirs were under way."""
_dismantling = threading.Lock()


def is_own(backend: Any) -> bool:
    """Is it the backend of a group of the probe's? What goes over it is none of the training's."""
    return any(getattr(group, "_backend", None) is backend for group in list(_open))


def check_gloo(ranks: int) -> None:
    """Raises RuntimeError where no group of so many ranks can be built: gloo is missing, or too many files are open."""
    if not dist.is_gloo_available():
        raise RuntimeError("this torch has no gloo: ranks cannot tell each other what they see")
    _check_files(ranks)


def _check_files(ranks: int) -> None:
    """Gloo connects every rank of a group with every other, by one file each. What is left has to do for the training's own files."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return
    try:
        used = len(os.listdir("/proc/self/fd"))
    except OSError:
        return
    if used + ranks + min(_SPARED, limit // 4) > limit:
        raise RuntimeError(
            f"a group of {ranks} ranks needs a connection to each of them, and of the {limit} files that this process may open {used} are "
            "open: raise the limit (ulimit -n)"
        )


class OwnGroup:
    """Connects its ranks, which takes until all of them do so too: in a thread of the probe's, once `Members` says that all have come.

    Args:
        rendezvous: what the ranks find each other by.
        place: of this rank among them.
        size: how many they are.
        timeout: seconds until an exchange over it counts as failed.

    Raises:
        RuntimeError: a rank did not come.
    """

    def __init__(self, rendezvous: Any, place: int, size: int, timeout: float) -> None:
        take_apart()
        self._timeout = timedelta(seconds=timeout)
        backend = _c10d.ProcessGroupGloo(rendezvous, place, size, timedelta(seconds=CONNECTING))
        self._parts = _Parts(backend, rendezvous)
        self._backend: Any = backend
        _open.add(self)

    def all_reduce(self, tensor: torch.Tensor, op: Any) -> Any:
        """Work that puts the reduction in place of `tensor`, on the CPU."""
        options = _c10d.AllreduceOptions()
        options.reduceOp = op
        options.timeout = self._timeout
        return self._parts.started(self._backend.allreduce([tensor], options))

    def all_gather(self, out: list[torch.Tensor], tensor: torch.Tensor) -> Any:
        """Work that fills `out` with the tensors of all ranks, all of one shape."""
        options = _c10d.AllgatherOptions()
        options.timeout = self._timeout
        return self._parts.started(self._backend.allgather([out], [tensor], options))

    def gather(self, out: list[torch.Tensor] | None, tensor: torch.Tensor) -> Any:
        """Work that fills `out`, given on the first rank only, with the tensors of all ranks, all of one shape."""
        options = _c10d.GatherOptions()
        options.rootRank = 0
        options.timeout = self._timeout
        return self._parts.started(self._backend.gather([] if out is None else [out], [tensor], options))

    def close(self, under_way: list[Any] | None = None) -> None:
        """Take the group apart, at once or, when exchanges have not ended, as soon as somebody looks after they have. Never waits.

        Args:
            under_way: what belongs to exchanges that have not ended, their tensors among it; taken over.
        """
        _open.discard(self)
        self._backend = None
        self._parts.kept += under_way or []
        if under_way:
            under_way.clear()
        with _dismantling:
            if self._parts not in _closing:
                _closing.append(self._parts)
        take_apart()


class _Parts:
    """What must not go before the exchanges have ended: gloo would wait for them in the destructor, and take the interpreter's lock again
    after that. In a thread that aborts the process ("terminate called without an active exception") when the interpreter is ending."""

    def __init__(self, backend: Any, rendezvous: Any) -> None:
        self._process = os.getpid()
        self._rendezvous = rendezvous  # gloo may ask it as long as it lives
        self._backend = backend
        self._works: list[Any] = []
        self.kept: list[Any] = []

    def started(self, work: Any) -> Any:
        """`work`, which is remembered until it has ended."""
        self._works = [each for each in self._works if not each.is_completed()]
        self._works.append(work)
        return work

    def apart(self) -> bool:
        """Let everything go if no exchange is under way; False if one is. A forked child has no threads of gloo that could end."""
        if os.getpid() != self._process or not all(work.is_completed() for work in self._works):
            return False
        self._backend = None  # first: waits for gloo's threads, which may hold tensors and would need the interpreter's lock for them
        self._works, self.kept = [], []
        return True


def take_apart(*, last: bool = False) -> None:
    """Let go of closed groups whose exchanges have ended.

    Args:
        last: the process ends: what is under way still, because a rank does not answer, stays for the little rest of it.
    """
    if _dismantling.acquire(timeout=1.0):
        try:
            _closing[:] = [parts for parts in list(_closing) if not parts.apart()]
        finally:
            _dismantling.release()
    if last:
        for parts in [*_closing, *(group._parts for group in _open)]:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(parts))
