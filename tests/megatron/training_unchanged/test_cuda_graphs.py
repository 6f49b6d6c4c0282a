"""Megatron's CUDA graphs of whole iterations: its own wrapper runs here; what records and replays is a stand-in, which needs no GPU and, as
a real replay, calls no Python of the model."""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import train_gpt
from forkpool import run_ranks
from megatron_harness import observed, probe_settings, run_gpt

from msprobe_engine.core.settings.schema import MonitorSettings
from msprobe_integrations import requirements
from msprobe_integrations.megatron import patches

pytestmark = pytest.mark.framework
MONITOR = MonitorSettings(activations=True, gradients=True, unreduced_gradients=True, parameters=True)
ARGUMENTS = "--steps 4 --nmb 2"


class Graph:
    """`torch.cuda.CUDAGraph`: what it replays is not computed here."""

    recording = False

    def register_generator_state(self, _state: Any) -> None: ...

    def replay(self) -> None: ...


@contextlib.contextmanager
def record(*_: Any, **__: Any) -> Iterator[None]:
    """`torch.cuda.graph`."""
    Graph.recording = True
    try:
        yield
    finally:
        Graph.recording = False


def stand_in() -> None:
    """In a process of its own."""
    torch.cuda.CUDAGraph, torch.cuda.graph = Graph, record  # type: ignore[misc, assignment]
    torch.cuda.graph_pool_handle = lambda: None  # type: ignore[assignment, return-value]


class Texts(logging.Handler):
    """Messages."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, item: logging.LogRecord) -> None:
        self.texts.append(item.getMessage())


def job(probed: bool) -> dict[str, Any]:
    """Train with the wrapper of full iterations around the passes."""
    stand_in()
    full = importlib.import_module("megatron.core.full_cuda_graph")
    texts, seen = Texts(), []
    logging.getLogger("msprobe").addHandler(texts)
    real = train_gpt.get_forward_backward_func

    def wrapped() -> Any:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        return full.FullCudaGraphWrapper(get_forward_backward_func(), 1)

    train_gpt.get_forward_backward_func = wrapped

    def hooks(chunks: Any) -> int:
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for chunk in chunks for m in chunk.modules())

    def after_build(_state: Any, chunks: Any, _optimizer: Any) -> None:
        first = next(m for m in chunks[0].modules() if type(m).__name__ == "GPTModel")
        forward = first.forward

        def counted(*args: Any, **kwargs: Any) -> Any:
            seen.append((Graph.recording, hooks(chunks)))
            return forward(*args, **kwargs)

        first.forward = counted

    try:
        state, frames = run_gpt(ARGUMENTS, probe_settings(MONITOR) if probed else None, after_build)
    finally:
        train_gpt.get_forward_backward_func = real
    found = [sorted({sample.family for sample in frame.samples if sample.ref.row >= 0}) for frame in frames]
    steps = [(frame.step, "loss" in frame.scalars, "grad_norm" in frame.scalars) for frame in frames]
    said = [text for text in texts.texts if "CUDA graph" in text]
    return {**state, "families": found, "steps": steps, "said": said, "seen": seen}


def test_steps_go_on_and_what_is_silent_is_said() -> None:
    """Before the graph there is everything. From the iteration that is recorded on every step has its frame, with losses and what is read
    at the update; nothing of ours is on while it is recorded; which families are silent is said once. The weights are those of a training
    without the probe."""
    (with_probe,) = run_ranks(1, job, True)
    (without,) = run_ranks(1, job, False)
    assert with_probe["weights"] == without["weights"]
    assert with_probe["losses"] == without["losses"]
    assert with_probe["steps"] == [(step, True, True) for step in range(4)]
    first, *others = with_probe["families"]
    assert {"actv", "grad_unreduced", "grad_reduced", "param_origin"} <= set(first)
    assert others == [["grad_reduced", "param_origin", "param_updated"]] * 3
    assert [recording for recording, _ in with_probe["seen"]] == [False, False, True, True]
    assert with_probe["seen"][0][1] > with_probe["seen"][2][1] == without["seen"][2][1]
    (said,) = with_probe["said"]
    assert "activations" in said
    assert "numbers of micro batches" in said


def test_an_update_by_a_graph_is_said() -> None:
    """What is read in the middle of an update has no rows once that is replayed, and this is said; all else has the numbers that it has
    without the graph."""
    pytest.importorskip("megatron.core.optimizer.optimizer_cuda_graph", reason="Megatron 0.17 and later")
    (plain,), (graphed,) = run_ranks(1, update_job, False), run_ranks(1, update_job, True)
    (said,) = graphed["said"]
    assert "agreement with momentum" in said
    assert plain["said"] == []
    assert graphed["rows"][0] == plain["rows"][0]
    missing = {name for name in plain["rows"][1] if name not in graphed["rows"][1]}
    assert {(family, phase) for family, phase, _ in missing} == {("grad_reduced", "clipped"), ("other", "")}
    assert graphed["rows"][1] == {name: row for name, row in plain["rows"][1].items() if name not in missing}


def update_job(graphed: bool) -> dict[str, Any]:
    """Train with the wrapper of the update, or without."""
    stand_in()
    graphs = importlib.import_module("megatron.core.optimizer.optimizer_cuda_graph")
    texts = Texts()
    logging.getLogger("msprobe").addHandler(texts)
    phases = ("reduced", "clipped")
    monitor = MonitorSettings(
        parameters=True, gradients=True, gradient_phases=phases, optimizer_states=True, updates=True, momentum_agreement=True
    )
    observer, sink = observed(probe_settings(monitor))
    a = train_gpt.arguments(["--quiet", "--steps", "2"])
    _, chunks, optimizer = train_gpt.build(a)
    if graphed:
        optimizer.step = graphs.OptimizerCudaGraphWrapper(optimizer.step, 1)
    train_gpt.train(a, chunks, optimizer)
    observer.close()
    rows = [
        {(s.family, s.phase, s.name): frame.rows[s.ref.row].tobytes() for s in frame.samples if s.ref.row >= 0} for frame in sink.frames
    ]
    return {"rows": rows, "said": [text for text in texts.texts if "CUDA graph" in text]}


def test_a_wrapper_of_another_name_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The part of the probe that wraps it is off, and is listed."""
    module = importlib.import_module("megatron.core.full_cuda_graph")
    monkeypatch.setattr(requirements, "MISSING", {})
    monkeypatch.delattr(module, "FullCudaGraphWrapper")
    patches._WITHIN_A_STEP[module.__name__](module)
    assert requirements.MISSING == {"megatron.core.full_cuda_graph.FullCudaGraphWrapper": "steps of a CUDA graph of the whole pass"}
