"""Memory of the host that a device still fills: results of ``x.to("cpu", non_blocking=True)`` and ``pinned.copy_(x, non_blocking=True)``
(activations and optimizer states that are offloaded). The program goes on before the bytes are there, and reading them then gives what
lay there before.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from msprobe_engine.core.guard import raise_of_training, suppress_faults
from msprobe_integrations.torch.statistics.streams import record_event
from msprobe_integrations.torch.tensors.devices import is_capturing
from msprobe_integrations.torch.tensors.dtensors import local

CALLS = frozenset(("to", "copy_", "_to_copy", "_foreach_copy_"))
"""Names of calls that may start such a copy."""


class _Copy(NamedTuple):
    event: Any
    kind: str
    """Type of the device."""
    storage: torch.UntypedStorage
    """The memory; kept, because its identity is nobody else's only while it lives."""
    target: weakref.ref[torch.Tensor]
    source: weakref.ref[torch.Tensor]
    versions: tuple[int, int]
    """Of target and source behind the copy."""


class HostCopies:
    """Copies from devices to the host that may be under way.

    Attributes:
        known: by the identity of the host's memory; empty nearly always, so callers look at it before they ask.
    """

    def __init__(self) -> None:
        self.known: dict[int, _Copy] = {}

    def add(self, api: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """A call of one of `CALLS` has returned. Never raises."""
        if kwargs.get("non_blocking") is not True and not any(each is True for each in args):
            return
        with suppress_faults():  # what is no tensor, has no memory, or no version
            for target, source in _pairs(api, args, kwargs, result):
                target, source = local(target), local(source)
                if not target.is_cpu or source.is_cpu or is_capturing(source.device.type):
                    continue
                self.drop_arrived()
                storage = target.untyped_storage()
                self.known[storage._cdata] = _Copy(
                    record_event(source.device),
                    source.device.type,
                    storage,
                    weakref.ref(target),
                    weakref.ref(source),
                    (target._version, source._version),
                )

    def holds(self, tensor: torch.Tensor) -> bool:
        """Is the memory of a tensor still being filled? Never raises, never waits."""
        return self._under_way(local(tensor)) is not None

    def source_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The tensor of the device that has what a tensor will have, where there still is one; its values are there in the order of
        the device's stream."""
        tensor = local(tensor)
        copy = self._under_way(tensor)
        if copy is None or copy.target() is not tensor:
            return None
        source = copy.source()
        if source is None or (source.dtype, source.shape) != (tensor.dtype, tensor.shape):
            return None
        return source if (tensor._version, source._version) == copy.versions else None

    def drop_arrived(self) -> None:
        for key in [key for key, copy in self.known.items() if _has_arrived(copy)]:
            del self.known[key]

    def _under_way(self, tensor: torch.Tensor) -> _Copy | None:
        try:
            key = tensor.untyped_storage()._cdata
            copy = self.known.get(key)
            if copy is not None and _has_arrived(copy):
                del self.known[key]
                copy = None
            return copy
        except Exception as error:
            raise_of_training(error)
            return None


def _has_arrived(copy: _Copy) -> bool:
    return not is_capturing(copy.kind) and bool(copy.event.query())  # a capture ends with an error when somebody asks


def _pairs(api: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Iterable[tuple[Any, Any]]:
    """Where a call copies to, and from where."""
    if api not in ("copy_", "_foreach_copy_"):
        return [(result, args[0])]
    source = args[1] if len(args) > 1 else kwargs["src"]
    return zip(args[0], source) if api == "_foreach_copy_" else [(args[0], source)]
