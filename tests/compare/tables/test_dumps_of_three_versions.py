"""One training, dumped by 8.1.1, by 26.2.0 and by this tool: what they write differently is no difference of the runs, and a planted fault
is named in every pair. The dumps of the existing tool are those of `tests/fixtures/compare`."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import itertools
import re
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from msprobe_engine.cli.main import main
from msprobe_engine.find.run import diagnose
from msprobe_engine.formats.dump.read_table import read_side
from msprobe_engine.measure.dump_dialects import NEW, OLD, OURS, recorder

FIXTURES = Path(__file__).parents[2] / "fixtures"
PAIRS = list(itertools.permutations((OLD, NEW, OURS), 2))
NAMED = {
    "bf16": ("divergence", "Tensor.bfloat16.0.forward", "Functional.linear.1.forward"),
    "eps": ("divergence", "Functional.layer_norm.0.forward"),
    "nan": ("nonfinite", "Torch.where.0.forward"),
    "arguments": ("divergence", "Functional.gelu.0.forward"),
    "more": ("none",),
}
"""Fault -> finding, and the records that may be named; 26.2.0 does not record casts, so the call before is named there. A call more that
changes no number is said."""


def _script() -> ModuleType:
    """The script that made the fixtures; our own package has the same interface."""
    spec = importlib.util.spec_from_file_location("make_existing_compare", FIXTURES / "make_existing_compare.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Root with {recorder}/{golden or fault}."""
    root = tmp_path_factory.mktemp("mixed")
    for version in (OLD, NEW):
        with tarfile.open(FIXTURES / "compare" / version / "statistics_mix.tar.xz") as archive:
            archive.extractall(root / version, filter="data")
    for name in ("torch._dynamo", "msprobe.pytorch"):  # once, before a process is forked for each dump
        importlib.import_module(name)
    version_of = importlib.metadata.version
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.metadata, "version", lambda name: NEW if name == "mindstudio-probe" else version_of(name))
        script = _script()
    for fault in ("", *NAMED):
        script.dump(root / OURS / (fault or "golden"), "statistics_mix", fault)
    return root


@pytest.mark.parametrize("version", [OLD, NEW, OURS])
@pytest.mark.fast_cells("26.2.0", "ours")
def test_recorder_is_known(dumps: Path, version: str) -> None:
    """The file tells who wrote it."""
    assert recorder(read_side(dumps / version / "golden" / "dump.json")) == version


@pytest.mark.parametrize(("one", "two"), PAIRS)
def test_equal_runs(dumps: Path, one: str, two: str, tmp_path: Path) -> None:
    """Equal runs are equal whoever wrote them: by the finding, and no row of the table is off; what holds NaN on both sides is said."""
    target, golden = str(dumps / one / "golden"), str(dumps / two / "golden")
    found = diagnose(target, golden)
    assert (found.finding, found.suspects) == ("none", [])
    assert found.problems == ["2 tensors hold NaN or Inf on both sides and cannot be compared; each run alone tells why."]
    assert found.looked_at["records"] > 30
    assert main(["compare", "-tp", target, "-gp", golden, "-o", str(tmp_path)]) == 3
    (table,) = tmp_path.rglob("*.csv")
    assert ",error," not in table.read_text()


@pytest.mark.parametrize(("one", "two"), PAIRS)
@pytest.mark.parametrize("fault", NAMED)
def test_fault(dumps: Path, one: str, two: str, fault: str) -> None:
    """The fault is named where it is."""
    finding, *records = NAMED[fault]
    found = diagnose(dumps / one / fault, dumps / two / "golden")
    assert found.finding == finding, found.headline()
    if records:
        first = found.first_suspect
        assert first is not None
        assert first.record in records
    else:
        assert "Torch.mul.0.forward" in found.unmatched["target"]


def test_xlsx_of_the_pair(dumps: Path, tmp_path: Path) -> None:
    """The table of a fault as xlsx: a filter over all rows, header and names stay in sight, rows that are off are red or yellow."""
    pair = ["-tp", str(dumps / OLD / "nan"), "-gp", str(dumps / OURS / "golden")]
    assert main(["compare", *pair, "-o", str(tmp_path), "--xlsx", "--columns", OLD]) == 1
    (table,) = tmp_path.rglob("*.xlsx")
    with zipfile.ZipFile(table) as archive:
        sheet, styles = (archive.read(f"xl/{name}.xml").decode() for name in ("worksheets/sheet1", "styles"))
    rows = sheet.count("<row ")
    (last,) = re.findall(r'<autoFilter ref="A1:[A-Z]+(\d+)"/>', sheet)
    assert int(last) == rows > 300
    assert re.search(r'<pane xSplit="1" ySplit="1" topLeftCell="B2"[^>]* state="frozen"/>', sheet)
    assert set(re.findall(r'<fgColor rgb="FF([0-9A-F]{6})"/>', styles)) == {"FF0000", "FFFF00"}
    coloured = dict(re.findall(r'<c r="A(\d+)" s="(\d)"', sheet))
    assert set(coloured.values()) == {"1", "2"}
    assert "1" not in coloured
