"""The base installation: what importing costs and needs."""

from __future__ import annotations

import graphlib
import itertools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FRAMEWORKS = ("torch", "mindspore", "megatron", "deepspeed", "pandas", "tensorboard", "prometheus_client", "rich")


def test_the_engine_imports_without_any_optional_package() -> None:
    """Every module of the engine can be imported where no framework and no optional package exists."""
    code = f"""
import importlib, pkgutil, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {FRAMEWORKS!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
import msprobe_engine
for module in pkgutil.walk_packages(msprobe_engine.__path__, "msprobe_engine."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_missing_torch_is_named_with_its_pip_command() -> None:
    """Without torch ``import msprobe.pytorch`` says which package to install."""
    code = """
import importlib.util, sys
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "torch" else found(name, package)
import msprobe.pytorch
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].endswith("msprobe.pytorch needs the package 'torch': pip install 'msprobe-integrations[torch]'")


def _packages(of: str) -> set[str]:
    """The packages in a package, as imports name them."""
    return {f"{of}.{path.parent.name}" for path in (Path(__file__).parents[2] / of).glob("*/__init__.py")}


@pytest.fixture(scope="module")
def contracts() -> list[dict[str, Any]]:
    """The rules of imports that ``make lint`` holds."""
    toml = pytest.importorskip("tomllib")
    settings = toml.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))
    found: list[dict[str, Any]] = settings["tool"]["importlinter"]["contracts"]
    return found


def test_every_package_of_the_engine_has_its_layer(contracts: list[dict[str, Any]]) -> None:
    """A package of the engine is in the order of the layers, and none is named that is not there."""
    layers = next(one["layers"] for one in contracts if one["type"] == "layers")
    assert {f"msprobe_engine.{name.strip()}" for layer in layers for name in layer.split("|")} == _packages("msprobe_engine")


def test_no_two_integrations_may_import_each_other(contracts: list[dict[str, Any]]) -> None:
    """A rule keeps every integration from every other one, but for what builds on torch, and MindSpeed's, which builds on Megatron's; from
    what all share to any of them; and from all to the checks of ``doctor``."""
    package = "msprobe_integrations"
    start = {f"{package}.autoload", f"{package}.doctor"}  # these start them all
    frameworks = _packages(package) - start - {f"{package}.common"}
    kept = {(a, b) for one in contracts if one["type"] == "forbidden" for a in one["source_modules"] for b in one["forbidden_modules"]}
    for one in contracts:
        if one["type"] == "independence":
            kept |= set(itertools.permutations(one["modules"], 2))
    on_torch = frameworks - {f"{package}.torch", f"{package}.mindspore"}
    wanted = set(itertools.permutations(frameworks, 2)) - {(one, f"{package}.torch") for one in on_torch}
    wanted -= {(f"{package}.mindspeed", f"{package}.megatron")}
    wanted |= {(f"{package}.common", one) for one in frameworks}
    wanted |= {(one, f"{package}.doctor") for one in _packages(package) if not one.endswith(".doctor")}
    assert not wanted - kept


CIRCLES = """
msprobe_integrations.torch.statistics device.check device.histogram device.launch device.pair_launch pair_kernels rows
msprobe_integrations.torch.training.plain loop training_detector
"""
"""Files that import each other in a circle, one circle a line: what their names begin with, and the rest of each."""
_IMPORT = re.compile(r"^\s*(?:from (msprobe[\w.]*) import (\([^)]*\)|.*)|import (msprobe[\w.]*))", re.MULTILINE)


def test_no_new_circle_of_files() -> None:
    """No files import each other in a circle but those of `CIRCLES`; imports inside of functions and those for types count, too."""
    root = Path(__file__).parents[2]
    paths = [path for package in ("msprobe", "msprobe_engine", "msprobe_integrations") for path in (root / package).rglob("*.py")]
    texts = {".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path.read_text("utf-8") for path in paths}
    known = {f"{start}.{name}": line for line in CIRCLES.strip().splitlines() for start, *names in [line.split()] for name in names}
    imports: dict[str, set[str]] = {}
    for file, text in texts.items():
        for base, names, module in _IMPORT.findall(text):
            found = {f"{base}.{name}" if f"{base}.{name}" in texts else base for name in re.findall(r"\w+", names)} | {module}
            imports.setdefault(known.get(file, file), set()).update(known.get(one, one) for one in found if one and one != file)
    for circle in known.values():
        imports[circle].discard(circle)
    graphlib.TopologicalSorter(imports).prepare()  # raises with the names of a circle
