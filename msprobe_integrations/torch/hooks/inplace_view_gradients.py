"""Calls that write into a view, such as ``relu_`` on the result of a linear layer of a three-dimensional input.

Autograd rewrites the graph of the view's base then: a node ``CopySlices`` stands for the call, and the nodes that led to the view are out
of the graph. The node produces the gradient of the base as it was before the call, and inside it, at the place of the view, that of the
view (torch/csrc/autograd/functions/tensor.cpp).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from msprobe_engine.core.guard import raise_of_training
from msprobe_integrations.torch.hooks.nodes import LightHook

if TYPE_CHECKING:
    from msprobe_integrations.torch.hooks.backward import GradientWatch

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
                watch.arrived(self.todo, (gradient,), (gradient,))
            except Exception as error:
                raise_of_training(error)
                watch.active = False
                watch.failed(error)
