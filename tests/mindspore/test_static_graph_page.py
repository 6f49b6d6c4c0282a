"""The examples of docs/mindspore-static-graph.md run as they stand."""

from __future__ import annotations

import itertools
import json
import re
import runpy
from pathlib import Path

import ms_programs
import pytest

from msprobe_integrations.mindspore.graph import single_files

PAGE = Path(__file__).parents[2] / "docs" / "mindspore-static-graph.md"


KERNELS = '"level": "L2"'


def blocks() -> list[str]:
    """The examples."""
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture(autouse=True)
def _first_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process."""
    monkeypatch.setattr(single_files, "_step", 0)
    monkeypatch.setattr(single_files, "_ids", itertools.count())


@pytest.mark.usefixtures("own_debugger")
def test_the_examples_run(tmp_path: Path) -> None:
    """They leave what the page says."""
    settings = {"task": "statistics", "level": "L0", "dump_path": "dump", "step": [0]}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    program = tmp_path / "program.py"
    program.write_text("\n".join(block for block in blocks() if KERNELS not in block))
    runpy.run_path(str(program))
    names = json.loads(next((tmp_path / "dump").glob("step0/*/dump.json")).read_text())["data"]
    assert {"Cell.fc1.Dense.forward.0", "Cell.fc2.Dense.backward.0", "Cell.fc1.Dense.parameters_grad.0"} <= set(names)
    assert sorted(p.name for p in (tmp_path / "saved" / "step0" / "rank0").iterdir()) == ["y_float32_0.npy", "y_grad_float32_1.npy"]


def test_the_kernels(tmp_path: Path) -> None:
    """The example of level L2, in a process of its own, dumps the chosen kernels under the names that the page has."""
    (block,) = (block for block in blocks() if KERNELS in block)
    (tmp_path / "program.py").write_text(block)
    ms_programs.run(tmp_path / "program.py", cwd=tmp_path, check=True)
    names = json.loads(next((tmp_path / "kernels").glob("step1/*/dump.json")).read_text())["data"]
    assert next(iter(names)) == "MatMul.Default_0-Dense_MatMul-op0.0.forward"
    assert {name.split(".")[0] for name in names} == {"MatMul", "BiasAdd"}
