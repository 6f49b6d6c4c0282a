"""What happens to gradients between the backward pass and the update in a torch loop: loss scaling and clipping, as it is called.

`GradScaler.unscale_` and `GradScaler.step` are methods of a class, clipping are functions; both are looked through while a probe is
attached, and concern a probe only when its own optimizer or parameters are passed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import clip_grad

from msprobe_integrations.common.parameters.gradients import CLIPPED, UNSCALED
from msprobe_integrations.patching import FunctionPatches
from msprobe_integrations.torch.tensors import dtensors

if TYPE_CHECKING:
    from msprobe_integrations.common.parameters.parameter_sampler import ParameterSampler

_PART = "gradient phases"
_Scaler: Any = getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler
_WITH_NORM = "_clip_grads_with_norm_"
"""What `clip_grad_norm_` calls, however it was imported; torch 2.5 and earlier have no such function."""
_CLIPPING = (("deepspeed.runtime.engine", "clip_grad_norm_"),)
"""Where frameworks clip on their own what an ordinary optimizer updates; looked through when they are imported already."""


def inner_optimizer(optimizer: Any) -> Any:
    """The optimizer inside of wrappers (of launchers, of learning-rate helpers) that keep it as ``optimizer``."""
    while hasattr(inner := getattr(optimizer, "optimizer", None), "param_groups"):
        optimizer = inner
    return optimizer


class UpdatePatches:
    """Tells a watch of the phases of its gradients and of skipped updates.

    Args:
        watch: whom to tell.
        skipped: called when a scaler has left an update out.
    """

    def __init__(self, watch: ParameterSampler, optimizer: Any, parameters: Collection[torch.Tensor], skipped: Callable[[], None]) -> None:
        self._watch = watch
        self._optimizer = optimizer
        self._parameters = frozenset(parameters)
        self._skipped = skipped
        self.stepped = False
        """Set by whoever sees the update itself."""
        self._stepping = False
        self._patches = FunctionPatches()
        for name, handler in (("unscale_", self._unscale), ("step", self._step)):
            for cls in _scalers(name):
                self._patches.add(cls, name, handler)
        clipping: tuple[Any, ...] = (clip_grad, torch.nn.utils)
        for owner in clipping:
            self._patches.add(owner, "clip_grad_value_", self._clip_value)
        if hasattr(clip_grad, _WITH_NORM):
            self._patches.add(clip_grad, _WITH_NORM, self._clip_with_norm)
            self._patches.add(torch.nn.utils, "clip_grads_with_norm_", self._clip_with_norm)
        else:
            for owner in clipping:
                self._patches.add(owner, "clip_grad_norm_", self._clip_norm)
        for module, name in _CLIPPING:
            if hasattr(own := sys.modules.get(module), name):
                self._patches.add(own, name, self._clip_norm)

    def close(self) -> None:
        self._patches.close()

    def _unscale(self, following: Any, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        with self._watch.guard(_PART):
            if scaler._enabled and self._watch.active and inner_optimizer(optimizer) is self._optimizer:
                self._note_scale(scaler)
                self._watch.change_to(UNSCALED)
        return following(scaler, optimizer, *args, **kwargs)

    def _step(self, following: Any, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        concerned = False
        with self._watch.guard(_PART):
            concerned = scaler._enabled and not self._stepping and inner_optimizer(optimizer) is self._optimizer
            if concerned:
                self._note_scale(scaler)
        if not concerned:
            return following(scaler, optimizer, *args, **kwargs)
        self.stepped, self._stepping = False, True  # a subclass may call the method it overrides
        try:
            result = following(scaler, optimizer, *args, **kwargs)
        finally:
            self._stepping = False
        if not self.stepped:
            with self._watch.guard(_PART):
                self._skipped()
        return result

    def _note_scale(self, scaler: Any) -> None:
        self._watch.scalar("loss_scale", scaler._scale)

    def _clip_with_norm(self, following: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        with self._watch.guard(_PART):
            parameters = _as_list(parameters)
            if self._clips(parameters):
                self._note_norm(parameters, kwargs["total_norm"] if "total_norm" in kwargs else args[1] if len(args) > 1 else None)
        return following(parameters, *args, **kwargs)

    def _clip_norm(self, following: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        concerned = False
        with self._watch.guard(_PART):
            parameters = _as_list(parameters)
            concerned = self._clips(parameters)
        result = following(parameters, *args, **kwargs)
        if concerned:
            with self._watch.guard(_PART):
                self._note_norm(parameters, result)
        return result

    def _clip_value(self, following: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        with self._watch.guard(_PART):
            parameters = _as_list(parameters)
            self._clips(parameters)
        return following(parameters, *args, **kwargs)

    def _clips(self, parameters: Any) -> bool:
        """Gradients of these parameters are about to be clipped; True when some of them are watched."""
        if not self._watch.active or self._parameters.isdisjoint(parameters):
            return False
        self._watch.change_to(CLIPPED)
        return True

    def _note_norm(self, parameters: Any, norm: Any) -> None:
        """The norm that the training worked out itself, if it is of all parameters. Of a DTensor this rank has only a part of it."""
        if norm is not None and not dtensors.is_dtensor(norm) and self._parameters.issubset(parameters):
            self._watch.scalar("grad_norm", norm)


def _scalers(method: str) -> list[Any]:
    """Torch's scaler and those derived from it (torch_npu's, FSDP's) that have this method of their own."""
    found, todo = [], [_Scaler]
    while todo:
        cls = todo.pop()
        if method in vars(cls) and cls not in found:
            found.append(cls)
        todo += cls.__subclasses__()
    return found


def _as_list(parameters: Any) -> Any:
    """As torch does it: one tensor is a list of one, and a generator can be read only once."""
    if isinstance(parameters, torch.Tensor):
        return [parameters]
    return parameters if isinstance(parameters, (list, tuple)) else list(parameters)
