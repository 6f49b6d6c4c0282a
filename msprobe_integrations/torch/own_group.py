"""A gloo group of the probe's own, which nobody else knows: no communicator of the training is used and no random number is drawn.

Why not `torch.distributed.new_group`: it names a group of some ranks after how many groups a rank is in. Ranks that are in different
numbers of groups (the stages of a pipeline are) would wait for each other in vain, in our groups and, counting ours, in the
training's.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

_c10d: Any = distributed_c10d  # what is used is there under its name since torch 1.13, exported or not
_made: dict[tuple[Any, tuple[int, ...]], int] = {}
_missed: set[tuple[Any, tuple[int, ...]]] = set()
"""Ranks that have waited in vain for each other: the probe is off on one of them, and they do so once."""
_open: set[OwnGroup] = set()
"""A group that nobody closes lives on: its end would break off what is under way on the other ranks."""


def is_own(backend: Any) -> bool:
    """Is it the backend of a group of the probe's? What goes over it is none of the training's."""
    return any(getattr(group, "_backend", None) is backend for group in list(_open))


def _limit_of_training() -> float:
    """Seconds that a collective of the default group may take; infinite where its backend does not say."""
    group: Any = _c10d._get_default_group()
    limits = []
    for device in ("cpu", "cuda", "npu"):
        try:
            limits.append(group._get_backend(torch.device(device)).options._timeout.total_seconds())
        except Exception:  # no backend for such a device, or one without options
            continue
    return min(limits, default=math.inf)


class OwnGroup:
    """Building it is a collective call of its ranks. Each kind of exchange returns its work at once.

    Args:
        ranks: global ranks, the same list on all of them, this one among it.
        patience: seconds that ranks wait for each other while it is built; no longer than a quarter of what the training's own
            collectives may take, which would end it if they had to wait for a rank that waits here.
        timeout: seconds until an exchange over it counts as failed; 0: as `patience`.

    Attributes:
        place: of this rank among `ranks`.

    Raises:
        RuntimeError: gloo is missing, or a rank did not come in time.
    """

    def __init__(self, ranks: Sequence[int], patience: float, timeout: float = 0.0) -> None:
        if not dist.is_gloo_available():
            raise RuntimeError("this torch has no gloo: ranks cannot tell each other what they see")
        store: Any = _c10d._get_default_store()
        patience = min(patience, _limit_of_training() / 4)
        key = (store, tuple(ranks))
        if key in _missed:
            raise RuntimeError(f"not all of the ranks {list(ranks)} have come before: is the probe off on one of them?")
        number = _made[key] = _made.get(key, 0) + 1
        name = hashlib.sha1(" ".join(map(str, ranks)).encode(), usedforsecurity=False).hexdigest()
        self.place = list(ranks).index(dist.get_rank())
        self._timeout = timedelta(seconds=timeout or patience)
        mine = _c10d.PrefixStore(f"msprobe/group/{name}/{number}", store)
        try:
            self._backend: Any = _c10d.ProcessGroupGloo(mine, self.place, len(ranks), timedelta(seconds=patience))
        except Exception:
            _missed.add(key)
            raise
        _open.add(self)

    def all_reduce(self, tensor: torch.Tensor, op: Any) -> Any:
        """Work that puts the reduction in place of `tensor`, on the CPU."""
        options = _c10d.AllreduceOptions()
        options.reduceOp = op
        options.timeout = self._timeout
        return self._backend.allreduce([tensor], options)

    def all_gather(self, out: list[torch.Tensor], tensor: torch.Tensor) -> Any:
        """Work that fills `out` with the tensors of all ranks, all of one shape."""
        options = _c10d.AllgatherOptions()
        options.timeout = self._timeout
        return self._backend.allgather([out], [tensor], options)

    def gather(self, out: list[torch.Tensor] | None, tensor: torch.Tensor) -> Any:
        """Work that fills `out`, given on the first rank only, with the tensors of all ranks, all of one shape."""
        options = _c10d.GatherOptions()
        options.rootRank = 0
        options.timeout = self._timeout
        return self._backend.gather([] if out is None else [out], [tensor], options)

    def close(self, under_way: list[Any] | None = None) -> None:
        """Take the group apart. A gloo group that lives until the interpreter exits may abort the process there.

        Args:
            under_way: the only references to exchanges that have not ended; taken over. Gloo waits for them, as long as the time
                limit says, when the last reference goes: that happens on a thread of its own then.
        """
        _open.discard(self)
        backend, self._backend = self._backend, None
        if under_way:
            under_way.append(backend)
            del backend
            threading.Thread(target=under_way.clear, name="msprobe-group", daemon=True).start()
