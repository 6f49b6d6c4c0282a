"""Memory that holds no values yet: results of ``torch.empty`` and its kin until something writes to them.

Their content is whatever was there before, NaN included, so statistics of it would be noise and an alert on it a false one. Megatron's
attention, for example, hands an uninitialised buffer to ``baddbmm(beta=0)``, which never reads it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from typing import Any

import torch

_MAKERS = frozenset(("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"))
_BETA = {"baddbmm": 0, "addmm": 0, "addbmm": 0, "addmv": 0, "addr": 0, "baddbmm_": 0, "addmm_": 0, "addbmm_": 0, "addmv_": 0, "addr_": 0}


def raw_results(api: str, result: Any) -> Sequence[torch.Tensor]:
    """Results of the call `api` that are memory without values."""
    if api in _MAKERS and isinstance(result, torch.Tensor):
        return (result,)
    # FSDP2: the buffer of an all-gather, of which only this rank's part is filled
    if api == "all_gather_copy_in" and isinstance(result, tuple) and len(result) > 1 and isinstance(result[1], torch.Tensor):
        return (result[1],)
    return ()


def ignored_argument(api: str, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """Position of an argument that the operation does not read, -1 when it reads all: the addend of ``addmm`` and friends with
    ``beta=0`` (documented: "if beta is 0, then input will be ignored, and nan and inf in it will not be propagated")."""
    return _BETA[api] if api in _BETA and kwargs.get("beta", 1) == 0 and args else -1


class RawMemory:
    """Which memory holds no values yet. Views, and aliases by ``.data`` and ``detach()``, of raw memory are raw; any write through one
    of the tensors that are known (their version counters tell) ends it, and so does `forget`.

    Attributes:
        known: what is known of each memory, by its identity; empty nearly always, so callers look at it before they ask.
    """

    def __init__(self) -> None:
        self.known: dict[int, list[tuple[weakref.ref[torch.Tensor], int]]] = {}

    def add(self, tensor: torch.Tensor) -> None:
        """`tensor` has just been made without values. Never raises."""
        with contextlib.suppress(Exception):  # sparse and wrapped tensors have no storage, inference tensors no version
            key = _storage(tensor)
            known = self.known

            def gone(_: Any) -> None:
                known.pop(key, None)

            known[key] = [(weakref.ref(tensor, gone), tensor._version)]

    def alias(self, tensor: torch.Tensor) -> None:
        """`tensor` shares memory with another and counts its own versions (``.data``): writes through it end rawness too."""
        if self.known:
            with contextlib.suppress(Exception):
                found = self.known.get(_storage(tensor))
                if found is not None:
                    found.append((weakref.ref(tensor), tensor._version))

    def forget(self, tensor: torch.Tensor) -> None:
        """The memory of `tensor` has been written to without a new version (a collective)."""
        if self.known:
            with contextlib.suppress(Exception):
                self.known.pop(_storage(tensor), None)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Is the memory of `tensor` still without values? Never raises."""
        try:
            key = _storage(tensor)
            found = self.known.get(key)
            if found is None:
                return False
            for reference, version in list(found):
                witness = reference()
                if witness is None or witness._version != version or _storage(witness) != key:  # the last: ``.data = ...``
                    self.known.pop(key, None)
                    return False
            return True
        except Exception:
            return False


def _storage(tensor: torch.Tensor) -> int:
    """Identity of the memory, while it lives."""
    return int(tensor.untyped_storage()._cdata)
