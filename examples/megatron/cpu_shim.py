"""Lets megatron-core (0.8 to 0.19) run on a machine without an accelerator, for examples and tests. Not part of the product.

Call `install` before anything of `megatron` is imported. It redirects the device that Megatron hard-codes to the CPU and replaces
the few helpers inside Megatron that no redirection reaches. With a real accelerator it does nothing.
"""

# ruff: noqa: ARG001, ARG002, ARG005
# Signatures are those of what is replaced.

from __future__ import annotations

import collections
import contextlib
import functools
import importlib.util
import logging
import os
import sys
import types
from collections.abc import Callable
from typing import Any

_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "randint", "linspace", "as_tensor", "triu_indices")
_LIKE = ("zeros_like", "ones_like", "empty_like", "full_like")
_installed = False


class _Stream:
    """Everything on a CPU is in order already."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_stream(self, *args: Any) -> None: ...
    def wait_event(self, *args: Any) -> None: ...
    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def query(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def record(self, *args: Any) -> None: ...
    def wait(self, *args: Any) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


def install() -> None:
    """Redirect once; later calls do nothing."""
    global _installed
    if _installed:
        return
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # Megatron's fuser is torch.compile, which wants a C++ compiler on a CPU
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    _packages()
    import torch

    if torch.cuda.is_available():
        return
    _installed = True
    _module_functions(torch)
    _random_state(torch)
    _literals(torch)
    _patch_megatron(torch)


def _packages() -> None:
    """0.8 takes `packaging` from where setuptools had a copy of it."""
    if importlib.util.find_spec("pkg_resources") is not None:
        return
    import packaging.version

    stand_in: Any = types.ModuleType("pkg_resources")
    stand_in.packaging = packaging
    sys.modules["pkg_resources"] = stand_in


def _module_functions(torch: Any) -> None:
    cuda, cpu = torch.cuda, torch.device("cpu")

    def answer(value: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: value

    cuda.current_device = answer(cpu)  # what most of Megatron asks for
    for name in ("synchronize", "set_device", "empty_cache", "reset_peak_memory_stats", "ipc_collect", "set_stream"):
        setattr(cuda, name, answer(None))
    cuda.device_count = answer(1)
    cuda.get_device_capability = answer((8, 0))
    cuda.get_device_properties = answer(types.SimpleNamespace(major=8, minor=0, name="cpu", total_memory=1 << 33, multi_processor_count=1))
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, answer(0))
    cuda.memory_stats = lambda *args, **kwargs: collections.defaultdict(int)
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: _Stream()
    cuda.stream = lambda stream=None: contextlib.nullcontext()
    cuda.nvtx.range_push = cuda.nvtx.range_pop = answer(None)


def _random_state(torch: Any) -> None:
    cuda, generator = torch.cuda, torch.default_generator
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device=None: generator.get_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, device=None: generator.set_state(state)
    cuda.manual_seed = cuda.random.manual_seed = lambda seed: generator.manual_seed(int(seed))
    cuda.default_generators = (generator,)


def _literals(torch: Any) -> None:
    """``device="cuda"`` (MindSpeed: ``"npu"``), ``.cuda()``, ``.to("cuda")`` and the type names by which Megatron sorts parameters."""
    cpu = torch.device("cpu")

    def is_cuda(device: Any) -> bool:
        if isinstance(device, str):
            return device.startswith(("cuda", "npu"))
        return getattr(device, "type", "") in ("cuda", "npu") or (isinstance(device, int) and not isinstance(device, bool))

    def factory(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def make(*args: Any, **kwargs: Any) -> Any:
            if is_cuda(kwargs.get("device")):
                kwargs["device"] = cpu
            return function(*args, **kwargs)

        return make

    def mover(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def to(self: Any, *args: Any, **kwargs: Any) -> Any:
            if args and not isinstance(args[0], int) and is_cuda(args[0]):
                args = (cpu, *args[1:])
            if is_cuda(kwargs.get("device")):
                kwargs["device"] = cpu
            return function(self, *args, **kwargs)

        return to

    for name in _FACTORIES + _LIKE:
        setattr(torch, name, factory(getattr(torch, name)))
    histogram = torch.histc  # on a CPU not of integers; routers before 0.10 count tokens with it
    torch.histc = lambda input, *args, **kwargs: histogram(input if input.is_floating_point() else input.float(), *args, **kwargs).to(
        input.dtype
    )
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.to = mover(torch.Tensor.to)
    torch.nn.Module.to = mover(torch.nn.Module.to)
    plain_type = torch.Tensor.type

    def type_name(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = plain_type(self, *args, **kwargs)
        if isinstance(found, str) and not args and not kwargs and found.startswith("torch.") and "cuda" not in found:
            return found.replace("torch.", "torch.cuda.")
        return found

    torch.Tensor.type = type_name


def _patch_megatron(torch: Any) -> None:
    import megatron.core.tensor_parallel.random as rng
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    rng._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.default_generator.set_state(state)
    rng._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.default_generator.get_state()
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    _norm_of_sequences()
    moe_utils.__dict__.setdefault("te_general_gemm", None)  # 0.14 to 0.16 ask for the name without TransformerEngine having set it
    _adam(torch)
    import megatron.core.models.gpt.gpt_layer_specs as specs

    for kind in ("ColumnParallelGroupedLinear", "RowParallelGroupedLinear", "ColumnParallelLinear", "RowParallelLinear"):
        specs.__dict__.setdefault(f"TE{kind}", None)  # the same in 0.10
    if hasattr(dispatcher, "maybe_move_tensor_to_cpu"):  # turns split sizes into numpy only when they are on a GPU

        def to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
            return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

        dispatcher.maybe_move_tensor_to_cpu = to_cpu
    try:
        import megatron.core.fp8_utils as fp8
    except ImportError:
        return
    quantize = getattr(fp8, "_quantize_param_shard_impl", None)
    if quantize is not None:  # 0.12 calls it without any FP8 parameter, and it raises without TransformerEngine
        fp8._quantize_param_shard_impl = lambda params, *args, **kwargs: quantize(params, *args, **kwargs) if len(params) else None


def _adam(torch: Any) -> None:
    """The distributed optimizer of 0.8 and 0.9 asks for Apex' Adam, or Transformer Engine's, although it does with torch's."""
    import megatron.core
    import megatron.core.optimizer.distrib_optimizer as sharded

    if megatron.core.__version__.startswith(("0.8.", "0.9.")):
        sharded.Adam, sharded.HAVE_APEX_OR_TE = torch.optim.AdamW, True


def _norm_of_sequences() -> None:
    """Torch's norm refuses sequence parallelism only because it does not mark its parameters, as Megatron's fused norm does."""
    try:
        from megatron.core.transformer.torch_norm import WrappedTorchNorm
    except ImportError:  # 0.9 has it elsewhere
        return
    make = WrappedTorchNorm.__new__

    def marked(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        divided, config.sequence_parallel = config.sequence_parallel, False
        try:
            norm = make(cls, config, *args, **kwargs)
        finally:
            config.sequence_parallel = divided
        for parameter in norm.parameters():
            parameter.sequence_parallel = divided
        return norm

    WrappedTorchNorm.__new__ = marked
