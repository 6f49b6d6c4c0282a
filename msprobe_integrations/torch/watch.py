"""Monitor samples of module inputs, outputs and their gradients (families ``actv`` and ``actv_grad``)."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from msprobe_engine.records import TensorRef
from msprobe_integrations.torch.backward import GradientWatch, edge, sequence_number
from msprobe_integrations.torch.calls import current_graph_task
from msprobe_integrations.torch.recorder import no_torch_function

if TYPE_CHECKING:
    from msprobe_integrations.torch.probe import TorchProbe


def matches(name: str, targets: Sequence[str]) -> bool:
    """Is `name` one of the targets? A target is whole path components (``layers.1`` is not ``layers.10``); ``*`` and ``?`` allowed."""
    if not targets:
        return True
    for target in targets:
        if name == target or name.startswith(f"{target}.") or fnmatch.fnmatchcase(name, target) or fnmatch.fnmatchcase(name, f"{target}.*"):
            return True
    return False


class TensorWatch:
    """Hooks on the targeted modules, only in steps that are due.

    Args:
        probe: owner; its monitor settings say what is watched.
    """

    def __init__(self, probe: TorchProbe) -> None:
        self._probe = probe
        self._modules: list[tuple[int, str, nn.Module]] = []
        self._handles: list[Any] = []
        self._watches: list[GradientWatch] = []

    def attach(self, models: Sequence[nn.Module]) -> None:
        """Choose the modules by the monitor's targets."""
        monitor = self._probe.monitor
        assert monitor is not None
        for chunk, model in enumerate(models):
            for name, module in model.named_modules():
                if name and matches(name, monitor.targets) and not isinstance(module, torch.jit.ScriptModule):
                    self._modules.append((chunk, name, module))

    def install(self) -> None:
        """Put the hooks on."""
        if self._handles:
            return
        for chunk, name, module in self._modules:
            pre, post = self._hooks(chunk, name)
            self._handles.append(module.register_forward_pre_hook(pre, with_kwargs=True))
            self._handles.append(module.register_forward_hook(post, with_kwargs=True))

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def end_step(self) -> None:
        """The step is over: report gradients that came in part, take the hooks off until the next step that is due."""
        for watch in self._watches:
            watch.report()
            watch.active = False
        self._watches.clear()
        self.remove()

    def _hooks(self, chunk: int, name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        probe = self._probe
        monitor = probe.monitor
        assert monitor is not None
        started: list[tuple[list[Any], int]] = []

        def pre(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if torch.compiler.is_compiling() or current_graph_task() != -1:  # recomputation repeats what was seen
                return
            try:
                with no_torch_function():
                    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
                    if monitor.activations:
                        self._samples("actv", chunk, f"{name}.input", [probe.backend.reduce(t) for t in tensors])
                    started.append(([edge(t) for t in tensors] if monitor.activation_gradients else [], sequence_number()))
            except Exception as error:
                self._fail(error)

        def post(_module: nn.Module, _args: Any, _kwargs: Any, result: Any) -> None:
            if torch.compiler.is_compiling() or current_graph_task() != -1 or not started:
                return
            edges, since = started.pop()
            try:
                with no_torch_function():
                    values = result if isinstance(result, (list, tuple)) else [result]
                    tensors = [v for v in values if isinstance(v, torch.Tensor)]
                    if monitor.activations:
                        self._samples("actv", chunk, f"{name}.output", [probe.backend.reduce(t) for t in tensors])
                    if monitor.activation_gradients and torch.is_grad_enabled():
                        watch = GradientWatch(
                            (chunk, name, probe.micro_step), len(edges), len(tensors), self._reduce, self._gradients, self._fail
                        )
                        if watch.start(edges, tensors, since):
                            self._watches.append(watch)
            except Exception as error:
                self._fail(error)

        return pre, post

    def _reduce(self, gradient: torch.Tensor) -> TensorRef:
        with no_torch_function():
            ref: TensorRef = self._probe.backend.reduce(gradient)
            return ref

    def _gradients(self, watch: GradientWatch, inputs: list[TensorRef | None], outputs: list[TensorRef | None]) -> None:
        chunk, name, micro_step = watch.tag
        self._samples("actv_grad", chunk, f"{name}.output", outputs, micro_step)
        self._samples("actv_grad", chunk, f"{name}.input", inputs, micro_step)

    def _samples(self, family: str, chunk: int, base: str, refs: Sequence[TensorRef | None], micro_step: int | None = None) -> None:
        for i, ref in enumerate(refs):
            if ref is not None:
                name = base if len(refs) == 1 else f"{base}_{i}"
                self._probe.add_sample(family, name, ref, micro_step=micro_step, vpp_stage=chunk)

    def _fail(self, error: Exception) -> None:
        self._probe.faults.fail("activation monitor", error)
        self._modules.clear()
        self.remove()
