"""Eyes of the test's own on a training: one that only looks, and two that spoil something in it."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[2] / "examples" / "megatron"))
from fault import damaged

DRIFT = NAN = 1
"""Step in which a parameter drifts, or a module gives NaN."""
Norms = dict[tuple[str, str], list[float]]
"""(module or operator, forward or backward) -> norms of outputs, or of their gradients, in the order in which they came."""


def rank() -> int:
    """0 without a group."""
    return dist.get_rank() if dist.is_initialized() else 0


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part; float64."""
    tensor = tensor.detach()
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).double()


class Eye:
    """Sees a training and leaves it alone."""

    def __init__(self) -> None:
        self.step = 0

    def begins(self, model: torch.nn.Module) -> None:
        """The model is there, and nothing is wrapped around it."""

    def updated(self) -> None:
        """The optimizer has updated it."""
        self.step += 1

    def leaves(self) -> None:
        """The training is over."""


class Spy(Eye):
    """Hooks of the test's own on modules of a kind, and on calls of the function that they call.

    Args:
        kind: end of the name of their class.
        function: of torch.nn.functional.
    """

    def __init__(self, kind: str = "Linear", function: str = "linear") -> None:
        super().__init__()
        self.kind, self.function = kind, function
        self.steps: list[Norms] = [{}]
        self.modules: list[dict[str, list[float]]] = [{}]
        """By step: name of a module -> norms of its outputs, a micro batch each."""
        self._original: Any = None
        self._handles: list[Any] = []

    def begins(self, model: torch.nn.Module) -> None:
        for name, module in model.named_modules():
            if type(module).__name__.endswith(self.kind):
                self._handles.append(module.register_forward_hook(functools.partial(self._left, name)))
        original = self._original = getattr(torch.nn.functional, self.function)

        @functools.wraps(original)
        def called(*args: Any, **kwargs: Any) -> torch.Tensor:
            output = original(*args, **kwargs)
            self._keep("operator", output)
            return output  # type: ignore[no-any-return]

        setattr(torch.nn.functional, self.function, called)

    def _left(self, name: str, module: torch.nn.Module, _args: Any, output: torch.Tensor) -> None:
        if module.training:
            self.modules[-1].setdefault(name, []).append(float(local(output).norm()))
        self._keep("module", output)

    def _keep(self, kind: str, output: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            now = self.steps[-1]
            now.setdefault((kind, "forward"), []).append(float(local(output).norm()))
            if output.requires_grad:
                output.register_hook(lambda g: now.setdefault((kind, "backward"), []).append(float(local(g).norm())) or None)

    def updated(self) -> None:
        super().updated()
        self.steps.append({})
        self.modules.append({})

    def leaves(self) -> None:
        if self._original is not None:
            setattr(torch.nn.functional, self.function, self._original)
        for handle in self._handles:
            handle.remove()
        self.steps.pop()
        self.modules.pop()


class Drift(Eye):
    """One element of a parameter is another one in step `DRIFT`, on the last rank alone: from the update before it on.

    Args:
        name: of the parameter.
        optimizer: a class that gathers the parameters again in every `step`: from the end of this step's own on.
    """

    def __init__(self, name: str, optimizer: type | None = None) -> None:
        super().__init__()
        self.name, self.optimizer = name, optimizer
        self.model: Any = None
        self._update = vars(optimizer)["step"] if optimizer is not None else None

    def begins(self, model: torch.nn.Module) -> None:
        self.model = model
        if self._update is not None:
            update, calls = self._update, [0]

            @functools.wraps(update)
            def step(*args: Any, **kwargs: Any) -> Any:
                result = update(*args, **kwargs)
                if calls[0] == DRIFT:
                    self._drift()
                calls[0] += 1
                return result

            self.optimizer.step = step  # type: ignore[union-attr]

    def updated(self) -> None:
        super().updated()
        if self.step == DRIFT and self._update is None:
            self._drift()

    def leaves(self) -> None:
        if self._update is not None:
            self.optimizer.step = self._update  # type: ignore[union-attr]

    def _drift(self) -> None:
        if rank() == dist.get_world_size() - 1:
            parameter = dict(self.model.named_parameters())[self.name].data
            (parameter.to_local() if hasattr(parameter, "to_local") else parameter).view(-1)[0] += 1


class Plant(Eye):
    """In one step a module of the last rank gives NaN, by a real operation.

    Args:
        name: of the module.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def begins(self, model: torch.nn.Module) -> None:
        if dist.is_initialized() and rank() != dist.get_world_size() - 1:
            return  # a stage of a pipeline has not all modules
        module = model.get_submodule(self.name)
        forward = module.forward

        @functools.wraps(forward)
        def faulty(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            spoiled = self.step == NAN and torch.is_grad_enabled()
            return spoil(output) if spoiled else output

        module.forward = faulty  # type: ignore[method-assign]


def spoil(output: Any) -> Any:
    """One element is NaN; of a tensor that is divided over ranks, of this rank's part, without the others; of several the first's."""
    if isinstance(output, tuple):
        return spoil(output[0]), *output[1:]
    if not hasattr(output, "to_local"):
        return damaged(output, "log_of_negative", 3)
    mine = damaged(output.to_local(), "log_of_negative", 3)
    facts = {"shape": output.shape, "stride": output.stride()}
    return type(output).from_local(mine, output.device_mesh, output.placements, run_check=False, **facts)  # type: ignore[attr-defined]
