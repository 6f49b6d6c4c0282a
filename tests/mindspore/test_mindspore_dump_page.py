"""docs/mindspore.md, section Dump: every example runs as it stands, one after the other, and writes what the page says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from msprobe_engine.dump.reader import open_dump
from msprobe_integrations.mindspore.debugger import PrecisionDebugger

PAGE = Path(__file__).parents[2] / "docs" / "mindspore.md"


def dump_section() -> str:
    """The text of the section."""
    return PAGE.read_text(encoding="utf-8").partition("\n## Dump\n")[2].partition("\n## ")[0]


def blocks(language: str) -> Iterator[str]:
    """Its code blocks in one language."""
    yield from re.findall(rf"^```{language}\n(.*?)^```", dump_section(), re.DOTALL | re.MULTILINE)


@pytest.mark.usefixtures("own_debugger")
def test_the_programs(tmp_path: Path) -> None:
    """The loop, a variable saved by hand, and Model.train."""
    (config,) = blocks("json")
    (tmp_path / "config.json").write_text(config)
    namespace: dict[str, Any] = {"__name__": "page"}
    seen: list[list[str]] = []
    for code, (out, step) in zip(blocks("python"), [("out", 1), ("saved", 0), ("model_out", 1)], strict=True):
        PrecisionDebugger._instance = None
        exec(compile(code, str(PAGE), "exec"), namespace)
        namespace["debugger"].run.at_exit()
        dump = open_dump(tmp_path / out)
        seen.append(list(dump.load(step).entries))
        assert dump.steps == ([0, 1] if out == "model_out" else [step])
    loop, saved, model = seen
    assert {"Cell.up.Dense.forward.0", "Cell.up.Dense.backward.0", "Cell.up.Dense.parameters_grad.0"} <= set(loop)
    assert "Functional.softmax.0.forward" in loop
    assert saved == ["hidden.0.debug", "hidden_grad.0.debug"]
    (document,) = (tmp_path / "saved").glob("step0/*/debug.json")
    assert json.loads(document.read_text())["data"]["hidden_grad.0.debug"]["shape"] == [2, 16]
    assert "Cell.down.Dense.backward.0" in model


def test_what_is_refused() -> None:
    """The keys that the page calls PyTorch's own are those that are refused."""
    from msprobe_integrations.mindspore.dump_checks import _ABSENT

    (line,) = re.findall(r"The keys (.*?) work with PyTorch only", dump_section(), re.DOTALL)
    assert sorted(re.findall(r"`(\w+)`", line)) == sorted(_ABSENT)
