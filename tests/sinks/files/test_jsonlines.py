"""JSON lines of the monitor."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from frames_of_lists import TENSOR, frame_of, row_of

from msprobe_engine.core.errors import SinkError
from msprobe_engine.core.records import Frame, Sample, TensorRef
from msprobe_engine.core.settings.schema import JsonLinesSettings, MonitorSettings
from msprobe_engine.core.statistics import histograms
from msprobe_engine.formats.monitor.reader import open_run
from msprobe_engine.probe.sinks.jsonlines import JsonLinesSink


def lines(path: Path) -> list[dict[str, object]]:
    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_a_line_per_step(tmp_path: Path) -> None:
    """The documented fields; numbers that JSON does not have are texts; mode 0640."""
    sink = JsonLinesSink(JsonLinesSettings(ops=("norm", "nans", "digest")), None, output_dir=tmp_path, rank=4, world_size=8)
    sink.write(frame_of({"w": [1.0, math.nan]}, step=3, rank=4, scalars={"loss": math.inf}, lost={"queue": 2}), [])
    sink.close()
    assert sink.path == tmp_path / "jsonl" / "rank4.jsonl"
    assert sink.path.stat().st_mode & 0o777 == 0o640
    run, step = lines(sink.path)
    assert run["run"]["world_size"] == 8  # type: ignore[index]
    assert {k: step[k] for k in ("step", "rank", "complete", "lost", "scalars")} == {
        "step": 3, "rank": 4, "complete": True, "lost": {"queue": 2}, "scalars": {"loss": "Infinity"},
    }  # fmt: skip
    assert step["samples"] == [
        {
            "family": "grad_reduced", "name": "w", "vpp_stage": 0, "phase": "reduced", "shape": [4], "dtype": "torch.float32",
            "norm": "NaN", "nans": 1, "digest": "NaN",
        }
    ]  # fmt: skip


def test_facts_histograms_and_tensors_without_statistics(tmp_path: Path) -> None:
    """Further facts of a sample are in extra, a histogram has kind and counts, a tensor without a row NaN everywhere."""
    counts = np.arange(30, dtype=np.int64)
    rows = np.concatenate([row_of([1.0]), histograms.to_rows(counts, 9)])
    extra = {"histogram": histograms.reference(1, "linear"), "scope": "shard"}
    samples = [Sample("update", "w", TensorRef(0, TENSOR), extra=extra), Sample("update", "v", TensorRef(-1, TENSOR))]
    sink = JsonLinesSink(JsonLinesSettings(ops=("norm",)), None, output_dir=tmp_path, rank=0)
    sink.write(Frame(0, 0, rows, samples=samples), [])
    sink.close()
    first, second = lines(sink.path)[1]["samples"]  # type: ignore[misc]
    assert first["extra"] == {"scope": "shard"}
    assert first["histogram"] == {"kind": "linear", "counts": counts.tolist()}
    assert (first["norm"], second["norm"]) == (1.0, "NaN")


def test_goes_on_in_its_file(tmp_path: Path) -> None:
    """A second run adds lines behind those of the first; half a line that a killed process left is cut off."""
    for step in (0, 1):
        sink = JsonLinesSink(JsonLinesSettings(), MonitorSettings(squash_name=True), output_dir=tmp_path, rank=0)
        sink.write(frame_of({"a.layers.0.w": [1.0]}, step=step), [])
        sink.close()
        with sink.path.open("a") as file:
            file.write('{"step": 9, "sam')
    sink = JsonLinesSink(JsonLinesSettings(), None, output_dir=tmp_path, rank=0)
    sink.close()
    run = open_run(tmp_path)
    assert [(k.name, s.steps.tolist()) for k, s in run.series(0, "grad_reduced", "norm").items()] == [("layers.0.w", [0, 1])]
    assert run.problems == {}


def test_killed_process_leaves_whole_steps(tmp_path: Path) -> None:
    """After kill -9 every step that was written can be read."""
    code = f"""
from pathlib import Path
from frames_of_lists import frame_of
from msprobe_engine.probe.sinks.jsonlines import JsonLinesSink
from msprobe_engine.core.settings.schema import JsonLinesSettings
sink = JsonLinesSink(JsonLinesSettings(), None, output_dir=Path({str(tmp_path)!r}), rank=0)
for step in range(10**9):
    sink.write(frame_of({{f"p{{i}}": [1.0] for i in range(50)}}, step=step), [])
    print(step, flush=True)
"""
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}  # with the helpers of these tests
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=os.environ | path) as process:
        assert process.stdout is not None
        last = [int(process.stdout.readline()) for _ in range(20)][-1]
        process.send_signal(signal.SIGKILL)
    found = open_run(tmp_path).series(0, "grad_reduced", "norm")
    assert len(found) == 50
    assert all(s.steps.tolist()[: last + 1] == list(range(last + 1)) for s in found.values())


def test_links_are_not_followed(tmp_path: Path) -> None:
    """A link in place of the file keeps the sink from starting."""
    (tmp_path / "jsonl").mkdir()
    (tmp_path / "secret").write_text("no line end")
    (tmp_path / "jsonl" / "rank0.jsonl").symlink_to(tmp_path / "secret")
    with pytest.raises(SinkError, match="cannot open"):
        JsonLinesSink(JsonLinesSettings(), None, output_dir=tmp_path, rank=0)
    assert (tmp_path / "secret").read_text() == "no line end"
