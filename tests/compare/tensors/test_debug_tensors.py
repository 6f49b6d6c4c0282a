"""Single saved tensors (debug.json, `PrecisionDebugger.save`): compared row by row, without calls that could be followed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from driver_dumps import tensor

from msprobe_engine.measure.options import GENERATIONS, CompareOptions
from msprobe_engine.report.table.api import compare_dumps
from msprobe_engine.report.table_files.reading import read_table


def debug(path: Path, factor: float) -> Path:
    """What two saves with gradients leave; `factor` is that of the second and of what follows from it."""
    data: dict[str, Any] = {
        "x.0.debug": tensor(1.0),
        "x_grad.0.debug": tensor(2.0 * factor),
        "y.0.debug": tensor(3.0 * factor),
        "y_grad.0.debug": None,
    }
    path.mkdir(parents=True)
    header = {"task": "statistics", "level": "debug", "framework": "pytorch", "dump_data_dir": None}
    (path / "debug.json").write_text(json.dumps(header | {"data": data}, indent=1))
    return path / "debug.json"


@pytest.mark.parametrize("columns", GENERATIONS)
@pytest.mark.parametrize("compat", [False, True])
def test_equal_ones(tmp_path: Path, columns: str, compat: bool) -> None:
    """Exit code 0: that nothing can be diagnosed is no problem."""
    files = [debug(tmp_path / side / "step0/rank0", 1.0) for side in ("a", "b")]
    found = compare_dumps(*files, tmp_path / "out", CompareOptions(columns=columns, compat=compat))
    assert (found.exit_code, found.all_problems) == (0, [])
    assert Path(found.files[0]).name.startswith("debug_compare_result")


def test_the_first_that_is_off(tmp_path: Path) -> None:
    """A gradient stands behind all that was saved before the backward pass, wherever the file has its place."""
    files = [debug(tmp_path / side / "step0/rank0", factor) for side, factor in (("a", 1.3), ("b", 1.0))]
    found = compare_dumps(*files, tmp_path / "out")
    assert found.exit_code == 1
    assert "y.0.debug" in found.headline()
    _, *rows = read_table(Path(found.files[0]))
    assert [row[0] for row in rows] == ["x.0.debug", "y.0.debug", "y_grad.0.debug", "x_grad.0.debug"]
