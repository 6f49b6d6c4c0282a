"""Tables as files: what is written reads back as the same, nothing is run, and a file is there whole or not at all."""

from __future__ import annotations

import base64
import csv
import gzip
import io
import json
import math
import os
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.core.errors import SinkError, UsageError
from msprobe_engine.formats import number_text
from msprobe_engine.measure.options import FORMATS
from msprobe_engine.report.table_files import csvtext, open_table
from msprobe_engine.report.table_files.html import HtmlTable
from msprobe_engine.report.table_files.reading import read_table
from msprobe_engine.report.table_files.xlsx import XlsxTable

HOSTILE = [
    "=1+1",
    "@x",
    "+cmd|' /C calc'!A0",
    "-2+3",
    "\t=1",
    "</script><b>",
    "a\0b",
    "\ud800",
    'q"q',
    "a,b",
    "two\nlines",
    "'=1",
    "\x1b[31m",
]
CELLS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.sampled_from(HOSTILE), st.sampled_from(["-1.5", "+3%", "-inf"])
)


@given(st.lists(st.tuples(CELLS, CELLS), max_size=20), st.sampled_from([csvtext.PLAIN, csvtext.COMPAT]))
def test_both_ways_to_write_csv_give_the_same(rows: list[tuple[Any, Any]], words: csvtext.Words) -> None:
    """The C implementation and the Python one write the same bytes, whatever the cells are."""
    columns = [list(column) for column in zip(*rows)] or [[], []]
    assert csvtext.block_bytes(columns, len(rows), words) == csvtext.lines(columns, words).encode()


@given(st.from_regex(r"[+-]?[0-9]{0,3}\.?[0-9]{0,3}([eE][+-]?[0-9]{0,2})?%?(inf)?", fullmatch=True))
def test_signed_numbers_are_told_from_formulas(text: str) -> None:
    """The C implementation knows the same texts for numbers as the Python one."""
    assert csvtext.block_bytes([[text]], 1) == csvtext.lines([[text]], csvtext.PLAIN).encode()


@given(st.lists(st.tuples(st.floats(), st.booleans()), max_size=30), st.sampled_from(["", "%"]))
def test_texts_of_numbers(rows: list[tuple[float, bool]], suffix: str) -> None:
    """Many numbers as text are what repr says of each."""
    values, where = np.array([value for value, _ in rows], np.float64), np.array([chosen for _, chosen in rows], bool)
    assert number_text.texts(values, where, suffix, "0") == [f"{value!r}{suffix}" if chosen else "0" for value, chosen in rows]


@given(st.lists(st.floats(), max_size=30))
def test_numbers_of_csv_read_back_as_the_same(values: list[float]) -> None:
    """A float64 column, as an array or as a list, is written by repr."""
    data = csvtext.block_bytes([np.array(values, np.float64)], len(values))
    assert data == csvtext.block_bytes([values], len(values))
    assert [float(line) for line in data.decode().split()] == pytest.approx(values, rel=0, abs=0, nan_ok=True)


@given(st.text(min_size=1))
def test_no_text_is_a_formula(text: str) -> None:
    """A cell begins with no character that a spreadsheet runs, unless it is a number."""
    cell = next(csv.reader(io.StringIO(csvtext.cell_text(text)), strict=True), [""])
    first = cell[0] if cell else ""
    assert not first.startswith(("=", "@", "\t", "\r"))
    if first.startswith(("+", "-")):
        assert math.isfinite(float(first.rstrip("%"))) or first.endswith("inf")


def _block(n: int) -> dict[str, Any]:
    return {
        "NPU Name": [HOSTILE[i % len(HOSTILE)] for i in range(n)],
        "Max diff": np.linspace(0, 1, n),
        "NPU max": [1.5 if i % 2 else "N/A" for i in range(n)],
        "Result": ["error" if i == 3 else "pass" for i in range(n)],
        "": ["red" if i == 3 else "" for i in range(n)],
    }


@pytest.mark.parametrize("mode", FORMATS)
def test_files_are_there_whole_or_not_at_all(tmp_path: Path, mode: str) -> None:
    """Under its name a file appears when the table is closed, with mode 0640; a table that is given up leaves nothing."""
    block = _block(40)
    columns = [name for name in block if name]
    table = open_table(tmp_path / "sub" / "t.csv", columns, mode)
    table.write(block)
    table.write(block)
    assert not (tmp_path / "sub" / f"t.{mode}").exists()
    table.close()
    assert [p.name for p in (tmp_path / "sub").iterdir()] == [f"t.{mode}"]
    assert os.stat(tmp_path / "sub" / f"t.{mode}").st_mode & 0o777 == 0o640
    other = open_table(tmp_path / "sub" / "u", columns, mode)
    other.write(block)
    other.abort()
    assert [p.name for p in (tmp_path / "sub").iterdir()] == [f"t.{mode}"]


def test_what_is_not_possible_is_said(tmp_path: Path) -> None:
    """An unknown format and a directory that cannot be one are refused with a sentence."""
    with pytest.raises(UsageError, match="csv, xlsx, parquet, html"):
        open_table(tmp_path / "t", ["a"], "docx")
    (tmp_path / "file").write_text("")
    with pytest.raises(SinkError, match="another output directory"):
        open_table(tmp_path / "file" / "t", ["a"], "csv")


def test_xlsx_has_colours_and_texts_and_is_split(tmp_path: Path) -> None:
    """Rows that are red have a style, numbers are numbers, texts are texts and no cell is a formula; a full sheet gets a successor."""
    block = _block(10)
    table = XlsxTable(tmp_path / "t.xlsx", [name for name in block if name], most_rows=7)
    table.write(block)
    table.close()
    assert [p.name for p in table.files] == ["t.xlsx", "t_slice_1.xlsx"]
    rows = [list(read_table(path)) for path in table.files]
    assert [len(r) for r in rows] == [7, 5]
    assert rows[0][0] == rows[1][0] == ["NPU Name", "Max diff", "NPU max", "Result"]
    assert [r[0] for r in rows[0][1:5]] == HOSTILE[:4]
    assert float(rows[0][2][1]) == pytest.approx(1 / 9)
    with zipfile.ZipFile(table.files[0]) as archive:
        sheet = archive.read("xl/worksheets/sheet1.xml").decode()
    assert "<f>" not in sheet
    styled = re.findall(r'<c r="[A-Z](\d+)" s="\d+"', sheet)
    assert styled == ["5"] * 4


def test_parquet_has_numbers_and_texts_apart(tmp_path: Path) -> None:
    """What is no number in a column of numbers stands beside it, as text."""
    parquet = pytest.importorskip("pyarrow.parquet")
    block = _block(4)
    table = open_table(tmp_path / "t.parquet", [name for name in block if name], "parquet")
    table.write(block)
    table.close()
    read = parquet.read_table(tmp_path / "t.parquet").to_pydict()
    assert read["NPU max"] == [None, 1.5, None, 1.5]
    assert read["NPU max (text)"] == ["N/A", None, "N/A", None]
    assert read["Max diff"] == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert read["Result"] == ["pass", "pass", "pass", "error"]


@pytest.mark.parametrize(
    ("rows", "headline"),
    [
        (
            (("x.0", "N/A", "pass", ""), ("x.1", "x.1", "warning", "small"), ("N/A", "x.2", "error", "of another\nkernel")),
            "x.2: of another<",
        ),
        ((("x.0", "x.0", "warning", ""),), "x.0: warning<"),
        ((("x.0", "x.0", "pass", ""),), "No row is off<"),
        ((), "<h1>title</h1>"),
    ],
)
def test_an_html_table_says_first_which_row_is_off(tmp_path: Path, rows: tuple[tuple[str, ...], ...], headline: str) -> None:
    """An error before a warning, else the first in table order, with its reason."""
    columns = ["NPU Name", "Bench Name", "Result", "Err_message"]
    table = HtmlTable(tmp_path / "t.html", columns, "title")
    table.write({name: [row[i] for row in rows] for i, name in enumerate(columns)})
    table.close()
    top = (tmp_path / "t.html").read_text(encoding="utf-8").partition("<h1>")[2].partition("</h1>")[0]
    assert headline in re.sub("</?span.*?>", "", f"<h1>{top}</h1>")


def test_html_is_bounded_and_shows_no_markup(tmp_path: Path) -> None:
    """Rows that are off are kept first, the page says how many there are, and no cell can end the script element."""
    table = HtmlTable(tmp_path / "t.html", ["NPU Name", "Result"], "</title><script>alert(1)</script>", most_rows=5)
    for _ in range(3):
        table.write({"NPU Name": HOSTILE, "Result": ["pass"] * 12 + ["error"]})
    table.close()
    page = (tmp_path / "t.html").read_text(encoding="utf-8")
    assert "<script>alert" not in page
    assert "39 rows, 5 of them here" in page
    found = re.search(r'id="table">(.*?)</script>', page, re.DOTALL)
    assert found
    data = json.loads(gzip.decompress(base64.b64decode(found[1])))
    assert [row[1] for row in data["rows"]].count("error") == 3
    assert "http" not in page.replace("http-equiv", "")
