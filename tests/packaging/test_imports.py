"""The base installation: what importing costs and needs."""

from __future__ import annotations

import subprocess
import sys

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
