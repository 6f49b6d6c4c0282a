"""From settings to sinks."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from urllib.request import urlopen

import pytest
from frames_of_lists import frame_of

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.errors import SinkError
from msprobe_engine.core.guard import Faults
from msprobe_engine.core.settings.schema import (
    JsonLinesSettings,
    MonitorSettings,
    ProbeSettings,
    PrometheusSettings,
    SinkSettings,
    SqliteSettings,
    TensorBoardSettings,
)
from msprobe_engine.formats.monitor.completeness import missing_parts, remarks
from msprobe_engine.formats.monitor.reader import open_run
from msprobe_engine.probe.sinks.base import Sink
from msprobe_engine.probe.sinks.build import build_sinks
from msprobe_engine.probe.sinks.memory import MemorySink
from msprobe_engine.probe.writer import Writer


def test_all_of_them(tmp_path: Path) -> None:
    """Every sink that is switched on is built, takes a frame and closes."""
    wanted = SinkSettings(
        tensorboard=TensorBoardSettings(enabled=True),
        prometheus=PrometheusSettings(enabled=True, port=0),
        jsonl=JsonLinesSettings(enabled=True),
        sqlite=SqliteSettings(enabled=True),
        memory=True,
    )
    sinks, errors = build_sinks(ProbeSettings(sinks=wanted), output_dir=tmp_path, rank=0, monitor=MonitorSettings())
    assert errors == []
    assert [s.name for s in sinks] == ["csv", "tensorboard", "jsonl", "sqlite", "prometheus", "memory"]
    for sink in sinks:
        assert isinstance(sink, Sink)
        sink.write(frame_of({"w": [1.0]}), [])
        sink.flush()
        sink.close()


class Point:
    """An installed package's entry point ``name`` of the group of sinks."""

    def __init__(self, name: str, made: object) -> None:
        self.name, self._made = name, made

    def load(self) -> object:
        return lambda **_: self._made


def test_sinks_of_other_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an entry point makes is one of the sinks; one that is not there, or makes something else, is said and the others work."""
    mine = MemorySink(3)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: [Point("mine", mine), Point("odd", 5)])
    wanted = ProbeSettings(sinks=SinkSettings(plugins=("mine", "odd", "absent")))
    sinks, errors = build_sinks(wanted, output_dir=tmp_path, rank=0)
    assert sinks == [mine]
    assert [str(error) for error in errors] == [
        "sinks.plugins: odd makes a int, not a msprobe_engine.probe.sinks.base.Sink",
        "sinks.plugins: 'absent' is no entry point of group msprobe.sinks; there: mine, odd",
    ]


def test_nothing_to_write(tmp_path: Path) -> None:
    """Without a monitor there are no samples and so no CSV files, not even a directory."""
    assert build_sinks(ProbeSettings(), output_dir=tmp_path, rank=0) == ([], [])
    assert list(tmp_path.iterdir()) == []


def test_one_that_cannot_start_leaves_the_others(tmp_path: Path) -> None:
    """A taken port costs Prometheus only; in strict mode it is raised."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        wanted = SinkSettings(prometheus=PrometheusSettings(enabled=True, port=taken.getsockname()[1]), memory=True)
        sinks, errors = build_sinks(ProbeSettings(sinks=wanted), output_dir=tmp_path, rank=0, monitor=MonitorSettings())
        assert [s.name for s in sinks] == ["csv", "memory"]
        assert ["is taken" in str(e) for e in errors] == [True]
        with pytest.raises(SinkError, match="is taken"):
            build_sinks(ProbeSettings(sinks=wanted, strict=True), output_dir=tmp_path, rank=0)


def test_ranks_that_leave_tensors_to_others(tmp_path: Path) -> None:
    """With `sinks.rank` the ranks that are not chosen write the numbers of a step and the alerts to files, and have no series of layers; a
    reader is told, and misses nothing."""
    endpoint, lines = PrometheusSettings(enabled=True, port=0), JsonLinesSettings(enabled=True)
    wanted = SinkSettings(rank=(0,), prometheus=endpoint, jsonl=lines, memory=True)
    alert = Alert("nan_inf", "critical", "grad", "a.0.w", 1, 1, 2.0, "1", "a.0.w is 2")
    for rank in (0, 1):
        sinks, errors = build_sinks(ProbeSettings(sinks=wanted), output_dir=tmp_path, rank=rank, world_size=2, monitor=MonitorSettings())
        assert errors == []
        for sink in sinks:
            sink.watch_remark("tensors_of", {"ranks": ["0"]})
        writer = Writer(sinks, Faults(strict=True))
        for step in (0, 1):
            frame = frame_of({"a.0.w": [2.0, 3.0]}, step=step, rank=rank, scalars={"step_seconds": 0.5})
            writer.submit(frame, [replace(alert, rank=rank)] if step else [])
        writer.wait_for_monitor()
        (memory,) = [sink for sink in sinks if isinstance(sink, MemorySink)]
        (prometheus,) = [sink for sink in sinks if sink.name == "prometheus"]
        assert [len(frame.samples) for frame in memory.frames] == [1, 1], "what is in memory is what the rank has seen"
        with urlopen(f"http://127.0.0.1:{prometheus.port}/metrics", timeout=240) as page:
            assert ("layer=" in page.read().decode()) == (rank == 0)
        writer.close()
        (directory,) = tmp_path.glob(f"monitor/*-rank{rank}-*")
        tables = {path.name.partition("_0-")[0] for path in directory.glob("*.csv")}
        assert tables == ({"grad_reduced", "scalars"} if rank == 0 else {"scalars"})
        assert len((directory / "alerts.jsonl").read_text().splitlines()) == 1
        text = (tmp_path / f"jsonl/rank{rank}.jsonl").read_text().splitlines()
        assert ["grad_reduced" in line for line in text if '"step"' in line][-2:] == [rank == 0] * 2
    run = open_run(tmp_path / "monitor")
    assert missing_parts(run) == []
    assert ["ranks 0 alone" in remark for remark in remarks(run)] == [True]
