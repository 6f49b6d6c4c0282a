"""CUDA graphs refuse modules that bear hooks. Hooks of the probe are away where they look, and graphed modules are seen at their boundary.

The capture of a graph needs a GPU; torch's and Megatron's checks for hooks do not, and are the real ones here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from capturing import capture, entries, stat
from torch import nn

from msprobe.pytorch import TorchProbe
from msprobe_integrations.torch.hooks import graphed


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.inner(x))


def hooks_of(model: nn.Module) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


@pytest.fixture(autouse=True)
def _alone() -> None:
    """What an earlier test has dropped without an end still looks through the functions that are replaced here."""
    for hooks in list(graphed.graphed_modules._users):
        graphed.graphed_modules.leave(hooks)
    graphed.graphed_modules._patches.close()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[nn.Module], nn.Module]]:
    """`make_graphed_callables` up to the capture: torch's own check of hooks, then a forward that runs no hooks of what is inside."""
    real = torch.cuda.graphs.make_graphed_callables

    def make(module: nn.Module, sample: Any) -> nn.Module:
        try:
            real(module, sample)
        except AssertionError as error:
            if "hooks" in str(error):
                raise
        except RuntimeError:
            pass  # there is no device
        forward = module.forward

        def replay(*args: Any) -> Any:
            given = [(m, dict(m._forward_pre_hooks), dict(m._forward_hooks)) for m in module.modules() if m is not module]
            for m, _, _ in given:
                m._forward_pre_hooks.clear()
                m._forward_hooks.clear()
            try:
                return forward(*args)
            finally:
                for m, pre, post in given:
                    m._forward_pre_hooks.update(pre)
                    m._forward_hooks.update(post)

        module.forward = replay  # type: ignore[method-assign]
        return module

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", make)
    return lambda module: torch.cuda.make_graphed_callables(module, (torch.ones(2, 4, requires_grad=True),))  # type: ignore[no-any-return]


@pytest.mark.parametrize("level", ["L0", "mix"])
@pytest.mark.parametrize("when", ["before", "while"])
def test_a_graphed_module_has_its_records(graphs: Callable[[nn.Module], nn.Module], level: str, when: str) -> None:
    """A module that is graphed before the window opens, or while it is open, has the record that it has without graphs, backward too; the
    modules inside have none, and no hook is left."""
    model = nn.Sequential(Block(), nn.Linear(4, 4))
    if when == "before":
        graphs(model[0])

    def work() -> None:
        if when == "while":
            graphs(model[0])
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()

    found = entries(capture(model, work, level)[0])
    names = {name for name in found if name.startswith("Module.")}
    assert {"Module.0.Block.forward.0", "Module.0.Block.backward.0", "Module.1.Linear.forward.0"} <= names
    assert not [name for name in names if "inner" in name and "parameters_grad" not in name]
    assert hooks_of(model) == 0
    assert "_compiled_call_impl" not in model[0].__dict__


def test_the_training_has_the_same_numbers_after_the_refusal_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """When making graphs fails, the hooks are on again."""

    def fails(*_: Any) -> None:
        raise RuntimeError("no graph")

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", fails)
    model = nn.Sequential(Block())

    def work() -> None:
        with pytest.raises(RuntimeError, match="no graph"):
            torch.cuda.make_graphed_callables(model[0], (torch.ones(2, 4),))
        model(torch.ones(2, 4))

    assert "Module.0.inner.Linear.forward.0" in entries(capture(model, work, "L0")[0])


def test_the_monitor_stands_aside(tmp_path: Any, graphs: Callable[[nn.Module], nn.Module]) -> None:
    """Modules that the monitor watches can be graphed in the middle of a monitored step."""
    settings = tmp_path / "probe.yaml"
    settings.write_text(f"output_dir: {tmp_path / 'out'}\nmonitor: {{activations: true}}\n")
    model = nn.Sequential(Block(), nn.Linear(4, 4))
    probe = TorchProbe.from_config(str(settings))
    probe.attach(model, torch.optim.SGD(model.parameters(), 0.1))
    probe.begin_step(0)
    assert hooks_of(model) > 0
    graphs(model[0])
    model(torch.ones(2, 4)).sum().backward()
    assert hooks_of(model[0]) == 0
    probe.end_step({})
    probe.close()
    assert hooks_of(model) == 0


class Managed(Block):
    """A layer of Megatron: its call goes to the manager of graphs."""

    def __init__(self, manager: Any) -> None:
        super().__init__()
        self.__dict__["cudagraph_manager"] = manager

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["cudagraph_manager"](self, args, kwargs)


@pytest.mark.parametrize("level", ["L0", "mix"])
@pytest.mark.slow
def test_megatron_finds_no_hooks_of_ours(monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    """Megatron looks for hooks at every call of a layer that it replays, and in all modules of it; the layer has its record."""
    cuda_graphs = pytest.importorskip("megatron.core.transformer.cuda_graphs")
    manager = object.__new__(cuda_graphs.CudaGraphManager)

    def replay(self: Any, module: Any, args: Any, kwargs: Any) -> Any:
        for each in module.modules():
            self.call_ddp_preforward_hook(each)  # Megatron's own check
        return module.forward(*args, **kwargs)

    monkeypatch.setattr(cuda_graphs.CudaGraphManager, "__call__", replay)
    model = nn.Sequential(Managed(manager), nn.Linear(4, 4))
    frame = capture(model, lambda: model(torch.ones(2, 4, requires_grad=True)).sum().backward(), level)[0]
    found = entries(frame)
    assert {"Module.0.Managed.forward.0", "Module.0.Managed.backward.0"} <= set(found)
    assert not [name for name in found if name.startswith("Module.0.inner") and "parameters_grad" not in name]
    assert stat(frame, found["Module.0.Managed.forward.0"].sections["input_args"][0]).max == 1.0
    assert cuda_graphs.CudaGraphManager.__call__ is replay
    assert graphed.is_graphed(model[0])


@pytest.mark.parametrize("level", ["L0", "mix"])
@pytest.mark.parametrize("made", ["before", "while"])
def test_replays_that_megatron_calls_of_transformer_engine(monkeypatch: pytest.MonkeyPatch, level: str, made: str) -> None:
    """With ``--cuda-graph-impl transformer_engine`` Megatron's module calls a graph in place of itself. Whether the graphs were made before
    the window or in it, by Megatron's own helper, the layer has the record that it has without graphs, backward too, and once; what is
    inside has none, and this is said."""
    cuda_graphs = pytest.importorskip("megatron.core.transformer.cuda_graphs")
    module = pytest.importorskip("megatron.core.transformer.module")
    if not hasattr(cuda_graphs, "TECudaGraphHelper"):
        pytest.skip("this Megatron has no helper for graphs of Transformer Engine")
    said: list[str] = []
    monkeypatch.setattr(graphed, "warn_once", lambda _key, text: said.append(text))

    class Graphable(module.GraphableMegatronModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.inner = nn.Linear(4, 4)
            self.config = SimpleNamespace(cuda_graph_impl="transformer_engine", fp8=None, fine_grained_activation_offloading=False)
            self.cuda_graphs: list[Any] = []
            self.cuda_graph_manual_hooks: list[Any] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.inner(x))

        def replay(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
            """What Transformer Engine gives for a micro batch; no hook of what is inside is called."""
            return torch.relu(torch.nn.functional.linear(x, self.inner.weight, self.inner.bias))

    def make(callables: Any, *_: Any, **__: Any) -> Any:
        assert all(hooks_of(one) == 0 for one in callables)  # else it refuses
        return tuple(one.replay for one in callables)

    monkeypatch.setattr(cuda_graphs, "make_graphed_callables", make, raising=False)
    model = nn.Sequential(Graphable(), nn.Linear(4, 4))
    helper = object.__new__(cuda_graphs.TECudaGraphHelper)
    helper.config = SimpleNamespace(sequence_parallel=False, overlap_moe_expert_parallel_comm=False)
    helper.flattened_callables, helper.callables_per_chunk, helper.num_microbatches = [model[0]], [[model[0]]], 1
    for name in ("_start_capturing", "_finish_capturing"):
        monkeypatch.setattr(type(helper), name, lambda *_: None)
    monkeypatch.setattr(type(helper), "_get_cuda_graph_input_data", lambda _: ((), {}))
    if made == "before":
        helper.create_cudagraphs()

    def work() -> None:
        if made == "while":
            helper.create_cudagraphs()
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()

    frame = capture(model, work, level)[0]
    found = entries(frame)
    names = [name for name in found if name.startswith("Module.0") and "parameters_grad" not in name]
    assert names == ["Module.0.Graphable.forward.0", "Module.0.Graphable.backward.0"]
    assert stat(frame, found[names[0]].sections["output"][0]).count == 8
    assert said
    assert "Graphable" in said[0]
    model.eval()
    assert "Module.0.Graphable.forward.0" in entries(capture(model, lambda: model(torch.ones(2, 4)), level)[0])


def test_what_torch_has_graphed_before_is_known() -> None:
    """A module whose forward torch has replaced by replays is told by that function, also when nobody of ours was there."""

    def make_graphed_callables(module: nn.Module) -> None:
        forward = module.forward
        module.forward = lambda *args: forward(*args)  # type: ignore[method-assign]

    module = Block()
    assert not graphed.is_graphed(module)
    make_graphed_callables(module)
    assert graphed.is_graphed(module)
    assert torch.cuda.graphs.make_graphed_callables.__qualname__ == "make_graphed_callables"
