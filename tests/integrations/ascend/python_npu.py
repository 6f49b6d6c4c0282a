"""A device of type ``npu`` that is the processor: torch's own third-party device key, renamed, with a fallback that runs every operator on
the memory of the host. Dispatch, autograd, device guards and generated methods (``tensor.npu()``) are torch's. Beside it a module
``torch_npu`` with operators of the ``npu`` namespace, registered as the real one registers them.

Only for a process of its own: `install` cannot be taken back. What a tensor costs and when the host waits is not modelled.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_VIEWS = (
    "slice.Tensor", "select.int", "transpose.int", "t", "permute", "expand", "unsqueeze", "squeeze", "squeeze.dim", "view.dtype",
    "diagonal", "unfold", "split.Tensor", "split_with_sizes", "unbind.int", "_reshape_alias", "view_as_real",
)  # fmt: skip
"""Torch makes these of strides, which the tensors here do not have."""
_ALONE = ("abs",)
"""Torch makes these of an ``out=`` that it makes larger, which the tensors here cannot become."""
EVENTS: list[str] = []
"""What was asked of the device: streams, events, seeds, overflow flags."""
flag = {"overflow": 0}


def _of(held: torch.Tensor) -> torch.Tensor:
    """`held`, on the device."""
    made: torch.Tensor = torch._C._acc.create_empty_tensor(held.shape, held.dtype)
    _memory[made.untyped_storage()._cdata] = held
    return made


_memory: dict[int, torch.Tensor] = {}
"""By storage: what C++ has detached has the same one."""
_formats: dict[int, tuple[int, torch.Tensor]] = {}
"""By storage: a private format, and the values. What lies in the memory itself is arranged in another way; here it is one number."""
BLOCKED = 777.0
"""That number."""


def _host(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.device.type == "npu":
        return _memory[value.untyped_storage()._cdata]
    if isinstance(value, torch.device) and value.type == "npu":
        return torch.device("cpu")
    return value


def _fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operator: on the host, with results on the device where the tensors came from or where they were asked for."""
    to = kwargs.get("device")
    home = to is not None and torch.device(to).type != "npu"
    tensors = [t for t in _pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.device.type == "npu"]
    known = {id(_host(t)): t for t in tensors}
    places = zip(args, op._schema.arguments)  # a number in place of a tensor reaches a fallback as what it is
    args = tuple(torch.tensor(a) if isinstance(a, int | float) and str(p.type) == "Tensor" else a for a, p in places)
    with torch._C.DisableTorchFunction():
        result = op(*_pytree.tree_map(_host, args), **_pytree.tree_map(_host, kwargs))

    def back(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or home:
            return value
        return known[id(value)] if id(value) in known else _of(value)

    return _pytree.tree_map(back, result)


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    with torch._C.DisableTorchFunction():
        if non_blocking and late["on"] and target.device.type == "cpu":
            _under_way.append((target.detach(), _host(source).clone()))
        else:
            _host(target).copy_(_host(source))
    return target


def _to_copy(tensor: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    to = kwargs.pop("device", None)
    kwargs.pop("pin_memory", None)
    dtype = kwargs.get("dtype") or tensor.dtype
    if to is None and dtype is torch.float64:  # ToKernelNpu.cpp, with this warning
        warnings.warn("Device do not support double dtype now, dtype cast replace with float.", stacklevel=2)
        dtype = torch.float32
    home = to is not None and torch.device(to).type == "cpu"
    with torch._C.DisableTorchFunction():
        made = _host(tensor).detach().to(dtype, copy=True)
        if home and kwargs.get("non_blocking") and late["on"]:
            _under_way.append((made, made.clone()))
            made.fill_(float("nan"))
    return made if home else _of(made)


late = {"on": False}
"""Copies to the host that are not waited for come with `arrive`, not at once."""
_under_way: list[tuple[torch.Tensor, torch.Tensor]] = []


def arrive() -> None:
    """All copies that are under way are there, without new versions."""
    while _under_way:
        target, values = _under_way.pop(0)
        with torch._C.DisableTorchFunction():
            target.data.copy_(values)


def _as_strided(tensor: torch.Tensor, size: Any, stride: Any, offset: int | None = None) -> torch.Tensor:
    held = _host(tensor)
    with torch._C.DisableTorchFunction():
        return _of(held.as_strided(size, stride, held.storage_offset() + (offset or 0)))


def _view(tensor: torch.Tensor, size: Any) -> torch.Tensor:
    with torch._C.DisableTorchFunction():
        return _of(_host(tensor).reshape(size))


def _empty(size: Any, **kwargs: Any) -> torch.Tensor:
    with torch._C.DisableTorchFunction():
        return _of(torch.empty(size, dtype=kwargs.get("dtype"), device="cpu"))


def _strided(size: Any, stride: Any, **kwargs: Any) -> torch.Tensor:
    with torch._C.DisableTorchFunction():
        return _of(torch.empty_strided(size, stride, dtype=kwargs.get("dtype"), device="cpu"))


class Stream:
    """A stream; everything is done when it is asked for."""

    def __init__(self, device: Any = None, **_: Any) -> None:
        self.device = device
        EVENTS.append("stream")

    def wait_stream(self, _: Any) -> None:
        """Nothing to wait for."""

    def wait_event(self, _: Any) -> None:
        """Nothing to wait for."""


class Event:
    """An event: complete when the copies are there that were under way when it was recorded."""

    def __init__(self, **_: Any) -> None:
        EVENTS.append("event")
        self._behind: list[Any] = []

    def record(self, stream: Any = None) -> None:
        """Behind all that was asked for, on any stream."""
        del stream
        self._behind = list(_under_way)

    def query(self) -> bool:
        """Complete?"""
        return not any(copy is each for copy in self._behind for each in _under_way)

    def synchronize(self) -> None:
        """Wait."""
        EVENTS.append("synchronize")
        arrive()


class _On:
    def __init__(self, *_: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: Any) -> None: ...


def _device_module() -> Any:
    """As far as `torch.npu` of torch_npu has it and the probe asks for it."""
    module: Any = types.ModuleType("torch.npu")
    stream = Stream()
    generator = torch.Generator()
    module.is_available = module.is_initialized = module._is_in_bad_fork = lambda: True
    module._is_in_bad_fork = lambda: False
    module.is_bf16_supported = lambda *_: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = module._lazy_init = lambda *_: None
    module._lazy_call = lambda call: call()
    module.get_device_name = lambda *_: "stand-in"
    module.get_device_capability = lambda *_: None
    module.get_device_properties = lambda *_: types.SimpleNamespace(name="stand-in", total_memory=1 << 33)
    module.synchronize = lambda *_: EVENTS.append("synchronize")
    module.current_stream = module.default_stream = lambda *_: stream
    module.Stream, module.Event, module.stream, module.device = Stream, Event, _On, _On
    module.default_generators = [generator]
    module.get_rng_state = lambda *_: generator.get_state()
    module.set_rng_state = lambda state, *_: generator.set_state(state)
    module.get_rng_state_all = lambda: [generator.get_state()]
    module.set_rng_state_all = lambda states: generator.set_state(states[0])
    module.manual_seed = lambda seed: generator.manual_seed(seed)
    module.manual_seed_all = lambda seed: (EVENTS.append(f"seed {seed}"), generator.manual_seed(seed))
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.is_current_stream_capturing = lambda: False
    module.__all__ = [name for name in vars(module) if not name.startswith("_")]
    module.utils = types.ModuleType("torch.npu.utils")
    module.utils.clear_npu_overflow_flag = lambda: EVENTS.append("clear")
    module.utils.is_support_inf_nan = lambda: False
    return module


def _kernels() -> Any:
    fallback = torch.library.Library("_", "IMPL")
    fallback.fallback(_fallback, "PrivateUse1")
    fallback.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    made = torch.library.Library("aten", "IMPL")
    for view in _VIEWS + _ALONE:
        name, _, overload = view.partition(".")
        made.impl(view, functools.partial(_fallback, getattr(getattr(torch.ops.aten, name), overload or "default")), "PrivateUse1")
    made.impl("view", _view, "PrivateUse1")
    made.impl("as_strided", _as_strided, "PrivateUse1")
    made.impl("empty.memory_format", _empty, "PrivateUse1")
    made.impl("empty_strided", _strided, "PrivateUse1")
    made.impl("_copy_from", _copy_from, "PrivateUse1")
    made.impl("_to_copy", _to_copy, "PrivateUse1")
    return fallback, made


def _operators() -> Any:
    library = torch.library.Library("npu", "DEF")
    library.define("npu_rms_norm(Tensor self, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)")
    results = "(Tensor, Tensor, Tensor, Tensor, int, int, int)"
    library.define(f"npu_fusion_attention(Tensor query, Tensor key, Tensor value, int head_num) -> {results}")
    library.define("npu_swiglu(Tensor self, int dim=-1) -> Tensor")

    def rms(x: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> Any:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)
        return x * scale * gamma, scale

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, head_num: int) -> Any:
        weights = torch.softmax(query @ key.transpose(-1, -2), -1)
        return weights @ value, weights.amax(-1), weights.sum(-1), weights.new_empty(0), head_num, 0, 0

    def swiglu(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        left, right = x.chunk(2, dim)
        return torch.nn.functional.silu(left) * right

    for name, function in (("npu_rms_norm", rms), ("npu_fusion_attention", attention), ("npu_swiglu", swiglu)):
        library.impl(name, function, "CompositeImplicitAutograd")
    return library


def get_npu_format(tensor: torch.Tensor) -> int:
    """As that of torch_npu."""
    return _formats.get(tensor.untyped_storage()._cdata, (2,))[0]


def npu_format_cast(tensor: torch.Tensor, number: int) -> torch.Tensor:
    """As that of torch_npu, which casts few types."""
    if number == get_npu_format(tensor):
        return tensor
    if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise RuntimeError("can not cast format when src is not float32 or float16")
    key = tensor.untyped_storage()._cdata
    values = _formats[key][1] if key in _formats else _host(tensor)
    with torch._C.DisableTorchFunction():
        if number == 2:
            return _of(values.clone())
        made = _of(torch.full_like(values, BLOCKED))
    _formats[made.untyped_storage()._cdata] = (number, values)
    return made


def in_private_format(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of a type that `npu_format_cast` refuses, as an operator of torch_npu may give it."""
    made = _of(torch.zeros_like(_host(tensor)))
    _formats[made.untyped_storage()._cdata] = (29, _host(tensor))
    return made


def generator() -> torch.Generator:
    """The generator of the device."""
    found: torch.Generator = torch.npu.default_generators[0]  # type: ignore[attr-defined]
    return found


def _bytes(storage: torch.UntypedStorage) -> int:
    held = _memory.get(storage._cdata)
    return 0 if held is None else held.untyped_storage().nbytes()


def install() -> Any:
    """From now on there is a device ``npu`` and a module ``torch_npu``; gives the latter."""
    device = _device_module()
    _setup_privateuseone_for_python_backend("npu", device)
    record = torch.Tensor.record_stream
    torch.Tensor.record_stream = lambda t, s: None if isinstance(s, Stream) else record(t, s)  # type: ignore[method-assign]
    size = torch.UntypedStorage.nbytes  # the storages have no memory of their own
    torch.UntypedStorage.nbytes = lambda s: size(s) or (_bytes(s) if s.device.type == "npu" else 0)  # type: ignore[method-assign]
    module: Any = types.ModuleType("torch_npu")
    module.npu = device
    module.npu_get_float_status = lambda status: status + flag["overflow"]
    module.kept = (_kernels(), _operators())
    for name in ("npu_rms_norm", "npu_fusion_attention", "npu_swiglu"):
        setattr(module, name, getattr(torch.ops.npu, name))

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return torch.ops.npu.npu_swiglu(*args, **kwargs)

    wrapped.__module__, wrapped.__name__ = "torch_npu.contrib.function", "npu_wrapped_swiglu"
    module.npu_wrapped_swiglu = wrapped
    module.get_npu_format, module.npu_format_cast = get_npu_format, npu_format_cast
    module.__version__ = "2.13.0"
    module.__spec__ = types.SimpleNamespace(name="torch_npu")
    sys.modules["torch_npu"] = module
    return module


class _Names(types.ModuleType):
    """A module of torch_npu in which every name that is looked up is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, type(name, (), {}))
        return vars(self)[name]


def transfer() -> None:
    """After `install`: what ``from torch_npu.contrib import transfer_to_npu`` does. With MSPROBE_TORCH_NPU, the directory of an unpacked
    wheel, by the real module, else by one of the tests that replaces the same."""
    torch_npu = sys.modules["torch_npu"]
    names = "contrib utils utils._dynamo profiler _C _C._distributed_c10d _init _init.patches _init.patches.monkey_patches "
    names += "npu.amp npu.amp.autocast_mode npu.amp.common npu.amp.grad_scaler npu.random npu.memory"
    sys.modules["torch_npu.npu"] = torch_npu.npu
    for name in names.split():
        path, _, last = name.rpartition(".")
        owner = sys.modules[f"torch_npu.{path}" if path else "torch_npu"]
        made = sys.modules[f"torch_npu.{name}"] = _Names(f"torch_npu.{name}")
        setattr(owner, last, made)
        like = sys.modules.get(f"torch.cuda{name[3:]}") if name.startswith("npu.") else None
        vars(made).update({key: value for key, value in vars(like).items() if not key.startswith("__")} if like else {})
    torch_npu.utils._dynamo.use_jit_script = False
    torch_npu.profiler.ProfilerActivity = types.SimpleNamespace(NPU=1, CPU=0)
    torch_npu._init.patches.monkey_patches._apply_patches = _put
    torch_npu.npu.get_autocast_dtype = torch_npu.npu.set_autocast_dtype = lambda *_: torch.bfloat16
    torch_npu.npu.FloatTensor, torch_npu.npu.NPUGraph = torch.FloatTensor, type("NPUGraph", (), {})
    torch.distributed.is_hccl_available = lambda: True  # type: ignore[attr-defined]
    torch.storage.TypedStorage.is_npu = property(lambda s: s.device.type == "npu")  # type: ignore[attr-defined]
    place = Path(os.environ.get("MSPROBE_TORCH_NPU") or Path(__file__).with_name("like_wheel")) / "torch_npu" / "contrib"
    torch_npu.contrib.__path__ = [str(place)]
    importlib.import_module("torch_npu.contrib.transfer_to_npu")


def _put(patches: list[list[Any]]) -> None:
    """As ``_apply_patches`` of torch_npu: modules that list their names give these."""
    for path, patch in patches:
        owner: Any = torch
        *way, last = path.split(".")
        for name in way:
            owner = getattr(owner, name)
        if hasattr(patch, "__all__") and hasattr(owner, last):
            for name in patch.__all__:
                setattr(getattr(owner, last), name, getattr(patch, name))
        else:
            setattr(owner, last, patch)
