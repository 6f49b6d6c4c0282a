"""The first lines of ``msprobe doctor``: what is here, what is in the way, what to type next."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from msprobe_engine.cli.main import main, version
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
    assert first.startswith(f"msprobe {version()}, Python 3.")
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
    ("name", "script"), [("mindstudio-probe", "msprobe.msprobe:main"), ("mindstudio-probe", ""), ("msprobe-of-others", "msprobe.run:main")]
)
def test_another_distribution_of_our_name(site: Path, name: str, script: str) -> None:
    """The existing tool, or a foreign program: said with what to do, once."""
    install(site, name, "26.2.0", script)
    (sentence,) = [one for one in find_conflicts() if "has the same command" in one]
    assert sentence.startswith(f"{name} 26.2.0 is installed beside")
    assert "in an environment of its own" in sentence


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
