"""The same training under `TrainerMon` here and in the existing tool: directories, files, columns, rows and values."""

from __future__ import annotations

import csv
import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import warm
from existing_environment import SOURCES, VERSIONS, environment_of, existing_tool, reference

pytestmark = pytest.mark.framework
SCRIPT = Path(__file__).with_name("existing_training.py")
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
STEPS = 6
OURS = {"run.json", "losses.json", "alerts.jsonl"}
"""Files that only ours has, besides the numbers of the steps (``scalars_*.csv``)."""
LAST = ["phase", "state", "tag"]
"""Columns that only ours has; they come last."""
Rows = dict[tuple[str, ...], dict[str, str]]


def run(python: Path | str, settings: dict[str, Any], directory: Path, version: str = "") -> Path:
    """Train under one tool; gives its output directory."""
    directory.mkdir()
    config = directory / "monitor_config.json"
    config.write_text(json.dumps({**settings, "ndigits": 16} if not version else {**settings, "output_dir": str(directory)}))
    environment = {**environment_of(python), "MONITOR_OUTPUT_DIR": str(directory / "out")}
    words = [str(config), str(STEPS), *([version] if version else [])]
    if python == sys.executable:
        done = warm.run(warm.script(SCRIPT), *words, env=environment, cwd=directory, timeout=900)
    else:
        command = [str(python), str(SCRIPT), *words]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=directory, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return directory if version else directory / "out"


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


def same(mine: str, theirs: str, source: str) -> bool:
    """Equal text, or numbers that are equal to the digits of float32 (in which the existing tool takes some of them); of kept outputs,
    which another processor may have rounded otherwise, to three digits."""
    try:
        a, b = float(mine), float(theirs)
    except ValueError:
        return mine == theirs
    relative, absolute = (1e-3, 1e-6) if source == "kept" else (2e-6, 1e-9)
    return (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, rel_tol=relative, abs_tol=absolute)


def settings_of(name: str, version: str) -> dict[str, Any]:
    """What both tools are told."""
    return CONFIGS[name] | ({"squash_name": False} if version == "8.1.1" else {})  # names are shortened as 26.2.0 does it


def make(out: Path) -> None:
    """The files of both versions of the existing tool: ``{version}/{configuration}``."""
    with tempfile.TemporaryDirectory() as directory:
        for version in VERSIONS:
            for name in CONFIGS:
                made = run(existing_tool(version).python, settings_of(name, version), Path(directory, version + name))
                shutil.copytree(rank_directory(made), out / version / name)
                for stacks in (out / version / name).glob("stack_info.csv"):  # the other columns name files of this machine
                    with stacks.open(newline="") as file:
                        names = [row[:1] for row in csv.reader(file)]
                    with stacks.open("w", newline="") as file:
                        csv.writer(file).writerows(names)
        made = run(existing_tool("26.2.0").python, CONFIG_V2, Path(directory, "v2"), "v2")
        shutil.copytree(made / "rank_0", out / "26.2.0" / "v2")


@pytest.fixture(scope="module", params=SOURCES)
def theirs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Where the existing tool's files come from, and their directory."""
    return request.param, reference("trainer_mon", request.param, tmp_path_factory.mktemp("theirs"), make)


@pytest.mark.fast_cells("kept-8.1.1-chosen", "kept-26.2.0-everything")
@pytest.mark.parametrize("name", list(CONFIGS))
@pytest.mark.parametrize("version", VERSIONS)
def test_same_files(tmp_path: Path, theirs: tuple[str, Path], version: str, name: str) -> None:
    """The same files with the same columns (ours last), rows and values. Differences, all in docs/reference/compatibility.md: what has no
    gradient has no row here; an activation of no tensor has none either."""
    source, other = theirs[0], theirs[1] / version / name
    ours = rank_directory(run(sys.executable, settings_of(name, version), tmp_path / "ours"))
    files = [{p.name for p in d.iterdir()} for d in (other, ours)]
    # The existing tool leaves unreduced gradients out where it sees a Megatron that is not used (docs/reference/compatibility.md).
    assert {n for n in files[1] - files[0] if not n.startswith(("scalars_", "grad_unreduced_"))} <= OURS
    assert name != "chosen" or any(n.startswith("grad_unreduced_") for n in files[0])
    assert files[0] - files[1] == set()
    compared = 0
    for file in sorted(files[0] - {"stack_info.csv"}):
        header, expected = table(other / file, ("vpp_stage", "name", "step", "micro_step"))
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
                assert same(row[column], expected[key][column], source), (file, key, column, row[column], expected[key][column])
                compared += 1
    assert compared > 100
    if "stack_info" in CONFIGS[name]:
        with (ours / "stack_info.csv").open(newline="") as file, (other / "stack_info.csv").open(newline="") as second:
            mine, others = ([row[0] for row in csv.reader(f)] for f in (file, second))
        assert set(others) <= set(mine)


def test_monitor_v2(tmp_path: Path, theirs: tuple[str, Path]) -> None:
    """TrainerMonitorV2: the same files, columns, rows and values. There, plain torch has no unreduced gradients, and the monitor changes
    the last bits of the training (hooks that put nodes into the graph), so values agree to the digits that this leaves."""
    source, other = theirs[0], theirs[1] / "26.2.0" / "v2"
    ours = run(sys.executable, CONFIG_V2, tmp_path / "ours", "v2") / "rank_0"
    assert {p.name for p in other.iterdir()} == {p.name for p in ours.iterdir()}
    for path in other.iterdir():
        header, expected = table(path, ("vpp_stage", "step", "module_name", "scope", "micro_step"))
        columns, found = table(ours / path.name, ("vpp_stage", "step", "module_name", "scope", "micro_step"))
        assert columns == header
        assert set(expected) - set(found) == set()
        assert {found[key]["scope"] for key in set(found) - set(expected)} <= {"unreduced"}
        for key, row in expected.items():
            for column in header:
                assert same(row[column], found[key][column], source), (path.name, key, column, row[column], found[key][column])
