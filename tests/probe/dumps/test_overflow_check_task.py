"""Task ``overflow_check``: only calls with NaN or Inf are written, with their tensors, and no more of them than asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from msprobe_engine.core.errors import SettingsError
from msprobe_engine.formats.dump.reader import open_dump
from msprobe_integrations.torch.dump.debugger import PrecisionDebugger


@pytest.fixture(autouse=True)
def _no_debugger() -> Any:
    PrecisionDebugger._instance = None
    yield
    PrecisionDebugger._instance = None


class Net(torch.nn.Module):
    """exp overflows when `scale` is large."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.scale = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.exp(self.first(x).abs() * self.scale))


def run(tmp_path: Path, level: str, nums: Any, bad_steps: tuple[int, ...] = (1, 2), **section: Any) -> Path:
    """Four steps; those of `bad_steps` overflow."""
    file, out = tmp_path / "config.json", tmp_path / "out"
    options = {"overflow_nums": nums, "check_mode": "all", **section}
    file.write_text(json.dumps({"task": "overflow_check", "dump_path": str(out), "level": level, "overflow_check": options}))
    torch.manual_seed(0)
    model = Net()
    debugger = PrecisionDebugger(config_path=str(file))
    for step in range(4):
        model.scale = 1e30 if step in bad_steps else 1.0
        debugger.start(model=model)
        model(torch.ones(3, 4)).sum().backward()
        debugger.stop()
        debugger.step()
    debugger.run.at_exit()
    return out


@pytest.mark.parametrize(
    ("level", "first"), [("L0", "Module.last.Linear.forward.0"), ("L1", "Torch.exp.0.forward"), ("mix", "Torch.exp.0.forward")]
)
def test_one_call_is_asked_for(tmp_path: Path, level: str, first: str) -> None:
    """overflow_nums 1 leaves one step with one record, the first call that has NaN or Inf, and only the files of its tensors."""
    out = run(tmp_path, level, 1)
    dump = open_dump(out)
    assert [path.name for path in sorted(out.iterdir())] == ["step1"]
    loaded = dump.load(1)
    assert list(loaded.entries) == [first]
    assert json.loads((loaded.directory / "dump.json").read_text())["task"] == "overflow_check"
    files = sorted(path.name for path in (loaded.directory / "dump_tensor_data").iterdir())
    assert files
    assert all(name.startswith(f"{first}.") for name in files)
    if level != "L0":
        assert torch.load(loaded.directory / "dump_tensor_data" / f"{first}.output.0.pt", weights_only=True).isinf().any()


def test_all_calls(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """overflow_nums -1 keeps every call with NaN or Inf of every step, none of the calls without, and says how many steps had none."""
    with caplog.at_level("INFO", logger="msprobe"):
        out = run(tmp_path, "L1", -1)
    assert [path.name for path in sorted(out.iterdir())] == ["step1", "step2"]
    names = list(open_dump(out).load(2).entries)
    assert "Torch.exp.0.forward" in names
    assert "Functional.linear.1.forward" in names
    assert "Tensor.abs.0.forward" not in names
    assert "Functional.linear.0.forward" not in names
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert "Overflow detected. step 1: Torch.exp.0.forward" in said
    assert "steps without NaN or Inf 2" in said


def test_a_number_of_calls_over_steps(tmp_path: Path) -> None:
    """overflow_nums counts over all steps of a run."""
    for name in ("all", "some"):
        (tmp_path / name).mkdir()
    all_calls = len(open_dump(run(tmp_path / "all", "L1", -1)).load(1).entries)
    PrecisionDebugger._instance = None
    out = run(tmp_path / "some", "L1", all_calls + 2)
    dump = open_dump(out)
    assert [len(dump.load(step).entries) for step in (1, 2)] == [all_calls, 2]


def test_a_healthy_run_leaves_nothing(tmp_path: Path) -> None:
    """Without NaN and Inf there are no steps on the disk."""
    out = run(tmp_path, "mix", -1, bad_steps=())
    assert not [path for path in out.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("level", "section", "words"),
    [
        ("L1", {"overflow_nums": 0}, "overflow_nums: 0 is not allowed"),
        ("L1", {"overflow_nums": -2}, "an integer >= -1"),
        ("L1", {"check_mode": "some"}, "aicore"),
        ("debug", {}, "looks at calls"),
        ("L2", {}, "looks at calls"),
    ],
)
def test_wrong_settings(tmp_path: Path, level: str, section: dict[str, Any], words: str) -> None:
    """What cannot work is refused by name."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"task": "overflow_check", "dump_path": str(tmp_path), "level": level, "overflow_check": section}))
    with pytest.raises(SettingsError, match=words):
        PrecisionDebugger(config_path=str(file))
