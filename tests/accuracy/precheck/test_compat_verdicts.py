"""`--compat` beside the existing tool's own result files, and the three-way comparison."""

from __future__ import annotations

import csv
import io
import json
import lzma
import math
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from any_processor import KERNELS
from existing_precheck import CASES, VERSIONS
from verdict_cases import Case, cases, name

from msprobe_engine.accuracy.precision_compare import Compared, compare_files, compare_rows, write
from msprobe_engine.accuracy.result_forms import DETAILS_COLUMNS, Form, form_of, join
from msprobe_engine.accuracy.results import SKIP, CallResult, TensorResult
from msprobe_engine.accuracy.verdict.existing import comparable, old_status
from msprobe_engine.accuracy.verdict.judge import judge
from msprobe_engine.accuracy.verdict.metrics import COLUMNS, convert_to_working_types
from msprobe_engine.accuracy.verdict.rounding import round_to
from msprobe_engine.accuracy.verdict.standards import _forms
from msprobe_engine.cli.main import main
from msprobe_engine.core.dtypes import float_type
from msprobe_engine.core.errors import UnreadableFileError, UsageError

# Cells of ``--compat`` are those of the existing tool, and so is the three-way comparison; what that one gets wrong ours does not.

FIXTURE = Path(__file__).resolve().parents[2] / "fixtures" / "verdicts_existing.json.xz"
LEFT_OUT = 31


@cache
def existing() -> dict[str, Any]:
    """What the existing tool wrote."""
    found: dict[str, Any] = json.loads(lzma.decompress(FIXTURE.read_bytes()))
    return found


def typed(value: Any, dtype: str) -> Any:
    """A value of a case as the backend hands it over."""
    if not isinstance(value, np.ndarray):
        return value
    with np.errstate(all="ignore"):
        if dtype == "bfloat16":
            kind = float_type(dtype)
            assert kind is not None
            return round_to(value, kind).astype(np.float32)
        return value.astype(dtype)


def judged(case: Case, number: int, version: str) -> TensorResult:
    """With the old verdict of that version."""
    bench, device = typed(case.bench, case.bench_dtype), typed(case.device, case.device_dtype)
    tensors = isinstance(bench, np.ndarray)
    one, two = (f"torch.{dtype}" if tensors else dtype for dtype in (case.bench_dtype, case.device_dtype))
    found = judge(case.api, name(case, number), bench, device, one, two)
    if not tensors:
        return found
    b, d = convert_to_working_types(bench, device, two)
    metrics = found.metrics if comparable(b.dtype.name, d.dtype.name, version) else {}
    status = old_status(b, d, two, metrics, version)
    return TensorResult(found.name, found.shape, one, two, metrics, found.standard, found.status, "", status, found.units)


def rows(version: str, side: str, form: Form) -> list[list[str]]:
    """Cells of all pairs as a reader has them."""
    lines = []
    for number, case in enumerate(cases(side)):
        call = CallResult("x", "pass", tensors=(judged(case, number, version),))
        lines += [join(row).decode() for row in form.details_rows(call)]
    return list(csv.reader(io.StringIO("".join(lines), newline="")))


@pytest.mark.parametrize("version", VERSIONS)
def test_cells_are_those_of_the_existing_tool(version: str) -> None:
    """Every metric, blank and status of about a thousand pairs of results; numbers without dimensions may differ in the last digits, and
    the cosine in its fourteenth: BLAS adds in another order on another processor."""
    ours, theirs = rows(version, "npu", form_of(version)), existing()[version]["npu"]
    assert len(ours) == len(theirs) > 1000
    for mine, old in zip(ours, theirs):
        for column, x, y in zip(DETAILS_COLUMNS, mine[:-1], old):
            same = x == y or (mine[3] == "()" and version == "26.2.0" and math.isclose(float(x), float(y), rel_tol=1e-6))
            same = same or (column == DETAILS_COLUMNS[4] and " " not in (x, y) and math.isclose(float(x), float(y), abs_tol=1.5e-14))
            assert same, (column, mine, old)


@pytest.mark.parametrize("version", VERSIONS)
def test_three_way_comparison_is_that_of_the_existing_tool(version: str, tmp_path: Path) -> None:
    """Files, rows, ratios and statuses, from the existing tool's own files."""
    stored = existing()[version]
    for side in ("npu", "gpu"):
        kept = [row for n, row in enumerate(stored[side]) if side == "npu" or n % LEFT_OUT]
        with (tmp_path / f"{side}.csv").open("w", encoding="utf-8-sig", newline="") as file:
            csv.writer(file).writerows([DETAILS_COLUMNS, *([*row, "message"] for row in kept)])
    found = compare_files(tmp_path / "npu.csv", tmp_path / "gpu.csv", version)
    for path, old in zip(write(found, tmp_path / "out", version), (stored["result"], stored["details"])):
        with path.open(encoding="utf-8-sig", newline="") as file:
            ours = list(csv.reader(file))
        assert [row[:-1] for row in ours] == [row[:-1] for row in old]
    assert found.missing
    assert found.exit_code == 1


def _against(version: str, one: list[list[str]], other: list[list[str]], columns: tuple[str, ...]) -> Compared:
    del version
    return compare_rows([dict(zip(columns, row)) for row in one], [dict(zip(columns, row)) for row in other], None)


@pytest.mark.fast_cells("8.1.1")
@pytest.mark.parametrize("version", VERSIONS)
def test_a_file_against_itself_passes(version: str) -> None:
    """Whatever it holds: of the existing tool (which fails this), and of ours."""
    stored = [[*row, "message"] for row in existing()[version]["npu"]]
    ours = rows(version, "npu", Form())
    for found in (_against(version, stored, stored, DETAILS_COLUMNS), _against(version, ours, ours, Form().details_columns)):
        assert set(found.counts) == {"pass", "SKIP"}
        assert found.counts["SKIP"] < 50
        assert found.exit_code == 0


def _file(path: Path, *results: TensorResult) -> Path:
    form = Form()
    lines = [join(form.details_columns)]
    lines += [join(row) for row in form.details_rows(CallResult("x", "pass", tensors=results))]
    path.write_bytes(b"".join(lines))
    return path


def _result(name: str, device: Any, dtype: str = "torch.float32") -> TensorResult:
    bench = np.linspace(0.1, 2, 50)
    return judge(
        name.split(".")[1], name, bench, np.asarray(device(bench), np.float32), "torch.float64", dtype, changed=[bench * (1 + 2.0**-24)]
    )


def test_a_worse_device_does_not_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """NaN on one device alone, and errors that are larger than the other's by more than ten times, are errors; alike errors are none;
    rows that one file has alone or twice are told."""

    def nan(bench: Any) -> Any:
        return np.where(np.arange(bench.size) == 3, np.nan, bench)

    def wrong(bench: Any) -> Any:
        return bench * 1.01

    def worse(bench: Any) -> Any:
        return bench * 1.5

    names = [f"Torch.exp.{n}.forward.output.0" for n in range(6)]
    npu = _file(tmp_path / "npu.csv", *map(_result, names[:5], (nan, wrong, worse, np.copy, np.copy)))
    gpu = _file(tmp_path / "gpu.csv", *map(_result, names[:4], (np.copy, wrong, wrong, np.copy)), *(_result(names[5], np.copy),) * 2)
    code = main(["api_precision_compare", "-npu", str(npu), "-gpu", str(gpu), "-o", str(tmp_path / "out")])
    out = capsys.readouterr().out
    assert code == 1
    assert "1 rows more than once" in out
    assert f"{names[4]} (first file)" in out
    result = next((tmp_path / "out").glob("api_precision_compare_result_*.csv"))
    with result.open(encoding="utf-8-sig", newline="") as file:
        statuses = [row[1] for row in csv.reader(file)][1:]
    assert statuses == ["error", "pass", "error", "pass", "SKIP"]
    assert main(["api_precision_compare", "-npu", str(npu), "-gpu", str(gpu), "-o", str(tmp_path / "again"), "--compat"]) == 1
    capsys.readouterr()


def test_what_is_no_details_file_is_refused(tmp_path: Path) -> None:
    """The message names the file and what is missing; with --compat a row that stands twice ends the comparison, as there."""
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(UsageError, match=r"other.csv.*columns are missing"):
        compare_files(path, path)
    with pytest.raises(UsageError, match=r"none\.csv: No such file"):
        compare_files(tmp_path / "none.csv", path)
    with pytest.raises(UnreadableFileError, match="a directory is where a regular file belongs"):
        compare_files(tmp_path, path)
    twice = _file(tmp_path / "twice.csv", *(_result("Torch.exp.0.forward.output.0", np.copy),) * 2)
    with pytest.raises(UsageError, match="stands there 2 times"):
        compare_files(twice, twice, "8.1.1")


def test_lists_of_standards_name_each_api_once() -> None:
    """An API has one standard."""
    text = (Path(__file__).resolve().parents[3] / "msprobe_engine/accuracy/standards.yaml").read_text("utf-8")
    lists = yaml.safe_load(text)
    first = [form for key in list(lists)[:4] for entry in lists[key] for form in _forms(entry)]
    assert len(first) == len(set(first)) > 100


# `--compat` side by side with the existing tool: its result files, written on a CPU by `tests/fixtures/make_existing_precheck.py`, have
# the cells that ours have, for a small transformer and a sweep over torch's operators. Both sides run with kernels that do not hang on
# the processor (`any_processor`).

ARCHIVE = Path(__file__).parents[2] / "fixtures" / "precheck_existing.tar.xz"
NOT_COMPARABLE = {
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


FAST = ("transformer_bfloat16",)


@pytest.fixture(scope="module", params=[FAST, pytest.param(tuple(set(CASES) - set(FAST)), marks=pytest.mark.slow)], ids=["one", "others"])
def ours(request: pytest.FixtureRequest, dumps: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Our result files of some cases, in both forms."""
    place = tmp_path_factory.mktemp("ours")
    program = [sys.executable, str(Path(__file__).parents[1] / "existing_precheck.py"), str(dumps), str(place), *request.param]
    ran = subprocess.run(program, env={**os.environ, **KERNELS}, capture_output=True, text=True, timeout=900)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "CPU capability DEFAULT" in ran.stdout
    return place


def rows_of_file(path: Path) -> dict[str, dict[str, str]]:
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


@pytest.mark.slow
def test_the_columns_are_those_of_the_existing_tool(dumps: Path, ours: Path) -> None:
    """All columns but the messages, in every row of a call that it could run; calls that draw random numbers cannot be equal."""
    for case in sorted(place.name for place in ours.iterdir()):
        for version in VERSIONS:
            compare_columns(dumps, ours, case, version)


def compare_columns(dumps: Path, ours: Path, case: str, version: str) -> None:
    equal, calls = 0, set()
    different: list[tuple[str, str, str, str]] = []
    rounded: list[tuple[str, str, str, str]] = []
    for file in ("result.csv", "details.csv"):
        found = rows_of_file(ours / case / version / file)
        for call, row in rows_of_file(dumps / case / version / file).items():
            if any(call.startswith(f"{api}.") for api in NOT_COMPARABLE) or SKIP in (row.get("Status"), row.get("Forward Test Success")):
                continue
            calls.add(".".join(call.split(".")[:2]))
            equal += len(row) - ("Message" in row)
            for column, processor in unequal(row, found[call]):
                (rounded if processor else different).append((call, column, row[column], found[call][column]))
                equal -= 1
    assert not different, (case, version, different)
    assert len(rounded) <= ROUNDED * equal, (case, version, rounded)
    assert equal >= COMPARED[case]
    assert len(calls) >= (300 if case.startswith("sweep") else 15)


def test_what_a_processor_may_change(dumps: Path) -> None:
    """Next to nothing: an error in its last units, and then on which side the elements lie. No verdict, no share below a bound."""
    row = next(
        r
        for r in rows_of_file(dumps / "sweep_float32" / "8.1.1" / "details.csv").values()
        if r["API Name"].startswith("Torch.cholesky.0.f")
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
