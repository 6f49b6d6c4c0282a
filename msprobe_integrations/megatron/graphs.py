"""Megatron's CUDA graphs of all passes of a step (``full_iteration``) and of the update (``optimizer_cuda_graph``): after the first steps a
call of its wrapper is one replay, in which no function of Megatron is called. Steps go on; what is silent from then on is said once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from msprobe_engine.core.log import warn_once

if TYPE_CHECKING:
    from msprobe_integrations.megatron.observer import TrainingObserver

_recording = False
_PASSES = (
    "the forward and backward passes of a step are replayed by one CUDA graph: from now on there are no records of dumps, activations "
    "and their gradients, layer features, gradients of micro batches or before their reduction, collectives, and numbers of micro "
    "batches, because a replay runs no Python. What is read at the update is there as before, and losses and other numbers of the "
    "step. Run without a graph of full iterations to see the rest"
)
_UPDATE = (
    "the update is replayed by a CUDA graph: from now on there is nothing of what is read in its middle (gradients behind scaling and "
    "clipping, their agreement with momentum), because a replay runs no Python. What is read before and after it is there. Run without "
    "optimizer_cuda_graph to see the rest"
)


def is_recording() -> bool:
    """Do Megatron's functions run to be recorded, by a call that is followed as a whole?"""
    return _recording


def is_graph(wrapper: Any, stage: str | None) -> bool:
    """Does this call of one of Megatron's wrappers record a graph, or replay one?

    Args:
        stage: ``training`` or ``validation``; None: the wrapper of the update, which has no stages.
    """
    try:
        graph = wrapper.cuda_graph if stage is None else wrapper.cuda_graph[stage]
        number = wrapper.curr_iter() if stage is None else wrapper.curr_iter(stage)
        return graph is not None or bool(number == wrapper.cuda_graph_warmup_steps)
    except (AttributeError, KeyError, TypeError):  # another version
        return False


def run_passes(observer: TrainingObserver, call: Callable[[], Any], kwargs: dict[str, Any]) -> Any:
    """All passes of a step by a graph. Nothing of ours is recorded, no hook would be called again."""
    warn_once("full CUDA graph", _PASSES)
    return observer.forward_backward(lambda **_: run_unseen(observer, call), (), kwargs)


def run_update(observer: TrainingObserver, call: Callable[[], Any]) -> Any:
    warn_once("optimizer CUDA graph", _UPDATE)
    return run_unseen(observer, call)


def run_unseen(observer: TrainingObserver, call: Callable[[], Any]) -> Any:
    """A call that records or replays, inside of which nothing is followed."""
    with observer.evaluation(), _record():
        return call()


@contextlib.contextmanager
def _record() -> Iterator[None]:
    global _recording
    before, _recording = _recording, True
    try:
        yield
    finally:
        _recording = before
