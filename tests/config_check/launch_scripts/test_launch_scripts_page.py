"""The example of docs/guide/launch-scripts.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "guide" / "launch-scripts.md"


def test_the_page_shows_what_comes_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The program of the page prints, for the script of the page, what the page shows."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    (_, script), (_, program), (_, shown) = blocks
    monkeypatch.chdir(tmp_path)
    Path("run.sh").write_text(script, encoding="utf-8")
    exec(compile(program, str(PAGE), "exec"), {})
    assert capsys.readouterr().out == shown
