"""Files of the module side next to those of the existing tool, from the same training."""

from __future__ import annotations

import csv
import math
import subprocess
import sys
from pathlib import Path

import pytest
from existing_environment import environment_of, existing_tool

pytestmark = [pytest.mark.framework, pytest.mark.existing_tool]
SCRIPT = Path(__file__).parent / "existing_modules.py"
Rows = dict[tuple[str, str, str], dict[str, str]]


def read(directory: Path) -> tuple[dict[str, Rows], dict[str, list[str]]]:
    """Rows and columns by family."""
    found: dict[str, Rows] = {}
    columns: dict[str, list[str]] = {}
    for path in directory.glob("*/*.csv"):
        family = path.name.rpartition("_")[0]
        with open(path, newline="") as file:
            reader = csv.DictReader(file)
            columns[family] = list(reader.fieldnames or ())
            for row in reader:
                found.setdefault(family, {})[row.get("name", ""), row["step"], row.get("micro_step", "")] = row
    return found, columns


def test_same_rows(tmp_path: Path) -> None:
    """The same names, columns and values. What the existing tool has more is `nan`: what is no tensor, and gradients that do not exist.
    Its spectral norm, after three iterations from a random start, is never above ours."""
    existing = existing_tool("26.2.0")
    for python, which in ((str(existing.python), "old"), (sys.executable, "new")):
        command = [python, str(SCRIPT), which, str(tmp_path / which)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment_of(python), cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
    (old, their_columns), (new, our_columns) = read(tmp_path / "old" / "monitor"), read(tmp_path / "new" / "monitor")
    compared = 0
    for family, rows in old.items():
        assert our_columns[family][: len(their_columns[family])] == their_columns[family]
        assert new[family].keys() <= rows.keys()
        for key, row in rows.items():
            numbers = {k: float(v) for k, v in row.items() if k not in ("vpp_stage", "name", "step", "micro_step", "shape", "dtype")}
            if all(math.isnan(v) for v in numbers.values()):
                continue
            ours = new[family][key]
            compared += 1
            if family == "linear_hook":
                assert numbers["kernel_norm"] <= float(ours["kernel_norm"]) * (1 + 1e-5)
                continue
            assert {k: float(ours[k]) for k in numbers} == pytest.approx(numbers, rel=1e-5, abs=1e-6), key
            assert (ours.get("shape"), ours.get("dtype")) == (row.get("shape"), row.get("dtype"))
    assert compared > 100
