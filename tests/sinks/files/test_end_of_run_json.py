"""What run.json and its like say of how a training ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from msprobe_engine.cli.main import main
from msprobe_engine.core.records import Frame
from msprobe_engine.core.settings.schema import JsonLinesSettings, MonitorSettings
from msprobe_engine.core.statistics.rows import empty
from msprobe_engine.formats.monitor.reader import open_run
from msprobe_engine.probe.sinks.jsonlines import JsonLinesSink

TRAIN = """
import os, signal, sys, torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(4):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 2 and sys.argv[1] == "raise":
        raise ValueError("token sk-123 is no label")
    if step == 2 and sys.argv[1] == "signal":
        os.kill(os.getpid(), signal.SIGTERM)
"""


def ended(tmp_path: Path, how: str, *settings: str) -> tuple[int, dict[str, Any]]:
    """Exit status of a training, and what its files say."""
    script, out = tmp_path / "train.py", tmp_path / "out"
    script.write_text(TRAIN)
    words = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "msprobe_engine.cli", "run", "--output-dir", str(out), *words, "--", sys.executable, str(script), how]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=tmp_path)
    return done.returncode, open_run(out).info(0)["ended"]


def test_the_end_stands_behind_the_last_step(tmp_path: Path) -> None:
    """That a run is over may be known while its last steps still wait to be written: their lines come first all the same."""
    how: dict[str, Any] = {}
    sink = JsonLinesSink(JsonLinesSettings(), MonitorSettings(), output_dir=tmp_path, rank=0)
    sink.watch_remark("ended", how)
    for step in range(2):
        if step == 1:
            how["how"] = "closed"
        sink.write(Frame(step, 0, empty(0), scalars={"loss": 1.0}), [])
    sink.close()
    lines = [json.loads(line) for line in sink.path.read_text().splitlines()]
    assert [line.get("step", "run") for line in lines] == ["run", 0, 1, "run"]
    assert ["ended" in line["run"] for line in lines if "run" in line] == [False, True]
    assert lines[-1]["run"]["ended"] == {"how": "closed"}


@pytest.mark.slow
def test_a_training_that_raised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Type, message and line are in run.json, and ``msprobe show`` says them; the exit status is the training's own."""
    code, found = ended(tmp_path, "raise")
    assert code == 1
    assert found == {
        "how": "exception",
        "error": "ValueError",
        "message": "token sk-123 is no label",
        "where": f"{tmp_path / 'train.py'}:10 <module>",
    }
    main(["show", str(tmp_path / "out")])
    assert "ended by ValueError: token sk-123 is no label (" in capsys.readouterr().out


@pytest.mark.slow
def test_other_ends(tmp_path: Path) -> None:
    for how, code, said in (("end", 0, {"how": "closed"}), ("signal", -signal.SIGTERM, {"how": "signal"})):
        (tmp_path / how).mkdir()
        assert ended(tmp_path / how, how) == (code, said)


@pytest.mark.slow
@pytest.mark.parametrize("sink", ["jsonl", "sqlite"])
def test_other_sinks(tmp_path: Path, sink: str) -> None:
    """Also there; what may not be written is left out."""
    code, found = ended(tmp_path, "raise", f"sinks.{sink}=true", "sinks.csv=false", "redact=[tokens]")
    assert (code, found["how"], found["error"], "message" in found) == (1, "exception", "ValueError", False)
    assert json.dumps(found).count("sk-123") == 0
