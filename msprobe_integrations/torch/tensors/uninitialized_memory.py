"""Memory that holds no values yet: results of ``torch.empty`` and its kin until something writes to them.

Their content is whatever was there before, NaN included, so statistics of it would be noise and an alert on it a false one. Megatron's
attention, for example, hands an uninitialised buffer to ``baddbmm(beta=0)``, which never reads it.

What writes cannot always be seen: a Triton kernel or a C++ extension gets a pointer, and no version counter moves. So memory counts as
without values only where nobody can have read it: as the result of ``torch.empty`` and of views of it, where an operation only writes,
and as an argument of an `autograd.Function` while the function that made it runs (a buffer for results). An operation that reads it
says by this that it was written, or shows that the training computes with chance values: both have numbers. Launches of Triton,
operators that are declared to write, modules and functions of autograd end it for all that they were given or return.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from msprobe_engine.core.guard import raise_of_training, suppress_faults
from msprobe_engine.core.operator_traits import UNINITIALISED

_BETA = {"baddbmm": 0, "addmm": 0, "addbmm": 0, "addmv": 0, "addr": 0, "baddbmm_": 0, "addmm_": 0, "addbmm_": 0, "addmv_": 0, "addr_": 0}
_OVERWRITING = frozenset(
    (
        *("copy_", "fill_", "zero_", "set_", "resize_", "resize_as_", "eye_", "_foreach_copy_", "_foreach_zero_", "__setitem__"),
        *("normal_", "uniform_", "random_", "bernoulli_", "exponential_", "cauchy_", "geometric_", "log_normal_", "trunc_normal_"),
        *("index_copy_", "index_fill_", "index_put_", "scatter_", "masked_fill_", "masked_scatter_", "fill_diagonal_", "constant_"),
        *("kaiming_uniform_", "set_data", "requires_grad_", "record_stream", "all_gather_copy_in", "split_with_sizes_copy"),
    )
)
"""Operations that write their first argument, or ask only what it is, and do not read it. Names of `torch.nn.init` are among them."""
_SHAPE_ONLY = ("new_", "view_as", "expand_as", "reshape_as")
"""How the names of operations begin that look at the shape or type of an argument; ``..._like`` is the other way to say it."""


def raw_results(api: str, result: Any) -> Sequence[torch.Tensor]:
    """Results of the call `api` that are memory without values."""
    if api in UNINITIALISED and isinstance(result, torch.Tensor):
        return (result,)
    # FSDP2: the buffer of an all-gather, of which only this rank's part is filled
    if api == "all_gather_copy_in" and isinstance(result, tuple) and len(result) > 1 and isinstance(result[1], torch.Tensor):
        return (result[1],)
    return ()


def ignored_argument(api: str, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """Position of an argument that the operation does not read, -1 when it reads all: the addend of ``addmm`` and friends with
    ``beta=0`` (documented: "if beta is 0, then input will be ignored, and nan and inf in it will not be propagated")."""
    return _BETA[api] if api in _BETA and kwargs.get("beta", 1) == 0 and args else -1


def leaves_unread(api: str) -> bool:
    """Does an operation of this name use memory without values rightly: it overwrites it, or looks only at its shape?"""
    return api in _OVERWRITING or api.endswith("_like") or api.startswith(_SHAPE_ONLY)


def writes_in_place(api: str) -> bool:
    """Does an operation of this name read its first argument and write to it (``add_``, ``__iadd__``)? Read after the call it would show
    the result."""
    return (api.endswith("_") and not api.endswith("__")) or api.startswith("__i")


_SCRATCH = (("megatron.core.parallel_state", "_GLOBAL_MEMORY_BUFFER", "buffer"),)
"""Module, its variable, and there a mapping of tensors that lend their memory: what a step finds in them is left from an earlier one."""


def scratch_buffers() -> list[torch.Tensor]:
    """Memory that frameworks hand out again and again, and that counts as without values when a step begins. Never raises."""
    found: list[torch.Tensor] = []
    for module, variable, mapping in _SCRATCH:
        with suppress_faults():
            lent = getattr(getattr(sys.modules.get(module), variable, None), mapping, None) or {}
            found += [tensor for tensor in lent.values() if isinstance(tensor, torch.Tensor)]
    return found


class _Buffer(NamedTuple):
    """Memory without values."""

    witnesses: list[tuple[weakref.ref[torch.Tensor], int]]
    """Tensors with this memory, and their versions."""
    frame: int
    """Identity of the frame of the function that made it. The frame itself is not kept: it would keep its variables alive."""
    code: CodeType | None


class UninitializedMemory:
    """Which memory holds no values yet. Views, and aliases by ``.data`` and ``detach()``, of raw memory are raw; any write through one
    of the tensors that are known (their version counters tell) ends it, and so does `forget`.

    Attributes:
        known: what is known of each memory, by its identity; empty nearly always, so callers look at it before they ask.
    """

    def __init__(self) -> None:
        self.known: dict[int, _Buffer] = {}

    def add(self, tensor: torch.Tensor, frame: FrameType | None = None) -> None:
        """`tensor` has just been made without values, by a function that runs in `frame` (None: not known). Never raises."""
        with suppress_faults():  # sparse and wrapped tensors have no storage, inference tensors no version
            key = _storage(tensor)
            known = self.known

            def forget_tensor(_: Any) -> None:
                known.pop(key, None)

            made = (weakref.ref(tensor, forget_tensor), tensor._version)
            known[key] = _Buffer([made], id(frame), frame.f_code if frame is not None else None)

    def alias(self, tensor: torch.Tensor) -> None:
        """`tensor` shares memory with another and counts its own versions (``.data``): writes through it end rawness too."""
        if self.known:
            with suppress_faults():
                found = self.known.get(_storage(tensor))
                if found is not None:
                    found.witnesses.append((weakref.ref(tensor), tensor._version))

    def forget(self, tensor: torch.Tensor) -> None:
        """The memory of `tensor` has been written to, or may have been, without a new version (a collective, a kernel)."""
        if self.known:
            with suppress_faults():
                self.known.pop(_storage(tensor), None)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Is the memory of `tensor` still without values? Never raises."""
        try:
            key = _storage(tensor)
            memory = self.known.get(key)
            if memory is None:
                return False
            for reference, version in list(memory.witnesses):
                witness = reference()
                if witness is None or witness._version != version or _storage(witness) != key:  # the last: ``.data = ...``
                    self.known.pop(key, None)
                    return False
            return True
        except Exception as error:
            raise_of_training(error)
            return False

    def maker_runs(self, tensor: torch.Tensor) -> bool:
        """Does the function that made this raw memory still run on this thread? A function that returns a buffer has mostly filled it."""
        found = self.known.get(_storage(tensor))
        if found is None or found.code is None:
            return False
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if id(frame) == found.frame and frame.f_code is found.code:  # both: another frame may lie where the first one was
                return True
            frame = frame.f_back
        return False


def share_memory(tensor: torch.Tensor, others: Iterable[torch.Tensor]) -> bool:
    """Is one of `others` the tensor itself or another view of its memory? Never raises."""
    try:
        key = _storage(tensor)
    except Exception as error:
        raise_of_training(error)
        return False
    for other in others:
        with suppress_faults():
            if _storage(other) == key:
                return True
    return False


def _storage(tensor: torch.Tensor) -> int:
    """Identity of the memory, while it lives."""
    return int(tensor.untyped_storage()._cdata)
