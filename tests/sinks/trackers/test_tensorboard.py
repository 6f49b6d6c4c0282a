"""TensorBoard event files, read by TensorBoard."""

from __future__ import annotations

import math
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from frames_of_lists import TENSOR, frame_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from msprobe_engine.core.errors import MissingExtraError, SinkError
from msprobe_engine.core.records import Sample, TensorRef
from msprobe_engine.core.settings.schema import TensorBoardSettings
from msprobe_engine.probe.rules.builtin.values.nan_inf import NanInfRule
from msprobe_engine.probe.sinks.tensorboard import TensorBoardSink, tag_of


def read(sink: TensorBoardSink) -> EventAccumulator:
    accumulator = EventAccumulator(str(sink.directory), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


def series(accumulator: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    if tag in accumulator.Tags()["scalars"]:
        return [(e.step, e.value) for e in accumulator.Scalars(tag)]
    return [(e.step, float(np.asarray(e.tensor_proto.float_val)[0])) for e in accumulator.Tensors(tag)]


def rounded(value: float) -> float:
    """As an event file holds it."""
    return float(np.float32(value))


def test_tensorboard_reads_every_step(tmp_path: Path) -> None:
    """Every statistic of every step comes back under its tag with its step, also while the sink is still open."""
    sink = TensorBoardSink(TensorBoardSettings(ops=("norm", "nans")), output_dir=tmp_path, rank=3)
    assert sink.directory == tmp_path / "tensorboard" / "rank3"
    for step in (5, 6, 9):
        sink.write(frame_of({"fc.weight": [3.0, 4.0 * step]}, step=step, scalars={"loss": 1.0 / step}), [])
    accumulator = read(sink)
    assert series(accumulator, "0:fc.weight/rank3/post_grad_norm") == [(s, rounded(math.hypot(3, 4 * s))) for s in (5, 6, 9)]
    assert series(accumulator, "0:fc.weight/rank3/post_grad_nans") == [(5, 0.0), (6, 0.0), (9, 0.0)]
    assert series(accumulator, "scalars/loss") == [(s, rounded(1 / s)) for s in (5, 6, 9)]


def test_one_event_per_step(tmp_path: Path) -> None:
    """All values of a step are in one event; the file is a record file with right checksums."""
    sink = TensorBoardSink(TensorBoardSettings(), output_dir=tmp_path, rank=0)
    sink.write(frame_of({f"p{i}": [1.0] for i in range(100)}), [])
    sink.close()
    (path,) = sink.directory.glob("*tfevents*")
    events = list(EventFileLoader(str(path)).Load())
    assert [len(e.summary.value) for e in events] == [0, 500]


def test_nan_is_kept_and_nothing_is_left_out(tmp_path: Path) -> None:
    """A NaN stays a NaN in the curve; a tensor without elements has no point; alerts are counted per step."""
    sink = TensorBoardSink(TensorBoardSettings(ops=("norm",)), output_dir=tmp_path, rank=0)
    bad = frame_of({"w": [math.nan], "empty": []}, step=1)
    sink.write(bad, NanInfRule().check(bad))
    sink.write(frame_of({"w": [1.0]}, step=2), [])
    accumulator = read(sink)
    (first, second) = series(accumulator, "0:w/rank0/post_grad_norm")
    assert math.isnan(first[1])
    assert second == (2, 1.0)
    assert "0:empty/rank0/post_grad_norm" not in accumulator.Tags()["scalars"] + accumulator.Tags()["tensors"]
    assert series(accumulator, "alerts/nan_inf") == [(1, 1.0), (2, 0.0)]


@pytest.mark.parametrize(
    ("family", "phase", "micro", "vpp", "tag"),
    [
        ("actv", "", 2, 0, "0:m.input:2/rank7/actv"),
        ("actv_grad", "", -1, 1, "1:m.input:0/rank7/actv_grad"),
        ("grad_unreduced", "accumulated", -1, 0, "0:m.input/rank7/acc_grad"),
        ("grad_unreduced", "local", 1, 0, "0:m.input:1/rank7/pre_grad"),
        ("grad_reduced", "reduced", -1, 0, "0:m.input/rank7/post_grad"),
        ("grad_reduced", "clipped", -1, 0, "0:m.input/rank7/clipped_grad"),
        ("exp_avg_sq", "", -1, 0, "0:m.input/rank7/exp_avg_sq"),
    ],
)
def test_tags(family: str, phase: str, micro: int, vpp: int, tag: str) -> None:
    """The tags of the existing tool; phases of a gradient never share a tag."""
    assert tag_of(Sample(family, "m.input", TensorRef(0, TENSOR), phase, micro, vpp), 7) == tag


def test_unknown_statistic(tmp_path: Path) -> None:
    """What is no number to plot is refused at the start."""
    with pytest.raises(SinkError, match="'digest'"):
        TensorBoardSink(TensorBoardSettings(ops=("norm", "digest")), output_dir=tmp_path, rank=0)


@pytest.mark.parametrize("module", ["tensorboard.compat.proto", "google_crc32c"])
def test_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """Without one of the packages the error holds the pip command."""
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=r"pip install 'msprobe-integrations\[tensorboard\]'"):
        TensorBoardSink(TensorBoardSettings(), output_dir=tmp_path, rank=0)


@pytest.mark.parametrize("count", [1, 20_000])
def test_checksums_are_tensorboards_own(tmp_path: Path, count: int) -> None:
    """Length and data of every record have the masked CRC-32C that TensorBoard's reader computes."""
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    sink = TensorBoardSink(TensorBoardSettings(ops=("norm",)), output_dir=tmp_path, rank=0)
    sink.write(frame_of({f"p{i}": [1.0] for i in range(count)}), [])
    sink.close()
    (path,) = sink.directory.glob("*tfevents*")
    data, at, records = path.read_bytes(), 0, 0
    while at < len(data):
        size, of_size = struct.unpack_from("<QI", data, at)
        body = data[at + 12 : at + 12 + size]
        assert of_size == masked_crc32c(data[at : at + 8])
        assert struct.unpack_from("<I", data, at + 12 + size)[0] == masked_crc32c(body)
        at, records = at + 16 + size, records + 1
    assert records == 2
