"""Packs of the existing tool, both versions: read by ours, and ours read by its compare.

The packs were written by the tool itself (tests/fixtures/make_existing_config_packs.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from existing_environment import existing_tool

from msprobe_engine.cli.main import main
from msprobe_engine.find.config.comparison import Comparison
from msprobe_engine.find.config.difference import CHECKERS, COLUMNS
from msprobe_engine.find.config.packs import compare_packs
from msprobe_engine.report.config.tables import Table, tables

PACKS = Path(__file__).parents[2] / "fixtures" / "config_packs"
VERSIONS = ("8.1.1", "26.2.0")


def _compare(version: str, cmp: str) -> Comparison:
    return compare_packs(PACKS / version / "base.zip", PACKS / version / f"{cmp}.zip")


def _tables(found: Comparison, old: bool = False) -> dict[str, Table]:
    return {table.name: table for table in tables(found, old)}


@pytest.mark.parametrize("version", VERSIONS)
def test_runs_that_mean_the_same_are_equal(version: str) -> None:
    """1e-5 and 0.00001, another save path, port and device: the existing tool reports five errors, there is no difference that matters."""
    found = _compare(version, "again")
    assert found.equal
    assert found.verdict == "pass"
    assert not found.problems
    assert {one.name for one in found.harmless} == {"save", "master_port", "CUDA_VISIBLE_DEVICES"}


@pytest.mark.parametrize("version", VERSIONS)
def test_planted_differences_are_all_found_and_nothing_else(version: str) -> None:
    """Alias pairs, a variable, one weight, one parameter, one rank's sample, an added random call, a missing step; floats of YAML where
    the version keeps them. The existing tool passes the variable, the parameter, the step, and cannot match the epsilon."""
    found = _compare(version, "planted")
    settings = {("lr", "learning_rate"), ("norm-epsilon", "rms_norm_eps"), ("seed", "seed")}
    settings |= {("optimizer.weight_decay", "optimizer.weight_decay")} if version == "26.2.0" else set()
    assert {(one.bench_name, one.cmp_name) for one in found.differences if one.sheet == "hyperparameters"} == settings
    others = [
        (one.sheet, one.bench_name, one.cmp_name, one.ranks, one.steps) for one in found.differences if one.sheet != "hyperparameters"
    ]
    assert sorted(others) == [
        ("dataset", "args.0", "args.0", (1,), (0,)),
        ("dataset", "recorded", "", (), (1,)),
        ("env", "NCCL_PROTO", "NCCL_PROTO", (), ()),
        ("random", "", "torch.rand", (), ()),
        ("weights", "inner.bias", "inner.bias", (), (0,)),
        ("weights", "recorded", "", (), (1,)),
        ("weights", "scale", "", (), (0,)),
    ]
    assert found.exit_code == 1


def test_packs_of_the_two_versions_are_compared_with_each_other() -> None:
    """What 8.1.1 has dropped is not taken for a default; packages of the two environments are what differs."""
    found = compare_packs(PACKS / "26.2.0" / "base.zip", PACKS / "8.1.1" / "again.zip")
    assert {one.sheet for one in found.differences} <= {"pip"}
    assert any("optimizer.weight_decay" in note and "8.1.1" in note for note in found.notes)


@pytest.mark.parametrize("version", VERSIONS)
def test_sheets_and_columns_are_those_of_the_existing_tool(version: str) -> None:
    """Every sheet of its workbook is there, in its order, with its columns first."""
    theirs: dict[str, list[list[Any]]] = json.loads((PACKS / version / "planted.json").read_text(encoding="utf-8"))
    ours = _tables(_compare(version, "planted"), old=version == "8.1.1")
    assert [name for name in ours if name in theirs] == list(theirs)
    for name, rows in theirs.items():
        assert list(ours[name].columns[: len(rows[0])]) == rows[0], name
    assert {type(row[1]) for row in ours["summary"].rows} == {type(row[1]) for row in theirs["summary"][1:]}


@pytest.mark.parametrize("version", VERSIONS)
def test_rows_of_tensors_are_those_of_the_existing_tool(version: str) -> None:
    """Each row that it writes for samples and weights is one of ours, with the same verdict and numbers."""
    theirs: dict[str, list[list[Any]]] = json.loads((PACKS / version / "planted.json").read_text(encoding="utf-8"))
    ours = _tables(_compare(version, "planted"))
    for name in ("dataset", "weights"):
        known = {tuple(row[:3]): row[3 : len(COLUMNS[name])] for row in ours[name].rows}
        for row in theirs[name][1:]:
            equal, *numbers = known[tuple(row[:3])]
            assert equal == row[3]
            assert [number is None for number in numbers] == [number is None for number in row[4:]]
            given = [number for number in row[4:] if number is not None]
            assert [number for number in numbers if number is not None] == pytest.approx(given, rel=1e-12)  # a workbook keeps 16 digits


def test_rows_of_settings_keep_the_existing_words() -> None:
    """A matched name is ``pure name`` or ``mapping``, a changed value ``error``."""
    rows = {row[1]: row for row in _tables(_compare("26.2.0", "planted"))["hyperparameters"].rows}
    assert rows["lr"][:7] == ("hyperparameters_static.json", "lr", "learning_rate", "3e-4", "1e-4", "mapping", "error")
    assert rows["seed"][5:7] == ("pure name", "error")


@pytest.mark.existing_tool
@pytest.mark.parametrize("version", VERSIONS)
def test_the_existing_tool_compares_packs_of_ours(version: str, tmp_path: Path) -> None:
    """Its compare reads what our command line collected, and finds the seed."""
    existing = existing_tool(version)
    for name, seed in (("a", 1), ("b", 2)):
        (tmp_path / "run.sh").write_text(f"torchrun --nproc_per_node 2 train.py --lr 1e-4 --seed {seed}\n", encoding="utf-8")
        assert main(["config_check", "-d", str(tmp_path / "run.sh"), "-o", str(tmp_path / f"{name}.zip")]) == 0
    flags = ["-f", "pytorch"] if version == "8.1.1" else []
    existing.run("msprobe", *flags, "config_check", "-c", "a.zip", "b.zip", "-o", "out", cwd=tmp_path)
    code = "import openpyxl, json; b = openpyxl.load_workbook('out/result.xlsx')\n"
    code += "print(json.dumps({s.title: [list(r) for r in s.iter_rows(values_only=True)] for s in b}))"
    sheets = json.loads(existing.run("python", "-c", code, cwd=tmp_path).stdout)
    assert [row[:5] for row in sheets["hyperparameters"][1:]] == [["hyperparameters_static.json", "seed", "seed", "1", "2"]]
    assert set(sheets) - {"summary"} <= set(CHECKERS)
