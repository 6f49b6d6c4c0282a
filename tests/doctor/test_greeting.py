"""The first lines of ``msprobe doctor``: what is here, what is in the way, what to type next."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import msprobe_engine
from msprobe_engine import __version__
from msprobe_engine.cli.main import main
from msprobe_engine.core.distribution import NAME
from msprobe_engine.core.errors import MissingExtraError
from msprobe_engine.workflow import greeting
from msprobe_engine.workflow.greeting import find_conflicts, greet

Capture = pytest.CaptureFixture[str]


def install(site: Path, name: str, version: str, script: str = "") -> None:
    """An installed distribution as its metadata have it."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if script:
        (info / "entry_points.txt").write_text(f"[console_scripts]\nmsprobe = {script}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is searched first for distributions."""
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return tmp_path / "site"


def test_what_is_here(capsys: Capture) -> None:
    """Frameworks with their versions, the machine, and one command; in a moment, without an import."""
    assert main(["doctor", "--brief"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith(f"msprobe {__version__}, Python 3.")
    assert any(line.startswith("found by msprobe run") and "torch 2" in line for line in rest)
    assert any(line.startswith("this machine") and "free in this directory" in line for line in rest)
    assert rest[-1].startswith("try next                 msprobe run -- torchrun train.py")


def test_as_json(tmp_path: Path, capsys: Capture) -> None:
    """On the standard output, or into a file."""
    assert main(["doctor", "--brief", "--json", "-"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["followed"]["torch"]
    assert main(["doctor", "--brief", "--json", str(tmp_path / "here.json")]) == 0
    assert json.loads((tmp_path / "here.json").read_text())["followed"] == told["followed"]


def test_our_own_installation_is_no_conflict() -> None:
    assert not [sentence for sentence in find_conflicts() if "has the same command" in sentence]


@pytest.mark.parametrize(
    ("name", "script"),
    [("mindstudio-probe", "msprobe.msprobe:main"), ("mindstudio-probe", ""), ("msprobe-of-others", "msprobe.run:main"), ("msprobe", "")],
)
def test_another_distribution_of_our_name(site: Path, name: str, script: str) -> None:
    """The existing tool, or a foreign program: said with what to do, once."""
    install(site, name, "26.2.0", script)
    (sentence,) = [one for one in find_conflicts() if "has the same command" in one]
    assert sentence.startswith(f"{name} 26.2.0 is installed beside")
    assert "in an environment of its own" in sentence


def test_the_former_name_of_this_tool(site: Path) -> None:
    """It shares all files with what is installed now: said only where both are there."""
    install(site, "msprobe", "0.0.9", greeting.COMMAND)
    install(site, "msprobe-integrations", "0.1.0", greeting.COMMAND)
    (sentence,) = find_conflicts()
    assert sentence.startswith("msprobe 0.0.9 is an earlier version of this tool under its former name: run 'pip uninstall msprobe'")


def test_a_launch_says_it_at_once(site: Path, tmp_path: Path) -> None:
    """Before the program starts."""
    install(site, "mindstudio-probe", "26.2.0")
    path = os.pathsep.join([str(site), str(Path(msprobe_engine.__file__).parents[1])])
    command = [sys.executable, "-m", "msprobe_engine.cli", "run", "--", "true"]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert "msprobe run: mindstudio-probe 26.2.0 is installed beside" in done.stderr


def test_hints_name_the_distribution_that_pyproject_declares() -> None:
    declared = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'name = "{NAME}"' in declared
    assert str(MissingExtraError("pandas", "pandas", "a table")).endswith(f"pip install '{NAME}[pandas]'")


@pytest.mark.parametrize(
    ("here", "said"),
    [
        ({"mindspore": "2.9.0"}, "needs a word             mindspore 2.9.0: name the steps"),
        ({"jax": "0.9"}, "not seen                 jax 0.9: no integration"),
        ({}, "no framework is installed here that the probe knows: torch,"),
    ],
)
def test_what_is_not_followed(here: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greeting, "_version", here.get)
    monkeypatch.setattr(greeting, "find_conflicts", list)
    assert any(line.startswith(said) for line in greet("0").lines())
