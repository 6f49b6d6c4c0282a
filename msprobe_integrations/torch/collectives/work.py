"""What is known of communication that is going on: operations, outputs that are not there yet, and what waits for them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

import torch

from msprobe_engine.core.guard import raise_of_training
from msprobe_engine.core.records import TensorRef
from msprobe_integrations.torch.collectives.calls import DistributedCall


def flat(value: Any) -> list[torch.Tensor]:
    """The tensors of nested lists, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in flat(v)]
    return []


class Operation(NamedTuple):
    """One communication operator that is about to run.

    Attributes:
        call: the public function it came through.
        silent: no entry is made of it.
        inputs, outputs: tensors the operator reads, and those it writes; None: what it returns, see `CollectiveObserver.returns`.
        tags: facts for the entry.
        caller: where the user's code is.
    """

    name: str
    call: DistributedCall | None
    silent: bool
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor] | None
    tags: Callable[[], dict[str, Any]]
    caller: FrameType | None


@dataclass(slots=True, eq=False)
class Open:
    """Outputs that are not there yet.

    Attributes:
        written: tensors that will hold them.
        store: called once when they do.
        tags, sections: those of the entry; None when no entry was made.
        left: operations that have to complete first.
        versions: of `written` when the operation had started.
        reduce: starts the reduction of a tensor of the entry.
    """

    written: list[torch.Tensor]
    store: Callable[[], None]
    tags: dict[str, Any] | None = None
    sections: dict[str, Any] | None = None
    left: int = 1
    versions: list[int] = field(default_factory=list)
    reduce: Callable[[torch.Tensor], TensorRef] | None = None

    def remember(self) -> None:
        """Note the versions of what is written; inference tensors have none."""
        with contextlib.suppress(RuntimeError):
            self.versions = [t._version for t in self.written]

    def is_untouched(self) -> bool:
        """Has nothing that raises versions written to the outputs?"""
        return len(self.versions) == len(self.written) and all(t._version == v for t, v in zip(self.written, self.versions))


@dataclass(slots=True, eq=False)
class Waiting:
    """What completes when one of the keys has been waited for."""

    keys: list[Any]
    opens: list[Open]

    def is_complete(self) -> bool:
        """Is it complete though nobody waited, and still as the operations left it?"""
        try:
            work = self.keys[0]
            if isinstance(work, torch.Tensor) or not all(open_.is_untouched() for open_ in self.opens):
                return False
            return bool(work.is_completed()) and not has_failed(work)
        except Exception as error:
            raise_of_training(error)
            return False


def has_failed(handle: Any) -> bool:
    """Has an operation ended with an error, as a `Work` or a future of it says? What its outputs hold is undefined then. Never waits.
    False too for work that has no future; that it has failed is known as soon as somebody waits for it."""
    try:
        future = handle if isinstance(handle, torch._C.Future) else handle.get_future()
        if not future.done():
            return False
    except Exception as error:
        raise_of_training(error)
        return False
    try:
        future.value()
    except Exception as error:
        raise_of_training(error)
        return True
    return False


def identity(key: Any) -> int:
    """What `key` is known by while it lives: a tensor by its memory, so that views of it count as well."""
    return -storage(key) if isinstance(key, torch.Tensor) else id(key)


def storage(tensor: torch.Tensor) -> int:
    """Identity of a tensor's memory; of the tensor itself where it has none of its own (sparse)."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except Exception as error:
        raise_of_training(error)
        return id(tensor)
