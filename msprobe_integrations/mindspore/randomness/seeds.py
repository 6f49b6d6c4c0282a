"""`seed_all`: the same random numbers and deterministic kernels in every run.

Dropout switched off: functions and Cells keep their names and arguments, what comes in goes out.

What is here is compiled by MindSpore in static graphs. So the functions carry no ``__wrapped__``, behind which its parser would find the
original again, and are of the plainest Python.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import mindspore
import numpy as np
from mindspore import mint, nn, ops
from mindspore.ops.function import nn_func

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.log import get_logger
from msprobe_integrations.patching import Patches

_log = get_logger()
_ENVIRONMENT = ("PYTHONHASHSEED", "HCCL_DETERMINISTIC", "TE_PARALLEL_COMPILER", "LCCL_DETERMINISTIC", "ATB_LLM_LCOC_ENABLE")
_undo: list[Callable[[], None]] = []


def seed_all(seed: int = 1234, mode: bool = False, rm_dropout: bool = False) -> None:
    """Seed Python, numpy and MindSpore (its operators, initializers and data sets) and choose deterministic kernels. Call it before the
    model is made.

    Args:
        seed: 0 .. 2**32 - 1.
        mode: use deterministic kernels (``deterministic="ON"`` of MindSpore's context, which also sets ``HCCL_DETERMINISTIC``).
        rm_dropout: dropout functions and Cells pass their input through, see `dropout.remove`.

    `undo_seed_all` takes all of it back but the states of the generators.

    Raises:
        UsageError: a value is of the wrong type or out of range; nothing has been changed then.
    """
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**32:
        raise UsageError(f"seed_all: seed is {seed!r}; allowed: an int from 0 to 4294967295")
    for name, value in (("mode", mode), ("rm_dropout", rm_dropout)):
        if not isinstance(value, bool):
            raise UsageError(f"seed_all: {name} is {value!r}; allowed: True or False")
    if not _undo:
        _remember()
    random.seed(seed)
    os.environ["PYTHONHASHSEED"] = str(seed)  # for processes that are started from here; this one has its hashes
    mindspore.set_seed(seed)
    np.random.seed(seed)
    if hasattr(mindspore, "manual_seed"):  # the generator of mint, which set_seed does not reach
        mindspore.manual_seed(seed)
    _choose(mode)
    if rm_dropout:
        remove()
        _log.info("seed_all: dropout passes its input through")


def undo_seed_all() -> None:
    """Take back what `seed_all` changed: dropout drops again, and the choice of kernels and the environment are as before the first call.
    Nothing happens when there was none."""
    restore()
    while _undo:
        _undo.pop()()


def _choose(deterministic: bool) -> None:
    wanted = "ON" if deterministic else "OFF"
    if mindspore.get_context("deterministic") != wanted:  # telling it again would set variables of the environment that nobody asked for
        mindspore.set_context(deterministic=wanted)


def _remember() -> None:
    environment = {name: os.environ.get(name) for name in _ENVIRONMENT}
    chosen: Any = mindspore.get_context("deterministic")

    def restore() -> None:
        _choose(chosen == "ON")
        for name, value in environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    _undo.append(restore)


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
