"""The calibration of docs/guide/diagnose.md: its example with a `PrecisionDebugger` does what the page says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from msprobe_engine.core.errors import SettingsError
from msprobe_engine.core.settings.load import load_settings
from msprobe_engine.find.run import diagnose

PAGE = (Path(__file__).parents[3] / "docs" / "guide" / "diagnose.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_example_of_the_page(tmp_path: Path) -> None:
    """The script with its two files makes a golden dump and a moved one, whose weights are others by round-off, and with which two
    golden runs are still the same."""
    (settings,) = re.findall(r"```json\n(\{.*?\"perturb\".*?)```", PAGE, re.DOTALL)
    (script,) = re.findall(r"```python\n(# train.py.*?)```", PAGE, re.DOTALL)
    moved = json.loads(settings)
    golden = {key: value for key, value in moved.items() if not key.startswith("perturb")} | {"dump_path": "golden"}
    (tmp_path / "moved.json").write_text(settings)
    (tmp_path / "golden.json").write_text(json.dumps(golden))
    (tmp_path / "again.json").write_text(json.dumps(golden | {"dump_path": "again"}))
    (tmp_path / "train.py").write_text(script)
    said = ""
    for name in ("golden", "moved", "again"):
        command = [sys.executable, "train.py", f"{name}.json"]
        done = subprocess.run(command, cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
        said += done.stdout + done.stderr
    assert "calibration run: 4 parameter tensors were moved" in said  # it changes the training, and says so
    weights = []
    for name in ("golden", "moved"):
        (dump,) = (tmp_path / name / "step0").glob("*/dump.json")
        weights.append(json.loads(dump.read_text())["data"]["Module.0.Linear.forward.0"]["parameters"]["weight"])
    assert weights[0] != weights[1]
    found = diagnose(tmp_path / "again", tmp_path / "golden", calibration=[tmp_path / "moved"])
    assert found.finding == "none"


def test_the_keys_are_checked_in_config_json(tmp_path: Path) -> None:
    """config.json takes both keys with the values that the dump section takes; another value names what is allowed."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"task": "statistics", "dump_path": "out", "perturb": "bf16", "perturb_seed": 2}))
    dump = load_settings(path).dump
    assert dump is not None
    assert (dump.perturb, dump.perturb_seed) == ("bf16", 2)
    path.write_text(json.dumps({"task": "statistics", "dump_path": "out", "perturb": "much"}))
    with pytest.raises(SettingsError, match=r"perturb.*ulp"):
        load_settings(path)
