"""A spy that sees a training without the probe: outputs of modules and calls, their gradients, whole tensors, calls of collectives."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from harness.case import Watcher

Norms = dict[tuple[str, str], list[float]]
"""(module or operator, forward or backward) -> norms of outputs, or of their gradients, in the order in which they came."""
SENT = {
    "allreduce": "all_reduce",
    "_allgather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "alltoall_base": "all_to_all_single",
    "broadcast": "broadcast",
    "send": "send",
    "recv": "recv",
}
"""Method of a process group -> the function of torch.distributed that calls it."""


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part; float64."""
    tensor = tensor.detach()
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).double()


class Spy(Watcher):
    """Hooks on modules of a kind, and around calls of the function that they call.

    Args:
        kind: end of the name of their class.
        function: of torch.nn.functional.

    Attributes:
        steps: by step, what came out.
        modules: by step, name of a module -> norms of its outputs, a micro batch each.
        sent: by step, how often collectives were called between the first forward pass and the end of the update.
        whole: (family, step, name) -> norm of the whole tensor, where a framework's module notes it.
    """

    def __init__(self, kind: str, function: str) -> None:
        self.kind, self.function = kind, function
        self.steps: list[Norms] = [{}]
        self.modules: list[dict[str, list[float]]] = [{}]
        self.sent: list[Counter[str]] = [Counter()]
        self.whole: dict[tuple[str, int, str], float] = {}
        self._paused = 0
        self._restore: list[Callable[[], None]] = []

    def begin(self, model: Any) -> None:
        for name, module in model.named_modules():
            if type(module).__name__.endswith(self.kind):
                self._restore.append(module.register_forward_hook(functools.partial(self._left, name)).remove)
        original = getattr(torch.nn.functional, self.function)

        @functools.wraps(original)
        def called(*args: Any, **kwargs: Any) -> torch.Tensor:
            output = original(*args, **kwargs)
            self._keep("operator", output)
            return output  # type: ignore[no-any-return]

        self._replace(torch.nn.functional, self.function, called)
        for method in SENT:
            self._replace(dist.ProcessGroup, method, self._counting(method, getattr(dist.ProcessGroup, method)))
        self._leave_out_dry_runs()

    def _replace(self, holder: Any, name: str, new: Any) -> None:
        self._restore.append(functools.partial(setattr, holder, name, inspect.getattr_static(holder, name)))
        setattr(holder, name, new)

    def _counting(self, method: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.modules[-1] and not self._paused:
                self.sent[-1][SENT[method]] += 1
            return original(*args, **kwargs)

        return call

    def _leave_out_dry_runs(self) -> None:
        """A stage of a pipeline that prepares itself runs its modules on memory without values: that is no training."""
        try:
            from torch.distributed.pipelining import stage
        except ImportError:
            return
        for cls in (stage._PipelineStageBase, stage.PipelineStage):
            for name in ("_prepare_forward_infra", "_prepare_backward_infra", "_shape_inference"):
                if name in vars(cls):
                    self._replace(cls, name, self._unseen(vars(cls)[name]))

    def _unseen(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.looking_away():
                return function(*args, **kwargs)

        return call

    def _left(self, name: str, module: torch.nn.Module, _args: Any, output: torch.Tensor) -> None:
        if module.training and torch.is_grad_enabled() and not self._paused:
            self.modules[-1].setdefault(name, []).append(float(local(output).norm()))
        self._keep("module", output)

    def _keep(self, kind: str, output: torch.Tensor) -> None:
        if torch.is_grad_enabled() and not self._paused:
            now = self.steps[-1]
            now.setdefault((kind, "forward"), []).append(float(local(output).norm()))
            if output.requires_grad:
                output.register_hook(lambda g: now.setdefault((kind, "backward"), []).append(float(local(g).norm())) or None)

    @contextlib.contextmanager
    def looking_away(self) -> Iterator[None]:
        """What runs inside is the test's own."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def note(self, family: str, named: dict[str, torch.Tensor]) -> None:
        """Norms of these whole tensors belong to the step."""
        for name, value in named.items():
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            self.whole[family, len(self.steps) - 1, name] = float(value.detach().double().norm())

    def after_update(self) -> None:
        self.steps.append({})
        self.modules.append({})
        self.sent.append(Counter())

    def end(self) -> None:
        for restore in reversed(self._restore):
            restore()
        for kept in (self.steps, self.modules, self.sent):
            kept.pop()  # type: ignore[attr-defined]
