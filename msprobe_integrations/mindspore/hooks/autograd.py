"""Gradients of one call without touching MindSpore's autograd graph.

Cell hooks and ``Tensor.register_hook`` insert identity operators or replace gradients, which changes the order in which gradients are
added up, or give the wrong one for containers. Since 2.10 every tensor of a recorded forward pass knows its node of the backward graph
(``Tensor._grad_node``), and a node its predecessors (``next_functions``) and post hooks. So the graph stays as it is: after a call the
nodes between its outputs and its inputs are walked once (those that the call itself made, told by their sequence number), and hooks on
them read the gradients of the outputs where they arrive, and the contribution of exactly this call to the gradient of each input.

Node objects are made anew each time they are asked for; ``_unique_id()`` is what tells them apart while they live.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import mindspore

from msprobe_engine.core import log
from msprobe_engine.core.guard import of_training, raise_of_training
from msprobe_integrations.common.hooks.gradient_watch import MAX_NODES, Action, Begin, GradientWatch, share_out
from msprobe_integrations.mindspore import environment

Tensor: Any = mindspore.Tensor
executor: Any = environment.api_module()._pynative_executor
_LEAF = 2**64 - 1
"""Sequence number of nodes of parameters and inputs."""

_CUSTOM = "CellCustomBackward"
_PLAIN: Any = getattr(importlib.import_module("mindspore._c_expression"), "BackwardNodePy", None)

Edge = tuple[int, int, Any]
"""Identity of a node, which of its outputs, and the node, so that the identity stays its own."""


def _nowhere() -> int:
    return -1


available: bool = hasattr(Tensor, "_grad_node") and hasattr(executor, "get_current_autodiff_engine_id")
"""Does this MindSpore show its backward graph (2.10 and later)?"""

graph_task: Callable[[], int] = getattr(executor, "get_current_autodiff_engine_id", _nowhere)
"""Number of the backward pass that runs, -1 outside of one."""

recording: Callable[[], bool] = getattr(executor, "requires_grad", executor.grad_flag)
"""Does autograd record what is called now?"""


def wait_for_operators() -> None:
    """Wait for all operators that were started, before something is done whose failures are the probe's own.

    Raises:
        Exception: one of the training has failed (`msprobe_engine.core.guard.of_training`); the framework tells that once, and whoever
            reads its result later gets memory that nothing was written to.
    """
    try:
        executor.sync()
    except Exception as error:
        raise_of_training(error)
        raise of_training(error) from None


TYPES = frozenset(
    kind
    for name in ("float16", "float32", "float64", "bfloat16", "complex64", "complex128")
    if (kind := getattr(mindspore, name, None)) is not None
)


def needs(tensor: Any) -> bool:
    """Can a gradient of this tensor come? Inputs of the differentiated function are marked whatever their type."""
    return tensor._requires_grad is True and tensor.dtype in TYPES


def place(tensor: Any) -> bool:
    """Has a tensor of which no gradient comes a place in the backward record of an API? Those that could have one by their type, and,
    as in the existing format, integers that autograd follows (labels)."""
    return tensor.dtype in TYPES or tensor._requires_grad is True


def edge(tensor: Any) -> Edge | None:
    """Where the gradient of `tensor` goes, taken before the call; None when there is none."""
    node = tensor._grad_node
    return None if node is None else (node._unique_id(), tensor._output_index, node)


def newest(edges: Sequence[Edge | None]) -> int:
    """The highest sequence number among the nodes of `edges`, -1 when there is none."""
    highest = -1
    for known in edges:
        if known is not None:
            number = known[2]._sequence_nr()
            if highest < number < _LEAF:
                highest = number
    return highest


class Watch(GradientWatch):
    """The watch of a call of MindSpore's."""

    __slots__ = ("made", "reached")

    graph_task = staticmethod(graph_task)

    made: int
    """Highest sequence number of the nodes that the call has given."""
    reached: Callable[[Watch], None]
    """Told when a backward pass reaches the call."""

    def begin_pass(self) -> None:
        super().begin_pass()
        self.reached(self)

    @staticmethod
    def add(a: Any, b: Any) -> Any:
        with environment.no_grad():
            return mindspore.ops.auto_generate.add(a, b)

    def start(self, input_edges: Sequence[Edge | None], outputs: Sequence[Any], since: int) -> bool:
        """Hook the nodes of the call. False when no gradient can come.

        Args:
            input_edges: `edge` of every input, taken before the call.
            outputs: results of the call that have a gradient.
            since: a sequence number that no older node has.
        """
        nodes: dict[int, Any] = {}
        actions: dict[int, list[Action]] = {}
        roots: list[int] = []
        for slot, output in enumerate(outputs):
            output_edge = edge(output)
            if output_edge is not None:
                nodes[output_edge[0]] = output_edge[2]
                actions.setdefault(output_edge[0], []).append((True, output_edge[1], slot))
                roots.append(output_edge[0])
        if not roots:
            return False
        targets: dict[tuple[int, int], int] = {}
        same: dict[int, list[int]] = {}
        for slot, known in enumerate(input_edges):
            if known is not None:
                first = targets.setdefault((known[0], known[1]), slot)
                if first != slot:
                    same.setdefault(first, [first]).append(slot)
        gaps: dict[int, tuple[bool, ...]] = {}
        roots = list(dict.fromkeys(roots))
        own = [key for key in roots if since <= nodes[key]._sequence_nr() < _LEAF]
        if targets and len(own) < len(roots):
            # an input that is handed on as it is: its gradient is what arrives at the output
            passed = {todo[2]: targets[key, todo[1]] for key, all_ in actions.items() for todo in all_ if (key, todo[1]) in targets}
            if passed:
                self._passed = passed
        if targets:
            self._walk(nodes, roots, own, targets, since, actions, gaps)
        if same:
            self.shared = share_out(same, actions)
        self.made = max((nodes[key]._sequence_nr() for key in own), default=-1)
        hooked = 0
        for key, todo in actions.items():
            node = nodes[key]
            if node._sequence_nr() != _LEAF:  # hooks of leaves are never called
                if self._begins is not None and todo[0][0] and (type(node) is not _PLAIN or node.name() == _CUSTOM):
                    node.register_prehook(Begin(self))  # its code may run what it was made of again, inside this pass
                node.register_hook(_Hook(self, tuple(todo), gaps.get(key)))
                hooked += 1
        self.expect(actions, hooked - len(actions))
        return hooked > 0

    def _walk(
        self,
        nodes: dict[int, Any],
        roots: Sequence[int],
        todo: list[int],
        targets: dict[tuple[int, int], int],
        since: int,
        actions: dict[int, list[Action]],
        gaps: dict[int, tuple[bool, ...]],
    ) -> None:
        """From the nodes `todo` inward. Other roots are inputs passed through: older than the call, their consumers lie outside. `gaps`
        gets, of nodes that show the gradient of an input, which of their inputs can have one."""
        seen = set(roots)
        todo = list(todo)
        while todo:
            key = todo.pop()
            edges = nodes[key].next_functions
            for index, (following, output) in enumerate(edges):
                if following is None:
                    continue
                inner = following._unique_id()
                slot = targets.get((inner, output))
                if slot is None:
                    if inner not in seen and since <= following._sequence_nr() < _LEAF:
                        seen.add(inner)
                        nodes[inner] = following
                        todo.append(inner)
                        if len(seen) > MAX_NODES:
                            return
                    continue
                if key not in gaps:
                    gaps[key] = tuple(other is not None for other, _ in edges)
                actions.setdefault(key, []).append((False, index, slot))


class _Hook:
    """Post hook of one node. `gaps`: which of its inputs can have a gradient, None: it is asked for none."""

    __slots__ = ("gaps", "todo", "watch")

    def __init__(self, watch: Watch, todo: tuple[Action, ...], gaps: tuple[bool, ...] | None) -> None:
        self.watch = watch
        self.todo = todo
        self.gaps = gaps

    def __call__(self, grad_inputs: Any, grad_outputs: Any) -> None:
        watch = self.watch
        if watch.active:
            try:
                if self.gaps is not None and len(grad_inputs) != len(self.gaps):
                    grad_inputs = _spread(grad_inputs, self.gaps)
                watch.receive_gradients(self.todo, grad_inputs, grad_outputs)
            except Exception as error:  # it would come out of the user's backward pass
                watch.stop(error)


def _spread(gradients: Any, gaps: tuple[bool, ...]) -> list[Any]:
    """The node of a compiled function gives only the gradients that somebody wants: each to the input that it belongs to. Where there
    are more or fewer (a tuple among the arguments, a Parameter that is not differentiated), nobody can tell which they are: none."""
    if len(gradients) != sum(gaps):
        log.warn_once(
            "inputs of compiled functions",
            "gradients of some inputs of functions under jit are not recorded: with a tuple among the arguments, or a Parameter that nobody"
            " differentiates, MindSpore does not say whose they are; give the tensors as arguments of their own",
        )
        return [None] * len(gaps)
    following = iter(gradients)
    return [next(following) if wanted else None for wanted in gaps]
