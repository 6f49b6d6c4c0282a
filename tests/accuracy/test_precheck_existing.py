"""`--compat` side by side with the existing tool: its result files, written on a CPU by `tests/fixtures/make_existing_precheck.py`,
have the cells that ours have, for a small transformer and a sweep over torch's operators. Both sides run with kernels that do not hang on
the processor (`any_processor`)."""

from __future__ import annotations

import csv
import lzma
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from any_processor import KERNELS
from existing_precheck import CASES, VERSIONS

from msprobe_engine.accuracy.metrics import COLUMNS
from msprobe_engine.accuracy.results import SKIP

ARCHIVE = Path(__file__).parents[1] / "fixtures" / "precheck_existing.tar.xz"
LEFT_OUT = {
    "Tensor.cauchy_": "draws random numbers",
    "Tensor.exponential_": "draws random numbers",
    "Tensor.geometric_": "draws random numbers",
    "Tensor.log_normal_": "draws random numbers",
    "Functional.multi_head_attention_forward": "draws random numbers inside",
    "Torch.resize_as_": "gives memory that nobody has written to",
    "Functional.triplet_margin_with_distance_loss": "an argument is a module; the existing tool calls it without",
}
COMPARED = {"transformer_float32": 3_000, "transformer_bfloat16": 3_000, "sweep_float32": 20_000, "sweep_bfloat16": 18_000}
"""Cells that are equal, at least."""

ERRORS = {COLUMNS[key] for key in ("cosine", "max_abs", "rmse", "max_rel", "mean_rel")}
ULPS = {COLUMNS[key] for key in ("max_ulp", "mean_ulp")}
SHARES = {COLUMNS[key] for key in ("balance", "ulp_share")}
UNITS = 16
ROUNDED = 0.005
"""Some functions of MKL (roots, powers, arc functions, and what is made of them) begin with the processor's own approximation of a
reciprocal or its root, whatever they are told: their last bits are those of the processor. An error that is measured may be another one by
`UNITS` of round-off of float32, and only in this share of all cells (0.17 % in float32 between AMD's and exact approximations); how many
elements are above or below is chance where another number of the row has changed. Verdicts, and shares below a bound, have to be equal."""


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("existing")
    with lzma.open(ARCHIVE) as file, tarfile.open(fileobj=file) as tar:
        tar.extractall(place, filter="data")
    return place


@pytest.fixture(scope="module")
def ours(dumps: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Our result files of all cases, in both forms."""
    place = tmp_path_factory.mktemp("ours")
    program = [sys.executable, str(Path(__file__).with_name("existing_precheck.py")), str(dumps), str(place)]
    ran = subprocess.run(program, env={**os.environ, **KERNELS}, capture_output=True, text=True, timeout=900)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "CPU capability DEFAULT" in ran.stdout
    return place


def rows(path: Path) -> dict[str, dict[str, str]]:
    with open(path, encoding="utf-8-sig", newline="") as file:
        found = list(csv.DictReader(file))
    return {next(iter(row.values())): row for row in found}


def unequal(theirs: dict[str, str], ours: dict[str, str]) -> Iterator[tuple[str, bool]]:
    """Columns that are not equal, the messages left out, and whether it is the processor that makes the difference."""
    columns = [column for column, cell in theirs.items() if column != "Message" and cell != ours[column]]
    if theirs.get("Shape") == "()":
        columns = [column for column in columns if not _near(theirs[column], ours[column], 1e-6, relative=True)]
    errors = [column for column in columns if _rounded(column, theirs[column], ours[column])]
    for column in columns:
        yield column, column in errors or (column in SHARES and bool(errors))


def _rounded(column: str, one: str, other: str) -> bool:
    if column in ULPS:
        return _near(one, other, UNITS)
    return column in ERRORS and _near(one, other, UNITS * 2.0**-23)


def _near(one: str, other: str, bound: float, relative: bool = False) -> bool:
    """`relative`: of results without dimensions. What numpy 1 takes in float64 of them, numpy 2 takes in float32; the two versions were
    run with one each."""
    try:
        numbers = float(one), float(other)
    except ValueError:
        return False
    size = max(map(abs, numbers))
    return abs(numbers[0] - numbers[1]) <= bound * (size if relative else max(1.0, size))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("case", CASES)
def test_the_columns_are_those_of_the_existing_tool(dumps: Path, ours: Path, case: str, version: str) -> None:
    """All columns but the messages, in every row of a call that it could run; calls that draw random numbers cannot be equal."""
    equal, calls = 0, set()
    different: list[tuple[str, str, str, str]] = []
    rounded: list[tuple[str, str, str, str]] = []
    for file in ("result.csv", "details.csv"):
        found = rows(ours / case / version / file)
        for name, row in rows(dumps / case / version / file).items():
            if any(name.startswith(f"{api}.") for api in LEFT_OUT) or SKIP in (row.get("Status"), row.get("Forward Test Success")):
                continue
            calls.add(".".join(name.split(".")[:2]))
            equal += len(row) - ("Message" in row)
            for column, processor in unequal(row, found[name]):
                (rounded if processor else different).append((name, column, row[column], found[name][column]))
                equal -= 1
    assert not different
    assert len(rounded) <= ROUNDED * equal, rounded
    assert equal >= COMPARED[case]
    assert len(calls) >= (300 if case.startswith("sweep") else 15)


def test_what_a_processor_may_change(dumps: Path) -> None:
    """Next to nothing: an error in its last units, and then on which side the elements lie. No verdict, no share below a bound."""
    row = next(
        r for r in rows(dumps / "sweep_float32" / "8.1.1" / "details.csv").values() if r["API Name"].startswith("Torch.cholesky.0.f")
    )
    rmse, balance, share = COLUMNS["rmse"], COLUMNS["balance"], COLUMNS["small_errors"]

    def changed(**cells: object) -> dict[str, bool]:
        return dict(unequal(row, {**row, **{key: str(value) for key, value in cells.items()}}))

    unit = 2.0**-23
    assert changed() == {}
    assert changed(Message="else") == {}
    assert changed(**{rmse: float(row[rmse]) + 4 * unit, balance: 0.5}) == {rmse: True, balance: True}
    assert changed(**{rmse: float(row[rmse]) + 20 * unit, balance: 0.5}) == {rmse: False, balance: False}
    assert changed(**{balance: 0.5}) == {balance: False}
    assert changed(**{rmse: float(row[rmse]) + unit, share: 0.5, "Status": "error"}) == {rmse: True, share: False, "Status": False}
    assert changed(**{rmse: "nan"}) == {rmse: False}
    assert changed(**{rmse: " "}) == {rmse: False}
