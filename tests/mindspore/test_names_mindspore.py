"""What programs and documents of the existing tool import from ``msprobe.mindspore`` is there."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("msprobe.mindspore", "PrecisionDebugger TrainerMon save save_grad step seed_all MsprobeStep MsprobeInitStep"),
        ("msprobe.mindspore.common.utils", "MsprobeStep MsprobeInitStep seed_all"),
        ("msprobe.mindspore.compare.ms_compare", "ms_compare"),
        ("msprobe.mindspore.compare.distributed_compare", "ms_compare_distributed"),
    ],
)
def test_names(module: str, names: str) -> None:
    """Both versions' names, and none of them needs torch."""
    found = importlib.import_module(module)
    assert all(callable(getattr(found, name)) for name in names.split())
    assert set(getattr(found, "__all__", ())) <= vars(found).keys()
    assert "torch" not in sys.modules


def test_signatures() -> None:
    """Arguments have the order that the existing tool has; those of our own come behind."""
    from msprobe.mindspore import PrecisionDebugger, save, save_grad, seed_all

    def first(function: object, count: int) -> list[str]:
        return list(inspect.signature(function).parameters)[:count]  # type: ignore[arg-type]

    assert first(PrecisionDebugger.__init__, 6) == ["self", "config_path", "task", "dump_path", "level", "step"]
    assert first(PrecisionDebugger.start, 2) == ["model", "token_range"]
    assert first(PrecisionDebugger.save, 3) == ["variable", "name", "save_backward"]
    assert first(PrecisionDebugger.register_custom_api, 3) == ["module", "api", "api_prefix"]
    assert first(seed_all, 3) == ["seed", "mode", "rm_dropout"]
    assert first(save, 3) == first(save_grad, 3) == ["save_dir", "name", "data"]


def test_an_installed_torch_is_left_alone(tmp_path: Path) -> None:
    """Importing and dumping does not import a torch that lies beside."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')\n")
    code = (
        "import mindspore, sys\n"
        "from msprobe.mindspore import PrecisionDebugger\n"
        "debugger = PrecisionDebugger(level='mix', dump_path='out')\n"
        "net = mindspore.nn.SequentialCell(mindspore.nn.Dense(2, 2))\n"
        "debugger.start(net)\n"
        "net(mindspore.ops.ones((2, 2)))\n"
        "debugger.stop()\n"
        "debugger.step()\n"
        "assert 'torch' not in sys.modules\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
