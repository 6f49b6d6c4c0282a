"""A device for tests that counts copies to the host and refuses them while `reads_forbidden` is active.

`ProbeDevice` tensors wrap CPU tensors behind ``__torch_dispatch__``; every operator runs on the wrapped tensors. What a real
accelerator has to wait for (``.item()``, ``bool()``, ``.tolist()``, ``nonzero``, a copy to the CPU) raises `EarlyRead`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_map

_WAITING = {
    "aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::nonzero", "aten::masked_select", "aten::equal",
    "aten::allclose", "aten::unique_dim", "aten::_unique2",
}  # fmt: skip


class EarlyRead(BaseException):
    """The host read device data before the end of the step. Not an `Exception`: guards must not swallow it."""


class ProbeDevice(torch.Tensor):
    """A tensor on the test device; make one with ``ProbeDevice.wrap(cpu_tensor)``."""

    probe_device = True
    forbidden = False
    copies = 0
    """Copies to the host so far."""
    launches = 0
    """Operators run so far."""
    held: torch.Tensor

    @staticmethod
    def wrap(inner: torch.Tensor) -> ProbeDevice:
        """`inner` on the test device; shares its memory."""
        made: ProbeDevice = torch.Tensor._make_wrapper_subclass(
            ProbeDevice,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=inner.device,
            requires_grad=False,
        )
        made.held = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run `func` on the wrapped tensors."""
        name = func._schema.name
        if name in _WAITING or (name == "aten::index" and _has_mask(args)):
            cls._refuse_read(name)
        ProbeDevice.launches += 1
        unwrapped = tree_map(lambda a: a.held if isinstance(a, ProbeDevice) else a, (args, dict(kwargs or {})))
        result = func(*unwrapped[0], **unwrapped[1])
        if func._schema.is_mutable and args and isinstance(args[0], ProbeDevice):
            return args[0]
        return tree_map(lambda r: cls.wrap(r) if isinstance(r, torch.Tensor) else r, result)

    def cpu(self, *_: Any, **__: Any) -> torch.Tensor:
        """The copy to the host."""
        self._refuse_read("cpu")
        ProbeDevice.copies += 1
        return self.held.clone()

    def numpy(self, *_: Any, **__: Any) -> Any:
        """A copy to the host."""
        return self.cpu().numpy()

    def tolist(self) -> Any:
        """A copy to the host."""
        return self.cpu().tolist()

    @classmethod
    def _refuse_read(cls, what: str) -> None:
        if ProbeDevice.forbidden:
            raise EarlyRead(f"host read by {what} before the end of the step")


def _has_mask(args: Any) -> bool:
    return any(isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1] if i is not None)


@contextmanager
def reads_forbidden() -> Iterator[None]:
    """Any host read of a `ProbeDevice` tensor inside raises `EarlyRead`."""
    before, ProbeDevice.forbidden = ProbeDevice.forbidden, True
    try:
        yield
    finally:
        ProbeDevice.forbidden = before
