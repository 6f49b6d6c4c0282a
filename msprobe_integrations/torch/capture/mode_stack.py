"""Torch function modes at a chosen place of this thread's stack.

Modes are taken off by who entered them, from the top. A mode that the probe puts on in the middle of user code must therefore stand
below those that the user has entered before it and will leave after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

depth = torch._C._len_torch_function_stack
"""How many modes are on this thread's stack."""
_push: Any = torch.overrides._push_mode
_pop: Any = torch.overrides._pop_mode


def insert(mode: TorchFunctionMode, at: int | None = None) -> None:
    """Put `mode` on, with `at` modes below it; None, or a stack that is not so deep: on top."""
    above = [_pop() for _ in range(depth() - at)] if at is not None else []
    _push(mode)
    for other in reversed(above):
        _push(other)


def take_out(mode: TorchFunctionMode) -> int:
    """Take `mode` off, wherever it stands; other modes stay. Returns how many are below it, -1 when it is not on this stack."""
    above = []
    found = -1
    while depth():
        top = _pop()
        if top is mode:
            found = depth()
            break
        above.append(top)
    for other in reversed(above):
        _push(other)
    return found


@contextmanager
def aside(mode: TorchFunctionMode) -> Iterator[None]:
    """Without `mode` for a while, on this thread."""
    at = take_out(mode)
    try:
        yield
    finally:
        if at >= 0:
            insert(mode, at)
