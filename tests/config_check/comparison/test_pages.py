"""Examples of docs/guide/config-check.md and docs/guide/launch-scripts.md."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from msprobe_engine.cli.main import main
from msprobe_integrations.config_checker import ConfigChecker

PAGE = Path(__file__).parents[3] / "docs" / "guide" / "config-check.md"
SCRIPTS = PAGE.with_name("launch-scripts.md")
RUN = """\
export NCCL_ALGO=Ring
MODEL=(--num-layers 4 --hidden-size 64)
torchrun --nproc_per_node 8 pretrain.py ${MODEL[@]} --lr 3e-4 --global-batch-size 64 --micro-batch-size 2 --save /a
"""
NEW = RUN.replace("Ring", "Tree").replace("--lr 3e-4", "--learning_rate 1e-4").replace("--global-batch-size 64", "--train_batch_size 128")


def _blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [code for word, code in found if word == language]


def _commands() -> list[list[str]]:
    lines = [line.partition("||")[0] for block in _blocks("bash") for line in block.splitlines()]
    return [words[1:] for line in lines if (words := shlex.split(line, comments=True)) and words[0] == "msprobe"]


def test_commands_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each runs as written, in this order; the comparison prints what the page shows."""
    monkeypatch.chdir(tmp_path)
    Path("run.sh").write_text(RUN, encoding="utf-8")
    Path("run_new.sh").write_text(NEW.replace("/a", "/b"), encoding="utf-8")
    collect, new, compare, verify, ranks = _commands()
    assert [main(words) for words in (collect, new)] == [0, 0]
    capsys.readouterr()
    assert main(compare) == 1
    shown = next(block for block in _blocks("") if block.startswith("The configurations differ"))
    assert capsys.readouterr().out.startswith(shown)
    assert {path.name for path in Path("result").iterdir()} == {"result.xlsx", "result.json", "result.html"}
    assert main(verify) == 0
    assert main([word if word != "pack.zip" else "good.zip" for word in ranks]) == 0


def test_the_program_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`ConfigChecker` collects and compares as the page says."""
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    Path("run.sh").write_text(RUN, encoding="utf-8")
    collect, compare = _blocks("python")
    made: list[ConfigChecker] = []
    own = ConfigChecker.__init__
    monkeypatch.setattr(ConfigChecker, "__init__", lambda checker, *args, **kwargs: made.append(checker) or own(checker, *args, **kwargs))
    exec(compile(collect, str(PAGE), "exec"), {"model": torch.nn.Linear(2, 2)})
    ConfigChecker.undo_patches()
    made[0].close()
    assert Path("pack.zip").exists()
    for script, name in ((RUN, "good"), (NEW, "new")):
        Path("x.sh").write_text(script, encoding="utf-8")
        assert main(["config_check", "-d", "x.sh", "-o", f"{name}.zip"]) == 0
    capsys.readouterr()
    exec(compile(compare, str(PAGE), "exec"), {})
    said = capsys.readouterr().out
    assert "changes numerics lr learning_rate 3e-4 1e-4 every update is scaled by it" in said
    assert "error {'env': 'error'" in said


def test_the_page_shows_what_comes_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The program of the page prints, for the script of the page, what the page shows."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", SCRIPTS.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    (_, script), (_, program), (_, shown) = blocks
    monkeypatch.chdir(tmp_path)
    Path("run.sh").write_text(script, encoding="utf-8")
    exec(compile(program, str(SCRIPTS), "exec"), {})
    assert capsys.readouterr().out == shown
