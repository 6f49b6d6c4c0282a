"""Where the program called an operator. In the backward pass that is where its forward operator was called: nodes of the autograd graph
have the numbers that were counted when they were made."""

from __future__ import annotations

import os
from types import FrameType

import torch

from msprobe_integrations.common.capture.stacks import Stacks
from msprobe_integrations.torch.hooks import frames
from msprobe_integrations.torch.hooks.backward import sequence_number

_TORCH = f"File {os.path.dirname(torch.__file__)}{os.sep}"
_LIMIT = 1 << 20
_task = torch._C._current_graph_task_id
_node = torch._C._current_autograd_node


class Sources:
    """Lines of the program, by the numbers of autograd nodes."""

    def __init__(self) -> None:
        self._stacks = Stacks(frames.hides)
        self._of_node: dict[int, int] = {}
        self._last = -1
        self._made = -1

    def forward(self) -> None:
        """An operator is called: autograd has made the node of it just before, if it makes one."""
        number = sequence_number()
        self._made = number - 1 if _task() < 0 and number != self._last else -1
        self._last = number

    def of(self, frame: FrameType) -> tuple[str, str]:
        """(``"forward"`` or ``"backward"``, ``"train.py:12 in step: loss = f(x)"``); the text is empty when it is not known."""
        if _task() >= 0:
            node = _node()
            if node is not None and (stack := self._of_node.get(node._sequence_nr())) is not None:
                return "backward", self._text(stack)
            return "backward", self._text(self._stacks.capture(frame))
        stack = self._stacks.capture(frame)
        if self._made >= 0:
            if len(self._of_node) >= _LIMIT:
                self._of_node.clear()
            self._of_node[self._made] = stack
        return "forward", self._text(stack)

    def _text(self, stack: int) -> str:
        lines = self._stacks.texts()[stack]
        if not lines:
            return ""
        line = next(
            (line for line in lines if not line.startswith(_TORCH)), lines[0]
        )  # rather where a module is called than torch's own line
        file, _, rest = line.removeprefix("File ").partition(", line ")
        number, _, rest = rest.partition(", in ")
        function, _, code = rest.partition(", \n ")
        return f"{file}:{number} in {function}: {code}"
