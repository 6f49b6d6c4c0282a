"""Module level (L0): forward hooks on every submodule, gradients through `backward.GradientWatch`, parameter gradients."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from msprobe_engine.records import Entry, TensorRef
from msprobe_integrations.torch.calls import Call, current_graph_task
from msprobe_integrations.torch.recorder import Recorder

_PRE, _POST = 4, 1  # frames between recorder.begin and the user's call of the module: hook, _call_impl, ...
_SKIPPED_CLASSES = ("FullyShardedDataParallel",)


class ModuleInfo:
    """A hooked module and its record names."""

    __slots__ = ("base", "module", "parameters", "parent_base", "path")

    def __init__(self, module: nn.Module, path: str, parent_base: str | None) -> None:
        self.module = module
        self.path = path
        self.base = f"Module.{path}.{type(module).__name__}"
        self.parent_base = parent_base
        self.parameters: dict[str, torch.Tensor] = {}


def named_infos(models: nn.Module | Sequence[nn.Module]) -> list[ModuleInfo]:
    """Every submodule of the model (the model itself is no record); with several models the index comes first in the path."""
    many = not isinstance(models, nn.Module)
    infos: list[ModuleInfo] = []
    for index, model in enumerate([models] if isinstance(models, nn.Module) else models):
        by_path: dict[str, ModuleInfo] = {}
        for path, module in model.named_modules():
            if not path or type(module).__name__ in _SKIPPED_CLASSES or isinstance(module, torch.jit.ScriptModule):
                continue
            parent = by_path.get(path.rpartition(".")[0])
            info = ModuleInfo(module, f"{index}.{path}" if many else path, parent.base if parent else None)
            by_path[path] = info
            infos.append(info)
    return infos


class ModuleCapture:
    """Installs and removes the hooks.

    Args:
        recorder: makes entries.
        is_on: one cheap call that says whether the current moment is inside the capture window.
        is_collecting: the same for gradients, which still come after the window was closed.
    """

    def __init__(self, recorder: Recorder, is_on: Callable[[], bool], is_collecting: Callable[[], bool]) -> None:
        self._recorder = recorder
        self._on = is_on
        self._collecting = is_collecting
        self._models: dict[int, nn.Module] = {}
        self._infos: list[ModuleInfo] = []
        self._handles: list[Any] = []
        self._grad_counts: dict[str, int] = {}
        self._grads: dict[str, dict[str, TensorRef]] = {}

    def attach(self, models: nn.Module | Sequence[nn.Module]) -> None:
        """Name the modules; a second model is added to the first. A model that is known costs nothing."""
        fresh = [m for m in ([models] if isinstance(models, nn.Module) else models) if id(m) not in self._models]
        if not fresh:
            return
        was_installed = self.installed
        self.remove()
        self._models |= {id(m): m for m in fresh}
        known = {id(i.module) for i in self._infos}
        self._infos += [i for i in named_infos(models) if id(i.module) not in known]
        if was_installed:
            self.install()

    @property
    def installed(self) -> bool:
        """True while hooks are on the modules."""
        return bool(self._handles)

    def install(self) -> None:
        """Put the hooks on."""
        if self._handles:
            return
        for info in self._infos:
            pre, post = self._hooks(info)
            self._handles.append(info.module.register_forward_pre_hook(pre, with_kwargs=True))
            self._handles.append(info.module.register_forward_hook(post, with_kwargs=True, always_call=True))
            info.parameters = {n: p for n, p in info.module._parameters.items() if p is not None}
            if self._recorder.backward:
                self._watch_parameters(info)

    def remove(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def end_step(self) -> None:
        """Emit parameter gradients of modules of which not all parameters got one, restart numbering."""
        for base in list(self._grads):
            self._emit_grads(base)
        self._grad_counts.clear()

    def _hooks(self, info: ModuleInfo) -> tuple[Callable[..., None], Callable[..., None]]:
        recorder, on = self._recorder, self._on
        compiling = torch.compiler.is_compiling

        def pre(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if compiling() or not on():
                return
            try:
                calls = recorder.stack.calls
                n = recorder.numbers.take(info.base)
                call = Call(f"{info.base}.forward.{n}", f"{info.base}.backward.{n}", info, calls[-1] if calls else None)
                if call.parent is None and info.parent_base is not None and current_graph_task() != -1:
                    # recomputed during a backward pass: its parent is the backward call of the module it belongs to
                    last = recorder.numbers.last(info.parent_base)
                    call.parent_name = f"{info.parent_base}.backward.{last}" if last >= 0 else None
                recorder.begin(call, args, kwargs, _PRE)
            except Exception as error:
                self._fail(error)

        def post(_module: nn.Module, _args: tuple[Any, ...], _kwargs: dict[str, Any], result: Any) -> None:
            if compiling():
                return
            call = recorder.stack.pop(info)
            if call is None:
                return
            try:
                # torch calls this hook with result None when the forward raised (or was stopped early in a recomputation)
                recorder.end(call, result, info.parameters, failed=result is None and sys.exc_info()[1] is not None)
            except Exception as error:
                self._fail(error)

        return pre, post

    def _watch_parameters(self, info: ModuleInfo) -> None:
        for name, parameter in info.parameters.items():
            if not parameter.requires_grad or not parameter.is_leaf:
                continue

            def hook(p: torch.Tensor, name: str = name) -> None:
                if not self._collecting():
                    return
                try:
                    self._parameter_gradient(info, name, p)
                except Exception as error:
                    self._fail(error)

            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def _parameter_gradient(self, info: ModuleInfo, name: str, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:  # already moved into the framework's own buffer
            gradient = getattr(parameter, "main_grad", None)
        if gradient is None:
            return
        ref = self._recorder.reduce_gradient(gradient)
        grads = self._grads.setdefault(info.base, {})
        if name in grads:  # this parameter is a round ahead: shared parameter or a module with unused ones
            self._emit_grads(info.base)
            grads = self._grads.setdefault(info.base, {})
        grads[name] = ref
        if len(grads) == len(info.parameters):
            self._emit_grads(info.base)

    def _emit_grads(self, base: str) -> None:
        grads = self._grads.pop(base, None)
        if not grads:
            return
        recorder = self._recorder
        k = self._grad_counts.get(base, 0)
        self._grad_counts[base] = k + 1
        name = f"{base}.parameters_grad.{k}"
        if recorder.wanted is not None and not recorder.wanted(name):
            return
        sections: dict[str, Any] = {n: [ref] for n, ref in grads.items()}
        recorder.pipeline.entries.append(Entry(name, sections, None, -1, recorder.micro_step))

    def _fail(self, error: Exception) -> None:
        self._recorder.pipeline.faults.fail("module capture", error)
        self.remove()
