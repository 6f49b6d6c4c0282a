"""The examples of docs/dispatch-compare.md and docs/compile-accuracy.md do what the pages say."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str) -> list[tuple[str, str]]:
    """(language, text) of the code blocks of a page."""
    return re.findall(r"```(\w*)\n(.*?)```", (DOCS / page).read_text("utf-8"), re.DOTALL)


def run(page: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    module = ModuleType("example_of_a_page")  # one that can be imported: torch.compile looks for what its code names
    monkeypatch.setitem(sys.modules, module.__name__, module)
    names = vars(module)
    for n, (_, code) in enumerate(block for block in blocks(page) if block[0] == "python"):
        exec(compile(code, f"{page}, block {n}", "exec"), names)
    return names


def test_dispatch_compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that adds up in bfloat16 is the one failure, and what is printed is what the page shows."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    shown = next(text for language, text in blocks("dispatch-compare.md") if not language)
    printed = run("dispatch-compare.md", monkeypatch)["dispatch"].tables.text()
    assert re.sub(r"\(/.*\)", "(...)", printed).strip() == shown.strip()


def test_compile_accuracy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The second block is where it begins, and dynamo is the layer."""
    monkeypatch.chdir(tmp_path)
    run("compile-accuracy.md", monkeypatch)
    printed = capsys.readouterr().out
    assert next(text for language, text in blocks("compile-accuracy.md") if not language).strip() in printed
    assert printed.rstrip().endswith("eager")
    assert (tmp_path / "compile.csv").exists()
