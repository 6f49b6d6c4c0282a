"""The page docs/guide/find-a-nan.md says what the tool does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from msprobe_engine.find.nonfinite.nan_analyze import nan_analyze
from msprobe_engine.find.nonfinite.report import CAUSES

PAGE = (Path(__file__).parents[3] / "docs/guide/find-a-nan.md").read_text(encoding="utf-8")


def _python(section: str) -> str:
    """The Python example of a section of the page."""
    code = re.search(rf"^## {section}\n.*?```python\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE)
    assert code is not None
    return code.group(1)


@pytest.fixture
def dump(tmp_path: Path, rank_dump: Any) -> Path:
    for rank in range(2):
        r = rank_dump()
        own = "nan" if rank == 1 else "ok"
        m = "Module.decoder.layers.0.mlp.MLP.forward.0"
        r.api("Functional.linear", ["ok"], ["ok"], parent=m)
        name = r.api("Functional.gelu", ["ok"], [own], parent=m)
        r.stack["0"] = [[name], ["File /job/model.py, line 42, in forward, \n h = F.gelu(h)"]]
        r.comm("all_reduce", [own], ["nan"])
        r.construct["Distributed.all_reduce.0.forward"] = m
        r.module("decoder.layers.0.mlp.MLP", ["ok"], ["nan"])
        r.write(tmp_path / f"msprobe_output/dump/step12/rank{rank}")
    return tmp_path


def test_answer(dump: Path) -> None:
    """The answer shown on the page is the one the tool gives, to the letter."""
    shown = re.search(r"```text\n(.*?)```", PAGE, re.DOTALL)
    assert shown is not None
    assert nan_analyze(dump / "msprobe_output/dump").text + "\n" == shown.group(1)


def test_python_example(dump: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The Python example runs as it stands."""
    code = _python("From Python")
    monkeypatch.chdir(dump)
    exec(compile(code, "find-a-nan.md", "exec"), {})
    assert capsys.readouterr().out == "12 1 decoder.layers.0.mlp gelu operator\n"


def test_attempts_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop of "Capture the very step" runs as it stands and, with the monitor alone, leads to the operator of the bad step."""
    torch = pytest.importorskip("torch")
    from msprobe_integrations.torch.monitor.probe import TorchProbe

    monkeypatch.chdir(tmp_path)
    (tmp_path / "probe.yaml").write_text('strict: true\nmonitor: {gradients: true}\nincident: {level: ""}\n')
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    data = [torch.full((2, 2), -1e30 if step == 2 else 1.0) for step in range(4)]
    names = {
        "TorchProbe": TorchProbe,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.0),
        "data": data,
        "loss_of": lambda m, x: m[1](torch.square(m[0](x))).mean(),
    }
    exec(compile(_python("Capture the very step"), "find-a-nan.md", "exec"), names)
    (directory,) = Path("msprobe_output/incidents").glob("step*")
    first = nan_analyze(directory).findings[0]
    assert (first["step"], first["operator"]) == (2, "square")
    assert "**reproduced**" in (directory / "summary.md").read_text()


def test_causes() -> None:
    """Every cause has its row on the page, and no other."""
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)) == set(CAUSES)


def test_overflow_task_example() -> None:
    """The settings of "Write only the calls that overflow" are accepted, and the task is the one the page speaks of."""
    import json

    from msprobe_engine.core.settings.load import load_settings

    shown = re.search(r"^## Write only the calls that overflow\n.*?```json\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE)
    assert shown is not None
    dump = load_settings(json.loads(shown.group(1))).dump
    assert dump is not None
    assert (dump.task, dump.overflow_nums) == ("overflow_check", 1)
