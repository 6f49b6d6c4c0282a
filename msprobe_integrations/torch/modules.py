"""Module level (L0): forward hooks on every submodule, gradients through `backward.GradientWatch`, parameter gradients."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

import torch
from torch import nn

from msprobe_engine.records import Entry, TensorRef
from msprobe_integrations.common.calls import Call
from msprobe_integrations.common.filters import ALWAYS, RecordFilter
from msprobe_integrations.torch.backward import is_stand_in
from msprobe_integrations.torch.compiled import ORIGINAL, CallBoundary, class_name, has_call_boundary, is_wrapper, shown_path
from msprobe_integrations.torch.module_hooks import OwnHook
from msprobe_integrations.torch.recorder import Recorder
from msprobe_integrations.torch.unchanged import Parts

_PRE, _POST = 4, 1  # frames between recorder.begin and the user's call of the module: hook, _call_impl, ...
Hook = Callable[..., None]
_SKIPPED_CLASSES = ("FullyShardedDataParallel",)


class ModuleInfo:
    """A module and its record names.

    Attributes:
        module: what has the parameters.
        hooked: what is called: a compiled module has its hooks outside of what was compiled.
        path: in record names.
        kind: what the filter knows of its calls.
        sealed: inside a compiled or scripted module, where no Python hook runs. Parameter gradients are seen all the same.
        inside: some call of the step is kept because of an enclosing one.
        last: the call whose backward record came last.
    """

    __slots__ = ("base", "expected", "hooked", "inside", "kind", "last", "module", "parameters", "path", "sealed", "sharded")

    def __init__(self, module: nn.Module, path: str, hooked: nn.Module | None = None, sealed: bool = False) -> None:
        self.module = module
        self.hooked = hooked if hooked is not None else module
        self.path = path
        self.base = f"Module.{path}.{class_name(module)}"
        self.kind = ALWAYS
        self.sealed = sealed
        self.parameters: dict[str, torch.Tensor] = {}
        self.sharded = False
        self.expected = 0
        self.inside = False
        self.last: Call | None = None


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


def _put_on(module: nn.Module, pre: Hook, post: Hook) -> list[Any]:
    if has_call_boundary(module):
        return [CallBoundary(module, pre, post)]
    # under ZeRO 3 a hook of DeepSpeed's takes the weights away after the module has run: ours comes before it
    borrowed = any(hasattr(parameter, "ds_id") for parameter in module._parameters.values())
    return [
        module.register_forward_pre_hook(OwnHook(pre), with_kwargs=True),
        module.register_forward_hook(OwnHook(post), with_kwargs=True, always_call=True, prepend=borrowed),
    ]


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
        self._parts = Parts([])
        self._infos: list[ModuleInfo] = []
        self._hooked: list[tuple[nn.Module, Hook, Hook, list[Any]]] = []
        self._handles: list[Any] = []
        self._installed = False
        self._sealed: set[int] = set()
        self._grad_counts: dict[str, int] = {}
        self._grads: dict[int, tuple[ModuleInfo, dict[str, TensorRef]]] = {}

    def attach(self, models: nn.Module | Sequence[nn.Module], anew: bool = False) -> None:
        """Name the modules; a second model is added to the first. A model that is known costs nothing.

        Args:
            anew: a step begins: a model that was changed is named again, and a new one, or none, takes the place of all others.
        """
        given = [models] if isinstance(models, nn.Module) else list(models)
        fresh = [m for m in given if id(m) not in self._models]
        was_installed = self.installed
        if anew and self._models and (fresh or not given or not self._parts.unchanged()):
            self.remove()
            self._models, self._parts, self._infos, fresh = {}, Parts([]), [], given
        if not fresh:
            return
        self.remove()
        self._models |= {id(m): m for m in fresh}
        self._parts = Parts(list(self._models.values()))
        known = {id(i.module) for i in self._infos}
        for info in named_infos(models):
            if id(info.module) not in known:  # a module has one name, the first
                known.add(id(info.module))
                self._infos.append(info)
        if was_installed:
            self.install()

    def add(self, module: nn.Module, path: str) -> None:
        """Name one module by itself, whatever is around and inside it."""
        was_installed = self.installed
        self.remove()
        self._infos.append(ModuleInfo(module, path, None))
        if was_installed:
            self.install()

    @property
    def infos(self) -> list[ModuleInfo]:
        """The modules that are named; the same list until other models take their place."""
        return self._infos

    @property
    def installed(self) -> bool:
        """True while hooks are on the modules."""
        return self._installed

    def install(self) -> None:
        """Put the hooks on: on modules of which a record can be kept, and on those around them, whose calls are parents."""
        if self._installed:
            return
        self._installed = True
        kept = self._recorder.kept
        around, own = self._chosen(kept)
        for info in self._infos:
            if kept is not None:
                info.kind = kept.module(info.base)
            if id(info) in around and not info.sealed:
                self._hook(info)
            if id(info) in own:
                info.parameters = {n: p for n, p in info.module._parameters.items() if p is not None}
                info.sharded = any(hasattr(p, "device_mesh") for p in info.parameters.values())
                if self._recorder.backward:
                    self._watch_parameters(info)

    def _chosen(self, kept: RecordFilter | None) -> tuple[set[int], set[int]]:
        """Modules that get hooks, and those of which records can be kept."""
        everything = {id(info) for info in self._infos}
        if kept is None or kept.names is None:
            return everything, everything
        listed = [info for info in self._infos if kept.module(info.base).possible]
        own = {id(info) for info in listed}
        if kept.expands:
            inside = tuple(f"{info.path}." for info in listed)
            own |= {id(info) for info in self._infos if info.path.startswith(inside)}
            if kept.keeps_apis:
                return everything, own
        paths = [info.path for info in self._infos if id(info) in own or kept.bounds(info.base)]
        above = {path[:i] for path in paths for i in range(len(path) + 1) if path[i : i + 1] in (".", "")}
        return {id(info) for info in self._infos if info.path in above}, own

    def _hook(self, info: ModuleInfo) -> None:
        pre, post = self._hooks(info)
        self._hooked.append((info.hooked, pre, post, _put_on(info.hooked, pre, post)))

    def remove(self) -> None:
        """Take all hooks off."""
        self.hide()
        self._hooked.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._installed = False

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
                handles += _put_on(module, pre, post)

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

    def end_step(self) -> None:
        """Emit parameter gradients of modules of which not all parameters got one, restart numbering."""
        for info, _ in list(self._grads.values()):
            self._emit_grads(info)
        self._grad_counts.clear()
        for info in self._infos:
            info.inside = False
            info.last = None

    def _hooks(self, info: ModuleInfo) -> tuple[Hook, Hook]:
        recorder, on = self._recorder, self._on
        compiling = torch.compiler.is_compiling

        def pre(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            try:
                if compiling() or not on():
                    return
                calls = recorder.stack.calls
                n = recorder.numbers.take(info.base)
                parent = calls[-1] if calls else None
                call = Call(f"{info.base}.forward.{n}", f"{info.base}.backward.{n}", info, parent, info.kind, True)
                recorder.begin(call, args, kwargs, _PRE)
                if call.inside:
                    info.inside = True
            except Exception as error:
                self._fail(error)

        def post(_module: nn.Module, _args: tuple[Any, ...], _kwargs: dict[str, Any], result: Any) -> None:
            if compiling():
                return
            try:
                call = recorder.stack.pop(info)
                if call is None:
                    return
                # sharded modules hold whole or no parameters while they run: what stays is this rank's part
                parameters = info.parameters if info.sharded else info.module._parameters
                # torch calls this hook with result None when the forward raised (or was stopped early in a recomputation)
                recorder.end(call, result, parameters, failed=result is None and sys.exc_info()[1] is not None)
            except Exception as error:
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
                        self._parameter_gradient(info, name, p)
                except Exception as error:
                    self._fail(error)

            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def _parameter_gradient(self, info: ModuleInfo, name: str, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is None or is_stand_in(parameter):  # already in the framework's own buffer
            gradient = getattr(parameter, "main_grad", None)
        recorder = self._recorder
        if gradient is None or (recorder.kept is not None and not self._keeps_gradients(info, recorder.kept)):
            return
        reduce = recorder.reduce_gradient if recorder.keeper is None else recorder.reduce_gradient_for(self._gradients_name(info))
        ref = reduce(gradient)
        grads = self._grads.setdefault(id(info), (info, {}))[1]
        if name in grads:  # this parameter is a round ahead: shared parameter or a module with unused ones
            self._emit_grads(info)
            grads = self._grads.setdefault(id(info), (info, {}))[1]
        grads[name] = ref
        if len(grads) == info.expected:
            self._emit_grads(info)

    def _keeps_gradients(self, info: ModuleInfo, kept: RecordFilter) -> bool:
        if kept.range is not None and not kept.range.holds(None, info.path):
            return False
        if kept.names is None or info.inside or info.kind.certain:
            return True
        return kept.names(self._gradients_name(info))

    def _gradients_name(self, info: ModuleInfo) -> str:
        return f"{info.base}.parameters_grad.{self._grad_counts.get(info.base, 0)}"

    def _emit_grads(self, info: ModuleInfo) -> None:
        _, grads = self._grads.pop(id(info), (info, {}))
        if not grads:
            return
        recorder = self._recorder
        name = self._gradients_name(info)
        self._grad_counts[info.base] = self._grad_counts.get(info.base, 0) + 1
        sections: dict[str, Any] = {n: [ref] for n, ref in grads.items()}
        recorder.record(Entry(name, sections, None, -1, recorder.micro_step))
        recorder.tree.gradients_of(name, info.last)

    @classmethod
    def hook_codes(cls) -> list[CodeType]:
        """The code of the hooks: it is never worth compiling."""
        return [constant for constant in cls._hooks.__code__.co_consts if isinstance(constant, CodeType)]

    def _fail(self, error: Exception) -> None:
        self._recorder.pipeline.faults.fail("module capture", error)
        self.remove()
