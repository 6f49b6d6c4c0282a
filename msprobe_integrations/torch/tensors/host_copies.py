"""Memory of the host that a device still fills: results of ``x.to("cpu", non_blocking=True)`` and ``pinned.copy_(x, non_blocking=True)``
(activations and optimizer states that are offloaded). The program goes on before the bytes are there, and reading them then gives what
lay there before.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from msprobe_integrations.torch.statistics.streams import record_event
from msprobe_integrations.torch.tensors.devices import is_capturing
from msprobe_integrations.torch.tensors.dtensors import local
from msprobe_integrations.torch.tensors.unversioned_mutations import version_of

CALLS = frozenset(("to", "copy_", "_to_copy", "_foreach_copy_"))
"""Names of calls that may start such a copy."""
_KEYWORDS = ("self", "input", "src", "other")
"""Of what they copy to, and from where, in the order of arguments without a keyword."""


class _Copy(NamedTuple):
    event: Any
    kind: str
    """Type of the device."""
    storage: torch.UntypedStorage
    """The memory; kept, because its identity is nobody else's only while it lives."""
    target: weakref.ref[torch.Tensor]
    source: weakref.ref[torch.Tensor]
    versions: tuple[int | None, int | None]
    """Of target and source behind the copy; None of one that counts none."""


class HostCopies:
    """Copies from devices to the host that may be under way.

    Attributes:
        known: by the identity of the host's memory; empty nearly always, so callers look at it before they ask.
    """

    def __init__(self) -> None:
        self.known: dict[int, _Copy] = {}

    def add(self, api: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """A call of one of `CALLS` has returned.

        Raises:
            Exception: it cannot be told whether memory is being filled; its values must not be read then.
        """
        if kwargs.get("non_blocking") is not True and not any(each is True for each in args):
            return
        for target, source in _pairs(api, args, kwargs, result):
            if not isinstance(target, torch.Tensor) or not isinstance(source, torch.Tensor):
                continue
            target, source = local(target), local(source)
            if not target.is_cpu or source.is_cpu or is_capturing(source.device.type):
                continue
            self.drop_arrived()
            storage = _memory(target)
            if storage is not None:
                event = record_event(source.device)
                versions = (version_of(target), version_of(source))
                self.known[storage._cdata] = _Copy(event, source.device.type, storage, weakref.ref(target), weakref.ref(source), versions)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Is the memory of a tensor still being filled? Never waits."""
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
        versions = (version_of(tensor), version_of(source))
        return source if None not in versions and versions == copy.versions else None

    def drop_arrived(self) -> None:
        for key in [key for key, copy in self.known.items() if _has_arrived(copy)]:
            del self.known[key]

    def _under_way(self, tensor: torch.Tensor) -> _Copy | None:
        storage = _memory(tensor)
        copy = None if storage is None else self.known.get(storage._cdata)
        if copy is None or not _has_arrived(copy):
            return copy
        del self.known[copy.storage._cdata]
        return None


def _memory(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """None of what has none: a sparse tensor, a wrapper of other tensors."""
    try:
        return tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return None


def _has_arrived(copy: _Copy) -> bool:
    return not is_capturing(copy.kind) and bool(copy.event.query())  # a capture ends with an error when somebody asks


def _pairs(api: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Iterable[tuple[Any, Any]]:
    """Where a call copies to, and from where."""
    given = [*args, *(kwargs[name] for name in _KEYWORDS if name in kwargs)]
    if api not in ("copy_", "_foreach_copy_"):
        return [(result, given[0])]
    return zip(given[0], given[1]) if api == "_foreach_copy_" else [(given[0], given[1])]
