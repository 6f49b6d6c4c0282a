"""What a sink says when its disk is full, or when the limit of the size of a file is reached: the cause, how much is free, what to do, and
that what was written before stays. Nobody is told to remove what the run has written."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from frames_of_lists import frame_of

from msprobe_engine.core.errors import SinkError
from msprobe_engine.core.settings.schema import CsvSettings, JsonLinesSettings, MonitorSettings, SqliteSettings, TensorBoardSettings
from msprobe_engine.probe.sinks.base import Sink
from msprobe_engine.probe.sinks.csv.monitor import CsvSink
from msprobe_engine.probe.sinks.jsonlines import JsonLinesSink
from msprobe_engine.probe.sinks.sqlite import SqliteSink
from msprobe_engine.probe.sinks.tensorboard import TensorBoardSink

SINKS: dict[str, Callable[[Path], Sink]] = {
    "csv": lambda root: CsvSink(CsvSettings(), MonitorSettings(), output_dir=root, rank=0),
    "jsonl": lambda root: JsonLinesSink(JsonLinesSettings(), None, output_dir=root, rank=0),
    "sqlite": lambda root: SqliteSink(SqliteSettings(), None, output_dir=root, rank=0),
    "tensorboard": lambda root: TensorBoardSink(TensorBoardSettings(), output_dir=root, rank=0),
}
MOST_STEPS = 5000
FRAME = {f"layers.{i}.weight": [1.0, 2.0] for i in range(50)}


@contextmanager
def file_limit(most: int) -> Iterator[None]:
    """Python would keep what it compiles of a module that is imported meanwhile, cut off, for all processes after this one."""
    before, compiled = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = compiled


def error_of(make: Callable[[Path], Sink], root: Path) -> str:
    """What a sink says when it can write no more."""
    sink = None
    try:
        sink = make(root)
        for step in range(MOST_STEPS):
            sink.write(frame_of(FRAME, step=step, rank=0), [])
            sink.flush()
    except SinkError as error:
        return str(error)
    finally:
        if sink is not None:
            sink.close()
    return ""


@pytest.mark.parametrize("taken", [0, 1000 << 10], ids=["filled by the run", "full before"])
@pytest.mark.parametrize("name", SINKS)
def test_full_disk(name: str, taken: int, small: Path) -> None:
    (small / "others").write_bytes(bytes(taken))
    said = error_of(SINKS[name], small / "out")
    assert str(small / "out") in said
    assert "the disk is full (0." in said
    assert f"of 1.0 MiB are free at {small}" in said
    assert "free some space there or name another place" in said
    assert "remove" not in said


@pytest.mark.parametrize("most", [4096, 40_000, 400_000])
@pytest.mark.parametrize("name", SINKS)
def test_limit_of_the_size_of_a_file(name: str, most: int, tmp_path: Path) -> None:
    with file_limit(most):
        said = error_of(SINKS[name], tmp_path / "out")
    assert str(tmp_path / "out") in said
    assert f"a file of this process may have {most:,} bytes and no more" in said
    assert "ulimit -f" in said
    assert "free some space" not in said
    assert "remove" not in said
