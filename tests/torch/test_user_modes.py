"""The user's own modes and tracers see the same training with the probe and without; threads that share a model keep their records."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from capturing import capture, entries
from torch import nn
from torch.overrides import TorchFunctionMode


class Notes(TorchFunctionMode):
    """Notes every call that reaches it; such a mode may draw random numbers or count, so one call more changes a training."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__qualname__", str(func)))
        return func(*args, **(kwargs or {}))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def test_a_mode_of_the_user_sees_the_calls_of_the_training_only() -> None:
    """Nothing that the probe asks of tensors and parameters reaches a function mode that the user has entered around the window."""
    x = torch.ones(3, 4)

    def noted(probe: bool) -> list[str]:
        model = net()

        def work() -> None:
            model(x).square().mean().backward()
            torch.autograd.backward(model(x).sum())

        with Notes() as notes:
            if probe:
                capture(model, work, "mix", steps=2)
            else:
                work()
                work()
        return notes.seen

    plain = noted(False)
    assert any("square" in name for name in plain)
    assert noted(True) == plain


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_traced_program_has_no_calls_of_the_probe() -> None:
    """torch.jit.trace inside the window gives the operations that it gives without the probe, and nothing of the trace is recorded."""
    model, x = net(), torch.ones(3, 4)
    traced: list[list[str]] = []

    def trace() -> None:
        graph = torch.jit.trace(model, x, check_trace=False).inlined_graph
        traced.append([node.kind() for node in graph.nodes()])

    trace()
    frame = capture(model, trace, "mix")[0]
    assert "aten::relu" in traced[0]
    assert traced[0] == traced[1]
    assert not [name for name in entries(frame) if name.startswith("Module.") or ".linear." in name]


def test_threads_that_call_one_model_get_numbers_of_their_own() -> None:
    """Calls of four threads at once are as many records, none under the name of another."""
    model, x = net(), torch.ones(3, 4)

    def calls() -> None:
        for _ in range(50):
            with torch.no_grad():
                model(x)

    def work() -> None:
        threads = [threading.Thread(target=calls) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    names = set(entries(capture(model, work, "L0")[0]))
    assert names == {f"Module.{i}.{kind}.forward.{n}" for i, kind in enumerate(("Linear", "ReLU", "Linear")) for n in range(200)}
