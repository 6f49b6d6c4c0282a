"""Variables of the environment: one table has them all, and a mistyped one is said once."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from msprobe_engine.core import log
from msprobe_engine.core.process.variables import LAUNCH_LINE, PREFIX, VARIABLES
from msprobe_engine.core.settings.load import load_settings

ROOT = Path(__file__).parents[2]
PACKAGES = ("msprobe_engine", "msprobe_integrations", "msprobe", "build_support")
NAME = re.compile(r"MSPROBE_[A-Z][A-Z_]*[A-Z]")
MISTYPED = {
    "MSPROBE_CHILDRN": "MSPROBE_CHILDREN",
    "MSPROBE_CHILD": "MSPROBE_CHILDREN",
    "MSPROBE_AUTO_LOAD": "MSPROBE_AUTOLOAD",
    "MSPROBE_LOGLEVEL": "MSPROBE_LOG_LEVEL",
    "MSPROBE_KEYS": "MSPROBE_KEY",
    "MSPROBE_KEYFILE": "MSPROBE_KEY_FILE",
    "MSPROBE_TLS_PASSPHRAS": "MSPROBE_TLS_PASSPHRASE",
    "MSPROB_CONFIG": "MSPROBE_CONFIG",
    "MPSROBE_CONFIG": "MSPROBE_CONFIG",
    "msprobe_config": "MSPROBE_CONFIG",
    "MONITOR_OUTPUT_DIRS": "MONITOR_OUTPUT_DIR",
}
OF_OTHERS = (
    "MSPROBE_HOME",
    "MSPROBE_JOB_NAME",
    "MSPROBE_OUTPUT",
    "MSPROBE_",
    "MSPROBE_CONFIG",
    "MY_MSPROBE_CHILDRN",
    "MY_CONFIG",
    "MONITOR",
    "OUTPUT_DIR",
)


def named_in(paths: list[Path]) -> set[str]:
    return {name for path in paths for name in NAME.findall(path.read_text(encoding="utf-8"))}


def test_the_table_has_what_the_code_reads() -> None:
    code = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if path.name != "variables.py"]
    by_constant = {LAUNCH_LINE} if any("LAUNCH_LINE" in path.read_text(encoding="utf-8") for path in code) else set()
    assert named_in(code) | by_constant == {name for name in VARIABLES if name.startswith(PREFIX)}


def test_tables_of_pages_have_no_other() -> None:
    """Prose may name those of tests and examples."""
    rows = re.compile(r"^\| `(MSPROBE_\w+)` \|", re.MULTILINE)
    listed = {page.name: set(rows.findall(page.read_text(encoding="utf-8"))) for page in (ROOT / "docs").rglob("*.md")}
    assert {name: found - set(VARIABLES) for name, found in listed.items() if found - set(VARIABLES)} == {}
    assert listed["settings.md"] == {name for name in VARIABLES if name.startswith(PREFIX)}


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> pytest.CaptureFixture[str]:
    monkeypatch.delenv("RANK", raising=False)
    log.forget_warnings()
    return capsys


@pytest.mark.parametrize("name", MISTYPED)
def test_a_mistyped_name_is_said_once(name: str, said: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the name that is meant, however often settings are read."""
    monkeypatch.setenv(name, "a value")
    for _ in range(2):
        load_settings({"monitor": {}})
    text = said.readouterr().err
    assert text.count("is not known and has no effect") == 1
    assert f"{name} is not known and has no effect; did you mean {MISTYPED[name]}?" in text
    assert "a value" not in text


@pytest.mark.parametrize("name", OF_OTHERS)
def test_other_names_are_left_alone(name: str, said: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "x")
    load_settings({"monitor": {}})
    assert said.readouterr().err == ""


def test_rank_0_says_it(said: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSPROBE_CHILDRN", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name, rank, expected in (("RANK", "1", 0), ("SLURM_PROCID", "1", 0), ("RANK", "0", 1)):
        monkeypatch.delenv("RANK", raising=False)
        monkeypatch.setenv(name, rank)
        load_settings({"monitor": {}})
        assert said.readouterr().err.count("did you mean MSPROBE_CHILDREN?") == expected


@pytest.mark.parametrize("words", [["run", "--", "true"], ["show", "."]], ids=["run", "show"])
def test_a_command_says_it(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``run`` where it finds no settings: the training says it otherwise."""
    monkeypatch.setenv("MSPROBE_CONFG", "probe.yaml")
    done = subprocess.run([sys.executable, "-m", "msprobe_engine.cli", *words], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stderr.count("MSPROBE_CONFG is not known and has no effect; did you mean MSPROBE_CONFIG?") == 1
