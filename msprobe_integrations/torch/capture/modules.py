"""Module level (L0): forward hooks on every submodule, gradients through `backward.GradientWatch`, parameter gradients."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any

import torch
from torch import nn

from msprobe_engine.core.guard import raise_of_training
from msprobe_integrations.common.capture.modules import ModuleInfo as _ModuleInfo
from msprobe_integrations.common.capture.modules import NamedModules
from msprobe_integrations.common.hooks import recursion_room
from msprobe_integrations.torch.capture.recorder import Recorder
from msprobe_integrations.torch.hooks.backward import is_stand_in
from msprobe_integrations.torch.hooks.compiled import ORIGINAL, CallBoundary, class_name, has_call_boundary, is_wrapper, shown_path
from msprobe_integrations.torch.hooks.modules import OwnHook

_PRE = 4  # frames between recorder.begin_call and the user's call of the module: hook, _call_impl, ...
Hook = Callable[..., None]
_SKIPPED_CLASSES = ("FullyShardedDataParallel",)


class ModuleInfo(_ModuleInfo):
    """A module and its record names.

    Attributes:
        hooked: what is called: a compiled module has its hooks outside of what was compiled.
        sealed: inside a compiled or scripted module, where no Python hook runs. Parameter gradients are seen all the same.
    """

    __slots__ = ("hooked", "sealed", "sharded")

    def __init__(self, module: nn.Module, path: str, hooked: nn.Module | None = None, sealed: bool = False) -> None:
        super().__init__(module, path, f"Module.{path}.{class_name(module)}")
        self.hooked = hooked if hooked is not None else module
        self.sealed = sealed
        self.sharded = False


def named_infos(models: nn.Module | Sequence[nn.Module]) -> list[ModuleInfo]:
    """Every submodule of the model (the model itself is no record, unless it is compiled: then there is nothing else to hook); with
    several models the index comes first in the path."""
    many = not isinstance(models, nn.Module)
    infos: list[ModuleInfo] = []
    for index, model in enumerate([models] if isinstance(models, nn.Module) else models):
        seals: list[str] = []
        for path, module in model.named_modules():
            if type(module).__name__ in _SKIPPED_CLASSES or path.removesuffix(ORIGINAL) in seals:
                continue
            inner = module._modules[ORIGINAL] if is_wrapper(module) else module
            assert inner is not None
            sealed = any(path.startswith(seal) for seal in seals)
            shown = shown_path(path)
            if inner is not module or has_call_boundary(module):
                seals.append(f"{path}." if path else "")
                shown = shown or (ORIGINAL if inner is not module else "")
            if shown:
                infos.append(ModuleInfo(inner, f"{index}.{shown}" if many else shown, module, sealed))
    return infos


def _hooks_on(module: nn.Module, pre: Hook, post: Hook) -> list[Any]:
    if has_call_boundary(module):
        return [CallBoundary(module, pre, post)]
    # under ZeRO 3 a hook of DeepSpeed's takes the weights away after the module has run: ours comes before it
    borrowed = any(hasattr(parameter, "ds_id") for parameter in module._parameters.values())
    return [
        module.register_forward_pre_hook(OwnHook(pre), with_kwargs=True),
        module.register_forward_hook(OwnHook(post), with_kwargs=True, always_call=True, prepend=borrowed),
    ]


class ModuleCapture(NamedModules[ModuleInfo]):
    """Installs and removes the hooks."""

    _recorder: Recorder

    def __init__(self, recorder: Recorder, is_on: Callable[[], bool], is_collecting: Callable[[], bool]) -> None:
        super().__init__(recorder, is_on, is_collecting)
        self._hooked: list[tuple[nn.Module, Hook, Hook, list[Any]]] = []
        self._handles: list[Any] = []
        self._sealed: set[int] = set()
        self._too_deep: RecursionError | None = None

    def list_models(self, models: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
        return [models] if isinstance(models, nn.Module) else list(models)

    def find_modules(self, models: nn.Module | Sequence[nn.Module]) -> list[ModuleInfo]:
        return named_infos(models)

    def single(self, module: nn.Module, path: str) -> ModuleInfo:
        return ModuleInfo(module, path)

    def dicts(self, models: Sequence[nn.Module]) -> list[Mapping[str, Any]]:
        return [d for model in models for module in model.modules() for d in (module._modules, module._parameters)]

    def _put_on(self, around: Sequence[ModuleInfo], own: Sequence[ModuleInfo]) -> None:
        recursion_room.raise_recursion_limit(self)
        for info in around:
            if not info.sealed:
                self._hook(info)
        for info in own:
            info.parameters = {n: p for n, p in info.module._parameters.items() if p is not None}
            info.sharded = any(hasattr(p, "device_mesh") for p in info.parameters.values())
            if self._recorder.backward:
                self._watch_parameters(info)

    def _hook(self, info: ModuleInfo) -> None:
        pre, post = self._hooks(info)
        self._hooked.append((info.hooked, pre, post, _hooks_on(info.hooked, pre, post)))

    def _take_off(self) -> None:
        self.hide()
        self._hooked.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        recursion_room.narrow(self)

    def hide(self) -> None:
        """Take the hooks off for a while: calls in progress go on, and parameter gradients are seen."""
        for _, _, _, handles in self._hooked:
            for handle in handles:
                handle.remove()
            handles.clear()

    def show(self) -> None:
        """Put them on again."""
        for module, pre, post, handles in self._hooked:
            if not handles:
                handles += _hooks_on(module, pre, post)

    def seal(self, module: nn.Module) -> None:
        """`module` is compiled, together with what is inside it: hooks there see nothing, from now on there are none."""
        if id(module) in self._sealed:
            return
        self._sealed.add(id(module))
        inside = {id(m) for m in module.modules()}
        for info in self._infos:
            info.sealed |= id(info.hooked) in inside and not has_call_boundary(info.hooked)
        outside = []
        for hooked in self._hooked:
            if id(hooked[0]) in inside and not has_call_boundary(hooked[0]):
                for handle in hooked[3]:
                    handle.remove()
            else:
                outside.append(hooked)
        self._hooked = outside

    def _hooks(self, info: ModuleInfo) -> tuple[Hook, Hook]:
        recorder, on = self._recorder, self._on
        compiling = torch.compiler.is_compiling

        def pre(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            try:
                if compiling() or not on():
                    return
                if self._too_deep is not None:
                    self._fail(self._too_deep)
                    return
                call = self.call(info)
                recorder.begin_call(call, args, kwargs, _PRE)
                if call.inside:
                    info.inside = True
            except RecursionError as error:
                self._too_deep = error  # no call is left to tell of it here
            except Exception as error:
                raise_of_training(error)
                self._fail(error)

        def post(_module: nn.Module, _args: tuple[Any, ...], _kwargs: dict[str, Any], result: Any) -> None:
            try:
                if compiling():
                    return
                call = recorder.stack.pop(info)
                if call is None:
                    return
                # sharded modules hold whole or no parameters while they run: what stays is this rank's part
                parameters = info.parameters if info.sharded else info.module._parameters
                # torch calls this hook with result None when the forward raised (or was stopped early in a recomputation)
                recorder.end_call(call, result, parameters, failed=result is None and sys.exc_info()[1] is not None)
            except RecursionError as error:
                self._too_deep = error
            except Exception as error:
                raise_of_training(error)
                self._fail(error)

        return pre, post

    def _watch_parameters(self, info: ModuleInfo) -> None:
        info.expected = 0
        with torch._C.DisableTorchFunction():  # a function mode of the user's must not see what the probe asks of parameters
            self._hook_parameters(info)

    def _hook_parameters(self, info: ModuleInfo) -> None:
        for name, parameter in info.parameters.items():
            if not parameter.requires_grad or not parameter.is_leaf:
                continue
            info.expected += 1

            def hook(p: torch.Tensor, name: str = name) -> None:
                try:
                    if self._collecting():
                        gradient = p.grad
                        if gradient is None or is_stand_in(p):  # already in the framework's own buffer
                            gradient = getattr(p, "main_grad", None)
                        if gradient is not None:
                            self.gradient(info, name, gradient)
                except Exception as error:
                    raise_of_training(error)
                    self._fail(error)

            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    @classmethod
    def hook_codes(cls) -> list[CodeType]:
        """The code of the hooks: it is never worth compiling."""
        return [constant for constant in cls._hooks.__code__.co_consts if isinstance(constant, CodeType)]

    def end_step(self) -> None:
        super().end_step()
        if self._too_deep is not None:
            self._fail(self._too_deep)

    def _fail(self, error: Exception) -> None:
        self._too_deep = None
        self._recorder.pipeline.faults.fail("module capture", error)
        self.remove()
