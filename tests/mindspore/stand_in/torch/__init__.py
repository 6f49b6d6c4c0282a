"""A stand-in for MSAdapter, which cannot be installed from a package index: names of torch over tensors of MindSpore.

It is real in what a probe depends on: ``torch.Tensor is mindspore.Tensor``, ``torch.nn.Module`` is no Cell, and ``backward`` is MindSpore's
own eager autograd (2.10 and later)."""

from __future__ import annotations

import builtins
import functools

import mindspore
import numpy as np
from mindspore import mint, ops
from mindspore._c_expression import TensorPy, run_backward
from mindspore.graph.api import _pynative_executor as executor

__version__ = "2.1.0+stand_in"
Tensor = mindspore.Tensor
float16, float32, float64, bfloat16 = mindspore.float16, mindspore.float32, mindspore.float64, mindspore.bfloat16
int32, int64, bool = mindspore.int32, mindspore.int64, mindspore.bool_
executor.set_grad_flag(True)  # record outside of value_and_grad too


def _backward(self, gradient=None, retain_graph=False, create_graph=False, inputs=None):
    start = ops.ones_like(self) if gradient is None else gradient
    run_backward((self,), (start,), retain_graph, create_graph, tuple(inputs or ()), True, accumulate_grad=True)


def _set_grad(self, gradient):
    self._grad = gradient


Tensor.backward = _backward
Tensor.grad = property(lambda self: self._grad, _set_grad)
Tensor.requires_grad = property(lambda self: self._requires_grad, TensorPy.requires_grad_)
Tensor.is_leaf = property(lambda self: self._is_leaf)
Tensor.grad_fn = property(lambda self: self._grad_node)
Tensor.detach = lambda self: ops.stop_gradient(self)
Tensor.numpy = lambda self: self.asnumpy()
Tensor.cpu = lambda self: self
Tensor.device = "npu"  # of every tensor, wherever it is
Tensor.size = lambda self, dim=None: self.shape if dim is None else self.shape[dim]


def tensor(data, dtype=None, device=None, requires_grad=False):  # noqa: ARG001 - torch's arguments
    array = np.asarray(data)
    if dtype is None and array.dtype == np.float64:
        array = array.astype(np.float32)
    made = Tensor(array, dtype)
    if requires_grad:
        made.requires_grad_(True)
    return made


def randn(*shape, **options):
    return tensor(np.random.randn(*shape).astype(np.float32), **options)


def ones(*shape, **options):
    return tensor(np.ones(shape, np.float32), **options)


def zeros(*shape, **options):
    return tensor(np.zeros(shape, np.float32), **options)


def manual_seed(seed):
    mindspore.set_seed(seed)


def matmul(a, b):
    return mint.matmul(a, b)


def add(a, b, *, alpha=1):
    return mint.add(a, b, alpha=alpha)


def sum(a, *dims, **options):
    return mint.sum(a, *dims, **options)


def softmax(a, dim):
    return ops.softmax(a, axis=dim)


def value_and_grad(function, weights):
    return mindspore.value_and_grad(function, 0, weights)


def is_tensor(value) -> builtins.bool:
    return isinstance(value, Tensor)


class no_grad:
    def __enter__(self):
        self._before = executor.enable_grad()
        executor.set_enable_grad(False)

    def __exit__(self, *_):
        executor.set_enable_grad(self._before)

    def __call__(self, function):
        @functools.wraps(function)
        def quiet(*args, **kwargs):
            with no_grad():
                return function(*args, **kwargs)

        return quiet


from . import distributed, nn, optim  # noqa: E402

__all__ = ["Tensor", "distributed", "nn", "no_grad", "optim", "tensor"]
