"""Level ``debug``: variables that the user saves by hand, and the gradients that come for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from msprobe_engine import log
from msprobe_engine.names import DebugName
from msprobe_engine.pipeline import Pipeline
from msprobe_engine.records import Entry, Opaque, TensorDescription, TensorRef
from msprobe_integrations.torch.structure import convert

_VALUE = "data"
"""The one section of a debug record; debug.json holds its value without the section."""
_ALLOWED = (torch.Tensor, int, float, str, dict, list, tuple, np.ndarray, np.generic)
_MARK = TensorDescription("", "", (), None)


class SavedVariables:
    """Records ``{name}.{N}.debug`` and ``{name}_grad.{N}.debug`` of one step.

    The gradient's record is there at once, with null in every place; a hook on each tensor that needs a gradient fills its place
    when it arrives (the last one, when several backward passes do). The hook returns nothing, so autograd goes on with the same
    gradient, and it is taken off at the end of the step.

    Args:
        pipeline: where records go.
        reduce: takes the statistics of a tensor.
        complete: told of each record when nothing more comes for it.
        broken: told of an error inside a hook.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        reduce: Callable[[torch.Tensor], TensorRef],
        complete: Callable[[Entry], None],
        broken: Callable[[Exception], None],
    ) -> None:
        self._pipeline = pipeline
        self._reduce = reduce
        self._complete = complete
        self._broken = broken
        self._counts: dict[str, int] = {}
        self._names: set[str] = set()
        self._hooks: list[Any] = []
        self._waiting: list[Entry] = []

    def save(self, variable: Any, name: str, backward: bool) -> None:
        """Record a variable that `problem` has nothing against."""
        number = self._counts.get(name, 0)
        while self._taken(name, number, backward):  # x_grad is the gradient of x, or a variable of that name
            number += 1
        self._counts[name] = number + 1
        with torch._C.DisableTorchFunction():
            entry = Entry(str(DebugName(name, number)), {_VALUE: convert(variable, self._reduce)})
            self._pipeline.entries.append(entry)
            self._complete(entry)
            if backward:
                entry = Entry(str(DebugName(name, number, is_grad=True)), self._await_gradients(variable))
                self._pipeline.entries.append(entry)
                self._waiting.append(entry)

    def end_step(self) -> None:
        """Take the hooks off and count from 0 again."""
        for hook in self._hooks:
            hook.remove()
        for entry in self._waiting:
            self._complete(entry)
        self._hooks, self._waiting = [], []
        self._counts.clear()
        self._names.clear()

    def _taken(self, name: str, number: int, backward: bool) -> bool:
        """Has a record of this step the name of this variable, or of its gradient? From now on they have."""
        wanted = {str(DebugName(name, number))} | ({str(DebugName(name, number, is_grad=True))} if backward else set())
        if wanted & self._names:
            return True
        self._names |= wanted
        return False

    def _await_gradients(self, variable: Any) -> dict[str, Any]:
        tensors: list[torch.Tensor] = []

        def note(tensor: torch.Tensor) -> TensorRef:
            tensors.append(tensor)
            return TensorRef(len(tensors) - 1, _MARK)

        sections: dict[str, Any] = {_VALUE: convert(variable, note)}
        self._empty(sections, _VALUE, tensors)
        return sections

    def _empty(self, holder: Any, key: Any, tensors: list[torch.Tensor]) -> None:
        """Put null in every place of a structure, and a hook on the tensor that was there."""
        node = holder[key]
        if isinstance(node, (TensorRef, Opaque)):
            holder[key] = None
            if isinstance(node, TensorRef):
                self._watch(tensors[node.row], holder, key)
        elif isinstance(node, dict):
            for inner in list(node):
                self._empty(node, inner, tensors)
        elif isinstance(node, list):
            for place in range(len(node)):
                self._empty(node, place, tensors)

    def _watch(self, tensor: torch.Tensor, holder: Any, key: Any) -> None:
        if not tensor.requires_grad:
            return

        def arrived(gradient: torch.Tensor) -> None:
            try:
                with torch._C.DisableTorchFunction():
                    holder[key] = self._reduce(gradient)
            except Exception as error:  # autograd would raise it out of the user's backward()
                self._broken(error)

        try:
            self._hooks.append(tensor.register_hook(arrived))
        except RuntimeError:  # tensors of a transform (torch.func) take no hooks
            self._pipeline.lose("gradients of saved variables that take no hook")


def problem(variable: Any, name: Any, backward: Any) -> str:
    """Why `save` cannot take this call; "" when it can."""
    if not isinstance(name, str) or not name:
        return f"name is {name!r}; allowed: a text that is not empty"
    if not isinstance(backward, bool):
        return f"save_backward is {backward!r}; allowed: True or False"
    if not isinstance(variable, _ALLOWED):
        return f"'{name}' is a {type(variable).__name__}; allowed: a tensor, number, string, numpy array, or a dict, list or tuple of them"
    return ""


def warn(why: str) -> None:
    """Say once that a call of `save` is left out."""
    log.warn_once(f"save {why}", f"PrecisionDebugger.save: {why}. This call is left out")
