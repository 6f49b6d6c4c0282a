"""Modules that are no Cells."""

from __future__ import annotations

from collections import OrderedDict

import mindspore
import numpy as np
from mindspore.ops.operations import _inner_ops as inner

from . import functional


class Parameter(mindspore.Parameter):
    def __new__(cls, data, requires_grad=True):
        return mindspore.Parameter(data, requires_grad=requires_grad)


class _Handle:
    _last = 0

    def __init__(self, hooks, hook):
        _Handle._last += 1
        self._hooks, self._number = hooks, _Handle._last
        hooks[self._number] = hook

    def remove(self):
        self._hooks.pop(self._number, None)


_DICTS = ("_parameters", "_modules", "_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")


class Module:
    def __init__(self):
        for name in _DICTS:
            self.__dict__[name] = OrderedDict()
        self.__dict__["training"] = True

    def __setattr__(self, name, value):
        if isinstance(value, mindspore.Parameter):
            self._parameters[name] = value
        elif isinstance(value, Module):
            self._modules[name] = value
        else:
            object.__setattr__(self, name, value)

    def __getattr__(self, name):
        for place in ("_parameters", "_modules"):
            found = self.__dict__.get(place, {})
            if name in found:
                return found[name]
        raise AttributeError(name)

    def named_modules(self, prefix=""):
        yield prefix, self
        for name, module in self._modules.items():
            yield from module.named_modules(f"{prefix}.{name}" if prefix else name)

    def modules(self):
        return (module for _, module in self.named_modules())

    def named_parameters(self):
        for path, module in self.named_modules():
            for name, parameter in module._parameters.items():
                yield (f"{path}.{name}" if path else name), parameter

    def parameters(self):
        return (parameter for _, parameter in self.named_parameters())

    def register_forward_pre_hook(self, hook, *, prepend=False, with_kwargs=False):  # noqa: ARG002 - torch's arguments
        return _Handle(self._forward_pre_hooks, hook if with_kwargs else lambda module, args, _: hook(module, args))

    def register_forward_hook(self, hook, *, prepend=False, with_kwargs=False, always_call=False):  # noqa: ARG002
        return _Handle(self._forward_hooks, hook if with_kwargs else lambda module, args, _, out: hook(module, args, out))

    def register_full_backward_hook(self, hook, prepend=False):  # noqa: ARG002
        return _Handle(self._backward_hooks, hook)

    def register_full_backward_pre_hook(self, hook, prepend=False):  # noqa: ARG002
        return _Handle(self._backward_pre_hooks, hook)

    def _call_impl(self, *args, **kwargs):
        for hook in list(self._forward_pre_hooks.values()):
            changed = hook(self, args, kwargs)
            if changed is not None:
                args = changed if isinstance(changed, tuple) else (changed,)
        after = before = None
        name = f"{type(self).__name__}({id(self)})"
        if self._backward_hooks:
            after = inner.CellBackwardHook(name, self, self._backward_hooks)
            after.register_backward_hook()
            args = after(args)
        out = self.forward(*args, **kwargs)
        for hook in list(self._forward_hooks.values()):
            changed = hook(self, args, kwargs, out)
            if changed is not None:
                out = changed
        if after is not None:
            out = after(out)
        if self._backward_pre_hooks:
            before = inner.CellBackwardHook(f"{name}p", self, self._backward_pre_hooks)
            before.register_backward_pre_hook()
            out = before(out)
        self.__dict__["_alive"] = (after, before)  # the operator holds its hooks weakly
        return out

    __call__ = _call_impl


class Linear(Module):
    def __init__(self, n_in, n_out, bias=True):
        super().__init__()
        self.weight = Parameter(mindspore.Tensor((np.random.randn(n_out, n_in) / n_in**0.5).astype(np.float32)))
        self.bias = Parameter(mindspore.Tensor(np.zeros(n_out, np.float32))) if bias else None

    def forward(self, x):
        return functional.linear(x, self.weight, self.bias)


class ReLU(Module):
    def forward(self, x):
        return functional.relu(x)


class Sequential(Module):
    def __init__(self, *modules):
        super().__init__()
        for number, module in enumerate(modules):
            self._modules[str(number)] = module

    def forward(self, x):
        for module in self._modules.values():
            x = module(x)
        return x
