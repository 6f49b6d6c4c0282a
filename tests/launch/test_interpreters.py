"""Interpreters of other versions and environments below ``msprobe run``, and Python's own children."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import launching as ln
import pytest

from msprobe_integrations.autoload import request

VERSIONS = ("2.7", "3.6", "3.9", "3.10", "3.12", "3.13")


def interpreter(version: str) -> str:
    """One of that version, without the packages of this environment; the test is skipped where there is none."""
    places = [*(Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"), shutil.which(f"python{version}")]
    for place in filter(None, places):
        if subprocess.run([place, "-c", "import numpy"], capture_output=True, check=False).returncode:
            return str(place)
    pytest.skip(f"no Python {version} without numpy on this machine")


@pytest.mark.fast_cells("2.7", "3.6")
@pytest.mark.parametrize("version", VERSIONS)
def test_other_pythons_go_on(tmp_path: Path, version: str) -> None:
    """A Python without the probe's packages runs its program; where that imports a framework, one line says what is missing. Nothing
    that is installed beside the probe gets onto its path."""
    python = interpreter(version)
    ln.place(tmp_path)
    (tmp_path / "torch.py").write_text("")
    (tmp_path / "other.py").write_text("import sys, torch\nsys.stdout.write('%s' % any('site-packages' in p for p in sys.path[1:-1]))\n")
    # Python 2.7 would write compiled files beside their sources.
    plain = ln.run(python, "-c", "pass", cwd=tmp_path, env=ln.environment(PYTHONPATH=str(ln.ROOT), PYTHONDONTWRITEBYTECODE="1"))
    assert (plain.returncode, plain.stdout, ln.without_last_words(plain.stderr)) == (0, "", "")
    done = ln.run(python, "other.py", cwd=tmp_path, env=ln.environment(PYTHONDONTWRITEBYTECODE="1"))
    assert done.returncode == 0
    assert done.stdout == "False"
    said = ln.without_last_words(done.stderr)
    if version in ("2.7", "3.6"):
        assert said == ""
        assert "No Python process with the probe has begun." in done.stderr
    else:
        (line,) = said.splitlines()
        assert "other.py runs in a Python that lacks package numpy" in done.stderr
        assert f"{python} lacks package numpy" in line
        assert ("Python 3.10" in line) == (version == "3.9")


@pytest.mark.parametrize("version", ["3.10", "3.13"])
def test_the_command_in_other_pythons(tmp_path: Path, version: str) -> None:
    """The help of ``msprobe run`` needs no package at all."""
    python = interpreter(version)
    code = "import sys; from msprobe_engine.cli.main import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [python, "-c", code, "run", "--help"], cwd=tmp_path, capture_output=True, text=True, check=False, env=ln.environment()
    )
    assert done.returncode == 0, done.stderr
    assert "-- COMMAND ..." in done.stdout


def test_an_environment_without_the_packages(tmp_path: Path) -> None:
    """A virtual environment of the same Python that has nothing: as with another version."""
    ln.place(tmp_path)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare venv")], check=True)
    python = str(tmp_path / "bare venv" / "bin" / "python")
    (tmp_path / "torch.py").write_text("")
    (tmp_path / "other.py").write_text("import torch, importlib.util\nprint(importlib.util.find_spec('numpy'))\n")
    done = ln.run(python, "other.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "None\n")
    (line,) = ln.without_last_words(done.stderr).splitlines()
    assert "the program goes on" in line
    assert f"{python} lacks package numpy, package yaml; install msprobe there" in line


def test_nothing_is_imported_for_a_process_without_frameworks(tmp_path: Path) -> None:
    """What every interpreter pays: three small modules, none of the standard library that is not there anyway."""
    code = "import os, sys; print(*sorted(sys.modules))"
    ln.place(tmp_path)
    plain = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True).stdout.split()
    with_it = f"import sys; sys.path.insert(0, {str(ln.ROOT)!r}); from msprobe_integrations.autoload import install; install()\n{code}"
    asked = subprocess.run(
        [sys.executable, "-S", "-c", with_it], capture_output=True, text=True, check=True, env=ln.environment(MSPROBE_CONFIG="probe.yaml")
    )
    new = set(asked.stdout.split()) - set(plain)
    assert {name for name in new if not name.startswith("msprobe_integrations")} <= {"__future__"}
    assert "msprobe_integrations.autoload.imports" in new


@pytest.mark.parametrize(
    ("line", "starts_ranks"),
    [
        ("python /bin/torchrun --nproc_per_node 2 train.py", True),
        ("python -u -m torch.distributed.run train.py", True),
        ("python -W ignore -X dev -m torch.distributed.run train.py", True),
        ("python -u -m deepspeed.launcher.launch --world_info=e30= train.py", True),
        ("python train.py torchrun", False),
        ("python -W torchrun train.py", False),
    ],
)
def test_launchers_are_told_from_trainings(line: str, starts_ranks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher may have a rank in its environment (a pod's), and is nobody's parent all the same."""
    monkeypatch.setattr(sys, "orig_argv", line.split())
    assert request.is_helper() == starts_ranks
