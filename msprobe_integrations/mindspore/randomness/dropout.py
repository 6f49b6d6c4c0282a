"""Dropout switched off: functions and Cells keep their names and arguments, what comes in goes out.

What is here is compiled by MindSpore in static graphs. So the functions carry no ``__wrapped__``, behind which its parser would find the
original again, and are of the plainest Python.
"""

from __future__ import annotations

from typing import Any

from mindspore import mint, nn, ops
from mindspore.ops.function import nn_func

from msprobe_integrations.patching import Patches

_FUNCTIONS = (
    *((ops, name) for name in ("dropout", "dropout1d", "dropout2d", "dropout3d")),
    *((mint.nn.functional, name) for name in ("dropout", "dropout2d")),
)
_ATTENTION = "_inner_dropout"  # of nn.MultiheadAttention
_CELLS = ("Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "DropoutExt", "Dropout2dExt")
_patches = Patches("numpy", "builtins")


def remove() -> None:
    """Dropout passes its input through: the functions ``ops.dropout``, ``mint.nn.functional.dropout`` and their relatives, the Cells
    ``nn.Dropout`` and ``mint.nn.Dropout`` and theirs, those that exist already too. A graph that was compiled before keeps its dropout, and
    so does a Primitive ``ops.Dropout`` that the program calls itself."""
    if _patches:
        return
    for owner, name in _FUNCTIONS:
        _patches.wrap(owner, name, lambda _: _function)
    _patches.wrap(nn_func, _ATTENTION, lambda _: _function)
    _patches.early_imports()
    for name in _CELLS:
        if hasattr(nn, name):
            _patches.wrap(getattr(nn, name), "construct", lambda _: _construct)


def restore() -> None:
    """Dropout drops again."""
    _patches.undo()


def _function(input: Any, p: Any = 0.5, training: Any = True, inplace: Any = False, seed: Any = None) -> Any:  # noqa: ARG001
    return input


def _construct(self: Any, x: Any) -> Any:  # noqa: ARG001
    return x
