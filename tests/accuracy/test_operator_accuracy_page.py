"""docs/operator-accuracy.md: its program, operators, settings and commands run as they stand there, and find what the page shows."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from msprobe_engine.accuracy.result_forms import DETAILS_COLUMNS, OUR_DETAILS_COLUMNS, OUR_RESULT_COLUMNS, RESULT_COLUMNS
from msprobe_engine.accuracy.settings import PrecheckSettings
from msprobe_engine.cli.main import main
from msprobe_engine.settings.tree import keys_of

PAGE = (Path(__file__).parents[2] / "docs" / "operator-accuracy.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_examples_find_the_wrong_epsilon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The first command prints what the page shows; the others take the files that it names."""
    monkeypatch.chdir(tmp_path)
    for code in blocks("python"):
        Path(code.partition("\n")[0].removeprefix("# ")).write_text(code)
    subprocess.run([sys.executable, "train.py"], check=True, capture_output=True)
    (Path("config.json")).write_text(blocks("json")[0])
    commands = [line for block in blocks("bash") for line in block.splitlines() if line.startswith(("msprobe acc_check", "msprobe -f"))]
    check, listed, resumed, compat = commands[:4]
    assert main([*shlex.split(check)[1:], "-d", "cpu"]) == 1
    out = capsys.readouterr().out
    for line in blocks("text")[0].splitlines():
        assert _without_numbers(line.replace("train.py", str(tmp_path / "train.py"))) in _without_numbers(out)
    (result,) = Path("output").glob("accuracy_checking_result_*.csv")
    header = result.read_text(encoding="utf-8-sig").splitlines()[0]
    assert header == ",".join((*RESULT_COLUMNS, *OUR_RESULT_COLUMNS))
    stamp = result.stem.rpartition("_")[2]
    assert main([*shlex.split(resumed.replace("<time>", stamp))[1:], "-d", "cpu"]) == 1
    assert "7 calls, 7 checked: 1 error" in capsys.readouterr().out
    assert main([*shlex.split(listed)[1:], "-d", "cpu"]) == 0
    assert "is not in white_list" in capsys.readouterr().out
    assert main([*shlex.split(compat)[1:], "-d", "cpu"]) == 0


def _without_numbers(text: str) -> str:
    """Errors differ in their last digits from one processor to the next; builds of torch have more than a number."""
    return re.sub(r"[0-9]+\.?[0-9]*(e[+-][0-9]+)?", "N", re.sub(r"(torch [0-9.]+)[a-z+][\w.+]*", r"\1", text))


def test_the_tables_have_every_key_and_column() -> None:
    """Settings (those of the online pre-check have a page of their own), and columns."""
    offline = [key.name for key in keys_of(PrecheckSettings) if not key.help.startswith("online")]
    missing = [name for name in (*offline, "is_online") if f"`{name}`" not in PAGE]
    assert not missing
    for column in (*RESULT_COLUMNS, *OUR_RESULT_COLUMNS, *OUR_DETAILS_COLUMNS):
        assert column in PAGE
    assert DETAILS_COLUMNS[0] == "API Name"
