"""Callbacks that drive `PrecisionDebugger` where ``mindspore.train.Model`` owns the loop."""

from __future__ import annotations

from typing import Any

import mindspore
from mindspore.train import Callback

from msprobe_engine.core import log
from msprobe_engine.core.errors import UsageError
from msprobe_integrations.mindspore import environment
from msprobe_integrations.mindspore.dump.debugger import PrecisionDebugger


class MsprobeStep(Callback):  # type: ignore[misc]  # mindspore has no types
    """A dump of each step of ``Model.train``: ``start()`` before the step, ``stop()`` and ``step()`` behind it. Call
    ``debugger.start(model)`` once before, where the level needs the model.

    Args:
        debugger: the `PrecisionDebugger`.

    Raises:
        UsageError: it is something else.
    """

    def __init__(self, debugger: PrecisionDebugger) -> None:
        super().__init__()
        if not isinstance(debugger, PrecisionDebugger):
            raise UsageError(f"MsprobeStep: debugger is a {type(debugger).__name__}; allowed: a PrecisionDebugger")
        self.debugger = debugger

    def on_train_begin(self, run_context: Any) -> None:
        environment.warn_of_sink_mode("MsprobeStep", run_context.original_args())

    def on_train_step_begin(self, run_context: Any) -> None:  # noqa: ARG002
        """``start()``"""
        self.debugger.start()

    def on_train_step_end(self, run_context: Any) -> None:  # noqa: ARG002
        """``stop()`` and ``step()``"""
        self.debugger.stop()
        self.debugger.step()


class MsprobeInitStep(Callback):  # type: ignore[misc]
    """A training that is resumed goes on counting where it was left, in the dump and in MindSpore's own kernel dump."""

    def on_train_begin(self, run_context: Any) -> None:
        """``cur_step_num`` is the number of steps that a loaded state has behind it."""
        steps = int(run_context.original_args().cur_step_num)
        begin = getattr(mindspore._c_expression, "_set_init_iter", None)
        if begin is None:
            log.warn_once("init iter", "MsprobeInitStep: this version of MindSpore numbers the steps of its kernel dump by itself, from 0")
        else:
            begin(steps)
        if PrecisionDebugger._instance is not None:
            PrecisionDebugger.set_init_step(steps)
