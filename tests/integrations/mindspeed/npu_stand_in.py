"""Stands in for `torch_npu`, `torchair` and `acl` where there is no NPU, so that MindSpeed can be imported: every name of them exists,
and every operator raises when it is called. Nothing is computed in place of the NPU; a training that needs one of its operators fails."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

PACKAGES = ("torch_npu", "torchair", "acl")


class Operator:
    """A name of the stand-in: may be imported, may be a base class or a decorator, but does nothing."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> Operator:
        if name.startswith("__"):
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


def _on_cpu(function: Any) -> Any:
    """MindSpeed writes ``device="npu"`` as Megatron writes ``device="cuda"``."""

    @functools.wraps(function)
    def make(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device")).startswith("npu"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)

    return make


def install() -> None:
    """From now on ``import torch_npu`` works; ``torch.npu`` is whatever ``torch.cuda`` is (the CPU shim)."""
    import torch

    for name in ("tensor", "zeros", "ones", "empty", "full", "arange"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))

    sys.meta_path.insert(0, _Finder())
    torch.npu = torch.cuda  # type: ignore[attr-defined]
    import torch_npu
    import torch_npu.utils.collect_env as collect_env

    torch_npu.npu = torch.npu  # type: ignore[attr-defined]
    torch_npu.__version__ = "0.0.0"  # type: ignore[attr-defined]
    torch_npu.unsupported_dtype = []  # type: ignore[attr-defined]
    collect_env.get_cann_version = lambda *_: "0.0.0"  # type: ignore[attr-defined]
