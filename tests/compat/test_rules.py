"""The page docs/compatibility.md and the rules of the comparison say the same."""

from __future__ import annotations

import re
from pathlib import Path

import cells
import pytest
from matching import Difference, RankDump
from rules import RULES, Context, explain

PAGE = (Path(__file__).parents[2] / "docs" / "compatibility.md").read_text(encoding="utf-8")


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


@pytest.mark.parametrize("difference", NOT_EXCUSED, ids=lambda d: f"{d.kind}-{d.record}")
@pytest.mark.parametrize("version", cells.VERSIONS)
def test_rules_do_not_excuse_what_matters(difference: Difference, version: str) -> None:
    """Names, order, shapes, dtypes, values, checksums, contents and parents of ordinary records are never explained away."""
    record = {"input_args": [], "output": [{}]}
    dump = RankDump(
        data={"Torch.matmul.0.forward": record, "Module.a.A.forward.0": record, "Module.a.A.backward.0": {"input": [{}], "output": [{}]}}
    )
    assert explain(difference, Context(cells.Cell("statistics", "mix", "md5", 1), version, dump, dump)) is None
