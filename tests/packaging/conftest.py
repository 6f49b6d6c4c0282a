"""The wheels that the tests of this directory look at, each built once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("build_support", "msprobe", "msprobe_engine", "msprobe_integrations")
BESIDE = ("tests", "benchmarks", "docs", "examples", "deploy")
"""Directories that the source distribution has and the wheel has not."""
SOURCES = (
    *PACKAGES,
    *BESIDE,
    "pyproject.toml",
    "setup.py",
    "LICENSE",
    "README.md",
    "README.zh.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "CONTRIBUTING.md",
    "noxfile.py",
    "package.json",
    "package-lock.json",
    "eslint.config.js",
    "tsconfig.json",
    ".pre-commit-config.yaml",
    "Makefile",
    "MANIFEST.in",
    "mkdocs.yml",
)
NO_COMPILER = "/bin/false"


def build(hook: str, tree: Path, into: Path) -> Path:
    """Call a hook of the backend in `tree`, as pip does; without a compiler, which is quicker."""
    into.mkdir(exist_ok=True)
    code = f"import sys; sys.path.insert(0, 'build_support'); import wheel_with_pth as b; print(b.{hook}({str(into)!r}))"
    environment = {**os.environ, "CC": NO_COMPILER}
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return into / done.stdout.splitlines()[-1]


def pip_wheel(tree: Path, into: Path, compiler: str) -> Path:
    """``pip wheel`` of `tree`, with this C compiler."""
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(into), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "CC": compiler})
    assert done.returncode == 0, done.stderr
    (wheel,) = into.glob("msprobe_integrations-*.whl")
    return wheel


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources as they are in the repository, with nothing that was built of them."""
    directory = tmp_path_factory.mktemp("sources") / "tree"
    directory.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__", "*.so", "output"))
        else:
            shutil.copy(ROOT / name, directory / name)
    return directory


@pytest.fixture(scope="session")
def source_distribution(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("build_sdist", tree, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="session")
def plain_wheel(source_distribution: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel that pip made from the source distribution, on a machine without a C compiler."""
    here = tmp_path_factory.mktemp("plain_wheel")
    with tarfile.open(source_distribution) as archive:
        archive.extractall(here / "unpacked", filter="data")
    (unpacked,) = (here / "unpacked").iterdir()
    return pip_wheel(unpacked, here, NO_COMPILER)


@pytest.fixture
def compiled_wheel(tree: Path, tmp_path: Path) -> Path:
    """A wheel that pip made with the machine's C compiler, which is told not to optimize: that is most of the time a build takes."""
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    script = tmp_path / "cc"
    script.write_text(f'#!/bin/sh\nexec {compiler} "$@" -O0\n')
    script.chmod(0o755)
    return pip_wheel(tree, tmp_path, str(script))


@pytest.fixture(scope="session")
def wheels(tree: Path, plain_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A wheel made from the source distribution, and an editable one."""
    return {"wheel": plain_wheel, "editable": build("build_editable", tree, tmp_path_factory.mktemp("editable") / "edit")}
