"""Stands in for `torch_npu`, `torchair`, `acl` and `fla_npu` where there is no NPU, so that MindSpeed can be imported: every name of them
exists. A few operators are computed; a training that needs another one fails, because that raises when it is called."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGES = ("torch_npu", "torchair", "acl", "fla_npu")


class Operator:
    """A name of the stand-in: may be imported, may be a base class or a decorator, but does nothing."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> Operator:
        if name.startswith("__") or name == "hccl_config":  # of options of process groups: as an older torch_npu, which has none
            raise AttributeError(name)
        return Operator(f"{self.name}.{name}")

    def __call__(self, *_: Any, **__: Any) -> Any:
        if self.name.rpartition(".")[2].startswith("register"):  # @register_fx_node_ge_converter(...): says how, computes nothing
            return lambda function: function
        if self.name.endswith(".is_initialized"):  # what torch_npu answers before anything has run on an NPU
            return False
        raise RuntimeError(f"{self.name} was called: this test has no NPU")

    def __mro_entries__(self, _bases: Any) -> tuple[type, ...]:
        return (object,)


class Inert(ModuleType):
    """A module, or a package, of `Operator`s."""

    __path__: list[str] = []
    __file__ = "stand-in"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Operator(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in PACKAGES else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return Inert(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


OPERATORS = {
    "npu_rms_norm": "(Tensor self, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
    "npu_swiglu": "(Tensor self, int dim=-1) -> Tensor",
    "npu_fusion_attention": "(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, Tensor? pse=None, Tensor? "
    "padding_mask=None, Tensor? atten_mask=None, float scale=1., float keep_prob=1., int pre_tockens=2147483647, "
    "int next_tockens=2147483647, int inner_precise=0, int[]? prefix=None, int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, "
    "int sparse_mode=0) -> (Tensor, Tensor, Tensor)",
}
"""Operators of torch_npu that are computed, by the formulas of the operator check."""


class Extension:
    """What MindSpeed compiles: computed where neither `__torch_function__` nor the versions of tensors tell of it."""

    def npu_rotary_position_embedding(self, x: Any, cos: Any, sin: Any, mode: int) -> Any:
        """A new tensor."""
        import torch

        from msprobe_integrations.torch.op_tools.accuracy import references

        with torch._C.DisableTorchFunction():
            return references.find("MindSpeed.npu_rotary_position_embedding")(x, cos, sin, mode)  # type: ignore[misc]

    def npu_matmul_add_fp32(self, grad_output: Any, total_input: Any, grad: Any) -> None:
        """Added to the memory of `grad`, by its pointer."""
        memory = grad.detach().numpy()
        memory[...] = memory + grad_output.detach().float().numpy().T @ total_input.detach().float().numpy()


def install() -> Any:
    """From now on ``import torch_npu`` works; ``torch.npu`` is whatever ``torch.cuda`` is (the CPU shim). Gives what is to be kept."""
    import torch

    from msprobe_integrations.torch.op_tools.accuracy import references

    sys.meta_path.insert(0, _Finder())
    torch.npu = torch.cuda  # type: ignore[attr-defined]
    torch.cuda.mstx = Inert("torch_npu.npu.mstx")  # type: ignore[attr-defined]
    for name in ("FloatTensor", "DoubleTensor", "HalfTensor", "BFloat16Tensor", "IntTensor", "LongTensor"):
        setattr(torch.cuda, name, getattr(torch, name))
    import torch_npu
    import torch_npu.utils.collect_env as collect_env

    torch_npu.npu = torch.npu  # type: ignore[attr-defined]
    torch_npu.__version__ = "0.0.0"  # type: ignore[attr-defined]
    torch_npu.unsupported_dtype = []  # type: ignore[attr-defined]
    collect_env.get_cann_version = lambda *_: "0.0.0"  # type: ignore[attr-defined]
    with contextlib.suppress(ImportError):
        import triton

        triton.autotune = lambda *_, **__: lambda kernel: kernel  # MindSpeed's kernels name keys that triton-ascend alone takes
    library = torch.library.Library("npu", "DEF")
    for name, schema in OPERATORS.items():
        formula = references.find(f"NPU.{name}")
        assert formula is not None
        library.define(name + schema)
        library.impl(name, formula, "CompositeImplicitAutograd")
        setattr(torch_npu, name, getattr(torch.ops.npu, name))
    return library


def extensions() -> None:
    """MindSpeed is imported: what it would compile is `Extension`."""
    from mindspeed.op_builder import atb_builder, builder

    for kind in (builder.MindSpeedOpBuilder, atb_builder.AtbOpBuilder):
        kind.load = lambda *_, **__: Extension()


def transfer(place: Path) -> None:
    """What ``from torch_npu.contrib import transfer_to_npu`` does, by the module below `place`: that of an unpacked wheel of torch_npu, or
    that of the tests."""
    import torch

    torch.utils.rename_privateuse1_backend("npu")
    torch.utils.generate_methods_for_privateuse1_backend()
    torch.Tensor.npu, torch.nn.Module.npu = torch.Tensor.cuda, torch.nn.Module.cuda  # type: ignore[attr-defined, method-assign]
    torch.storage.TypedStorage.is_npu = property(lambda _: False)  # type: ignore[attr-defined]
    torch._C._get_accelerator = lambda: torch.device("cpu")  # type: ignore[assignment]
    npu: Any = torch.cuda
    npu.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    npu.NPUGraph = npu.CUDAGraph
    npu.get_autocast_dtype = npu.set_autocast_dtype = lambda *_: torch.bfloat16
    torch.distributed.is_hccl_available = lambda: True  # type: ignore[attr-defined]
    names: Any = importlib.import_module("torch_npu._init.patches.monkey_patches")
    names._apply_patches = lambda patches: [setattr(torch, name, patch) for name, patch in patches if "." not in name]
    file = place / "torch_npu" / "contrib" / "transfer_to_npu.py"
    spec = importlib.util.spec_from_file_location("torch_npu.contrib.transfer_to_npu", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    importlib.import_module("torch_npu.contrib").transfer_to_npu = module  # type: ignore[attr-defined]
    spec.loader.exec_module(module)
