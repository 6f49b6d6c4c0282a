"""Trainings that do unusual things: what is recorded is still right, and nothing is switched off."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from capturing import Block, capture, entries, stat
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from msprobe_engine.core.records import Opaque
from msprobe_engine.core.settings.schema import IncidentSettings, MonitorSettings, ProbeSettings
from msprobe_engine.probe.incident.notify import SilentNotifier, StoreNotifier
from msprobe_engine.probe.sinks.memory import MemorySink
from msprobe_integrations.torch.backend import TorchBackend
from msprobe_integrations.torch.monitor.probe import TorchProbe
from msprobe_integrations.torch.tensors.structure import MAX_VALUES, convert


class TwoHeads(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        trunk = x * 2
        return trunk * 3, trunk * 5


def test_backward_passes_that_use_only_some_outputs_are_kept_apart() -> None:
    """Each of several passes through one graph is a record with its own numbers, also when it reaches only one of two outputs."""
    model, x = nn.Sequential(TwoHeads()), torch.ones(4, requires_grad=True)

    def work() -> None:
        a, b = model(x)
        a.sum().backward(retain_graph=True)
        a.sum().backward(retain_graph=True)
        (b.sum() * 10).backward()

    frame = capture(model, work, "L0")[0]
    seen = [
        [[None if ref is None else stat(frame, ref).max for ref in e.sections[key]] for key in ("input", "output")]
        for name, e in entries(frame).items()
        if ".backward." in name
    ]
    assert seen == [[[1.0, None], [6.0]], [[1.0, None], [6.0]], [[None, 10.0], [100.0]]]


def test_views_of_freed_memory_have_no_statistics() -> None:
    """A view whose storage was given back (sharded training) has an address and no memory: it is not read."""
    whole = torch.randn(1000)
    view = whole[500:900]
    backend = TorchBackend()
    assert backend.reduce(view.clone()).row >= 0  # this kind of tensor is known from now on
    whole.untyped_storage().resize_(0)
    ref = backend.reduce(view)
    assert ref.row == -1
    assert ("freed", True) in ref.description.extra
    backend.want_digest = True
    whole.untyped_storage().resize_(4000)
    part = whole[500:900]
    whole.untyped_storage().resize_(0)
    assert backend.reduce_part(part, 500).row == -1


def test_arguments_with_code_of_their_own_cost_nothing_but_their_value() -> None:
    """Arguments whose own code raises are recorded by type; objects that refer to each other, and long lists, end."""

    class Bad(dict[str, int]):
        def items(self) -> Any:
            raise RuntimeError("no")

    class BadInt(int):
        def __str__(self) -> str:
            raise RuntimeError("no")

    @dataclasses.dataclass
    class Node:
        others: list[Any]

    def reduce(_: torch.Tensor) -> Any:
        raise AssertionError("no tensor here")

    for value in (Bad(a=1), BadInt(3), slice("a", "b")):
        assert isinstance(convert(value, reduce), Opaque)
    nodes = [Node([]) for _ in range(10)]
    for node in nodes:
        node.others.extend(nodes)

    def size(found: Any) -> int:
        children = found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
        return 1 + sum(size(child) for child in children)

    assert size(convert(nodes, reduce)) < 3 * MAX_VALUES
    assert size(convert(list(range(10**6)), reduce)) < 3 * MAX_VALUES
    assert convert(np.float32(2), reduce).json["value"] == 2.0


def test_all_tensors_of_a_long_list_are_recorded() -> None:
    """The limit on values does not count tensors: fused operations take thousands of them."""
    tensors = [torch.zeros(1)] * (2 * MAX_VALUES)
    backend = TorchBackend()
    assert len(convert(tensors, backend.reduce)) == len(tensors)


@pytest.mark.slow
def test_very_deep_graphs_survive() -> None:
    """A chain of 60,000 operations is released without overflowing the stack; how many calls have no gradients is said."""
    x = torch.ones(1, requires_grad=True)

    def work() -> None:
        out = x
        for _ in range(60_000):
            out = out + 1
        out.sum().backward()

    (frame,) = capture(None, work, "L1", stacks=False)
    assert sum(frame.lost.values()) >= 30_000
    assert "Tensor.__add__.0.backward" in entries(frame)


# Activation checkpointing: recomputed calls are marked, stand below the backward record during which they ran, and lose nothing. And
# what runs inside a backward pass without being a recomputation.


class Stack(nn.Module):
    """Checkpoints its blocks, or a function over their parts."""

    def __init__(self, how: str, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(2)])
        self.how, self.reentrant = how, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "function":
            return torch.sigmoid(checkpoint(lambda h: self.layers[0].fc(torch.relu(h)), x, use_reentrant=self.reentrant))
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant) if self.how == "module" else layer(x)
        return x


def run(how: str, reentrant: bool, level: str = "mix") -> dict[str, Any]:
    model = nn.Sequential(Stack(how, reentrant))
    x = torch.ones(2, 4, requires_grad=True)
    return entries(capture(model, lambda: model(x).sum().backward(), level)[0])


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("level", ["L0", "mix"])
def test_recomputed_modules(reentrant: bool, level: str) -> None:
    """Every call of the checkpointed block is recorded again, marked, below the backward record during which it runs: that of the
    module around the checkpoint, or of the block itself, whose graph is used in the other kind."""
    found = run("module", reentrant, level)
    plain = run("plain", reentrant, level)
    again = {name: entry for name, entry in found.items() if entry.tags.get("is_recompute")}
    assert {n for n in plain if ".forward" in n} <= set(found)
    assert {n.split(".forward")[0] for n in again if n.startswith("Module.")} == {
        f"Module.0.layers.{i}.{part}" for i in (0, 1) for part in ("Block", "fc.Linear", "act.GELU")
    }
    for i in (0, 1):
        during = "Module.0.Stack.backward.0" if reentrant else f"Module.0.layers.{i}.Block.backward.0"
        assert again[f"Module.0.layers.{i}.Block.forward.1"].parent == during
        assert again[f"Module.0.layers.{i}.fc.Linear.forward.1"].parent == f"Module.0.layers.{i}.Block.forward.1"
    number = 1 if reentrant else 0  # where the graph of the recomputed call is the one that is used
    assert found[f"Module.0.layers.0.fc.Linear.backward.{number}"].parent == f"Module.0.layers.0.Block.backward.{number}"
    assert found[f"Module.0.layers.0.Block.backward.{number}"].parent == ("Module.0.Stack.backward.0")
    if level == "mix":
        assert again["Functional.linear.2.forward"].parent == "Module.0.layers.1.fc.Linear.forward.1"
        assert not [n for n in found if "CheckpointFunction" in n]


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_functions(reentrant: bool) -> None:
    """A checkpointed function: its calls stand directly below the backward record."""
    found = run("function", reentrant)
    for name in ("Torch.relu.1.forward", "Module.0.layers.0.fc.Linear.forward.1"):
        assert found[name].tags.get("is_recompute") is True
        assert found[name].parent == "Module.0.Stack.backward.0"


def test_a_recomputation_that_is_stopped_early_says_so() -> None:
    """Non-reentrant checkpoints stop when they have what they need: the call that was cut off has no output and is no failure."""
    found = run("function", False)
    cut = [e for e in found.values() if e.tags.get("stopped_early")]
    assert cut
    assert all(e.tags.get("is_recompute") and "raised" not in e.tags and e.sections["output"] is None for e in cut)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return g * 3 * torch.square(x)


def test_code_of_a_backward_pass_is_no_recomputation() -> None:
    """Calls of a custom function's backward and of a tensor hook are recorded below the backward record, not marked."""

    class Around(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = Cube.apply(x * 2)
            y.register_hook(lambda g: g.clamp(max=1e9))
            return y * 1

    model = nn.Sequential(Around())
    found = entries(capture(model, lambda: model(torch.ones(2, requires_grad=True)).sum().backward(), "mix")[0])
    for name in ("Torch.square.0.forward", "Tensor.clamp.0.forward"):
        assert "is_recompute" not in found[name].tags
        assert found[name].parent == "Module.0.Around.backward.0"


def test_records_stand_before_what_encloses_them() -> None:
    """Gradients of weights arrive after those of inputs; their records stand before the backward records of the modules around."""
    names = list(run("plain", True))
    place = {name: i for i, name in enumerate(names)}
    for i in (0, 1):
        block = [
            f"Functional.linear.{i}.backward",
            f"Module.0.layers.{i}.fc.Linear.parameters_grad.0",
            f"Module.0.layers.{i}.fc.Linear.backward.0",
            f"Module.0.layers.{i}.Block.backward.0",
            "Module.0.Stack.backward.0",
        ]
        assert sorted(block, key=place.__getitem__) == block


# The user's own modes and tracers see the same training with the probe and without; threads that share a model keep their records.


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


# A probe that was built before the process group.


def test_incidents_are_announced_when_the_group_came_late(tmp_path: Path) -> None:
    """Ranks that meet after the probe was built tell each other about incidents from the next step on."""
    probe = TorchProbe(ProbeSettings(output_dir=str(tmp_path), strict=True, monitor=MonitorSettings()))
    model = nn.Linear(2, 2)
    probe.attach(model)
    incidents = probe.session.incidents
    assert incidents is not None
    assert isinstance(incidents.notifier, SilentNotifier)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        probe.begin_step(0)
        assert isinstance(incidents.notifier, StoreNotifier)
        assert incidents.world_size == 2
        model(torch.ones(1, 2)).sum().backward()
        probe.end_step()
    finally:
        probe.close()
        dist.destroy_process_group()


# What users hand to `end_step`.


def test_a_scalar_that_is_no_number_costs_itself_only(tmp_path: Path) -> None:
    """Text, huge integers, complex numbers and containers are left out and counted; steps stay apart and memory does not grow."""
    sink = MemorySink()
    settings = ProbeSettings(output_dir=str(tmp_path), monitor=MonitorSettings(), incident=IncidentSettings(level="mix"))
    probe = TorchProbe(settings, extra_sinks=[sink])
    model = nn.Linear(2, 2)
    probe.attach(model, torch.optim.SGD(model.parameters(), 0.1))
    for step, value in enumerate(["text", 10**400, 1j, {"loss": 1.0}, [1.0], object()]):
        probe.begin_step(step)
        model(torch.ones(1, 2)).sum().backward()
        probe.end_step({"loss": value, "other": step})
        assert probe.pipeline.empty
    probe.close()
    assert [frame.scalars["other"] for frame in sink.frames] == [0, 1, 2, 3, 4, 5]
    assert all(frame.lost == {"scalar loss": 1} and "loss" not in frame.scalars for frame in sink.frames)
    assert len({len(frame.entries) for frame in sink.frames}) == 1
