"""Puts the device ``npu`` behind the names of CUDA, as the module of this name in torch_npu does: functions of ``torch.npu`` in
``torch.cuda``, wrappers that write ``npu`` for ``cuda`` around functions of torch, classes and answers of torch replaced."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.utils._triton
import torch_npu  # type: ignore[import-not-found]
from torch.nn.parallel import DistributedDataParallel

WRAPPED = (
    (torch, ("arange", "empty", "empty_like", "full", "ones", "ones_like", "rand", "randn", "randperm", "tensor", "zeros", "zeros_like")),
    (torch, ("empty_strided", "frombuffer", "full_like", "load", "scalar_tensor", "get_device_module")),
    (torch.Tensor, ("new_empty", "new_ones", "new_tensor", "new_zeros", "to", "pin_memory")),
    (torch.nn.Module, ("to", "to_empty")),
    (torch.UntypedStorage, ("__new__",)),
    (torch.amp.autocast_mode.autocast, ("__init__",)),
    (DistributedDataParallel, ("__init__",)),
    (torch.distributed.device_mesh.DeviceMesh, ("__init__",)),
    (torch.distributed.ProcessGroup, ("_get_backend",)),
    (torch.distributed.distributed_c10d, ("_new_group_with_tag",)),
)


class _Kind(type(torch.Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: Any) -> bool:
        return super().__instancecheck__(instance) or isinstance(instance, cls.__mro__[1])


class _GeneratorProxy(torch.Generator, metaclass=_Kind):
    def __new__(cls, device: Any = "cpu") -> Any:
        return super().__new__(cls, named(device))


class _EventProxy(torch.Event, metaclass=_Kind):
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__new__(cls, *map(named, args), **{name: named(value) for name, value in kwargs.items()})


def named(value: Any) -> Any:
    """Of a device: that of the NPU for that of CUDA; other values as they are."""
    if isinstance(value, str):
        return value.replace("cuda", "npu")
    return torch.device("npu", value.index) if isinstance(value, torch.device) and value.type == "cuda" else value


def _wrapper(function: Any) -> Any:
    @functools.wraps(function)
    def decorated(*args: Any, **kwargs: Any) -> Any:
        return function(*map(named, args), **{name: named(value) for name, value in kwargs.items()})

    return decorated


for _name in torch_npu.npu.__all__:
    setattr(torch.cuda, _name, getattr(torch_npu.npu, _name))
for _owner, _names in WRAPPED:
    for _name in _names:
        setattr(_owner, _name, _wrapper(getattr(_owner, _name)))
torch.Generator, torch.Event = _GeneratorProxy, _EventProxy  # type: ignore[misc]
torch.Tensor.cuda, torch.nn.Module.cuda = torch.Tensor.npu, torch.nn.Module.npu
torch.Tensor.is_cuda = torch.Tensor.is_npu
torch.jit.script = lambda function, *_, **__: function
torch.distributed.Backend.default_device_backend_map.pop("cuda", None)
torch.utils._triton.has_triton = lambda: False
