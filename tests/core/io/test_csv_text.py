"""CSV that nobody should believe: one error, with the line, and nothing larger than a line in memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from msprobe_engine.core.errors import TextError
from msprobe_engine.core.io import csv_text
from msprobe_engine.core.io.csv_text import read_rows
from msprobe_engine.core.io.regular_files import OddFileError


def test_rows(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'\xef\xbb\xbfa,b\r\n\r\n"x\ny","1,2"\r\nz\0,')
    assert list(read_rows(tmp_path / "a.csv")) == [["a", "b"], [], ["x\ny", "1,2"], ["z\\0", ""]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'a\n"' + b"x" * 200_000, r"field larger than field limit .*line 2"),
        (b'a\n"' + b"x\n" * 200_000, r"field larger than field limit"),
        (b"a\n\xff\n", "is not UTF-8"),
        (b"a\n" + b"x," * 2_000_001, "more than 4000000 characters"),
    ],
    ids=["a cell", "a quote without an end", "no UTF-8", "a line"],
)
def test_what_is_no_table(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(TextError, match=message):
        list(read_rows(tmp_path / "a.csv"))


def test_bytes_that_are_kept(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"\xff\n")
    assert list(read_rows(tmp_path / "a.csv", errors="backslashreplace")) == [["\\xff"]]


def test_no_regular_file_and_one_that_is_too_large(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OddFileError, match="named pipe"):
        next(read_rows(tmp_path / "pipe"))
    (tmp_path / "a.csv").write_bytes(b"a,b\n")
    with pytest.raises(OSError, match="4 bytes; 3 are the most"):
        next(csv_text.read_rows(tmp_path / "a.csv", most=3))
