"""Gradients of one call (module or API) without touching the autograd graph.

Torch's own full backward hooks insert identity nodes, which changes the order in which gradients are added up and with it the last
bits of the training. Here the graph stays as it is: after the forward call the nodes between the call's outputs and its inputs are
walked once (only nodes that the call itself made, told by their sequence number), and post hooks on them read

* the gradients with respect to the outputs, where they arrive, and
* the contribution of exactly this call to the gradient of each input, where it is produced. An input that is used several times
  inside the call has several contributions; the probe adds them up on its own.

Autocast keeps the cast of a leaf for all calls that come later, so that what the cast gives back is the sum over them: the contribution
of one call is read in front of the cast.

Calls that write into a view, such as ``relu_`` on the result of a linear layer of a three-dimensional input.

Autograd rewrites the graph of the view's base then: a node ``CopySlices`` stands for the call, and the nodes that led to the view are out
of the graph. The node produces the gradient of the base as it was before the call, and inside it, at the place of the view, that of the
view (torch/csrc/autograd/functions/tensor.cpp).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import function as _function
from torch.autograd.graph import Node

from msprobe_integrations.common.hooks.gradient_watch import MAX_NODES, Action, Begin, share_out
from msprobe_integrations.common.hooks.gradient_watch import GradientWatch as _GradientWatch
from msprobe_integrations.torch.hooks.nodes import LightHook

sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""Sequence number the next autograd node of this thread will get."""

_ACCUMULATE_GRAD: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]  # a C++ class without type information
_CUSTOM: Any = _function.BackwardCFunction
_CAST = type(torch.empty(0, requires_grad=True).to(torch.bfloat16).grad_fn)

Edge = tuple[Any, int]


def edge(tensor: torch.Tensor) -> Edge | None:
    """Where the gradient of `tensor` goes, taken before the call (an in-place call changes it); None when there is none."""
    if not tensor.requires_grad:
        return None
    node = tensor.grad_fn
    return (tensor, -1) if node is None else (node, tensor.output_nr)


@functools.cache
def _knows_autocast(device: str) -> bool:
    return torch.amp.is_autocast_available(device)


def _autocast(device: str) -> bool:
    return _knows_autocast(device) and torch.is_autocast_enabled(device)


def is_stand_in(parameter: Any) -> bool:
    """Is the gradient that autograd hands on for this parameter memory without values?

    With fused gradient accumulation (Megatron, Transformer Engine) the matrix product adds the weight's gradient into ``main_grad`` and
    marks the parameter ``grad_added_to_main_grad``; what the function returns only starts hooks. With ``zero_out_wgrad`` it is zeros, to
    which other gradients are added."""
    return bool(getattr(parameter, "grad_added_to_main_grad", False)) and not getattr(parameter, "zero_out_wgrad", False)


class GradientWatch(_GradientWatch):
    """The watch of a call of torch's.

    Attributes:
        view: the view that the call has written to, None when it has not.
    """

    __slots__ = ("view",)

    graph_task = staticmethod(torch._C._current_graph_task_id)
    stands_in = staticmethod(is_stand_in)
    view: View | None

    @staticmethod
    def cast_gradient(gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            return gradient.to(dtype)

    @staticmethod
    def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            return a + b

    def start(self, input_edges: Sequence[Edge | None], outputs: Sequence[torch.Tensor | None], since: int) -> bool:
        """Hook the nodes of the call. False when no gradient can come.

        Args:
            input_edges: `edge` of every input, taken before the call.
            outputs: results of the call, None for what is no tensor.
            since: `sequence_number()` taken before the call.
        """
        self.view = None
        actions: dict[Node, list[Action]] = {}
        roots: list[Node] = []
        for slot, output in enumerate(outputs):
            if output is not None and output.requires_grad and (node := output.grad_fn) is not None:
                actions.setdefault(node, []).append((True, output.output_nr, slot))
                roots.append(node)
        if not roots:
            return False
        targets: dict[tuple[Node, int], int] = {}
        leaves: dict[int, int] = {}
        cast_on = ""
        same: dict[int, list[int]] = {}
        for slot, found in enumerate(input_edges):
            if found is None:
                continue
            if found[1] < 0:
                first = leaves.setdefault(id(found[0]), slot)
                cast_on = cast_on or found[0].device.type
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
            self._walk(roots, own, targets, leaves, since, actions, bool(cast_on) and _autocast(cast_on))
        if same:
            self.shared = share_out(same, actions)
        if targets:
            self._written_view(targets, actions, outputs, since)
        for node, todo in actions.items():
            if self._begins is not None and isinstance(node, _CUSTOM) and todo[0][0]:
                node.register_prehook(Begin(self))  # its code may run what it was made of again, inside this pass
            node.register_hook(_Hook(self, tuple(todo)))
        self.expect(actions, self.view is not None)
        return True

    def _walk(
        self,
        roots: list[Node],
        todo: list[Node],
        targets: dict[tuple[Node, int], int],
        leaves: dict[int, int],
        since: int,
        actions: dict[Node, list[Action]],
        casts: bool,
    ) -> None:
        """From the nodes `todo` inward. Other roots are inputs passed through: older than the call, their consumers lie outside. `casts`:
        autocast is on."""
        seen = set(roots)
        accumulates, sought = _ACCUMULATE_GRAD, targets.get
        while todo:
            node = todo.pop()
            step: Any
            for index, step in enumerate(node.next_functions):  # (following node, number of its output)
                slot = sought(step)
                if slot is None:
                    following = step[0]
                    if following is None:
                        continue
                    if type(following) is accumulates:  # its sequence number is the largest, but it is not the call's
                        slot = leaves.get(id(following.variable)) if leaves else None
                    elif casts and type(following) is _CAST and (slot := self._before_cast(following, leaves)) is not None:
                        pass
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

    def _before_cast(self, cast: Any, leaves: dict[int, int]) -> int | None:
        """The input that a node of autocast casts; None of another one."""
        leaf = cast.next_functions[0][0]
        slot = leaves.get(id(leaf.variable)) if type(leaf) is _ACCUMULATE_GRAD else None
        if slot is not None:
            self._wider = {**self._wider, slot: leaf.variable.dtype}
        return slot

    def _written_view(
        self,
        targets: dict[tuple[Node, int], int],
        actions: dict[Node, list[Action]],
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


class _Hook(LightHook):
    """Post hook of one node. An object instead of a closure: thousands live at a time, and each costs the garbage collector."""

    __slots__ = ("todo", "watch")

    def __init__(self, watch: GradientWatch, todo: tuple[Action, ...]) -> None:
        self.watch = watch
        self.todo = todo

    def __call__(self, grad_inputs: Any, grad_outputs: Any) -> None:
        watch = self.watch
        if watch.active:
            try:
                watch.receive_gradients(self.todo, grad_inputs, grad_outputs)
            except Exception as error:  # autograd would raise it out of the user's backward()
                watch.stop(error)


_NODE = "CopySlices"  # a node of C++ without a class of its own in Python
Place = tuple[tuple[int, ...], tuple[int, ...], int]
"""Sizes, strides and offset of a view in its base, in elements."""


class View(NamedTuple):
    """A view that a call has written to.

    Attributes:
        node: of the graph, whose first gradient is that of the view's base before the call.
    """

    node: Any
    place: Place


def written_by(output: torch.Tensor | None, since: int) -> View | None:
    """The write that gave `output`, if it is a view that was written to by a call whose nodes have sequence numbers from `since` on."""
    if output is None or not output._is_view() or output.grad_fn is None:
        return None
    following = output.grad_fn.next_functions
    node: Any = following[0][0] if following else None
    base = output._base
    if base is None or type(node).__name__ != _NODE or node._sequence_nr() < since:
        return None
    return View(node, (tuple(output.shape), output.stride(), int(output.storage_offset() - base.storage_offset())))


class ViewHook(LightHook):
    """Post hook of the node that stands for a write into a view."""

    __slots__ = ("place", "todo", "watch")

    def __init__(self, watch: GradientWatch, place: Place, slot: int, is_output: bool) -> None:
        self.watch = watch
        self.place = place
        self.todo = ((is_output, 0, slot),)

    def __call__(self, grad_inputs: Any, grad_outputs: Any) -> None:  # noqa: ARG002
        watch = self.watch
        if watch.active:
            try:
                whole = grad_inputs[0]
                with torch.no_grad(), torch._C.DisableTorchFunction():
                    gradient = None if whole is None else whole.as_strided(*self.place)
                watch.receive_gradients(self.todo, (gradient,), (gradient,))
            except Exception as error:
                watch.stop(error)
