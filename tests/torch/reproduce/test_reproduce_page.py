"""The page docs/guide/reproduce.md says what the tools do: every example is run, every shown output is looked for."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from msprobe.core import SingleSave
from msprobe.pytorch import PrecisionDebugger, random_save_end, undo_seed_all
from msprobe_engine.formats.dump.reader import open_dump

pytestmark = pytest.mark.slow
PAGE = (Path(__file__).parents[3] / "docs/guide/reproduce.md").read_text(encoding="utf-8")


def section(title: str) -> tuple[list[str], list[str]]:
    """The Python examples of a section, and the outputs shown in it."""
    text = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    assert text is not None
    return re.findall(r"```python\n(.*?)```", text[1], re.DOTALL), re.findall(r"```text\n(.*?)```", text[1], re.DOTALL)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory to run in; what the examples leave in the process is taken back."""
    monkeypatch.chdir(tmp_path)
    PrecisionDebugger._instance = SingleSave._instance = None
    yield tmp_path
    PrecisionDebugger._instance = SingleSave._instance = None
    random_save_end()
    undo_seed_all()


def run(code: str, names: dict[str, Any]) -> None:
    """Run one example; a debugger is a process' own, so the next one starts without."""
    exec(compile(code, "reproduce.md", "exec"), names)
    if PrecisionDebugger._instance is not None:
        PrecisionDebugger._instance.run.at_exit()
        PrecisionDebugger._instance = None


def test_seeds() -> None:
    """Seeds, and calls that start from one state."""
    names: dict[str, Any] = {}
    for code in section("The same numbers in every run")[0]:
        run(code, names)


def test_random_save(place: Path) -> None:
    """The calls that the page shows are those in the file."""
    (code,), (shown,) = section("Where random numbers are drawn")
    run(code, {})
    (file,) = (place / "output").iterdir()
    lines = re.findall(r"^(\w+_random\.[\w.]+),", file.read_text(encoding="utf-8-sig"), re.MULTILINE)
    assert lines == shown.split()


def test_comparison_and_replay(place: Path) -> None:
    """The second run writes the record that the page shows; the third run's last layer gets the first one's input."""
    (first, second), (shown,) = section("The first call that differs")
    (replay,), _ = section("Give a module the inputs of another run")
    names: dict[str, Any] = {}
    run(first, names)
    run(second, names)
    found = open_dump(place / "second").load(0)
    assert list(found.entries) == shown.split()
    assert (found.directory / "bench.json").is_file()
    run(replay, names)
    name = "Module.2.Linear.forward.0"
    given = [dict(open_dump(place / d).load(0).entries[name].tensors())["input.0"].norm for d in ("first", "third")]
    assert given[0] == given[1]
    before = [dict(open_dump(place / d).load(0).entries["Module.1.ReLU.forward.0"].tensors())["output.0"].norm for d in ("first", "third")]
    assert before[0] != before[1]


def test_single_save(place: Path) -> None:
    """The files that the page shows are there, and the comparison gives a sheet per key."""
    (save, compare), (shown,) = section("Save and compare tensors by name")
    run(save, {})
    written = {str(p.relative_to(place)) for p in (place / "run1").rglob("*") if p.is_file()}
    assert set(shown.split()) <= written
    assert len(written) == 1 + 4 * 5
    shutil.copytree(place / "run1", place / "run2")
    run(compare, {})
    assert sorted(p.name for p in (place / "result").iterdir()) == ["log_probs.csv", "response.csv", "summary.csv"]
    assert (place / "result/response.csv").read_text(encoding="utf-8-sig").count(",100.0,") >= 4
