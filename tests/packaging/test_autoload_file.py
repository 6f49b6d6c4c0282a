"""``msprobe_autoload.pth``: in every way to install, gone with the package, and harmless when it is broken."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
PTH = "msprobe_autoload.pth"


def backend() -> Any:
    """The build backend as a module."""
    spec = importlib.util.spec_from_file_location("wheel_with_pth", ROOT / "build_support" / "wheel_with_pth.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Place:
    """A virtual environment without any package."""

    def __init__(self, directory: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory)], check=True)
        self.python = str(directory / "bin" / "python")
        (self.packages,) = (directory / "lib").glob("python*/site-packages")
        (self.packages / "torch.py").write_text("")

    def pip(self, *words: str) -> None:
        command = [sys.executable, "-m", "pip", "--python", self.python, *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=self.environment())
        assert done.returncode == 0, done.stderr

    def environment(self, **variables: str) -> dict[str, str]:
        return {**{k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "MSPROBE"))}, **variables}

    def run(self, *words: str, **variables: str) -> list[str]:
        """Lines that the interpreter and its program wrote to both streams."""
        done = subprocess.run(
            [self.python, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            env=self.environment(**variables),
        )
        assert done.returncode == 0, done.stdout
        return done.stdout.splitlines()

    def loads(self, *flags: str) -> bool:
        """Is the probe there when a framework is imported? (It says that the environment has no numpy.)"""
        lines = self.run(*flags, "-c", "import torch", MSPROBE_CONFIG="probe.yaml")
        assert len(lines) < 2
        return any("lacks package numpy" in line for line in lines)


@pytest.mark.fast_cells("editable")
@pytest.mark.parametrize("kind", ["wheel", "editable"])
@pytest.mark.slow
def test_installed_and_gone(tmp_path: Path, wheels: dict[str, Path], kind: str) -> None:
    """Both ways of installing bring the file, also for isolated interpreters; ``pip uninstall`` takes it away."""
    place = Place(tmp_path / "a place")
    place.pip("install", "--no-deps", "--no-index", "--no-compile", str(wheels[kind]))  # not every module is needed
    assert (place.packages / PTH).is_file()
    assert place.run("-c", "import torch") == []
    for flags in ([], ["-I"], ["-E"]):
        assert place.loads(*flags)
    assert not place.loads("-S", "-c", "pass")
    assert place.run("-c", "import torch", MSPROBE_CONFIG="probe.yaml", MSPROBE_AUTOLOAD="0") == []
    if kind == "wheel":
        shutil.rmtree(place.packages / "msprobe_integrations")  # half of it removed by hand
        assert place.run("-c", "print(1)") == ["1"]
        said, printed = place.run("-c", "print(1)", MSPROBE_CONFIG="probe.yaml")
        assert said == "msprobe: not loaded: No module named 'msprobe_integrations'"
        assert printed == "1"
    place.pip("uninstall", "-y", "msprobe-integrations")
    assert not (place.packages / PTH).exists()
    assert place.run("-c", "import torch", MSPROBE_CONFIG="probe.yaml") == []


@pytest.mark.slow
def test_packages_that_cannot_be_written(tmp_path: Path, wheels: dict[str, Path]) -> None:
    """A read-only installation: no byte code is written, nothing is said."""
    place = Place(tmp_path / "place")
    place.pip("install", "--no-deps", "--no-index", "--no-compile", str(wheels["wheel"]))
    for directory in (place.packages / "msprobe_integrations").rglob("*"):
        if directory.is_dir():
            directory.chmod(0o555)
    try:
        assert place.run("-c", "import torch") == []
        assert place.loads()
    finally:
        for directory in (place.packages / "msprobe_integrations").rglob("*"):
            if directory.is_dir():
                directory.chmod(0o755)


MEMBER = st.tuples(
    st.text("abc_é", min_size=1, max_size=8), st.binary(max_size=200), st.sampled_from([0o644, 0o755, 0o600]), st.sampled_from([0, 8])
)


@given(members=st.lists(MEMBER, max_size=6, unique_by=lambda m: m[0]))
def test_the_wheel_stays_as_it_is(members: list[tuple[str, bytes, int, int]], tmp_path_factory: pytest.TempPathFactory) -> None:
    """The file and its line in RECORD are added; content, modes, times and compression of the others stay, and RECORD is right."""
    path = tmp_path_factory.mktemp("wheel") / "x-1-py3-none-any.whl"
    lines = []
    with zipfile.ZipFile(path, "w") as archive:
        for name, data, mode, compression in members:
            info = zipfile.ZipInfo(f"x/{name}.py", (2020, 2, 2, 0, 0, 0))
            info.external_attr, info.compress_type = (0o100000 | mode) << 16, compression
            archive.writestr(info, data)
            lines.append(f"x/{name}.py,sha256={digest(data)},{len(data)}\n")
        archive.writestr(zipfile.ZipInfo("x-1.dist-info/RECORD"), "".join([*lines, "x-1.dist-info/RECORD,,\n"]))
    before = described(path)
    module = backend()
    module._added(str(path.parent), path.name)
    after = described(path)
    assert after.pop(PTH)[0] == module.LINE.encode()
    record = "x-1.dist-info/RECORD"
    assert before.pop(record)[1:] == after.pop(record)[1:]
    assert before == after
    with zipfile.ZipFile(path) as archive:
        rows = list(csv.reader(io.StringIO(archive.read(record).decode())))
        assert sorted(row[0] for row in rows) == sorted(archive.namelist())
        for name, digested, size in rows:
            if name != record:
                data = archive.read(name)
                assert (digested, size) == (f"sha256={digest(data)}", str(len(data)))


def digest(data: bytes) -> str:
    """As RECORD has it."""
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def described(path: Path) -> dict[str, tuple[bytes, int, int, tuple[int, ...]]]:
    with zipfile.ZipFile(path) as archive:
        return {i.filename: (archive.read(i), i.external_attr, i.compress_type, i.date_time) for i in archive.infolist()}
