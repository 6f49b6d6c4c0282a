"""`msprobe.open`: one reader for everything that a run has left, and what notebooks show of it."""

from __future__ import annotations

import json
from pathlib import Path

import dump_frames as frames
import pytest
from frames_of_lists import frame_of

import msprobe
from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.records import Entry, Frame, TensorRef
from msprobe_engine.core.settings.schema import JsonLinesSettings, MonitorSettings
from msprobe_engine.find.findings import DIVERGENCE, Diagnosis, Suspect
from msprobe_engine.probe.sinks.dump.dump_files import DumpSink
from msprobe_engine.probe.sinks.jsonlines import JsonLinesSink
from msprobe_engine.report.diagnosis.page import write

ODD = "<script>alert(1)</script>"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    entry = Entry("Functional.linear.0.forward", {"output": [TensorRef(0, frames.F32)]})
    sink = DumpSink(tmp_path / "dump", level="mix", rank=0)
    sink.write(Frame(3, 0, frames.row_of([1.0, 2.0]), [entry], level="mix"))
    sink.close()
    lines = JsonLinesSink(JsonLinesSettings(), MonitorSettings(), output_dir=tmp_path, rank=0)
    lines.write(frame_of({ODD: [1.0]}, step=3, scalars={"loss": 2.5, ODD: 1.0}), [])
    lines.close()
    write(Diagnosis(DIVERGENCE, [Suspect(ODD, "fc", 0, 3)]), tmp_path / "analysis" / "diagnose-1")
    return tmp_path


def test_everything_of_a_run(run: Path) -> None:
    """Dumps, monitor frames and findings, from the run directory; each part by its own path, too."""
    opened = msprobe.open(run)
    assert opened.dump is not None
    assert [record.name for record in opened.dump[3, 0].find("*linear*")] == ["Functional.linear.0.forward"]
    assert opened.monitor is not None
    assert opened.monitor.scalars(0)["loss"].values.tolist() == [2.5]
    assert [found["finding"] for found in opened.findings.values()] == [DIVERGENCE]
    assert opened.incidents == ()
    assert msprobe.open(run / "dump").monitor is None
    assert msprobe.open(run / "jsonl").dump is None
    assert list(msprobe.open(run / "analysis/diagnose-1/diagnosis.json").findings.values()) == list(opened.findings.values())


def test_what_notebooks_show(run: Path) -> None:
    """The same facts as on the console, and names of the training are text there."""
    opened = msprobe.open(run)
    assert opened.dump is not None
    assert opened.monitor is not None
    shown = [
        opened._repr_html_(),
        opened.dump._repr_html_(),
        opened.monitor._repr_html_(),
        Diagnosis(DIVERGENCE, [Suspect(ODD, "fc", 0, 3)])._repr_html_(),
    ]
    assert "<script>" not in "".join(shown)
    assert "finding " in shown[0]
    assert "<td>3</td><td>0</td>" in shown[1]
    assert "loss 2.5" in shown[2]
    assert "&lt;script&gt;" in shown[3]


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(UsageError):
            msprobe.open(path)
    (tmp_path / "diagnosis.json").write_text("[1]")
    with pytest.raises(UsageError, match="is no diagnosis"):
        msprobe.open(tmp_path / "diagnosis.json").findings.clear()
    (tmp_path / "diagnosis.json").write_text(json.dumps({"finding": "none"})[:-2])
    with pytest.raises(UsageError, match="cannot be read"):
        msprobe.open(tmp_path / "diagnosis.json").findings.clear()
