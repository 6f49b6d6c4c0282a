"""Collectives called on a backend itself (``group._get_backend(device).allreduce(...)``): wrappers of process groups do that, and torch's
dispatcher, where all others are seen, never hears of it.

The methods of the class are wrapped while there is an observer. What C++ calls does not pass through them; a backend written in Python is
called below an operator that has been seen already, and is left alone then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from msprobe_integrations.patching import Patches

METHODS: dict[str, tuple[str, int | None, int | None]] = {
    # method: (name as users know it, position of the inputs, position of the outputs)
    "allreduce": ("all_reduce", 0, 0),
    "allreduce_coalesced": ("all_reduce_coalesced", 0, 0),
    "reduce": ("reduce", 0, 0),
    "broadcast": ("broadcast", 0, 0),
    "allgather": ("all_gather", 1, 0),
    "_allgather_base": ("all_gather_into_tensor", 1, 0),
    "allgather_coalesced": ("all_gather_coalesced", 1, 0),
    "reduce_scatter": ("reduce_scatter", 1, 0),
    "_reduce_scatter_base": ("reduce_scatter_tensor", 1, 0),
    "alltoall_base": ("all_to_all_single", 1, 0),
    "alltoall": ("all_to_all", 1, 0),
    "gather": ("gather", 1, 0),
    "scatter": ("scatter", 1, 0),
    "send": ("send", 0, None),
    "recv": ("recv", None, 0),
    "recv_anysource": ("recv_any_source", None, 0),
    "batch_isend_irecv": ("batch_isend_irecv", None, None),  # of HCCL: both directions in one call, see `tensors_of`
}
_RANK_AT = {"reduce": 1, "broadcast": 1, "gather": 2, "scatter": 2, "send": 1, "recv": 1}
"""Position of the root or peer where it is given as a number."""
_REDUCING = ("allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "_reduce_scatter_base")
_MESSAGES = ("send", "recv")
Call = Callable[[Any, str, tuple[Any, ...], dict[str, Any], Callable[[], Any]], Any]


class Backends:
    """The wrapped methods.

    Args:
        call: ``(backend, method, args, kwargs, run)``; has to call `run` once and to return what that returns.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self._patches = Patches()

    def install(self) -> None:
        """Wrap the methods of all kinds of backends that are known now."""
        base: Any = getattr(torch._C._distributed_c10d, "Backend", None)
        for cls in (base, *_below(base)) if base is not None else ():
            for method in METHODS:
                if method in vars(cls):  # what a class inherits is wrapped where it is defined
                    self._patches.wrap(cls, method, functools.partial(self._build_wrapper, method))

    def remove(self) -> None:
        """Put the methods back."""
        self._patches.undo()

    def _build_wrapper(self, method: str, original: Any) -> Any:
        def wrapper(backend: Any, *args: Any, **kwargs: Any) -> Any:
            return self._call(backend, method, args, kwargs, functools.partial(original, backend, *args, **kwargs))

        return wrapper


def tensors_of(method: str, values: Sequence[Any]) -> tuple[Any, Any]:
    """What a call of `method` with these arguments reads, and what it writes: tensors in nested lists.

    Raises:
        IndexError: an argument is missing.
    """
    if method == "batch_isend_irecv":  # (kinds of messages, tensors, peers), one of each per message
        kinds, tensors = values[0], values[1]
        return tuple([t for kind, t in zip(kinds, tensors) if ("recv" in kind) is receives] for receives in (False, True))  # type: ignore[return-value]
    _, at_in, at_out = METHODS[method]
    return values[at_in] if at_in is not None else [], values[at_out] if at_out is not None else []


def facts(backend: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The tags of a call: global ranks, where a group with this backend is known, and what its options say."""
    ranks = _ranks(backend)
    known_facts: dict[str, Any] = {"group_ranks": ranks, "async": True}
    values = (*args, *kwargs.values())
    if method == "batch_isend_irecv" and len(values) > 2:
        known_facts["peers"] = [ranks[rank] if ranks is not None and 0 <= rank < len(ranks) else rank for rank in values[2]]
    position = _RANK_AT.get(method)
    if position is not None:
        given = values[position] if position < len(values) else 0
        rank = getattr(given, "rootRank", given)
        if isinstance(rank, int):
            known = ranks is not None and 0 <= rank < len(ranks)
            known_facts["peer" if method in _MESSAGES else "root"] = ranks[rank] if ranks is not None and known else rank
    if method in _REDUCING:
        known_facts["reduce"] = dist.ReduceOp.SUM
    for value in values:
        reduce_op = getattr(value, "reduceOp", value)
        if isinstance(reduce_op, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
            known_facts["reduce"] = reduce_op
    return known_facts


def _ranks(backend: Any) -> list[int] | None:
    for group in list(dist.distributed_c10d._world.pg_map):
        for device in group._device_types:
            if group._get_backend(device) is backend:
                return list(dist.get_process_group_ranks(group))
    return None


def _below(cls: type[Any]) -> Iterator[type[Any]]:
    for child in cls.__subclasses__():
        yield child
        yield from _below(child)
