"""Collects the gradients of one call (module or API) from post hooks on the nodes of the autograd graph; knows no framework.

A framework's integration finds the nodes (``start`` of a subclass) and says what each of them shows: the gradients with respect to the
outputs, where they arrive, and the contribution of exactly this call to the gradient of each input, where it is produced. An input that
is used several times inside the call has several contributions; the probe adds them up on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msprobe_engine.core.guard import raise_of_training
from msprobe_engine.core.records import TensorRef

MAX_NODES = 20_000
"""Nodes walked for one call at most (a whole model in one module); a call with more has no gradients of its inputs recorded."""

NO_PARTS: dict[int, int] = {}
"""Shared by all watches whose inputs have one contribution each: never written to."""
NO_SUMS: dict[int, Any] = {}
_NO_WEIGHTS: dict[int, Any] = {}
_NO_CASTS: dict[int, Any] = {}

Refs = list["TensorRef | None"]
Done = Callable[["GradientWatch", Refs, Refs], None]
Reduce = Callable[[Any], "TensorRef | None"]
Action = tuple[bool, int, int]
"""What a node shows: is it an output, place in the gradients, slot of the call."""


class GradientWatch:
    """Collects the gradients of one call and reports them when all have arrived.

    Gradients are reduced the moment they are seen and not kept: a kept one would stay in memory and would stop autograd from
    handing its buffer on. Only an input with several contributions needs their running sum.

    Args:
        tag: whatever the owner wants to find back.
        n_inputs, n_outputs: how many inputs and outputs the call has.
        reduce: takes the statistics of the gradient of one input.
        done: called with (watch, gradients of inputs, gradients of outputs) once per backward pass.
        failed: told of an error inside the watch; the watch is off then.
        begins: called with the watch when the first gradient of a pass has arrived, before it is reduced.
        reduce_arriving: takes the statistics of the gradient of one output; default: as `reduce`.

    Attributes:
        passes: how many backward passes were reported so far.
        task: graph task of the pass that came last, -1 before the first.
        shared: places of inputs that are one tensor and whose contributions cannot be told apart: the first has their sum.
        active: False: gradients that still come are ignored.
        unfinished: gradients of a pass have come and are not reported yet.
    """

    __slots__ = (
        "_awaited", "_begins", "_done", "_expected", "_fused", "_inputs", "_missing", "_outputs", "_parts", "_passed", "_reduce",
        "_reduce_arriving", "_sums", "_wider", "active", "failed", "passes", "shared", "tag", "task", "unfinished",
    )  # fmt: skip

    def __init__(
        self,
        tag: Any,
        n_inputs: int,
        n_outputs: int,
        reduce: Reduce,
        done: Done,
        failed: Callable[[Exception], None],
        begins: Callable[[GradientWatch], None] | None = None,
        reduce_arriving: Reduce | None = None,
    ) -> None:
        self.tag = tag
        self._begins = begins
        self.unfinished = False
        self.failed = failed
        self.passes = 0
        self.shared: tuple[list[int], ...] = ()
        self.active = True
        self._reduce = reduce
        self._reduce_arriving = reduce_arriving or reduce
        self._done = done
        self._inputs: Refs = [None] * n_inputs
        self._outputs: Refs = [None] * n_outputs
        self._expected = 0
        self._missing = 0
        self.task = -1
        self._parts = self._awaited = self._passed = NO_PARTS
        self._fused = _NO_WEIGHTS
        self._wider = _NO_CASTS
        self._sums = NO_SUMS

    @staticmethod
    def graph_task() -> int:
        """Number of the backward pass that runs on this thread."""
        raise NotImplementedError

    @staticmethod
    def add(a: Any, b: Any) -> Any:
        """Sum of two contributions, unseen by autograd and by the probe."""
        raise NotImplementedError

    @staticmethod
    def cast_gradient(gradient: Any, dtype: Any) -> Any:
        """The gradient of an input that was cast on its way into the call, in the input's own dtype."""
        raise NotImplementedError

    @staticmethod
    def stands_in(parameter: Any) -> bool:  # noqa: ARG004
        """Is the gradient of a weight in ``_fused`` memory without values?"""
        return False

    def expect(self, actions: Mapping[Any, list[Action]], more: int = 0) -> None:
        """Wait for one call of `receive_gradients` per node of `actions`, and for `more` others."""
        slots = [slot for todo in actions.values() for is_output, _, slot in todo if not is_output]
        if len(slots) > 1 and len(set(slots)) < len(slots):
            self._parts = {slot: slots.count(slot) for slot in slots if slots.count(slot) > 1}
        self._expected = self._missing = len(actions) + more
        if self._parts:
            self._rewind()

    def _rewind(self) -> None:
        self._missing = self._expected
        self._inputs = [None] * len(self._inputs)
        self._outputs = [None] * len(self._outputs)
        if self._parts:
            self._awaited = dict(self._parts)
            self._sums = dict.fromkeys(self._parts)

    def begin_pass(self) -> None:
        """A backward pass reaches the call."""
        task = self.graph_task()
        if task == self.task:
            return
        if self.unfinished:  # the last pass has used only some outputs
            self.report()
        self.task = task
        self.unfinished = True
        if self._missing != self._expected:
            self._rewind()
        if self._begins is not None:
            self._begins(self)

    def receive_gradients(self, todo: tuple[Action, ...], grad_inputs: Any, grad_outputs: Any) -> None:
        """Called by the hooks: note what one node saw."""
        if self.graph_task() != self.task:
            self.begin_pass()
        for is_output, index, slot in todo:
            gradient = grad_outputs[index] if is_output else grad_inputs[index]
            if self._wider and not is_output and gradient is not None and slot in self._wider:
                gradient = self.cast_gradient(gradient, self._wider[slot])
            if is_output:
                if gradient is not None:
                    self._outputs[slot] = ref = self._reduce_arriving(gradient)
                    if self._passed and slot in self._passed:
                        self._inputs[self._passed[slot]] = ref
            elif self._fused and slot in self._fused and self.stands_in(self._fused[slot]):
                if slot in self._parts:
                    self._contribute(slot, None)
            elif slot in self._parts:
                self._contribute(slot, gradient)
            elif gradient is not None:
                self._inputs[slot] = self._reduce(gradient)
        self._missing -= 1
        if self._missing == 0:
            self.report()

    def _contribute(self, slot: int, gradient: Any) -> None:
        before = self._sums[slot]
        if gradient is not None:
            self._sums[slot] = gradient if before is None else self.add(before, gradient)
        self._awaited[slot] -= 1
        if self._awaited[slot] == 0:
            total, self._sums[slot] = self._sums[slot], None
            if total is not None:
                self._inputs[slot] = self._reduce(total)

    def stop(self, error: Exception) -> None:
        """An error in a hook: the watch is off, unless the error is the training's."""
        raise_of_training(error)
        self.active = False
        self.failed(error)

    def report(self) -> None:
        """Report what has arrived and was not reported yet; called by the owner at the end of a step, for calls whose outputs were
        only partly used."""
        if not self.unfinished:
            return
        self.unfinished = False
        for slot, total in self._sums.items():
            if total is not None:
                self._inputs[slot] = self._reduce(total)
        self._sums = NO_SUMS
        if not any(self._inputs) and not any(self._outputs):  # a reference is a tuple with fields: always true
            return
        inputs, outputs = self._inputs, self._outputs
        self._inputs, self._outputs = [None] * len(inputs), [None] * len(outputs)
        self._missing = 0
        self._done(self, inputs, outputs)
        self.passes += 1


class Begin:
    """Hook before a node of a custom function, or of a module that is computed again."""

    __slots__ = ("watch",)

    def __init__(self, watch: GradientWatch) -> None:
        self.watch = watch

    def __call__(self, *_: Any) -> None:
        watch = self.watch
        if watch.active:
            try:
                watch.begin_pass()
            except Exception as error:
                watch.stop(error)


def share_out(same: dict[int, list[int]], actions: dict[Any, list[Action]]) -> tuple[list[int], ...]:
    """A tensor that stands at several places of the arguments has a contribution for each place, when one node made them all. Returns the
    places whose contributions cannot be told apart: the first one has their sum.

    Args:
        same: first slot of such a tensor to all of them.
        actions: by node; changed where places can be told apart.
    """
    left: list[list[int]] = []
    for first, slots in same.items():
        nodes = [node for node, todo in actions.items() for is_output, _, slot in todo if not is_output and slot == first]
        if len(nodes) != len(slots) or any(node is not nodes[0] for node in nodes):
            left.append(slots)
            continue
        places = iter(slots)
        actions[nodes[0]] = [(o, i, next(places) if not o and slot == first else slot) for o, i, slot in actions[nodes[0]]]
    return tuple(left)
