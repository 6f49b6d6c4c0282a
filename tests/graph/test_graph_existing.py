"""Our graph files against those that the existing tool wrote of the same dumps, cell by cell.

The fast tier has a few cases of each kind.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from pathlib import Path

import pytest
from existing_graph import VERSIONS, Case, cases, outcome, unpack
from graph_reasons import differences, reason
from ours_graph import options_of, ours

from msprobe_engine.report.graph.options import DB, MODEL_EXPLORER, NEW, OLD, VIS, GraphOptions
from msprobe_engine.report.graph.run import run

SHORT = (
    "statistics_mix-bf16",
    "statistics_L0-nan",
    "md5_mix-more",
    "tensor_mix-nan",
    "statistics_mix-dtype-fuzzy",
    "two_ranks-nan",
    "nan-after",
    "job-structures",
    "mindspore-build",
    "own-nan",
)
HELD = ("statistics", "md5", "tensor", "two_ranks", "nan", "job", "mindspore", "megatron", "merge-dp2", "own")
LEFT_OUT = ("statistics_L1-build",)
"""The existing tool makes nothing of a dump without construct.json. Merged graphs: test_graph_merge.py."""


def held(version: str) -> list[Case]:
    """The cases in which every difference has a name."""
    return [c for c in cases(version) if c.name.startswith(HELD) and c.name not in LEFT_OUT]


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directory of each version for the dumps of its cases: a dump of saved tensors is thousands of files, and has fifteen cases."""
    return {version: tmp_path_factory.mktemp(version) for version in VERSIONS}


@pytest.mark.fast_cells("8.1.1-statistics_mix-bf16", "8.1.1-statistics_L0-nan", "8.1.1-md5_mix-more", "8.1.1-tensor_mix-nan")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{version}-{case.name}", marks=() if case.name in SHORT else pytest.mark.slow)
        for version in VERSIONS
        for case in held(version)
    ],
)
def test_every_cell(tmp_path: Path, dumps: dict[str, Path], case: Case) -> None:
    """Nodes, their place, type, order, micro step, partner, index, overflow level, stack, links and all fields of their rows are those of
    the existing tool, but for differences with a name."""
    theirs, made = outcome(case), ours(case, tmp_path, dumps[case.version])
    assert list(theirs.raw) == list(made.raw)
    count, found = differences(theirs.pairs, made.pairs)
    named = Counter(reason(case, one) for one in found)
    unnamed = [one[3:] for one in found if not reason(case, one)]
    print(case.version, case.name, f"{count} cells, {sum(named.values())} differ: {dict(named)}")
    assert unnamed == []
    assert count > 300


@pytest.mark.parametrize("version", VERSIONS)
def test_the_form_of_the_files(tmp_path: Path, version: str) -> None:
    """Tables, columns and indexes, keys of documents and their settings, are those of the existing tool; only this user may write."""
    case = next(case for case in cases(version) if case.name == "statistics_mix-bf16")
    theirs, made = outcome(case).raw, ours(case, tmp_path).raw
    (name, document), (_, mine) = next(iter(theirs.items())), next(iter(made.items()))
    written = next(tmp_path.glob("*/*.vis*"))
    assert written.stat().st_mode & 0o777 == 0o640
    if version == OLD:
        assert sorted(document) == sorted(mine)
        assert {key: value for key, value in document.items() if key in ("MicroSteps", "task", "OverflowCheck")}.items() <= mine.items()
        assert {key: value["value"] for key, value in document["Colors"].items()} == {k: v["value"] for k, v in mine["Colors"].items()}
        assert json.loads(document["ToolTip"]).keys() == json.loads(mine["ToolTip"]).keys()
        return
    assert name == "compare.vis.db"
    assert [" ".join(line.split()).replace("( ", "(").replace(" )", ")") for line in document["schema"]] == sorted_like(
        document["schema"], mine["schema"]
    )
    one, other = (dict(zip(d["tb_config"]["columns"], d["tb_config"]["rows"][0], strict=True)) for d in (document, mine))
    for key, value in one.items():
        if key == "node_colors":
            levels = [{c: (v["value"], v["accuracy_level"]) for c, v in json.loads(text).items()} for text in (value, other[key])]
            assert levels[0] == levels[1]
        elif key == "tool_tip":
            assert json.loads(value).keys() == json.loads(other[key]).keys()
        else:
            assert other[key] == value, key
    assert document["tb_stack"]["rows"] == mine["tb_stack"]["rows"]
    with sqlite3.connect(written) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)


def sorted_like(wanted: list[str], made: list[str]) -> list[str]:
    """Our statements in the order of theirs, by what they make."""
    words = {line.split("(")[0].strip(): " ".join(line.split()) for line in made}
    return [words.get(line.split("(")[0].strip(), "") for line in wanted]


def test_nothing_is_left_of_a_broken_run(tmp_path: Path) -> None:
    """Writers that are aborted leave no file, also when a graph is already in them."""
    from msprobe_engine.report.graph.writer import Plan, open_writer

    case = next(case for case in cases(NEW) if case.name == "statistics_L0-nan")
    target, golden = unpack(case, tmp_path / "dumps")
    from msprobe_engine.report.graph.source import jobs_of
    from msprobe_engine.report.graph.work import run_job

    options = GraphOptions(formats=(DB, VIS, MODEL_EXPLORER), workers=1)
    job = jobs_of(target, golden, options).jobs[0]
    made = run_job(job, options=options).made
    assert made is not None
    out = tmp_path / "out"
    out.mkdir()
    for mode in options.formats:
        writer = open_writer(mode, Plan(out, "20260101000000", options, str(target), str(golden), (job.key,)))
        writer.add(made)
        assert len(list(out.iterdir())) == 1
        writer.abort()
        assert list(out.iterdir()) == []


def test_model_explorer(tmp_path: Path) -> None:
    """The json is a graph collection as input_graph.ts of Model Explorer has it: nodes once, edges between nodes that are there, groups
    for namespaces; a name with a slash makes no level."""
    case = next(case for case in cases(NEW) if case.name == "statistics_mix-nan")
    target, golden = unpack(case, tmp_path / "dumps")
    (file,) = run(target, golden, tmp_path / "out", GraphOptions(formats=(MODEL_EXPLORER,), workers=1)).files
    document = json.loads(file.read_text())
    assert set(document) == {"label", "graphs"}
    assert [graph["id"] for graph in document["graphs"]] == ["step 0 rank 0 run", "step 0 rank 0 golden"]
    for graph in document["graphs"]:
        nodes = {node["id"]: node for node in graph["nodes"]}
        assert len(nodes) == len(graph["nodes"]) > 50
        groups = set(graph["groupNodeAttributes"])
        for node in nodes.values():
            assert not node["namespace"] or node["namespace"] in groups
            for edge in node["incomingEdges"]:
                assert int(edge["targetNodeInputId"]) < len(node["inputsMetadata"])
                assert edge["sourceNodeId"] in nodes
            assert all(isinstance(one["value"], str) for one in node["attrs"])
        assert sum(len(node["incomingEdges"]) for node in nodes.values()) > 30
    softmax = next(node for node in document["graphs"][0]["nodes"] if node["id"] == "Torch.softmax.0.forward")
    assert softmax["style"] == {"backgroundColor": "#FF704D"}
    assert options_of(case).match == "exact"
