"""The same training under `TrainerMon` here and in the existing tool: directories, files, columns, rows and values.

Opt-in: MSPROBE_EXISTING_VENV_81 and MSPROBE_EXISTING_VENV_26 name virtual environments that hold its versions 8.1.1 and 26.2.0.
"""

from __future__ import annotations

import csv
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.framework
SCRIPT = Path(__file__).with_name("existing_training.py")
VERSIONS = [("8.1.1", "MSPROBE_EXISTING_VENV_81"), ("26.2.0", "MSPROBE_EXISTING_VENV_26")]
OPS = ["norm", "min", "max", "mean", "nans", "zeros"]
CONFIGS: dict[str, dict[str, Any]] = {
    "everything": {
        "targets": {},
        "xy_distribution": True,
        "wg_distribution": True,
        "param_distribution": True,
        "mv_distribution": True,
        "mg_direction": True,
        "ops": OPS,
        "squash_name": False,
        "stack_info": True,
    },
    "chosen": {
        "targets": {"layers.0": {}, "head": {"input": "tensor"}},
        "xy_distribution": True,
        "wg_distribution": True,
        "monitor_mbs_grad": True,
        "ops": ["max", "norm"],
        "squash_name": True,
    },
    "schedule": {
        "targets": {"layers.0": {}},
        "all_xy": True,
        "xy_distribution": True,
        "backward_only": True,
        "param_distribution": True,
        "start_step": 1,
        "step_interval": 2,
        "collect_times": 2,
        "step_count_per_record": 3,
        "ops": ["nans", "mean"],
        "squash_name": False,
    },
}
STEPS = 6
OURS = {"run.json", "alerts.jsonl"}
"""Files that only ours has, besides the numbers of the steps (``scalars_*.csv``)."""
LAST = ["phase", "state", "tag"]
"""Columns that only ours has; they come last."""
Rows = dict[tuple[str, ...], dict[str, str]]


def run(python: Path | str, settings: dict[str, Any], directory: Path, version: str = "") -> Path:
    """Train under one tool; gives its output directory."""
    directory.mkdir()
    config = directory / "monitor_config.json"
    config.write_text(json.dumps({**settings, "ndigits": 16} if not version else {**settings, "output_dir": str(directory)}))
    environment = {**os.environ, "MONITOR_OUTPUT_DIR": str(directory / "out"), "OMP_NUM_THREADS": "1"}
    command = [str(python), str(SCRIPT), str(config), str(STEPS), *([version] if version else [])]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=directory, check=False, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return directory if version else directory / "out"


def venv_of(version: str, variable: str) -> Path:
    """The existing tool's interpreter; skips where there is none."""
    if not os.environ.get(variable):
        pytest.skip(f"{variable} does not name a virtual environment with version {version}")
    return Path(os.environ[variable]).absolute() / "bin/python"


def rank_directory(root: Path) -> Path:
    """The one directory of a rank."""
    (found,) = (p for p in root.iterdir() if p.is_dir() and "-rank0-" in p.name)
    assert re.fullmatch(r"[A-Z][a-z]{2}\d\d_\d\d-\d\d-\d\d-rank0-[0-9a-f]{8}", found.name)
    return found


def table(path: Path, keys: tuple[str, ...]) -> tuple[list[str], Rows]:
    """Header, and rows by their key columns and how often this key came before."""
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        out: Rows = {}
        for row in reader:
            key = tuple(row[k] for k in keys if k in row)
            out[(*key, str(sum((*key, str(n)) in out for n in range(9))))] = row
    return list(reader.fieldnames or ()), out


def same(mine: str, theirs: str) -> bool:
    """Equal text, or numbers that are equal to the digits of float32 (in which the existing tool takes some of them)."""
    try:
        a, b = float(mine), float(theirs)
    except ValueError:
        return mine == theirs
    return (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, rel_tol=2e-6, abs_tol=1e-9)


@pytest.mark.parametrize("name", list(CONFIGS))
@pytest.mark.parametrize(("version", "variable"), VERSIONS)
def test_same_files(tmp_path: Path, version: str, variable: str, name: str) -> None:
    """The same files with the same columns (ours last), rows and values. Differences, all in docs/compatibility.md: what has no gradient
    has no row here; an activation of no tensor has none either."""
    python = venv_of(version, variable)
    settings = dict(CONFIGS[name])
    if version == "8.1.1":
        settings["squash_name"] = False  # names are shortened as 26.2.0 does it
    pythons = ((python, "theirs"), (sys.executable, "ours"))
    theirs, ours = (rank_directory(run(path, settings, tmp_path / which)) for path, which in pythons)
    files = [{p.name for p in d.iterdir()} for d in (theirs, ours)]
    assert {n for n in files[1] - files[0] if not n.startswith("scalars_")} <= OURS
    assert files[0] - files[1] == set()
    compared = 0
    for file in sorted(files[0] - {"stack_info.csv"}):
        header, expected = table(theirs / file, ("vpp_stage", "name", "step", "micro_step"))
        columns, found = table(ours / file, ("vpp_stage", "name", "step", "micro_step"))
        assert columns[: len(header)] == header
        assert [c for c in columns[len(header) :] if c not in LAST] == []
        missing = {key for key, row in expected.items() if key not in found and row["shape"] != "nan"}
        assert missing == set()
        assert set(found) - set(expected) == set()
        for key, row in found.items():
            if row.get("phase") == "local" and row["micro_step"] != "0":
                continue  # the gradient of this micro batch here, of all so far there
            for column in header:
                assert same(row[column], expected[key][column]), (file, key, column, row[column], expected[key][column])
                compared += 1
    assert compared > 100
    if "stack_info" in CONFIGS[name]:
        with (ours / "stack_info.csv").open(newline="") as file, (theirs / "stack_info.csv").open(newline="") as other:
            mine, others = ([row[0] for row in csv.reader(f)] for f in (file, other))
        assert set(others) <= set(mine)


CONFIG_V2: dict[str, Any] = {
    "step_count_per_record": 2,
    "start_step": 1,
    "monitors": {
        "module": {"targets": ["layers.0", "head"]},
        "weight_grad": {"enabled": True, "ops": ["norm", "max"]},
        "optimizer": {"enabled": True},
        "param": {"enabled": True, "ops": ["mean"]},
    },
}


def test_monitor_v2(tmp_path: Path) -> None:
    """TrainerMonitorV2: the same files, columns, rows and values. There, plain torch has no unreduced gradients, and the monitor changes
    the last bits of the training (hooks that put nodes into the graph), so values agree to the digits that this leaves."""
    python = venv_of("26.2.0", "MSPROBE_EXISTING_VENV_26")
    theirs, ours = (run(p, CONFIG_V2, tmp_path / n, "v2") / "rank_0" for p, n in ((python, "theirs"), (sys.executable, "ours")))
    assert {p.name for p in theirs.iterdir()} == {p.name for p in ours.iterdir()}
    for path in theirs.iterdir():
        header, expected = table(path, ("vpp_stage", "step", "module_name", "scope", "micro_step"))
        columns, found = table(ours / path.name, ("vpp_stage", "step", "module_name", "scope", "micro_step"))
        assert columns == header
        assert set(expected) - set(found) == set()
        assert {found[key]["scope"] for key in set(found) - set(expected)} <= {"unreduced"}
        for key, row in expected.items():
            for column in header:
                assert same(row[column], found[key][column]), (path.name, key, column, row[column], found[key][column])
