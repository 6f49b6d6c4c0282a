"""Graphs of dumps: what is a node, below which, in which order; held against the existing tool, and where its files say nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from existing_graph import VERSIONS, cases, outcome, unpack

from msprobe_engine.formats.dump.read_table import read_side
from msprobe_engine.report.graph.existing.items import items
from msprobe_engine.report.graph.existing.vis_json import stack_line
from msprobe_engine.report.graph.nodes.build import backward_of, build, forward_of
from msprobe_engine.report.graph.nodes.model import API, API_COLLECTION, MODULE, ROOT, Graph
from msprobe_engine.report.graph.options import GraphOptions
from msprobe_engine.report.graph.source import jobs_of

CASES = {"statistics_mix-stacks", "statistics_mix-more", "statistics_L0-build", "two_ranks-build", "nan-after", "megatron-build"}


def _tensor(value: float = 1.0) -> dict[str, Any]:
    stats = {"Max": value, "Min": -value, "Mean": 0.0, "Norm": value}
    return {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2, 2], **stats, "requires_grad": True}


def _record(name: str) -> dict[str, Any]:
    if ".parameters_grad" in name:
        return {"weight": [_tensor()]}
    if "backward" in name:
        return {"input": [_tensor()], "output": [_tensor()]}
    return {"input_args": [_tensor()], "input_kwargs": {}, "output": [_tensor()]}


def write(root: Path, names: list[str], construct: dict[str, Any], stack: dict[str, Any] | None = None) -> Path:
    """A rank directory with these records."""
    root.mkdir(parents=True)
    header = {"task": "statistics", "level": "mix", "framework": "pytorch", "dump_data_dir": None}
    (root / "dump.json").write_text(json.dumps(header | {"data": {name: _record(name) for name in names}}))
    (root / "construct.json").write_text(json.dumps(construct))
    (root / "stack.json").write_text(json.dumps(stack or {}))
    return root / "dump.json"


def _graph(root: Path, names: list[str], construct: dict[str, Any], stack: dict[str, Any] | None = None) -> Graph:
    return build(read_side(write(root, names, construct, stack)))


def _children(graph: Graph, name: str) -> list[str]:
    return [graph.names[child] for child in graph.children[graph.index[name]]]


@pytest.mark.parametrize("version", VERSIONS)
def test_nodes_are_those_of_the_existing_tool(version: str, tmp_path: Path) -> None:
    """Names, types, what encloses them, their order, and their call stacks, of dumps of both versions. 8.1.1 has no node for gradients
    with a number."""
    held = 0
    for case in cases(version):
        if case.name not in CASES:
            continue
        target, _ = unpack(case, tmp_path)
        pairs = {(pair.step, pair.rank): pair for pair in outcome(case).pairs}
        for job in jobs_of(target, None, GraphOptions()).jobs:
            graph, theirs = build(read_side(job.target), old=version == "8.1.1"), pairs[job.key].npu
            ours = {name for name in graph.names if version != "8.1.1" or not name.endswith(".parameters_grad.0")}
            assert ours == set(theirs), case.name
            whole = version == "26.2.0" or "-cs" in case.flags
            for node, name in enumerate(graph.names):
                other = theirs.get(name)
                if other is None:
                    continue
                above = graph.names[graph.parents[node]] if node else ""
                stack = graph.stacks[node] if whole else stack_line(name, graph.stacks[node])
                inside = [graph.names[child] for child in graph.children[node] if graph.names[child] in ours]
                mine = (graph.types[node], above, inside, list(stack))
                assert mine == (int(other["node_type"]), other["up_node"], other["sub_nodes"] or [], other["stack"] or []), name
                held += 1
    assert held > 400


def test_twins_of_calls() -> None:
    """A backward record belongs to its forward call; further passes through it (numbers from 1,000,000 on) to the same one."""
    assert forward_of("Functional.linear.2.backward") == "Functional.linear.2.forward"
    assert forward_of("Functional.linear.1000002.backward") == "Functional.linear.2.forward"
    assert forward_of("Module.a.backward.b.Linear.backward.1") == "Module.a.backward.b.Linear.forward.1"
    assert forward_of("Module.a.Linear.forward.0") is None
    assert backward_of("Module.forward.x.Linear.forward.3") == "Module.forward.x.Linear.backward.3"
    assert backward_of("optimizer") is None


def test_calls_between_modules_are_collected(tmp_path: Path) -> None:
    """Two or more in a row at the top; one alone stays where it is."""
    names = ["Torch.a.0.forward", "Module.m.M.forward.0", "Torch.b.0.forward", "Torch.c.0.forward", "optimizer"]
    graph = _graph(tmp_path / "r", names[:-1], dict.fromkeys(names))
    assert _children(graph, "DefaultModel") == ["Torch.a.0.forward", "Module.m.M.forward.0", "Apis_Between_Modules.0", "optimizer"]
    assert _children(graph, "Apis_Between_Modules.0") == ["Torch.b.0.forward", "Torch.c.0.forward"]
    assert [graph.types[graph.index[name]] for name in (*names[:2], "Apis_Between_Modules.0", "optimizer")] == [
        API,
        MODULE,
        API_COLLECTION,
        MODULE,
    ]


def test_a_backward_call_without_a_parent_is_inside_the_twin_of_its_forward_parent(tmp_path: Path) -> None:
    """construct.json need not say it."""
    names = ["Torch.a.0.forward", "Module.m.M.forward.0", "Module.m.M.backward.0", "Torch.a.0.backward"]
    graph = _graph(tmp_path / "r", names, {**dict.fromkeys(names), "Torch.a.0.forward": "Module.m.M.forward.0"})
    assert _children(graph, "Module.m.M.backward.0") == ["Torch.a.0.backward"]


def test_gradients_are_below_the_last_backward_call(tmp_path: Path) -> None:
    """Without a backward call below the forward one; placeholders that were never filled in are no node."""
    names = [
        "Module.m.M.forward.0",
        "Module.m.M.backward.0",
        "Module.m.M.backward.1",
        "Module.m.M.parameters_grad.0",
        "Module.n.N.forward.0",
    ]
    path = write(tmp_path / "r", [*names, "Module.n.N.parameters_grad"], dict.fromkeys(names[:3] + names[4:]))
    graph = build(read_side(path))
    assert _children(graph, "Module.m.M.backward.1") == ["Module.m.M.parameters_grad.0"]
    assert _children(graph, "Module.n.N.forward.0") == ["Module.n.N.parameters_grad"]
    document = json.loads(path.read_text())
    document["data"]["Module.n.N.parameters_grad"] = {"weight": [None]}
    path.write_text(json.dumps(document))
    assert "Module.n.N.parameters_grad" not in build(read_side(path)).index


def test_micro_steps_begin_with_a_forward_call_behind_a_backward_one(tmp_path: Path) -> None:
    """What is inside of a node, and what stands between, belongs to the current one; numbers of construct.json come first."""
    names = [f"Module.m.M.{way}.{n}" for n in range(2) for way in ("forward", "backward")]
    graph = _graph(tmp_path / "r", [*names, "Torch.a.0.forward"], {**dict.fromkeys(names), "Torch.a.0.forward": names[2]})
    assert [graph.micro_steps[graph.index[name]] for name in (*names, "Torch.a.0.forward")] == [0, 0, 1, 1, 1]
    assert graph.micro_step_count == 2
    said = {name: [None, number] for name, number in zip(names, (0, 1, 1, 0))} | {"megatron_micro_step_number": 2}
    graph = _graph(tmp_path / "s", names, said)
    assert "megatron_micro_step_number" not in graph.index
    assert [graph.micro_steps[graph.index[name]] for name in names] == [0, 1, 1, 0]


def test_stacks_are_shared_and_those_of_the_forward_call(tmp_path: Path) -> None:
    """A hundred thousand nodes have a few hundred stacks."""
    names = ["Torch.a.0.forward", "Torch.b.0.forward", "Torch.a.0.backward"]
    graph = _graph(tmp_path / "r", names, dict.fromkeys(names), {"0": [names[:2], ["File x.py, line 1, in f, \n y"]]})
    stacks = [graph.stacks[graph.index[name]] for name in names]
    assert stacks[0] is stacks[1] is stacks[2] == ("File x.py, line 1, in f, \n y",)


def test_without_construct_the_paths_of_modules_make_the_hierarchy(tmp_path: Path) -> None:
    """Of several calls of a parent the numbers tell which; functions stand in order."""
    names = ["Torch.a.0.forward"]
    for n in range(4):
        names += [f"Module.m.block.fc.Linear.forward.{n}"] + ([f"Module.m.M.forward.{n // 2}"] if n % 2 else [])
    graph = _graph(tmp_path / "r", names, {})
    assert graph.by_names
    assert _children(graph, "Module.m.M.forward.1") == ["Module.m.block.fc.Linear.forward.2", "Module.m.block.fc.Linear.forward.3"]
    assert _children(graph, "DefaultModel") == ["Torch.a.0.forward", "Module.m.M.forward.0", "Module.m.M.forward.1"]


def test_a_damaged_construct_still_makes_a_graph(tmp_path: Path) -> None:
    """Records that enclose each other, themselves, or are in something that is no name."""
    names = [f"Torch.{letter}.0.forward" for letter in "abcde"]
    construct = dict(zip(names, (names[1], names[0], names[2], 7, ["", "x", None])))
    graph = _graph(tmp_path / "r", names, construct)
    assert set(names) < set(graph.names)
    assert any("enclose each other" in problem for problem in graph.problems)
    seen = [ROOT]
    for node in seen:
        seen += graph.children[node]
    assert sorted(seen) == list(range(len(graph)))


def test_displaced_backward_calls_go_where_their_forward_calls_are(tmp_path: Path) -> None:
    """Behind a module whose backward hook was never called construct.json has all others inside of it; 8.1.1 leaves them there."""
    names = ["Module.a.A.forward.0", "Module.b.B.forward.0", "Module.b.B.backward.0", "Module.a.A.backward.0"]
    path = write(tmp_path / "r", names, {**dict.fromkeys(names), names[3]: names[2]})
    assert _children(build(read_side(path)), "DefaultModel") == names
    assert _children(build(read_side(path), old=True), names[2]) == [names[3]]


def test_calls_that_were_not_recorded_are_nodes_without_rows(tmp_path: Path) -> None:
    """construct.json of 26.2.0 has them, and of task structure nothing else is there."""
    graph = _graph(tmp_path / "r", [], {"Torch.a.0.forward": "Module.m.M.forward.0", "Module.m.M.forward.0": None})
    assert _children(graph, "Module.m.M.forward.0") == ["Torch.a.0.forward"]
    assert graph.records == [-1, -1, -1]
    assert items(graph, 1) == ({}, {})
