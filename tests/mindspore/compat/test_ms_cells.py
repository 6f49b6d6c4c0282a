"""Every cell of net x task x level x summary mode, and the variants, against the existing tool on MindSpore; some against kept dumps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from existing_environment import VERSIONS, reference
from matching import Context, Difference, RankDump
from ms_cells import KEPT, SUITE, Cell
from ms_rules import RULES

PAGE, PYTORCH = (
    (Path(__file__).parents[3] / "docs" / "reference" / name).read_text(encoding="utf-8")
    for name in ("compatibility-mindspore.md", "compatibility.md")
)


@pytest.mark.slow
@pytest.mark.framework
@pytest.mark.timeout(900)
def test_our_mindspore_dumps_match_the_kept_ones(tmp_path: Path) -> None:
    """Record for record, each difference with a rule of docs/reference/compatibility-mindspore.md."""
    kept = reference(SUITE.name, "kept", tmp_path, SUITE.make)
    ours = SUITE.ours([cell for cases in KEPT.values() for cell, _, _ in cases])
    faults = SUITE.kept_faults(ours, kept)
    assert not faults, "\n".join(faults)


@pytest.mark.framework
@pytest.mark.existing_tool
@pytest.mark.timeout(1800)
def test_every_cell_matches_on_mindspore() -> None:
    """Record for record the same names, order, places, types, dtypes, shapes, statistics, checksums, files, stacks and parents, and saved
    tensors bit by bit; each difference has a rule of docs/reference/compatibility-mindspore.md, and each rule occurs."""
    found = [SUITE.total(version) for version in VERSIONS]
    assert [difference for whole in found for difference in whole.unexplained] == []
    assert sum(whole.records - whole.equal - whole.explained for whole in found) == 0
    assert {rule for whole in found for rule in whole.rules} == {rule.id for rule in RULES}


def test_page_lists_the_rules_on_mindspore() -> None:
    """Every rule has one row with its id, its sentence and a reason, or its id stands among those of the page on PyTorch."""
    part = PAGE.split("## Every difference")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([a-z0-9-]+)` \| (.+?) \| (.+?) \|$", part, re.MULTILINE)
    shared = re.findall(r"`(ms-[a-z0-9-]+)`", part.split("\n| id ")[0].split("in place of modules: ")[1])
    assert {id: sentence for id, sentence, _ in rows} == {rule.id: rule.sentence for rule in RULES if rule.id not in shared}
    assert len(rows) + len(shared) == len(RULES)
    assert [id for id in shared if f"| `{id.removeprefix('ms-')}` |" not in PYTORCH] == []
    assert all(len(reason) > 3 for _, _, reason in rows)


TENSOR = {"dtype": "Float32", "shape": [2], "Max": 1.0, "Min": 0.0, "Mean": 0.5, "Norm": 1.0}
NOT_EXCUSED = (
    Difference("missing", "Mint.matmul.0.forward"),
    Difference("extra", "Mint.matmul.0.forward"),
    Difference("order", "Mint.matmul.0.forward"),
    Difference("dtype", "Mint.matmul.0.forward", "output.0.dtype", "Float64", "Float32"),
    Difference("shape", "Mint.matmul.0.forward", "output.0.shape", [1], [2]),
    Difference("value", "Cell.a.A.forward.0", "output.0.Max", 1.0, 2.0, (TENSOR, TENSOR)),
    Difference("value", "Cell.a.A.backward.0", "input.0.Norm", 1.0, 2.0, (TENSOR, TENSOR)),
    Difference("value", "Mint.matmul.0.backward", "output.0.Max", 1.0, 2.0, (TENSOR, TENSOR)),
    Difference("checksum", "Cell.a.A.forward.0", "output.0.md5", "0", "1", (TENSOR, TENSOR)),
    Difference("content", "Mint.matmul.0.forward", "output.0", "[2]", "[2]"),
    Difference("dangling", "Mint.matmul.0.forward", "x.npy"),
    Difference("parent", "Mint.matmul.0.forward", "", "Cell.a.A.forward.0", None),
    Difference("header", "", "task", "tensor", "statistics"),
    Difference("layout", "", "stack.json", None, True),
)


@pytest.mark.parametrize("version", VERSIONS)
def test_rules_on_mindspore_do_not_excuse_what_matters(version: str) -> None:
    """Names, order, shapes, dtypes, values, checksums, contents and parents of ordinary records are never explained away."""
    forward, backward = {"input_args": [], "output": [TENSOR]}, {"input": [TENSOR], "output": [TENSOR]}
    ours = RankDump(
        data={"Mint.matmul.0.forward": forward, "Cell.a.A.forward.0": forward, "Cell.a.A.backward.0": backward}
        | {"Mint.matmul.0.backward": {"input": [TENSOR], "output": [TENSOR | {"Max": 2.0}]}}
    )
    theirs = RankDump(data=ours.data | {"Mint.matmul.0.backward": backward})
    context = Context(Cell("chain", "statistics", "mix", "md5"), version, ours, theirs)
    assert [str(d) for d in NOT_EXCUSED if SUITE.explain(d, context)] == []
