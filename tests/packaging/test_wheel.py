"""Building and installing the distribution."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("build_support", "msprobe", "msprobe_engine", "msprobe_integrations", "pyproject.toml", "LICENSE", "README.md")


@pytest.mark.parametrize("compiler", ["", "/bin/false"])
def test_a_wheel_is_built_with_and_without_a_compiler(tmp_path: Path, compiler: str) -> None:
    """A machine without a C compiler gets a complete wheel; compiled helpers are only added where they can be built."""
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        elif source.is_file():
            shutil.copy(source, tree / name)
    environment = {**os.environ, **({"CC": compiler} if compiler else {})}
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        str(tmp_path),
        str(tree),
    ]
    subprocess.run(command, check=True, capture_output=True, env=environment)
    (wheel,) = tmp_path.glob("msprobe-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        entry_points = archive.read(next(n for n in names if n.endswith("entry_points.txt"))).decode()
    assert {"msprobe/py.typed", "msprobe_engine/settings/load.py", "msprobe_integrations/torch/__init__.py"} <= set(names)
    assert {"msprobe_autoload.pth", "msprobe_integrations/autoload/bootstrap/sitecustomize.py"} <= set(names)
    pages = {str(path.relative_to(ROOT)) for path in (ROOT / "msprobe_engine/web").rglob("*.*") if path.suffix in (".css", ".js", ".json")}
    assert {"msprobe_engine/web/kit.css", "msprobe_engine/web/kit_texts.json"} <= pages <= set(names)
    assert "msprobe = msprobe_engine.cli.main:main" in entry_points
    assert not any(n.startswith(("tests/", "benchmarks/", "examples/")) for n in names)
    if compiler:
        assert not any(n.endswith(".so") for n in names)
