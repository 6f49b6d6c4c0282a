"""Level ``debug``: variables that the user saves by hand, and the gradients that come for them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import numpy as np

from msprobe_engine.core import log
from msprobe_engine.core.guard import raise_of_training
from msprobe_engine.core.names import DebugName
from msprobe_engine.core.records import Entry, Opaque, TensorDescription, TensorRef
from msprobe_engine.probe.pipeline import Pipeline

_VALUE = "data"
"""The one section of a debug record; debug.json holds its value without the section."""
_ALLOWED = (int, float, str, dict, list, tuple, np.ndarray, np.generic)
_MARK = TensorDescription("", "", (), None)


class SavedVariables(ABC):
    """Records ``{name}.{N}.debug`` and ``{name}_grad.{N}.debug`` of one step.

    The gradient's record is there at once, with null in every place; a hook on each tensor that needs a gradient fills its place
    when it arrives (the last one, when several backward passes do). The hook returns nothing, so autograd goes on with the same
    gradient, and it is taken off at the end of the step.

    Args:
        complete: told of each record when nothing more comes for it.
        broken: told of an error inside a hook.
    """

    tensors: ClassVar[type]
    """Class of the framework's tensors."""

    def __init__(
        self,
        pipeline: Pipeline,
        reduce: Callable[[Any], TensorRef],
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
        while self._claim_name(name, number, backward):  # x_grad is the gradient of x, or a variable of that name
            number += 1
        self._counts[name] = number + 1
        with self.unseen():
            entry = Entry(str(DebugName(name, number)), {_VALUE: self.convert(variable, self._reduce)})
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

    def _claim_name(self, name: str, number: int, backward: bool) -> bool:
        """Has a record of this step the name of this variable, or of its gradient? From now on they have."""
        wanted = {str(DebugName(name, number))} | ({str(DebugName(name, number, is_grad=True))} if backward else set())
        if wanted & self._names:
            return True
        self._names |= wanted
        return False

    def _await_gradients(self, variable: Any) -> dict[str, Any]:
        tensors: list[Any] = []

        def number_tensor(tensor: Any) -> TensorRef:
            tensors.append(tensor)
            return TensorRef(len(tensors) - 1, _MARK)

        sections: dict[str, Any] = {_VALUE: self.convert(variable, number_tensor)}
        self._empty(sections, _VALUE, tensors)
        return sections

    def _empty(self, holder: Any, key: Any, tensors: list[Any]) -> None:
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

    def _watch(self, tensor: Any, holder: Any, key: Any) -> None:
        def reduce_gradient(gradient: Any) -> None:
            try:
                with self.unseen():
                    holder[key] = self._reduce(gradient)
            except Exception as error:  # the framework would raise it out of the user's backward pass
                raise_of_training(error)
                self._broken(error)

        try:
            hook = self.hook(tensor, reduce_gradient)
        except RuntimeError:  # of a transform (torch.func), say
            self._pipeline.lose("gradients of saved variables that take no hook")
        else:
            if hook is not None:
                self._hooks.append(hook)

    def problem(self, variable: Any, name: Any, backward: Any) -> str:
        """Why `save` cannot take this call; "" when it can."""
        if not isinstance(name, str) or not name:
            return f"name is {name!r}; allowed: a text that is not empty"
        if not isinstance(backward, bool):
            return f"save_backward is {backward!r}; allowed: True or False"
        if not isinstance(variable, (self.tensors, *_ALLOWED)):
            kind = type(variable).__name__
            return f"'{name}' is a {kind}; allowed: a tensor, number, string, numpy array, or a dict, list or tuple of them"
        return ""

    @staticmethod
    @abstractmethod
    def convert(variable: Any, reduce: Callable[[Any], TensorRef], /) -> Any:
        """`variable` as a structure of records, its tensors as `reduce` gives them."""

    @staticmethod
    @abstractmethod
    def unseen() -> AbstractContextManager[Any]:
        """While this is open, what the probe calls is no call of the training."""

    @staticmethod
    @abstractmethod
    def hook(tensor: Any, arrived: Callable[[Any], None]) -> Any:
        """Have `reduce_gradient` called with the gradient of a tensor; returns what has a ``remove()``, None for a tensor without gradient.

        Raises:
            RuntimeError: the tensor takes no hook.
        """


def warn(why: str) -> None:
    """Say once that a call of `save` is left out."""
    log.warn_once(f"save {why}", f"PrecisionDebugger.save: {why}. This call is left out")
