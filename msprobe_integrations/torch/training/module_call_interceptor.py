"""Tells of every call of one module, outside of its hooks: a step that begins or ends there puts hooks on it and takes them off, and torch
has made its list of them when the first one is called."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from msprobe_integrations.torch.hooks.compiled import ORIGINAL, is_wrapper
from msprobe_integrations.torch.monitor.targets import unwrap_model

_NAME = "_compiled_call_impl"
"""Where ``module.compile()`` puts what is called in place of the hooks and ``forward``; a copy of the module does not have it."""
_NOTHING: Any = object()


class ModuleCallInterceptor:
    """Stands in one module's place for compiled code, until `remove`.

    Args:
        module: as the loop calls it: wrapped.
        enters: ``(module, inner, args, kwargs)`` before a call; the mode of `inner` says whether this is training. Never raises.
        leaves: ``(id of the module)`` after it, also when it raised. Never raises.

    Attributes:
        inside: what was there before: compiled code, or None.
    """

    def __init__(self, module: nn.Module, enters: Callable[[nn.Module, nn.Module, Any, Any], None], leaves: Callable[[int], None]) -> None:
        inner = unwrap_model(module)
        compiled = inner._modules[ORIGINAL] if is_wrapper(inner) else None  # modules are never asked whether they are true: some raise
        self._inner = weakref.ref(inner if compiled is None else compiled)
        self._module = weakref.ref(module)
        self._enters, self._leaves = enters, leaves
        self._before = module.__dict__.get(_NAME, _NOTHING)
        self.inside = None if self._before is _NOTHING else self._before
        module.__dict__[_NAME] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module()
        call = module._call_impl if self.inside is None else self.inside
        if torch.compiler.is_compiling():
            return call(*args, **kwargs)
        inner = self._inner()
        self._enters(module, module if inner is None else inner, args, kwargs)
        try:
            return call(*args, **kwargs)
        finally:
            self._leaves(id(module))

    @property
    def alive(self) -> bool:
        return self._module() is not None

    def remove(self) -> None:
        """Leave the module as it was, unless somebody has put something else there."""
        module = self._module()
        if module is None or module.__dict__.get(_NAME) is not self:
            return
        if self._before is _NOTHING:
            del module.__dict__[_NAME]
        else:
            module.__dict__[_NAME] = self._before

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the module, or one that is saved whole, has nothing of ours."""
        return type(None), ()
