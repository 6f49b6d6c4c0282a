"""Gradient probe, monitor of moments and packs of the config check with MindSpore, file by file against the existing tool's.

26.2.0 has no gradient probe any more.
"""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import ms_programs
import numpy as np
import pytest
from existing_environment import SOURCES, environment_of, existing_tool, reference

pytestmark = pytest.mark.timeout(900)
HERE = Path(__file__).parent
PARTS = {"8.1.1": ("L0", "L1", "L2", "moments", "pack"), "26.2.0": ("moments", "pack")}


def run(python: Path | None, parts: tuple[str, ...], out: Path) -> dict[str, Any]:
    """Every table, sign file and entry of a pack by its place, of the existing tool in this Python, without one of this project; the
    directory of a monitor and its random name left out."""
    env = environment_of(python or sys.executable) | {"GLOG_v": "3"}
    if python is None:
        ms_programs.run(HERE / "ms_watching.py", ".", *parts, cwd=out, env=env, check=True)
    else:
        env |= {"MSPROBE_COMPAT_NORM": "1"}
        subprocess.run([str(python), str(HERE / "ms_watching.py"), ".", *parts], cwd=out, env=env, check=True, timeout=900)
    found: dict[str, Any] = {}
    for part in parts:
        assert (out / part / "code").read_text() == "0", (out / part / "log").read_text()[-3000:]
        for path in sorted((out / part).rglob("*.csv")):
            place = f"{part}/{path.name}" if part == "moments" else str(path.relative_to(out))
            found[place] = list(csv.reader(io.StringIO(path.read_text("utf-8-sig"))))
        for path in sorted((out / part).rglob("*.npy")):
            found[str(path.relative_to(out))] = np.load(path).astype(int).tolist()
    if "pack" in parts:
        with zipfile.ZipFile(out / "pack" / "pack.zip") as archive:
            for name in ("dataset/step0/rank0/dataset.json", "weights/step0/rank0/weight.json"):
                found[name] = json.loads(archive.read(name))
    return found


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All parts by this project."""
    return run(None, PARTS["8.1.1"], tmp_path_factory.mktemp("watching"))


def near(mine: str, theirs: str) -> bool:
    """The same text, or the same number but for rounding on another processor."""
    try:
        return mine == theirs or abs(float(mine) - float(theirs)) <= 1e-6 * max(1.0, abs(float(theirs)))
    except ValueError:
        return False


def make(out: Path) -> None:
    """What the existing versions write, as `run` reads it."""
    for version, parts in PARTS.items():
        with tempfile.TemporaryDirectory() as directory:
            found = run(existing_tool(version, "mindspore").python, parts, Path(directory))
        (out / f"{version}.json").write_text(json.dumps(found, indent=0))


@pytest.fixture(scope="module", params=SOURCES)
def theirs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the existing tool wrote, by version."""
    out = reference("watching_mindspore", request.param, tmp_path_factory.mktemp("theirs"), make)
    return {version: json.loads((out / f"{version}.json").read_text()) for version in PARTS}


def test_gradient_probe_files(ours: dict[str, Any], theirs: dict[str, dict[str, Any]]) -> None:
    """The same files, columns, rows, numbers, checksums and signs; level L2 has one more column, for NaN, at the end."""
    tables = {place: table for place, table in theirs["8.1.1"].items() if place.startswith("L")}
    assert len(tables) == 33
    assert {place for place in ours if place.startswith("L")} == set(tables)
    for place, table in tables.items():
        if place.endswith(".npy"):
            assert ours[place] == table
            continue
        head = table[0]
        assert ours[place][0] == [*head, *(["NaN"] if place.startswith("L2") else [])]
        checksum = head.index("MD5") if "MD5" in head else -1
        assert len(ours[place]) == len(table)
        for mine, row in zip(ours[place][1:], table[1:]):
            assert all(near(a, b) or (i == checksum and len(a) == len(b) == 8) for i, (a, b) in enumerate(zip(mine, row)))


@pytest.mark.parametrize("version", PARTS)
def test_monitor_files(ours: dict[str, Any], theirs: dict[str, dict[str, Any]], version: str) -> None:
    """The same files and columns. Theirs write moments shifted by a column (the name stands below ``vpp_stage``, prefixed); here every
    number stands below its own name."""
    tables = {place: table for place, table in theirs[version].items() if place.startswith("moments/")}
    assert len(tables) == 6
    for place, table in tables.items():
        assert ours[place][0] == table[0]
        assert table[0] == ["vpp_stage", "name", "step", "norm", "min", "max", "mean", "shape", "dtype"]
        family = place.removeprefix("moments/").rpartition("_")[0]
        rows = {row[1]: row for row in ours[place][1:]}
        for name, norm, step, *numbers, _, dtype in table[1:]:
            mine = rows.pop(name.removeprefix(f"{family}."))
            assert (mine[0], mine[2], mine[8]) == ("0", step, dtype)
            assert all(near(a, b) for a, b in zip(mine[3:7], [norm, *numbers]))
        assert rows == {}


@pytest.mark.parametrize("version", PARTS)
def test_packs(ours: dict[str, Any], theirs: dict[str, dict[str, Any]], version: str) -> None:
    """Weights and inputs of the first step have the same entries and numbers, without ``set_train`` too."""
    entries = {place: entry for place, entry in theirs[version].items() if place.endswith(".json")}
    assert len(entries) == 2
    for place, entry in entries.items():
        assert flat(ours[place]).keys() == flat(entry).keys()
        assert all(near(str(value), str(flat(entry)[key])) for key, value in flat(ours[place]).items())


def flat(node: Any, at: str = "") -> dict[str, Any]:
    """Leaves by their path."""
    if not isinstance(node, dict):
        return {at: node}
    return {key: value for name, child in node.items() for key, value in flat(child, f"{at}/{name}").items()}
