"""Dump only what is asked: what ``scope``, ``list`` and ``risk_level`` keep, and what is done for the rest (nothing)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import capturing
import pytest
import torch
from capturing import Block, capture, entries
from torch import nn

from msprobe_engine.core.records import Frame
from msprobe_engine.probe.sinks.dump.dump_files import DumpSink
from msprobe_integrations.common.capture.filters import RecordFilter
from msprobe_integrations.common.capture.stacks import Stacks
from msprobe_integrations.torch.backend import TorchBackend
from msprobe_integrations.torch.capture.modules import ModuleCapture
from msprobe_integrations.torch.hooks.graph_tasks import current_graph_task


class Net(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(blocks)])
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x.to(torch.float32))


def frame_of(level: str, blocks: int = 3, **asked: Any) -> Frame:
    model = Net(blocks)
    x = torch.ones(3, 4, requires_grad=True)
    return capture(model, lambda: model(x).sum().backward(), level, kept=RecordFilter(level=level, graph_task=current_graph_task, **asked))[
        0
    ]


def kept(frame: Frame) -> list[str]:
    return [e.name for e in frame.entries if "node_only" not in e.tags]


def sections(frame: Frame, name: str) -> set[str]:
    return set(entries(frame)[name].sections)


FC1 = "Module.layers.1.fc.Linear"
BLOCK1 = "Module.layers.1.Block"
INSIDE_1 = [
    "Functional.linear.1.forward",
    f"{FC1}.forward.0",
    "Functional.gelu.1.forward",
    "Module.layers.1.act.GELU.forward.0",
    "Torch.relu.1.forward",
    "Tensor.__add__.1.forward",
    f"{BLOCK1}.forward.0",
]
BACK_1 = [
    "Tensor.__add__.1.backward",
    "Torch.relu.1.backward",
    "Functional.gelu.1.backward",
    "Module.layers.1.act.GELU.backward.0",
    "Functional.linear.1.backward",
    f"{FC1}.parameters_grad.0",
    f"{FC1}.backward.0",
    f"{BLOCK1}.backward.0",
]


def test_list_of_modules() -> None:
    """L0: records whose name has the text, parameter gradients too, and nothing else."""
    assert kept(frame_of("L0", names=["layers.1.fc"])) == [f"{FC1}.forward.0", f"{FC1}.parameters_grad.0", f"{FC1}.backward.0"]


def test_a_listed_module_is_whole_at_mix() -> None:
    """mix: everything inside the calls of a listed module is kept, its backward pass with it, with numbers as if all were recorded."""
    assert kept(frame_of("mix", names=[f"{BLOCK1}.forward.0"])) == INSIDE_1 + BACK_1
    assert kept(frame_of("mix", names=[f"{BLOCK1}.backward"])) == BACK_1
    assert kept(frame_of("mix", names=["Module.layers.1.*"])) == INSIDE_1 + BACK_1


def test_list_of_apis() -> None:
    """L1 and mix: APIs by name; at mix the modules around them are nodes, not records."""
    for level in ("L1", "mix"):
        names = kept(frame_of(level, names=["relu"]))
        assert names == [f"Torch.relu.{n}.forward" for n in range(3)] + [f"Torch.relu.{n}.backward" for n in (2, 1, 0)]
    found = {e.name: e for e in frame_of("mix", names=["relu.1"]).entries}
    assert found["Torch.relu.1.forward"].parent == f"{BLOCK1}.forward.0"
    assert "node_only" in found[f"{BLOCK1}.forward.0"].tags
    assert found["Torch.relu.1.backward"].parent == f"{BLOCK1}.backward.0"
    assert "node_only" in found[f"{BLOCK1}.backward.0"].tags
    assert len(found) == 4


def test_nodes_are_in_the_tree_and_not_in_the_data(tmp_path: Any) -> None:
    """construct.json leads from a kept record to the root; dump.json holds the kept records only."""
    frame = frame_of("mix", names=["relu.1"])
    sink = DumpSink(tmp_path, level="mix")
    sink.write(frame)
    files = {f.name: json.loads(f.read_text()) for f in sink.directory(0).iterdir()}
    assert list(files["dump.json"]["data"]) == ["Torch.relu.1.forward", "Torch.relu.1.backward"]
    assert files["construct.json"] == {
        "Torch.relu.1.forward": f"{BLOCK1}.forward.0",
        f"{BLOCK1}.forward.0": None,
        f"{BLOCK1}.backward.0": None,
        "Torch.relu.1.backward": f"{BLOCK1}.backward.0",
    }


def test_range_of_modules() -> None:
    """L0: from the start of the first to the end of the last; a call that started before has no inputs, one that ends after no output."""
    frame = frame_of("L0", scope=[f"{FC1}.forward.0", "Module.layers.2.fc.Linear.forward.0"])
    assert kept(frame) == [
        f"{FC1}.forward.0",
        "Module.layers.1.act.GELU.forward.0",
        f"{BLOCK1}.forward.0",
        "Module.layers.2.fc.Linear.forward.0",
        "Module.layers.2.Block.forward.0",
    ]
    assert sections(frame, f"{BLOCK1}.forward.0") == {"output", "parameters"}
    assert sections(frame, "Module.layers.2.Block.forward.0") == {"input_args", "input_kwargs"}
    assert sections(frame, "Module.layers.2.fc.Linear.forward.0") == {"input_args", "input_kwargs", "output", "parameters"}


def test_range_of_one_module_holds_what_is_inside() -> None:
    """mix: first and last may be the same call."""
    assert kept(frame_of("mix", scope=[f"{BLOCK1}.forward.0", f"{BLOCK1}.forward.0"])) == INSIDE_1


def test_range_that_ends_at_an_api_has_its_output() -> None:
    """The API that ends a range is recorded whole; the kinds of the ends may differ at mix."""
    frame = frame_of("mix", scope=[f"{FC1}.forward.0", "Torch.relu.2.forward"])
    assert kept(frame)[-2:] == ["Torch.relu.2.forward", "Module.layers.2.Block.forward.0"]
    assert "output" in sections(frame, "Torch.relu.2.forward")


def test_range_from_forward_to_backward() -> None:
    """A range may end in the backward pass; gradients of weights that arrive after the record that ends it belong to it."""
    frame = frame_of("mix", scope=[f"{BLOCK1}.forward.0", f"{BLOCK1}.backward.0"])
    names = kept(frame)
    assert names[:7] == INSIDE_1
    assert names[-8:] == BACK_1
    assert sections(frame, "Functional.linear.1.backward") == {"input", "output"}
    assert not [n for n in names if "layers.0" in n or n.startswith(("Functional.linear.0", "Torch.relu.0"))]


def test_range_within_the_backward_pass() -> None:
    """L1: both ends may be backward records; nothing of the forward pass is kept."""
    names = kept(frame_of("L1", scope=["Torch.relu.1.backward", "Functional.linear.1.backward"]))
    assert names == ["Torch.relu.1.backward", "Functional.gelu.1.backward", "Functional.linear.1.backward"]


def test_range_starts_anew_in_every_step() -> None:
    """A range whose end does not come closes with its step."""
    model = Net(1)
    scope = ["Torch.relu.0.forward", "Torch.relu.7.forward"]
    frames = capture(
        model, lambda: model(torch.ones(1, 4)), "L1", steps=2, kept=RecordFilter(scope, level="L1", graph_task=current_graph_task)
    )
    assert [kept(f)[0] for f in frames] == ["Torch.relu.0.forward"] * 2


def test_scope_and_list_together() -> None:
    """Both must hold."""
    frame = frame_of("L1", scope=["Functional.linear.1.forward", "Functional.linear.2.forward"], names=["linear", "relu"])
    assert kept(frame) == ["Functional.linear.1.forward", "Torch.relu.1.forward", "Functional.linear.2.forward"]


def test_risk_level_leaves_apis_out_and_counts_them() -> None:
    """CORE at mix: modules and core APIs are records; other APIs are nodes, and they count: numbers are those of ALL."""
    core = frame_of("mix", risk_level="CORE")
    everything = {e.name: e for e in frame_of("mix").entries}
    assert [n for n in kept(core) if n.split(".")[0] in ("Torch", "Tensor", "Functional") and n.endswith("forward")] == [
        f"Functional.linear.{n}.forward" for n in range(4)
    ]
    forward = {n for n in everything if n.endswith(".forward") or ".forward." in n}
    assert forward == {e.name for e in core.entries if ".forward" in e.name}
    for entry in core.entries:
        assert entry.parent == everything[entry.name].parent
    assert "Tensor.to.0.forward" not in kept(frame_of("L1", risk_level="FOCUS"))
    assert "Torch.relu.0.forward" in kept(frame_of("L1", risk_level="FOCUS"))


def test_risk_level_gives_way_to_a_list() -> None:
    """With a list or a scope the class of an API does not matter."""
    assert kept(frame_of("L1", names=["Tensor.to"], risk_level="CORE"))[0] == "Tensor.to.0.forward"


def hooked(level: str, names: list[str], blocks: int = 12) -> Counter[str]:
    """Forward hooks and parameter hooks by module path, inside the window."""
    model, found = Net(blocks), Counter[str]()

    def work() -> None:
        for path, module in model.named_modules():
            found[path] += len(module._forward_hooks)
        for path, parameter in model.named_parameters():
            found[path] += len(parameter._post_accumulate_grad_hooks or ())
        model(torch.ones(1, 4)).sum().backward()

    capture(model, work, level, kept=RecordFilter((), names, level))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    return +found


def test_hooks_where_records_can_be_kept() -> None:
    """L0: hooks on listed modules and on those around them; parameter hooks on listed ones. No match: no hook at all."""
    # the list of layers has a hook that never runs: it is on the path
    assert hooked("L0", ["layers.3.fc"]) == Counter(
        {"layers": 1, "layers.3": 1, "layers.3.fc": 1, "layers.3.fc.weight": 1, "layers.3.fc.bias": 1}
    )
    assert set(hooked("L0", ["layers.1.*"])) == {"layers", *(f"layers.1{p}" for p in ("", ".fc", ".act", ".fc.weight", ".fc.bias"))}
    assert hooked("L0", ["nothing"]) == Counter()


def test_hooks_at_mix() -> None:
    """mix: what is inside a listed module is hooked too; modules elsewhere only if an API there could be kept for its own name."""
    assert set(hooked("mix", ["Module.layers.3.Block"])) == {
        "layers",
        *(f"layers.3{part}" for part in ("", ".fc", ".act", ".fc.weight", ".fc.bias")),
    }
    assert len([p for p in hooked("mix", ["relu"]) if not p.endswith(("weight", "bias"))]) == 12 * 3 + 2


class Counting(TorchBackend):
    """Counts reductions."""

    count = 0

    def reduce_unshielded(self, tensor: Any) -> Any:
        type(self).count += 1
        return super().reduce_unshielded(tensor)


def reductions(monkeypatch: pytest.MonkeyPatch, level: str, **asked: Any) -> tuple[int, int]:
    """Tensors looked at, and call stacks walked, with this filter."""
    walked: list[int] = []
    walk: Callable[..., int] = Stacks.capture
    monkeypatch.setattr(Stacks, "capture", lambda *args: walked.append(1) or walk(*args))
    monkeypatch.setattr(capturing, "TorchBackend", Counting)
    Counting.count = 0
    frame_of(level, 12, **asked)
    return Counting.count, len(walked)


@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
def test_nothing_is_done_for_the_rest(monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    """The tensors that are reduced and the stacks that are walked are those of the kept records: in a model with twelve blocks, of one."""
    name = {"L0": ["Module.layers.3.act"], "L1": ["gelu.3."], "mix": ["Module.layers.3.act"]}[level]
    tensors, stacks = reductions(monkeypatch, level, names=name)
    calls = 2 if level == "mix" else 1
    assert stacks == calls
    assert tensors == 4 * calls  # input, output and their gradients
    assert reductions(monkeypatch, level, names=["nothing at all"]) == (0, 0)


def test_hidden_hooks_come_back() -> None:
    """`hide` and `show` (used while code is compiled) leave a call in progress alone."""
    model, seen = Net(1), []
    capturing_modules: list[ModuleCapture] = []
    original = ModuleCapture.install

    def install(self: ModuleCapture) -> None:
        capturing_modules.append(self)
        original(self)

    class Hiding(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            capturing_modules[0].hide()
            seen.append(len(model.head._forward_hooks))
            capturing_modules[0].show()
            seen.append(len(model.head._forward_hooks))
            return x

    model.layers[0].act = Hiding()
    ModuleCapture.install = install  # type: ignore[method-assign]
    try:
        names = kept(capture(model, lambda: model(torch.ones(1, 4)), "L0")[0])
    finally:
        ModuleCapture.install = original  # type: ignore[method-assign]
    assert seen == [0, 1]
    assert "Module.layers.0.act.Hiding.forward.0" in names
    assert "Module.layers.0.Block.forward.0" in names
