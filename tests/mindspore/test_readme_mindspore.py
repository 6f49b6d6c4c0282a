"""README.md and README.zh.md: what they say of MindSpore."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from msprobe_integrations.mindspore.debugger import PrecisionDebugger

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "README.zh.md")


def example(page: str) -> str:
    """The one program of the page that is for MindSpore."""
    programs = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    (found,) = [program for program in programs if "msprobe.mindspore" in program]
    return str(found)


@pytest.mark.usefixtures("own_debugger")
def test_the_program() -> None:
    """Run as it stands, it writes Cells and operations of the step that config.json names; both pages have the same one."""
    assert example(PAGES[0]) == example(PAGES[1])
    Path("config.json").write_text(json.dumps({"task": "statistics", "level": "mix", "dump_path": "./dump", "step": [1]}))
    net = nn.SequentialCell(nn.Dense(3, 4), nn.ReLU(), nn.Dense(4, 1))
    given: dict[str, Any] = {
        "mindspore": mindspore,
        "net": net,
        "optimizer": nn.Adam(net.trainable_params()),
        "data": [Tensor(np.full((2, 3), step, np.float32)) for step in range(3)],
        "loss_of": lambda batch: ops.square(net(batch)).mean(),
    }
    exec(compile(example(PAGES[0]), PAGES[0], "exec"), given)
    made: Any = PrecisionDebugger._instance
    made._run.at_exit()
    (path,) = Path("dump").glob("step*/*/dump.json")
    assert path.parents[1].name == "step1"
    names = list(json.loads(path.read_text())["data"])
    assert "Cell.0.Dense.forward.0" in names
    assert any(name.startswith("Functional.") and name.endswith(".backward") for name in names)


def test_both_pages_lead_to_the_same() -> None:
    """Install line and pages about MindSpore are the same in both languages."""
    links = []
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        assert "pip install '.[mindspore," in text
        links.append(re.findall(r"\]\((docs/[a-z-]*mindspore[a-z-]*\.md)\)", text))
    assert links[0] == links[1]
    assert {"docs/mindspore.md", "docs/mindspore-monitor.md", "docs/mindspore-static-graph.md"} <= set(links[0])
