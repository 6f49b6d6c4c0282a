"""The page docs/operator-scripts.md: its program, its commands and its output, run from top to bottom."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from msprobe_engine.accuracy.scripts.request import KEYS
from msprobe_engine.cli.main import main

PAGE = (Path(__file__).parents[2] / "docs" / "operator-scripts.md").read_text(encoding="utf-8")


def blocks(kind: str) -> list[str]:
    """The examples of a kind, in order."""
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every command works as shown, and what is shown of the output is in it."""
    monkeypatch.chdir(tmp_path)
    (program,) = blocks("python")
    (tmp_path / "train.py").write_text(program)
    subprocess.run([sys.executable, "train.py"], check=True, capture_output=True)
    (settings,) = blocks("json")
    assert tuple(json.loads(settings)) == KEYS
    (tmp_path / "config_op.json").write_text(settings)
    for line in "".join(blocks("bash")).splitlines():
        words = shlex.split(line)
        if words[0] == "msprobe":
            assert main(words[1:]) == 0, line
        else:
            monkeypatch.setattr(sys, "argv", words[1:])
            with pytest.raises(SystemExit) as ended:
                runpy.run_path(words[1], run_name="__main__")
            assert ended.value.code == 0, line
    said = capsys.readouterr().out
    (shown,) = blocks("text")
    for line in shown.splitlines():
        assert re.sub(r" +", " ", line) in re.sub(r" +", " ", said), line
    assert (tmp_path / "scripts" / "Torch.softmax.0.backward.py").exists()
    assert (tmp_path / "softmax.json").exists()
    assert (tmp_path / "results" / "Functional.linear.0.0.pt").exists()
