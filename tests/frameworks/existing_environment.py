"""The existing tool: environments of its own, which `make venv-existing` makes, and what it wrote in them once, kept in
`tests/fixtures/existing`.

A comparison with it is one test with two parameters (`SOURCES`): the kept outputs, always, and outputs made anew, with the marker
`existing_tool`. ``python tests/fixtures/make_reference_outputs.py NAME`` makes the kept ones again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = ("8.1.1", "26.2.0")
SOURCES = ("kept", pytest.param("run", marks=pytest.mark.existing_tool))
"""Where outputs of the existing tool come from."""
_PLACES = {
    ("8.1.1", "torch"): "existing-81",
    ("26.2.0", "torch"): "existing-26",
    ("8.1.1", "mindspore"): "existing-ms-81",
    ("26.2.0", "mindspore"): "existing-ms-26",
}


@dataclass(frozen=True)
class ExistingTool:
    """One version in its environment.

    Attributes:
        directory: of the virtual environment.
    """

    version: str
    directory: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.directory / "bin" / "python"

    def run(self, program: str, *arguments: object, cwd: Path, timeout: float = 900, **env: str) -> subprocess.CompletedProcess[str]:
        """Run ``python`` or ``msprobe`` of the environment to its end.

        Raises:
            AssertionError: it did not end with 0, or would not run the existing tool.
        """
        command = [str(self.directory / "bin" / program), *map(str, arguments)]
        environment = environment_of(self.python) | env
        ran = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd, timeout=timeout, check=False)
        assert ran.returncode == 0, f"{' '.join(command)} ended with {ran.returncode}:\n{ran.stderr[-3000:]}"
        return ran


def environment_of(python: Path | str) -> dict[str, str]:
    """The environment of a program that this interpreter runs, ours or that of an existing tool: both have a package `msprobe`, and one
    that PYTHONPATH names would hide the other. The program is one rank of its own.

    Raises:
        AssertionError: in it the interpreter imports another `msprobe` than that of this checkout, or of its virtual environment.
    """
    left_out = ("PYTHONPATH", "RANK", "RANK_ID", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    environment = {key: value for key, value in os.environ.items() if key not in left_out} | {"OMP_NUM_THREADS": "1"}
    ours = str(python) == sys.executable
    environment |= {"PYTHONPATH": str(ROOT)} if ours else {}
    place = ROOT / "msprobe" if ours else Path(python).parents[1]
    imported = _imported(str(python), environment)
    right = imported is not None and imported.is_relative_to(place.resolve())
    assert right, f"{python} would import msprobe from {imported and imported.parent}, not from {place}"
    return environment


def _imported(python: str, environment: dict[str, str]) -> Path | None:
    """The file of `msprobe` that this interpreter finds, in a directory that has none."""
    code = "import importlib.util; found = importlib.util.find_spec('msprobe'); print(found.origin if found else '')"
    ran = subprocess.run([python, "-c", code], capture_output=True, text=True, env=environment, cwd="/", timeout=60, check=True)
    return Path(ran.stdout.strip()).resolve() if ran.stdout.strip() else None


def existing_tool(version: str, framework: str = "torch") -> ExistingTool:
    """The existing tool of a version beside a framework; skips the test where its environment was not made."""
    directory = ROOT / ".venvs" / _PLACES[version, framework]
    if not (directory / "bin" / "msprobe").exists():
        pytest.skip(f"the existing tool {version} is not installed in .venvs/{directory.name}: make venv-existing")
    return ExistingTool(version, directory)


def reference(name: str, source: str, out: Path, make: Callable[[Path], None]) -> Path:
    """A directory with outputs of the existing tool.

    Args:
        name: of the kept archive.
        source: of `SOURCES`.
        make: runs the existing tool and leaves what it wrote in the directory that it is given.
    """
    if source == "run":
        out.mkdir(parents=True, exist_ok=True)
        make(out)
    else:
        with tarfile.open(_archive(name)) as archive:
            archive.extractall(out, filter="data")
    return out


def keep(name: str, make: Callable[[Path], None]) -> None:
    """Make the kept outputs again. Equal outputs give equal archives.

    Raises:
        AssertionError: they name a directory of this machine.
    """
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory)
        make(out)
        files = sorted(path for path in out.rglob("*") if path.is_file())
        for path, place in ((path, place) for path in files for place in (directory, str(ROOT), str(Path.home()))):
            assert place.encode() not in path.read_bytes(), f"{path} names {place}"
        _archive(name).parent.mkdir(exist_ok=True)
        with tarfile.open(_archive(name), "w:xz", format=tarfile.USTAR_FORMAT) as archive:
            for path in files:
                entry = tarfile.TarInfo(str(path.relative_to(out)))
                entry.size = path.stat().st_size
                with path.open("rb") as file:
                    archive.addfile(entry, file)


def _archive(name: str) -> Path:
    return ROOT / "tests" / "fixtures" / "existing" / f"{name}.tar.xz"
