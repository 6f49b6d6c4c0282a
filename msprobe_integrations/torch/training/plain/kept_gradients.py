"""Whether a backward pass adds to the gradients of the update before, because nobody has cleared them."""

from __future__ import annotations

import weakref
from typing import Any

import torch


class KeptGradients:
    """Looks at one parameter: its gradient is the same tensor as after the last update, and since then only backward passes have written
    into it. Clearing makes another tensor or none, or writes once more; what is written through ``.data`` is not counted, so the first time
    the values are looked at, which is the only time."""

    def __init__(self) -> None:
        self._found = False
        self._is_left: bool | None = None
        self._parameter: weakref.ref[torch.Tensor] | None = None
        self._gradient: weakref.ref[torch.Tensor] | None = None
        self._version = 0
        self._passes = 0

    @property
    def added(self) -> bool:
        """The last backward pass added to the gradient of the update before; one of another model leaves it as it is."""
        gradient = None if self._gradient is None else self._gradient()
        return self._found and gradient is not None and gradient._version > self._version

    def updated(self, optimizer: Any) -> None:
        """An optimizer has updated its parameters."""
        self._found, self._passes = False, 0
        self._parameter = self._gradient = None
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            gradient = parameter.grad
            if type(gradient) is torch.Tensor:
                self._parameter, self._gradient = weakref.ref(parameter), weakref.ref(gradient)
                self._version = gradient._version
                return

    def backward(self) -> None:
        """A backward pass begins outside of any update."""
        parameter, gradient = (None if ref is None else ref() for ref in (self._parameter, self._gradient))
        if parameter is None or gradient is None:
            self._found = False
            return
        self._found = parameter.grad is gradient and gradient._version - self._version <= self._passes and self._is_left is not False
        self._passes += 1
        if self._found and self._is_left is None:
            if gradient.is_cuda and torch.cuda.is_current_stream_capturing():
                self._found = False
                return
            with torch.no_grad(), torch._C.DisableTorchFunction():
                self._found = self._is_left = bool(gradient.any())
