"""Calls that belong to an optimizer step or to gradient clipping: their parents in construct.json are ``optimizer`` and ``clip_grad``.

Nothing is patched: the functions are found among the callers by their code, so a ``clip_grad_norm_`` that was imported before the
probe existed, or is called by a framework, is known too. Callers are looked at only for calls without an enclosing module that can be
such calls: inside ``step()`` (the capture's hooks tell), or while gradients are off, as both run.
"""

from __future__ import annotations

from types import CodeType, FrameType
from typing import Any

import torch
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from msprobe_engine.core.names import CLIP_GRAD, OPTIMIZER

_grad_enabled = torch.is_grad_enabled


def _code(function: Any) -> CodeType:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    code: CodeType = function.__code__
    return code


_CLIP = (clip_grad.clip_grad_norm_, clip_grad.clip_grad_value_)
_CODES: dict[CodeType, str] = {
    **{_code(function): CLIP_GRAD for function in _CLIP},
    Optimizer.profile_hook_step(lambda _: None).__code__: OPTIMIZER,  # the wrapper that every optimizer's step gets
}
_CLIPS_WITH_GRADIENTS_ON = not all(hasattr(function, "__wrapped__") for function in _CLIP)  # torch < 2.3


class OptimizerCalls:
    """Attributes:
    stepping: an optimizer's ``step`` is running (closures turn gradients on inside).
    """

    def __init__(self) -> None:
        self.stepping = False

    def of(self, frame: FrameType | None) -> str | None:
        """``optimizer``, ``clip_grad`` or None for a call made at `frame`."""
        if _grad_enabled() and not self.stepping and not _CLIPS_WITH_GRADIENTS_ON:
            return None
        while frame is not None:
            found = _CODES.get(frame.f_code)
            if found is not None:
                return found
            frame = frame.f_back
        return None
