"""Every cell of task x level x summary mode x ranks, and the variants, against the existing tool; some against kept dumps of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from cells import KEPT, RUN, SUITE, Cell
from existing_environment import VERSIONS, reference
from matching import Context, Difference, RankDump, is_tensor, load, same_number
from rules import RULES

from msprobe_engine.find.nonfinite.nan_analyze import nan_analyze
from msprobe_engine.formats.dump.reader import open_dump

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "compatibility.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dumps of both versions of the existing tool."""
    return reference(SUITE.name, "kept", tmp_path_factory.mktemp("kept"), SUITE.make)


@pytest.mark.framework
def test_our_dumps_match_the_kept_ones(kept: Path) -> None:
    """Record for record, each difference with a rule of docs/reference/compatibility.md."""
    ours = SUITE.ours(RUN)
    faults = SUITE.kept_faults(ours, kept)
    assert not faults, "\n".join(faults)


@pytest.mark.framework
@pytest.mark.existing_tool
@pytest.mark.timeout(1800)
def test_every_cell_matches() -> None:
    """Record for record the same names, order, shapes, dtypes, statistics, checksums, files, stacks and parents, and saved tensors bit by
    bit; each difference has a rule of docs/reference/compatibility.md, and each rule occurs."""
    found = [SUITE.total(version) for version in VERSIONS]
    assert [difference for whole in found for difference in whole.unexplained] == []
    assert sum(whole.records - whole.equal - whole.explained for whole in found) == 0
    assert {rule for whole in found for rule in whole.rules} == {rule.id for rule in RULES}


def test_page_lists_the_rules() -> None:
    """Every rule has one row with its id, its sentence and a reason, and no row has no rule."""
    part = PAGE.split("## Every difference")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([a-z0-9-]+)` \| (.+?) \| (.+?) \|$", part, re.MULTILINE)
    assert {id: sentence for id, sentence, _ in rows} == {rule.id: rule.sentence for rule in RULES}
    assert len(rows) == len(RULES)
    assert all(len(reason) > 3 for _, _, reason in rows)


NOT_EXCUSED = (
    Difference("missing", "Torch.matmul.0.forward"),
    Difference("extra", "Torch.matmul.0.forward"),
    Difference("order", "Torch.matmul.0.forward"),
    Difference("dtype", "Torch.matmul.0.forward", "output.0.dtype", "torch.float64", "torch.float32"),
    Difference("shape", "Torch.matmul.0.forward", "output.0.shape", [1], [2]),
    Difference("value", "Module.a.A.forward.0", "output.0.Max", 1.0, 2.0, ({}, {"dtype": "torch.float32", "shape": [2], "Norm": 1.0})),
    Difference("checksum", "Module.a.A.forward.0", "output.0.md5", "0", "1", ({}, {"dtype": "torch.float32", "shape": [2]})),
    Difference("value", "Module.a.A.backward.0", "input.0.Max", 1.0, 2.0, ({}, {"dtype": "torch.float32", "shape": [2], "Norm": 1.0})),
    Difference("content", "Torch.matmul.0.forward", "output.0", "[2]", "[2]"),
    Difference("dangling", "Torch.matmul.0.forward", "x.pt"),
    Difference("parent", "Torch.matmul.0.forward", "", "Module.a.A.forward.0", None),
    Difference("header", "", "task", "tensor", "statistics"),
    Difference("layout", "", "stack.json", None, True),
)


@pytest.mark.parametrize("version", VERSIONS)
def test_rules_do_not_excuse_what_matters(version: str) -> None:
    """Names, order, shapes, dtypes, values, checksums, contents and parents of ordinary records are never explained away."""
    record = {"input_args": [], "output": [{}]}
    dump = RankDump(
        data={"Torch.matmul.0.forward": record, "Module.a.A.forward.0": record, "Module.a.A.backward.0": {"input": [{}], "output": [{}]}}
    )
    context = Context(Cell("statistics", "mix", "md5", 1), version, dump, dump)
    assert [str(d) for d in NOT_EXCUSED if SUITE.explain(d, context)] == []


def check_reading(root: Path) -> None:
    """Every step, rank, record, tensor, statistic, stack and parent that the raw files hold is in what the reader gives."""
    dump = open_dump(root)
    for step in dump.steps:
        for rank in dump.ranks(step):
            raw, read = load(dump.path(step, rank)), dump.load(step, rank)
            assert list(read.entries) == list(raw.data)
            for name, record in raw.data.items():
                entry = read.entries[name]
                given = [tensor for _, tensor in entry.tensors()]
                for tensor, fields in zip(given, leaves(record), strict=True):
                    assert list(tensor.description.shape) == fields["shape"]
                    assert tensor.description.dtype == fields["dtype"]
                    assert same_number(tensor.max, fields.get("Max"), 0.0)
                    assert same_number(tensor.norm, fields.get("Norm"), 0.0)
                    if "data_name" in fields:
                        path = read.files.source(tensor.data_name).path
                        assert path is not None
                        assert path.exists()
                if name in raw.construct:
                    assert (entry.parent or None) == (raw.construct[name] or None)
                assert len(entry.stack) == len(raw.stacks.get(name, ()))


def leaves(node: Any) -> list[dict[str, Any]]:
    """The tensor objects of a record, in order."""
    if is_tensor(node):
        return [node]
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return [tensor for child in children for tensor in leaves(child)]


def test_reader_takes_kept_dumps(kept: Path) -> None:
    """Our reader takes dumps of both versions, of every task and level."""
    for version, cases in KEPT.items():
        for cell, _, _ in cases:
            check_reading(kept / version / str(cell) / "dump")


@pytest.mark.framework
@pytest.mark.existing_tool
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", VERSIONS)
def test_reader_takes_every_dump(version: str) -> None:
    """Our reader takes the dumps of all cells; nan_analyze finds in them what it finds in ours: the logarithm of negative numbers on
    rank 1, and nothing where there is only a mask of infinities."""
    theirs = SUITE.theirs(version)
    for cell in SUITE.cells(version):
        check_reading(theirs / str(cell) / "dump")
    for variant, ranks, expected in (("nan", 2, "Torch.log.0.forward"), ("", 2, None), ("", 1, None)):
        for out in (SUITE.ours(), theirs):
            result = nan_analyze(out / str(Cell("statistics", "mix", "statistics", ranks, variant)) / "dump")
            assert result.problems == []
            assert [f["op_name"] for f in result.findings[:1]] == ([expected] if expected else [])
            assert not expected or "rank 1" in result.text
