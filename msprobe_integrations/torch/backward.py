"""Gradients of one call (module or API) without touching the autograd graph.

Torch's own full backward hooks insert identity nodes, which changes the order in which gradients are added up and with it the last
bits of the training. Here the graph stays as it is: after the forward call the nodes between the call's outputs and its inputs are
walked once (only nodes that the call itself made, told by their sequence number), and post hooks on them read

* the gradients with respect to the outputs, where they arrive, and
* the contribution of exactly this call to the gradient of each input, where it is produced. An input that is used several times
  inside the call has several contributions; the probe adds them up on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import function as _function
from torch.autograd.graph import Node

from msprobe_engine.records import TensorRef
from msprobe_integrations.torch.node_hooks import LightHook
from msprobe_integrations.torch.written_views import View, ViewHook, written_by

sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""Sequence number the next autograd node of this thread will get."""

_graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""Number of the backward pass that runs on this thread."""

MAX_NODES = 20_000
"""Nodes walked for one call at most (a whole model in one module); a call with more has no gradients of its inputs recorded."""

_ACCUMULATE_GRAD: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]  # a C++ class without type information
_CUSTOM: Any = _function.BackwardCFunction
_NO_WEIGHTS: dict[int, Any] = {}
_NO_PARTS: dict[int, int] = {}  # shared by all watches whose inputs have one contribution each: never written to
_NO_SUMS: dict[int, torch.Tensor | None] = {}

Edge = tuple[Any, int]
Refs = list["TensorRef | None"]
Done = Callable[["GradientWatch", Refs, Refs], None]
Reduce = Callable[[torch.Tensor], "TensorRef | None"]


def edge(tensor: torch.Tensor) -> Edge | None:
    """Where the gradient of `tensor` goes, taken before the call (an in-place call changes it); None when there is none."""
    if not tensor.requires_grad:
        return None
    node = tensor.grad_fn
    return (tensor, -1) if node is None else (node, tensor.output_nr)


def is_stand_in(parameter: Any) -> bool:
    """Is the gradient that autograd hands on for this parameter memory without values?

    With fused gradient accumulation (Megatron, Transformer Engine) the matrix product adds the weight's gradient into ``main_grad`` and
    marks the parameter ``grad_added_to_main_grad``; what the function returns only starts hooks. With ``zero_out_wgrad`` it is zeros, to
    which other gradients are added."""
    return bool(getattr(parameter, "grad_added_to_main_grad", False)) and not getattr(parameter, "zero_out_wgrad", False)


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
        view: the view that the call has written to, None when it has not.
        active: False: gradients that still come are ignored.
        unfinished: gradients of a pass have come and are not reported yet.
    """

    __slots__ = (
        "_awaited",
        "_begins",
        "_done",
        "_expected",
        "_fused",
        "_inputs",
        "_missing",
        "_outputs",
        "_parts",
        "_passed",
        "_reduce",
        "_reduce_arriving",
        "_sums",
        "active",
        "failed",
        "passes",
        "shared",
        "tag",
        "task",
        "unfinished",
        "view",
    )

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
        self.view: View | None = None
        self.active = True
        self._reduce = reduce
        self._reduce_arriving = reduce_arriving or reduce
        self._done = done
        self._inputs: Refs = [None] * n_inputs
        self._outputs: Refs = [None] * n_outputs
        self._expected = 0
        self._missing = 0
        self.task = -1
        self._parts = self._awaited = self._passed = _NO_PARTS
        self._fused = _NO_WEIGHTS
        self._sums = _NO_SUMS

    def start(self, input_edges: Sequence[Edge | None], outputs: Sequence[torch.Tensor | None], since: int) -> bool:
        """Hook the nodes of the call. False when no gradient can come.

        Args:
            input_edges: `edge` of every input, taken before the call.
            outputs: results of the call, None for what is no tensor.
            since: `sequence_number()` taken before the call.
        """
        actions: dict[Node, list[tuple[bool, int, int]]] = {}
        roots: list[Node] = []
        for slot, output in enumerate(outputs):
            if output is not None and output.requires_grad and (node := output.grad_fn) is not None:
                actions.setdefault(node, []).append((True, output.output_nr, slot))
                roots.append(node)
        if not roots:
            return False
        targets: dict[tuple[Node, int], int] = {}
        leaves: dict[int, int] = {}
        same: dict[int, list[int]] = {}
        for slot, found in enumerate(input_edges):
            if found is None:
                continue
            if found[1] < 0:
                first = leaves.setdefault(id(found[0]), slot)
                if hasattr(found[0], "grad_added_to_main_grad"):
                    self._fused = {**self._fused, slot: found[0]}
            else:
                first = targets.setdefault((found[0], found[1]), slot)
            if first != slot:
                same.setdefault(first, [first]).append(slot)
        if len(roots) > 1:
            roots = list(dict.fromkeys(roots))  # one node may have made several outputs
        own = [node for node in roots if node._sequence_nr() >= since]
        if targets and len(own) < len(roots):
            # an input that is handed on as it is: its gradient is what arrives at the output
            passed = {todo[2]: targets[node, todo[1]] for node, all_ in actions.items() for todo in all_ if (node, todo[1]) in targets}
            if passed:
                self._passed = passed
        if targets or leaves:
            self._walk(roots, own, targets, leaves, since, actions)
        if same:
            self.shared = _share_out(same, actions)
        if targets:
            self._written_view(targets, actions, outputs, since)
        slots: list[int] = []
        for node, todo in actions.items():
            for action in todo:
                if not action[0]:
                    slots.append(action[2])
            if self._begins is not None and isinstance(node, _CUSTOM) and todo[0][0]:
                node.register_prehook(_Begin(self))  # its code may run what it was made of again, inside this pass
            node.register_hook(_Hook(self, tuple(todo)))
        if len(slots) > 1 and len(set(slots)) < len(slots):
            self._parts = {slot: slots.count(slot) for slot in slots if slots.count(slot) > 1}
        self._expected = self._missing = len(actions) + (self.view is not None)
        if self._parts:
            self._rewind()
        return True

    def _rewind(self) -> None:
        self._missing = self._expected
        self._inputs = [None] * len(self._inputs)
        self._outputs = [None] * len(self._outputs)
        if self._parts:
            self._awaited = dict(self._parts)
            self._sums = dict.fromkeys(self._parts)

    def _walk(
        self,
        roots: list[Node],
        todo: list[Node],
        targets: dict[tuple[Node, int], int],
        leaves: dict[int, int],
        since: int,
        actions: dict[Node, list[tuple[bool, int, int]]],
    ) -> None:
        """From the nodes `todo` inward. Other roots are inputs passed through: older than the call, their consumers lie outside."""
        seen = set(roots)
        while todo:
            node = todo.pop()
            index = -1
            step: Any
            for step in node.next_functions:  # (following node, number of its output)
                index += 1
                slot = targets.get(step)
                if slot is None:
                    following = step[0]
                    if following is None:
                        continue
                    if type(following) is _ACCUMULATE_GRAD:  # its sequence number is the largest, but it is not the call's
                        slot = leaves.get(id(following.variable)) if leaves else None
                    elif following not in seen and following._sequence_nr() >= since:
                        seen.add(following)
                        todo.append(following)
                        if len(seen) > MAX_NODES:
                            return
                    if slot is None:
                        continue
                found = actions.get(node)
                if found is None:
                    actions[node] = [(False, index, slot)]
                else:
                    found.append((False, index, slot))

    def _written_view(
        self,
        targets: dict[tuple[Node, int], int],
        actions: dict[Node, list[tuple[bool, int, int]]],
        outputs: Sequence[torch.Tensor | None],
        since: int,
    ) -> None:
        """A call that has written into a view: its input is not in the graph any more, see `written_views`."""
        for output in outputs:
            view = written_by(output, since)
            if view is not None:
                found = {slot for todo in actions.values() for is_output, _, slot in todo if not is_output}
                left = [slot for slot in targets.values() if slot not in found]
                if left:
                    self.view = view
                    view.node.register_hook(ViewHook(self, view.place, left[0], is_output=False))
                return

    def redirect(self, slot: int, view: View) -> None:
        """Output `slot`, a view, has been written to by a later call: its gradient comes from there, the node of the call is out of the
        graph."""
        view.node.register_hook(ViewHook(self, view.place, slot, is_output=True))

    def begin(self) -> None:
        """A backward pass reaches the call."""
        task = _graph_task()
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

    def arrived(self, todo: tuple[tuple[bool, int, int], ...], grad_inputs: Any, grad_outputs: Any) -> None:
        """Called by the hooks: note what one node saw. `todo`: (is it an output, place in the gradients, slot) of each."""
        if _graph_task() != self.task:
            self.begin()
        for is_output, index, slot in todo:
            gradient = grad_outputs[index] if is_output else grad_inputs[index]
            if is_output:
                if gradient is not None:
                    self._outputs[slot] = ref = self._reduce_arriving(gradient)
                    if self._passed and slot in self._passed:
                        self._inputs[self._passed[slot]] = ref
            elif self._fused and slot in self._fused and is_stand_in(self._fused[slot]):
                if slot in self._parts:
                    self._contribute(slot, None)
            elif slot in self._parts:
                self._contribute(slot, gradient)
            elif gradient is not None:
                self._inputs[slot] = self._reduce(gradient)
        self._missing -= 1
        if self._missing == 0:
            self.report()

    def _contribute(self, slot: int, gradient: torch.Tensor | None) -> None:
        before = self._sums[slot]
        if gradient is not None:
            self._sums[slot] = gradient if before is None else _add(before, gradient)
        self._awaited[slot] -= 1
        if self._awaited[slot] == 0:
            total, self._sums[slot] = self._sums[slot], None
            if total is not None:
                self._inputs[slot] = self._reduce(total)

    def report(self) -> None:
        """Report what has arrived and was not reported yet; called by the owner at the end of a step, for calls whose outputs were
        only partly used."""
        if not self.unfinished:
            return
        self.unfinished = False
        for slot, total in self._sums.items():
            if total is not None:
                self._inputs[slot] = self._reduce(total)
        self._sums = _NO_SUMS
        if not any(self._inputs) and not any(self._outputs):  # a reference is a tuple with fields: always true
            return
        inputs, outputs = self._inputs, self._outputs
        self._inputs, self._outputs = [None] * len(inputs), [None] * len(outputs)
        self._missing = 0
        self._done(self, inputs, outputs)
        self.passes += 1


class _Hook(LightHook):
    """Post hook of one node. An object instead of a closure: thousands live at a time, and each costs the garbage collector."""

    __slots__ = ("todo", "watch")

    def __init__(self, watch: GradientWatch, todo: tuple[tuple[bool, int, int], ...]) -> None:
        self.watch = watch
        self.todo = todo

    def __call__(self, grad_inputs: Any, grad_outputs: Any) -> None:
        watch = self.watch
        if watch.active:
            try:
                watch.arrived(self.todo, grad_inputs, grad_outputs)
            except Exception as error:  # autograd would raise it out of the user's backward()
                watch.active = False
                watch.failed(error)


class _Begin:
    """Hook before a node of a custom function."""

    __slots__ = ("watch",)

    def __init__(self, watch: GradientWatch) -> None:
        self.watch = watch

    def __call__(self, grad_outputs: Any) -> None:  # noqa: ARG002
        watch = self.watch
        if watch.active:
            try:
                watch.begin()
            except Exception as error:
                watch.active = False
                watch.failed(error)


def _add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), torch._C.DisableTorchFunction():
        return a + b


def _share_out(same: dict[int, list[int]], actions: dict[Node, list[tuple[bool, int, int]]]) -> tuple[list[int], ...]:
    """A tensor that stands at several places of the arguments has a contribution for each place, when one node made them all. Returns the
    places whose contributions cannot be told apart: the first one has their sum."""
    left: list[list[int]] = []
    for first, slots in same.items():
        nodes = [node for node, todo in actions.items() for is_output, _, slot in todo if not is_output and slot == first]
        if len(nodes) != len(slots) or any(node is not nodes[0] for node in nodes):
            left.append(slots)
            continue
        places = iter(slots)
        actions[nodes[0]] = [(o, i, next(places) if not o and slot == first else slot) for o, i, slot in actions[nodes[0]]]
    return tuple(left)
