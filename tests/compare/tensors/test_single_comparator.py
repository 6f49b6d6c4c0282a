"""`SingleComparator`: sheets of what `SingleSave` wrote in two runs."""

from __future__ import annotations

import csv
import math
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from existing_environment import existing_tool

from msprobe.core import SingleComparator
from msprobe_engine.core.errors import DumpFormatError, MissingExtraError, SinkError, UsageError
from msprobe_engine.report.table.single_save import HEADER


def write(root: Path, place: str, *values: Any) -> None:
    """An array file as `SingleSave` has it."""
    path = root / "data" / place
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, np.array(values))


def rows(path: Path, expected: tuple[str, ...] = HEADER) -> list[list[str]]:
    """The lines of a csv sheet, without the header."""
    assert path.read_bytes().startswith(b"\xef\xbb\xbf")
    with open(path, newline="", encoding="utf-8-sig") as file:
        header, *lines = csv.reader(file)
    assert tuple(header) == expected
    return lines


def xlsx_rows(path: Path) -> list[list[str | float]]:
    """The cells of the one sheet of an xlsx file."""
    with zipfile.ZipFile(path) as book:
        sheet = book.read("xl/worksheets/sheet1.xml").decode()
    found: list[list[str | float]] = []
    for row in re.findall(r"<row [^>]*>(.*?)</row>", sheet, re.DOTALL):
        cells = re.findall(r'<c r="[A-Z]+\d+"(?: t="inlineStr"><is><t[^>]*>(.*?)</t></is>|><v>(.*?)</v>)</c>', row, re.DOTALL)
        found.append([text or float(number) for text, number in cells])
    assert "<f>" not in sheet
    return found


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """Two runs of two steps, with lists, dicts and files directly in the rank directory; one file is in the first only."""
    a, b = tmp_path / "a", tmp_path / "b"
    for root, shift in ((a, 0.0), (b, 0.5)):
        for step in (10, 2):
            write(root, f"response/step{step}/rank0/micro_step0/response.npy", 1.0, 2.0 + shift)
        write(root, "pair/step0/rank1/micro_step3/pair.0.npy", 1.0)
        write(root, "pair/step0/rank1/micro_step3/pair.10.npy", 1.0)
        write(root, "pair/step0/rank1/micro_step3/pair.2.npy", 1.0)
        write(root, "d/step0/rank0/micro_step0/d.x.npy", 1.0 + shift)
        write(root, "d/step0/rank0/micro_step0/d.y.npy", 1.0)
        write(root, "plain/step0/rank0/plain.npy", 1.0)
    write(a, "pair/step0/rank1/micro_step4/pair.0.npy", 1.0)
    write(a, "alone/step0/rank0/micro_step0/alone.npy", 1.0)
    return a, b


def test_sheets(two: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One sheet per key of either directory, rows in the order of step, rank, micro step and id; what only one has is said."""
    made = SingleComparator.compare(*map(str, two), output_path=str(tmp_path / "out"), num_processes=2, file_format="csv")
    assert [p.name for p in made] == ["alone.csv", "d.csv", "pair.csv", "plain.csv", "response.csv"]
    sheets = {p.stem: rows(p) for p in made}
    assert [r[0] for r in sheets["response"]] == ["2", "10"]
    assert sheets["response"][0] == [
        "2",
        "0",
        "0",
        "0",
        "[2]",
        "[2]",
        "50.0",
        "1",
        "0.5",
        "0.2",
        "50.0",
        "50.0",
        "2",
        "differs",
        "1 elements beyond the tolerance",
    ]
    places = [["0", "1", "3", "0"], ["0", "1", "3", "2"], ["0", "1", "3", "10"], ["0", "1", "4", "0"]]
    assert [r[:4] for r in sheets["pair"]] == places
    assert [r[-2] for r in sheets["pair"]] == ["same", "same", "same", "missing"]
    assert [r[3] for r in sheets["d"]] == ["x", "y"]
    assert [r[6] for r in sheets["plain"]] == ["100.0"]
    assert [r[4:] for r in sheets["alone"]] == [["[1]", *[""] * 7, "0", "missing", "only in the first directory"]]
    with open(tmp_path / "out" / "summary.csv", newline="", encoding="utf-8-sig") as file:
        lines = list(csv.DictReader(file))
    assert [line["key"] for line in lines] == ["response", "alone", "d", "pair", "plain"]
    assert lines[0]["differs"] == "2"
    assert lines[0]["first"].startswith("step 2, rank 0, micro_step 0, id 0: differs")
    said = capsys.readouterr().err
    assert "pair: 1 arrays are in one directory only" in said
    assert "micro step 4" in said


def test_xlsx_says_the_same(two: tuple[Path, Path], tmp_path: Path) -> None:
    """xlsx sheets hold the same cells as csv sheets, numbers as numbers, and no formula."""
    pytest.importorskip("xlsxwriter")
    write(two[0], "=cmd/step0/rank0/micro_step0/=cmd.=x.npy", np.inf)
    write(two[1], "=cmd/step0/rank0/micro_step0/=cmd.=x.npy", 1.0)
    made = SingleComparator.compare(*two, output_path=tmp_path / "out")
    texts = {p.stem: rows(p) for p in SingleComparator.compare(*two, output_path=tmp_path / "out", file_format="csv")}
    for path in made:
        header, *lines = xlsx_rows(path)
        assert tuple(header) == HEADER
        for line, expected in zip(lines, texts[path.stem], strict=True):
            assert [c if isinstance(c, str) else float(c) for c in line] == [
                float(e) if re.fullmatch(r"[\d.e-]+", e) else e.removeprefix("'") for e in expected if e
            ]
    assert {"=x", "inf"} <= set(xlsx_rows(tmp_path / "out/=cmd.xlsx")[1])


def test_missing_xlsx_package(two: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package xlsx says what to install before any work is done."""
    monkeypatch.setitem(sys.modules, "xlsxwriter", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'msprobe-integrations\[xlsx\]'"):
        SingleComparator.compare(*two, output_path=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_damaged_and_hostile_files(two: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A cut file, a pickled object and texts are named and left out; the other rows are there. Nothing is unpickled."""
    bad = two[0] / "data/pair/step0/rank1/micro_step3"
    (bad / "pair.0.npy").write_bytes((bad / "pair.0.npy").read_bytes()[:-3])
    np.save(bad / "pair.2.npy", np.array([print], dtype=object), allow_pickle=True)
    np.save(two[0] / "data/plain/step0/rank0/plain.npy", np.array(["text"]))
    made = SingleComparator.compare(*two, output_path=tmp_path / "out", file_format="csv")
    assert [(r[3], r[-2]) for r in rows(made[2])] == [("0", "unreadable"), ("2", "unreadable"), ("10", "same"), ("0", "missing")]
    assert [r[-2] for r in rows(made[3])] == ["unreadable"]
    said = capsys.readouterr().err
    assert said.count("is no numpy file or is damaged (") >= 2
    assert "only numbers can be compared" in said


def test_bad_arguments(two: tuple[Path, Path], tmp_path: Path) -> None:
    """Directories that SingleSave never wrote, bad numbers and formats, and an unwritable place are named, before a directory is made."""
    with pytest.raises(DumpFormatError, match="no such directory"):
        SingleComparator.compare(two[0], tmp_path / "nothing", file_format="csv")
    with pytest.raises(UsageError, match="num_processes is 0"):
        SingleComparator.compare(*two, num_processes=0)
    with pytest.raises(UsageError, match="file_format is 'xls'"):
        SingleComparator.compare(*two, file_format="xls")
    for wrong in ({"rtol": -1}, {"atol": True}, {"align": "left"}, {"masks": {"d": 1}}, {"masks": {"d": "nothing"}}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            SingleComparator.compare(*two, tmp_path / "out", file_format="csv", **wrong)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("x")
    with pytest.raises(SinkError, match="file"):
        SingleComparator.compare(*two, output_path=tmp_path / "file" / "out", file_format="csv")


def test_verdicts(tmp_path: Path) -> None:
    """Tolerance, NaN on one side, shapes, sequences of different lengths on either end, masks that differ."""
    a, b = tmp_path / "a", tmp_path / "b"
    cases: dict[str, tuple[Any, Any]] = {
        "close": ([[1.0, 2.0]], [[1.0005, 2.0]]),
        "nan": ([[math.nan, 2.0]], [[3.0, 2.0]]),
        "same": ([[math.nan, math.inf]], [[math.nan, math.inf]]),
        "shape": (np.eye(4), np.eye(2)),
        "lp": ([[0.5, 0.25, 9.0]], [[0.5, 0.25, 7.0, 7.0]]),
        "mask": ([[1, 1, 0]], [[1, 1, 0, 0]]),
        "left": ([[9.0, 0.5, 0.25]], [[7.0, 7.0, 0.5, 0.25]]),
        "left_mask": ([[0, 1, 1]], [[0, 0, 1, 1]]),
        "other": ([[0.5, 0.25]], [[0.5, 0.25]]),
        "other_mask": ([[1, 1]], [[1, 0]]),
        "long": ([[0.5]], [[0.5, 0.25]]),
        "long_mask": ([[1]], [[1, 1]]),
    }
    for key, sides in cases.items():
        for root, value in zip((a, b), sides):
            write(root, f"{key}/step0/rank0/micro_step0/{key}.npy", *value)
    masks = {"lp": "mask", "other": "other_mask", "long": "long_mask"}

    def verdicts(**options: Any) -> dict[str, list[str]]:
        made = SingleComparator.compare(a, b, tmp_path / "out", file_format="csv", **options)
        return {path.stem: rows(path)[0][-3:] for path in made}

    found = verdicts(masks=masks)
    assert {key: found[key][1] for key in ("close", "nan", "same", "shape", "lp")} == {
        "close": "close", "nan": "differs", "same": "same", "shape": "differs", "lp": "same",
    }  # fmt: skip
    assert found["shape"][2] == "shapes differ"
    assert found["lp"][0] == "2"
    assert found["other"][1:] == ["differs", "masks differ in 1 elements"]
    assert found["long"][1:] == ["differs", "masks differ in 1 elements"]
    assert verdicts(masks={"left": "left_mask"}, align="end")["left"][:2] == ["2", "same"]
    assert verdicts(rtol=0)["close"][1:] == ["differs", "1 elements beyond the tolerance"]
    assert verdicts(rtol=0, atol=1e-3)["close"][1] == "close"


THEIRS = """
import sys, pandas
from msprobe.core import SingleComparator
SingleComparator.compare(sys.argv[1], sys.argv[2], sys.argv[3], num_processes=1)
for key in ("x", "pair"):
    pandas.read_excel(f"{sys.argv[3]}/{key}.xlsx").to_csv(f"{sys.argv[3]}/{key}.csv", index=False, encoding="utf-8-sig")
"""


@pytest.mark.existing_tool
def test_figures_of_the_existing_tool(tmp_path: Path) -> None:
    """The same columns and rows, and figures that agree within the rounding of float32, in which the existing tool computes."""
    a, b = tmp_path / "a", tmp_path / "b"
    random = np.random.default_rng(0)
    for place in ("x/step0/rank0/micro_step0/x", "x/step1/rank2/micro_step1/x", "pair/step0/rank0/micro_step0/pair.0"):
        values = random.standard_normal(500, dtype=np.float32)
        other = np.where(random.random(500) < 0.5, values, values * (1 + 0.004 * random.standard_normal(500))).astype(np.float32)
        write(a, f"{place}.npy", *values)
        write(b, f"{place}.npy", *other)
    existing_tool("26.2.0").run("python", "-c", THEIRS, a, b, tmp_path / "theirs", cwd=tmp_path)
    for path in SingleComparator.compare(a, b, tmp_path / "ours", file_format="csv"):
        ours, theirs = rows(path), rows(tmp_path / "theirs" / path.name, HEADER[:12])
        assert [r[:6] for r in ours] == [r[:6] for r in theirs]
        assert np.array([r[6:12] for r in ours], float) == pytest.approx(np.array([r[6:] for r in theirs], float), rel=1e-5)
