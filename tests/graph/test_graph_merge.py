"""Ranks of a parallel job in one graph: against one process that trains the same, and against what 26.2.0 makes of the same dumps."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from existing_graph import Case, Pair, cases, outcome, unpack

from msprobe_engine.align.calls.structure import Matcher
from msprobe_engine.align.parallel import stages
from msprobe_engine.align.parallel.merge_records import origin_of
from msprobe_engine.align.parallel.run_pieces import LooseTree
from msprobe_engine.cli.main import main
from msprobe_engine.core.errors import UsageError
from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.formats.dump.read_table import read_side
from msprobe_engine.measure import distances
from msprobe_engine.report.graph.existing.items import items as items_of
from msprobe_engine.report.graph.global_suspect import node_of
from msprobe_engine.report.graph.merge import device_mesh
from msprobe_engine.report.graph.merge.make import build_merged_graph
from msprobe_engine.report.graph.merge.merge_ranks import MergedRanks, merge_ranks
from msprobe_engine.report.graph.merge.write_back import construct_of, dump_of, stacks_of
from msprobe_engine.report.graph.nodes.build import build
from msprobe_engine.report.graph.nodes.model import Comparison, Graph
from msprobe_engine.report.graph.options import GraphOptions, Layout
from msprobe_engine.report.graph.source import jobs_of

MERGES = {case.name.removeprefix("merge-"): case for case in cases("26.2.0") if case.name.startswith("merge-")}
STATISTICS = ("Max", "Min", "Mean", "Norm")
OF_SUM = "one term on each of ranks"
"""In the note of a row that has the numbers of a sum."""


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name of a dump of the archive -> its step."""
    root = tmp_path_factory.mktemp("merge")

    @cache
    def found(name: str) -> Path:
        return unpack(Case("26.2.0", name, f"megatron:{name}/step0"), root)[0]

    return found


def layouts(case: Case) -> tuple[Layout, ...]:
    """What the flags of a case say."""
    values: dict[str, list[str]] = {}
    for word in case.flags:
        if word.startswith("--"):
            values[word[2:]] = []
        else:
            values[list(values)[-1]].append(word)
    n = len(values["rank_size"])
    columns = [list(map(int, values.get(name, ["1"] * n))) for name in ("rank_size", "tp", "pp", "vpp")]
    return tuple(map(Layout, *columns, values.get("order", ["tp-cp-ep-dp-pp"] * n)))


def made(dumps: Callable[[str], Path], name: str) -> tuple[list[Graph | Comparison], list[Pair]]:
    """Ours of a case, and the existing tool's."""
    case = MERGES[name]
    target, golden = (dumps(place.split(":")[1].split("/")[0]) if place else None for place in (case.target, case.golden))
    assert target is not None
    options = GraphOptions(merge="given", layouts=layouts(case), match="exact")
    found = [build_merged_graph(job, options, [], []) for job in jobs_of(target, golden, options).jobs]
    return found, outcome(case).pairs


def sides(place: Path) -> dict[int, DumpTable]:
    return {int(path.parent.name[4:]): read_side(path) for path in sorted(place.glob("rank*/dump.json"))}


def one_whole(place: Path) -> MergedRanks:
    return merge_ranks(sides(place))


@pytest.mark.parametrize("name", ["tp2", "dp2"])
def test_nodes_and_edges_are_those_of_the_existing_tool(name: str, dumps: Callable[[str], Path]) -> None:
    """Tensor-parallel ranks, and single ranks when sizes are given: the same nodes, the same parents, the same rows."""
    graphs, pairs = made(dumps, name)
    assert len(graphs) == len(pairs)
    for graph, pair in zip(graphs, pairs):
        assert isinstance(graph, Graph)
        assert (graph.step, graph.rank) == (pair.step, pair.rank)
        assert set(graph.names) == set(pair.npu)
        for node, label in enumerate(graph.names[1:], 1):
            theirs = pair.npu[label]
            assert graph.names[graph.parents[node]] == theirs["up_node"]
            assert {graph.names[child] for child in graph.children[node]} == set(theirs["sub_nodes"] or [])
            ours, others = items_of(graph, node), (theirs["input_data"], theirs["output_data"])
            assert [set(one) for one in ours] == [set(one) for one in others]


def test_values_differ_from_the_existing_tool_for_known_reasons_alone(dumps: Callable[[str], Path]) -> None:
    """A merged tensor has the same statistics, but where ours are those of the sum it is a term of, or where the existing tool merges
    nothing: in the optimizer, and gradients that are added up."""
    (graph,), (pair,) = made(dumps, "tp2")
    assert isinstance(graph, Graph)
    assert graph.side is not None
    reasons: Counter[str] = Counter()
    for node in range(1, len(graph)):
        theirs = pair.npu[graph.names[node]]
        notes = graph.merge_notes.get(node, [])
        for rows, items in ((graph.inputs(node), theirs["input_data"]), (graph.outputs(node), theirs["output_data"])):
            for row in rows:
                if not isinstance(graph.side.shape[row], list) or row in graph.side.nonfloat_stats:
                    continue
                other = [items[graph.side.name[row]].get(key) for key in STATISTICS]
                ours = graph.side.stats[row]
                try:
                    close = np.allclose(ours, np.array(other, np.float64), rtol=1e-6, atol=1e-12, equal_nan=True)
                except (TypeError, ValueError):
                    close = bool(np.isnan(ours).all())
                if close:
                    reasons["the same"] += 1
                    continue
                place = graph.side.name[row][len(graph.names[node]) + 1 :]
                note = next((text for text in notes if text.startswith(f"{place}: ")), "")
                assert note, graph.side.name[row]
                merged_there = bool(theirs["parallel_merge_info"])
                assert OF_SUM in note or not merged_there, (graph.side.name[row], note)
                reasons["sum" if OF_SUM in note else "not merged there"] += 1
    assert reasons["the same"] > 2500
    assert 10 < reasons["sum"] < 200
    assert reasons["not merged there"] < 300


@pytest.mark.parametrize("name", ["pp2", "vpp2", "tp2pp2", "order"])
def test_a_pipeline_has_all_that_the_existing_tool_shows_and_what_it_loses(name: str, dumps: Callable[[str], Path]) -> None:
    """Every node of theirs is there, in the same module; so is what it drops: the optimizer of later stages, and what their own autograd
    functions call, whose names it gives twice."""
    (graph,), (pair,) = made(dumps, name)
    assert isinstance(graph, Graph)
    assert set(pair.npu) <= set(graph.names)
    more = Counter(graph.names[graph.parents[graph.index[label]]].split(".")[0] for label in set(graph.names) - set(pair.npu))
    assert more["optimizer"] > 100
    for label, theirs in pair.npu.items():
        parent = graph.names[graph.parents[graph.index[label]]] if label != "DefaultModel" else theirs["up_node"]
        twice = {"Autograd"} & {parent.split(".")[0], theirs["up_node"].split(".")[0], label.split(".")[0]}
        assert parent == theirs["up_node"] or twice, (label, parent, theirs["up_node"])
    layers = {label.split(".layers.")[1].split(".")[0] for label in graph.names if ".layers." in label}
    assert layers == {str(n) for n in range(len(layers))}


@pytest.mark.slow
def test_runs_that_are_cut_alike_have_the_index_of_the_existing_tool(dumps: Callable[[str], Path]) -> None:
    """Two runs of two tensor-parallel ranks: precision index and partners are those of 26.2.0, but for one value that round-off decides."""
    (found,), (pair,) = made(dumps, "tp2-scaled")
    assert isinstance(found, Comparison)
    graph = found.target
    assert set(graph.names) == set(pair.npu)
    others = {label for label, node in graph.index.items() if found.index[node] != pair.npu[label]["precision_index"]}
    assert others <= {"Tensor.addcmul_.15.forward"}


@pytest.mark.parametrize("name", ["tp2-compare", "pp2-compare"])
def test_runs_cut_in_different_ways_as_the_existing_tool_has_them(name: str, dumps: Callable[[str], Path]) -> None:
    """With ``--match exact`` the same nodes have partners as in 26.2.0, and its index, but where its own reasons are false: terms of sums
    beside sums, an optimizer of one rank beside that of all, gradients that were sent and are said to require gradients."""
    (found,), (pair,) = made(dumps, name)
    assert isinstance(found, Comparison)
    outcomes = Counter[str]()
    for label, theirs in pair.npu.items():
        ours, other = found.index[found.target.index[label]], theirs["precision_index"]
        assert (ours is None) == (other is None), label
        outcomes["same" if ours == other else "healthy here" if not ours else "healthy there"] += 1
    assert outcomes["same"] > 0.95 * len(pair.npu)
    assert outcomes["healthy there"] < 0.01 * len(pair.npu)


def test_pieces_are_the_tensor_of_one_process(dumps: Callable[[str], Path]) -> None:
    """Statistics and shapes of what two tensor-parallel ranks hold together are those of one process; other ones are what only the cut
    run does (places in a vocabulary that is cut, memory that is not set, moments that are all zeros)."""
    found, one = one_whole(dumps("tp2")), read_side(dumps("tp1") / "rank0" / "dump.json")
    pairs = Matcher(LooseTree(found.side), LooseTree(one)).run().pairs
    good, shapes, off = 0, 0, Counter[str]()
    for i, j in distances.paired_rows(found.side, one, pairs)[0]:
        if not isinstance(one.shape[j], list) or i in found.side.values or not one.stats[j][3] > 0:
            continue
        mine, other = found.side.stats[i], one.stats[j]
        if np.abs(mine - other).max() > 1e-3 * np.abs(other).max():
            off[found.side.ops[found.side.op[i]].split(".")[1]] += 1
            continue
        good += 1
        shapes += found.side.shape[i] == one.shape[j]
    assert good > 2000
    assert shapes > 0.97 * good
    assert sum(off.values()) < 0.05 * good
    assert not any(name in off for name in ("matmul", "linear", "gelu", "softmax", "layer_norm", "module"))
    assert not any("differ between ranks that should agree" in text for text in found.said)


@pytest.mark.fast_cells("tp2-tp1")
@pytest.mark.parametrize(("target", "golden"), [("tp2", "tp1"), ("dp2", "tp1")])
def test_runs_cut_in_different_ways_are_no_difference(target: str, golden: str, dumps: Callable[[str], Path]) -> None:
    """One graph of all ranks against one process: nothing is found, no node is an error, and what cannot be compared says why."""
    options = GraphOptions(merge="auto")
    (job,) = jobs_of(dumps(target), dumps(golden), options).jobs
    assert job.across
    assert [rank for rank, _ in job.members] == [0, 1]
    found = build_merged_graph(job, options, [], [])
    assert isinstance(found, Comparison)
    assert found.suspect is None
    assert not any(value == 1 for value in found.index)
    assert sum(partner >= 0 for partner in found.partners) > 0.9 * len(found.partners)
    assert any("not compared: parts of a sum" in text for texts in found.target.merge_notes.values() for text in texts)


@pytest.mark.slow
def test_a_difference_is_found_across_layouts(dumps: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A module that scales its output on two ranks, beside one process: the command names it, with the rank, and ends with 1."""
    target, golden = dumps("tp2_scaled"), dumps("tp1")
    code = main(["graph_visualize", "-tp", str(target), "-gp", str(golden), "-o", str(tmp_path), "--merge", "auto", "--format", "html"])
    said = capsys.readouterr().out
    assert code == 1, said
    assert said.startswith("First difference: ")
    assert "(step 0, rank" in said.splitlines()[0]


def test_the_merged_dump_is_the_merged_graph(dumps: Callable[[str], Path], tmp_path: Path) -> None:
    """``--file_type json``: what is written reads back as the same nodes, parents and rows."""
    (graph,), _ = made(dumps, "tp2")
    assert isinstance(graph, Graph)
    for name, document in (("dump", dump_of(graph)), ("construct", construct_of(graph)), ("stack", stacks_of(graph))):
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    side = read_side(tmp_path / "dump.json")
    again = build(side)
    ours = graph.side
    assert ours is not None
    assert not side.problems
    assert {name: graph.names[graph.parents[node]] for name, node in graph.index.items() if node} == {
        name: again.names[again.parents[node]] for name, node in again.index.items() if node
    }
    rows = {name: row for row, name in enumerate(side.name)}
    assert set(rows) == set(ours.name)
    for row, name in enumerate(ours.name):
        other = rows[name]
        assert (ours.shape[row], ours.dtype[row], ours.values.get(row)) == (side.shape[other], side.dtype[other], side.values.get(other))
        assert np.array_equal(ours.stats[row], side.stats[other], equal_nan=True)
    theirs = outcome(MERGES["tp2-json"]).raw
    assert set(theirs["step0/rank0/dump.json"]["data"]) == set(dump_of(graph)["data"])
    assert dump_of(graph)["is_merged"] is theirs["step0/rank0/dump.json"]["is_merged"] is True


def test_json_command(dumps: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command writes three files per copy of the model, for one run alone, and never over others."""
    flags = ["--rank_size", "2", "--tp", "2", "--pp", "1", "--file_type", "json"]
    run = ["graph_visualize", "-tp", str(dumps("tp2")), "-o", str(tmp_path / "out")]
    assert main([*run, *flags]) == 0
    assert sorted(path.name for path in (tmp_path / "out").rglob("*.json")) == ["construct.json", "dump.json", "stack.json"]
    assert main([*run, *flags]) == 2
    assert "is there already" in capsys.readouterr().err
    assert main([*run, "--file_type", "json"]) == 2


def test_a_replica_that_differs_is_said(dumps: Callable[[str], Path], tmp_path: Path) -> None:
    """A call that took in the same on all ranks and gave out something else, and a weight that the dump says all ranks hold whole."""
    place = tmp_path / "step0"
    shutil.copytree(dumps("tp2"), place)
    path = place / "rank1" / "dump.json"
    document = json.loads(path.read_text())
    norm = next(name for name in document["data"] if name.startswith("Functional.layer_norm.") and name.endswith(".forward"))
    document["data"][norm]["output"][0]["Max"] += 1.0
    path.write_text(json.dumps(document))
    found = one_whole(place)
    assert any("1 tensors differ between ranks that should agree" in text and norm in text for text in found.said)
    notes = found.notes[found.side.ops.index(norm)]
    assert any("all ranks took in the same" in text for text in notes)


def test_copies_of_the_model_that_differ_are_said(dumps: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights of two data-parallel ranks that are not the same are named."""
    place = tmp_path / "step0"
    shutil.copytree(dumps("dp2"), place)
    path = place / "rank1" / "dump.json"
    document = json.loads(path.read_text())
    module = next(name for name, record in document["data"].items() if record.get("parameters"))
    next(iter(document["data"][module]["parameters"].values()))["Norm"] *= 1.5
    path.write_text(json.dumps(document))
    main(["graph_visualize", "-tp", str(place), "-o", str(tmp_path / "out"), "--merge", "auto", "--format", "html"])
    said = capsys.readouterr().err
    assert "copies of the model differ from that of rank 0: that of rank 1 in 1 parameters" in said
    assert module in said


def test_a_record_of_any_rank_has_its_node(dumps: Callable[[str], Path]) -> None:
    """Suspects are named as in the dump of their rank: in a merged pipeline that is the record that came from there."""
    found = one_whole(dumps("tp2pp2"))
    graph = build(found.side, 0, 0)
    name = next(op for op in sides(dumps("tp2pp2"))[2].ops if ".layers.0." in op and op.startswith("Module."))
    for rank in (2, 3):  # rank 3 was merged into rank 2
        node = node_of(graph, rank, name)
        assert node is not None
        assert ".layers.1." in graph.names[node]
    node = node_of(graph, 1, name)
    assert node is not None
    assert graph.names[node] == name
    assert node_of(graph, 0, "Tensor.nothing.0.forward") is None


@pytest.mark.parametrize(
    ("layout", "ranks", "said"),
    [
        (Layout(4, 3, 1), 4, "no whole number of models"),
        (Layout(4, 2, 2), 2, "no dump of ranks 2, 3"),
        (Layout(2, 2, 1), 3, "dumps of ranks 2 besides"),
        (Layout(4, 2, 2, 1, "tp-pp-xx"), 4, "must have each of"),
        (Layout(4, 2, 2, 1, "tp-dp"), 4, "lacks pp"),
        (Layout(2, 2, 1, 2), 2, "virtual stages need a pipeline"),
    ],
)
def test_sizes_that_make_no_sense(layout: Layout, ranks: int, said: str) -> None:
    """Wrong sizes, missing ranks and wrong orders are refused, with what is allowed."""
    with pytest.raises(UsageError, match=said):
        device_mesh.check(layout, dict.fromkeys(range(ranks)))


def test_sizes_that_contradict_the_dump(dumps: Callable[[str], Path]) -> None:
    """A dump that says how it was cut is believed."""
    options = GraphOptions(merge="given", layouts=(Layout(4, 1, 4),))
    (job,) = jobs_of(dumps("tp2pp2"), None, options).jobs
    with pytest.raises(UsageError, match="was made with 2"):
        build_merged_graph(job, options, [], [])


def test_ranks_with_a_batch_each_are_no_model(dumps: Callable[[str], Path], tmp_path: Path) -> None:
    """Without a word on the layout in the dumps, ranks are put together only when the first module takes in the same on all of them: masks
    and places are the same on data-parallel ranks too."""
    options = GraphOptions(merge="auto")
    for name, expected in (("dp2", [[0], [1]]), ("tp2", [[0, 1]])):
        place = tmp_path / name / "step0"
        shutil.copytree(dumps(name), place)
        for path in place.rglob("dump.json"):
            document = json.loads(path.read_text())
            document.pop("parallel", None)
            path.write_text(json.dumps(document, indent=1))
        found = jobs_of(place, None, options)
        assert [[rank for rank, _ in job.members] for job in found.jobs] == expected
        assert any("do not say how the job was cut" in note for note in found.notes) == (name == "dp2")


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (Layout(8, 2, 2), {1: (1, 0, 0), 2: (0, 1, 0), 5: (1, 0, 1)}),
        (Layout(8, 2, 2, 1, "tp-pp-dp"), {1: (1, 0, 0), 2: (0, 0, 1), 5: (1, 1, 0)}),
    ],
)
def test_places_of_ranks(layout: Layout, expected: dict[int, tuple[int, int, int]]) -> None:
    """Places follow each other in the order that was given, the fastest first."""
    found = device_mesh.mesh_of_layout(layout)
    assert {rank: tuple(found[rank][axis] for axis in ("tp", "dp", "pp")) for rank in expected} == expected


@pytest.mark.parametrize("name", ["micro", "vpp2"])
def test_batches_are_loaded_outside_of_the_model(name: str, dumps: Callable[[str], Path]) -> None:
    """What a stage calls outside of its modules before the next forward pass is outside in the joined pipeline too, not in the backward
    pass before: else batches of one micro step are held against those of another."""
    ranks = sides(dumps(name))
    joined = stages.merge_pipelines(ranks, ranks, [], [])[0]
    loaded = 0
    for op, label in enumerate(joined.ops):
        origin = origin_of(joined, op)
        if origin is not None and any("in _batches" in line for line in ranks[origin[0]].stacks.get(origin[1], [])[:1]):
            assert joined.parent(label) is None, (label, origin)
            loaded += 1
    assert loaded > 16


def _rank_of_experts(root: Path, rank: int, tp: int, ep: int, dp: int) -> Path:
    """A dense layer that is cut by tensor parallelism, and one expert of its own."""

    def tensor(shape: list[int], value: float) -> dict[str, Any]:
        numbers = {"Max": value, "Min": -value, "Mean": value / 4, "Norm": value * 3}
        return {"type": "torch.Tensor", "dtype": "torch.float32", "shape": shape, **numbers, "requires_grad": True}

    def call(taken: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
        return {"input_args": [taken], "input_kwargs": {}, "output": [given]}

    batch, own = tensor([6, 8], 1.0 + dp), tensor([6, 16], 2.0 + rank)
    data = {
        "Module.layers.0.fc.Linear.forward.0": call(batch, own),
        "Module.layers.0.mlp.experts.local_experts.0.MLP.forward.0": call(
            tensor([3 + rank, 8], 5.0 + rank), tensor([3 + rank, 8], 9.0 + rank)
        ),
        "Module.layers.0.Layer.forward.0": call(batch, tensor([6, 8], 4.0)),
    }
    place = {
        "rank": {"tp": tp, "pp": 0, "dp": dp, "cp": 0, "ep": ep, "etp": 0},
        "size": {"tp": 2, "pp": 1, "dp": 2, "cp": 1, "ep": 2, "etp": 1},
    }
    directory = root / "step0" / f"rank{rank}"
    directory.mkdir(parents=True)
    head = {"task": "statistics", "level": "L0", "framework": "pytorch", "parallel": place}
    (directory / "dump.json").write_text(json.dumps({**head, "data": data}))
    around = "Module.layers.0.Layer.forward.0"
    (directory / "construct.json").write_text(json.dumps({name: None if name == around else around for name in data}))
    (directory / "stack.json").write_text("{}")
    return directory / "dump.json"


def test_experts_of_tensor_parallel_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where the ranks of a tensor-parallel group hold different experts (their own tensor parallel size is 1), dense layers are put
    together and all experts are shown, with the numbers of the whole model; each replica has experts of its own and is a model."""
    files = [_rank_of_experts(tmp_path, rank, tp=rank % 2, ep=rank % 2, dp=rank // 2) for rank in range(4)]
    found = merge_ranks({rank: read_side(file) for rank, file in enumerate(files[:2])})
    assert found.said == []
    experts = "Module.layers.0.mlp.experts.local_experts"
    assert [name for name in found.side.ops if "experts" in name] == [f"{experts}.{n}.MLP.forward.0" for n in range(2)]
    rows = {name: row for row, name in enumerate(found.side.name)}
    both = found.side.stats[rows["Module.layers.0.fc.Linear.forward.0.output.0"]]
    assert (both[0], both[1], both[3]) == (3.0, -3.0, pytest.approx((6**2 + 9**2) ** 0.5))
    second = rows[f"{experts}.1.MLP.forward.0.output.0"]
    assert (found.side.shape[second], found.side.stats[second][0]) == ([4, 8], 10.0)
    assert main(["graph", str(tmp_path), "-o", str(tmp_path / "out"), "--format", "html", "--merge", "auto"]) == 0
    said = capsys.readouterr().out
    assert "2 ranks" in said
    assert "not shown" not in said


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([(0, 0), (0, 1), (1, 0), (1, 1)], [[0, 1], [2, 3]]),
        ([(0, 0), (1, 1), (2, 0), (3, 1)], [[0, 1, 2, 3]]),
    ],
    ids=["experts over tensor-parallel ranks", "experts over replicas"],
)
def test_copies_that_share_experts_are_one_model(ranks: list[tuple[int, int]], expected: list[list[int]]) -> None:
    """A copy that has all experts is a model by itself."""
    sizes = {"tp": 2, "pp": 1, "dp": 4, "ep": 2}
    headers = {rank: {"parallel": {"rank": {"dp": dp, "ep": ep}, "size": sizes}} for rank, (dp, ep) in enumerate(ranks)}
    assert device_mesh.models(headers) == expected
