"""TensorBoard event files, read by TensorBoard: scalars, and derived families (collectives, momentum agreement, numbers of modules,
histograms and heat maps)."""

from __future__ import annotations

import io
import math
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frames_of_lists import TENSOR, frame_of, row_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from msprobe_engine.core.errors import MissingExtraError, SinkError
from msprobe_engine.core.records import Frame, Sample, TensorRef
from msprobe_engine.core.settings.schema import MonitorSettings, TensorBoardSettings
from msprobe_engine.core.statistics import histograms
from msprobe_engine.probe.rules.builtin.values.nan_inf import NanInfRule
from msprobe_engine.probe.sinks import tensorboard
from msprobe_engine.probe.sinks.tensorboard import COLUMNS, Heatmap, TensorBoardSink, tag_of


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


def sample(family: str, name: str, phase: str = "", micro_step: int = -1, **extra: Any) -> Sample:
    return Sample(family, name, TensorRef(0, TENSOR), phase, micro_step, 0, extra)


def frame(step: int, *samples: tuple[Sample, list[float]], more: Any = None) -> Frame:
    rows = [row_of(values) for _, values in samples] + ([] if more is None else [more])
    placed = [s._replace(ref=TensorRef(i, TENSOR)) for i, (s, _) in enumerate(samples)]
    return Frame(step, 3, np.concatenate(rows), samples=placed)


def accumulator(directory: Path) -> EventAccumulator:
    events = EventAccumulator(str(directory), size_guidance={"images": 0, "histograms": 0, "scalars": 0})
    events.Reload()
    return events


def test_tags_of_derived_families(tmp_path: Path) -> None:
    """Collectives have no chunk in front, momentum agreement and optimizer states their word, derived numbers their column."""
    sink = TensorBoardSink(TensorBoardSettings(ops=("norm",)), output_dir=tmp_path, rank=3, monitor=MonitorSettings(squash_name=True))
    sink.write(
        frame(
            7,
            (sample("other", "all_reduce", tag="pre_0"), [3.0]),
            (sample("other", "all_reduce", tag="all_reduce/rank3/post_2_0", call=2), [6.0]),
            (sample("other", "a.layers.0.w", tag="mg_direction"), [0.5]),
            (sample("opt_state", "w", state="momentum_buffer"), [2.0]),
            (sample("attention_hook", "attn", micro_step=1, column="entropy"), [1.25]),
            (sample("update", "w"), [4.0]),
        ),
        [],
    )
    sink.close()
    events = accumulator(sink.directory)
    found = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert found == {
        "all_reduce/rank3/pre_0_norm": [(7, 3.0)],
        "all_reduce/rank3/post_2_0_norm": [(7, 6.0)],
        "0:layers.0.w/rank3/mg_direction_norm": [(7, 0.5)],
        "0:w/rank3/momentum_buffer_norm": [(7, 2.0)],
        "0:attn:1/rank3/entropy": [(7, 1.25)],
        "0:w/rank3/update_norm": [(7, 4.0)],
    }


@pytest.mark.parametrize("kind", ["linear", "log2"])
def test_histograms(tmp_path: Path, kind: str) -> None:
    """A histogram has the counts and the limits of the rows."""
    counts = np.arange(histograms.BINS[kind], dtype=np.int64)
    sink = TensorBoardSink(TensorBoardSettings(ops=("norm",)), output_dir=tmp_path, rank=0)
    one = sample("grad_reduced", "w", "reduced", histogram=histograms.reference(1, kind))
    sink.write(frame(2, (one, [0.5, -0.25]), more=histograms.to_rows(counts, 500)), [])
    sink.close()
    (event,) = accumulator(sink.directory).Histograms("0:w/rank0/post_grad_histogram")
    value = event.histogram_value
    assert value.num == counts.sum()
    assert value.bucket == [0, *counts.tolist()]
    assert value.bucket_limit == histograms.edges(kind).tolist()
    if kind == "linear":
        assert (value.min, value.max) == (-0.25, 0.5)


def test_heat_maps_of_updates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images come every IMAGE_STEPS steps and at the end, under the tags of the existing tool, one column per step."""
    image = pytest.importorskip("PIL.Image")
    monkeypatch.setattr(tensorboard, "IMAGE_STEPS", 10)
    sink = TensorBoardSink(TensorBoardSettings(ops=("norm",)), output_dir=tmp_path, rank=0)
    counts = np.zeros(30, np.int64)
    counts[29] = 9
    update, ratio = (sample(family, "w", histogram=histograms.reference(2, "linear")) for family in ("update", "ratio"))
    for step in range(25):
        sink.write(frame(step, (update, [1.0]), (ratio, [1.0]), more=histograms.to_rows(counts, 9)), [])
    sink.close()
    events = accumulator(sink.directory)
    assert sorted(events.Tags()["images"]) == ["0:w/rank0/adam_ratio", "0:w/rank0/adam_update"]
    images = events.Images("0:w/rank0/adam_update")
    assert [event.step for event in images] == [10, 20, 24]
    picture = image.open(io.BytesIO(images[-1].encoded_image_string)).convert("L")
    assert picture.size == (images[-1].width, images[-1].height) == (25 * 4, 30 * 4)
    pixels = np.asarray(picture)
    assert pixels[:4].min() > 200, "all values are in the highest bin, which is the top"
    assert pixels[4:].max() < 50


def test_heat_map_does_not_grow() -> None:
    """Beyond its columns neighbouring steps are put together: old and new ones stay visible, width and memory stay."""
    heat = Heatmap(2)
    for step in range(5 * COLUMNS + 3):
        heat.add(np.array([4, 0]) if step < 3 * COLUMNS else np.array([0, 4]))
    data, width, height = heat.png()
    assert width <= 4 * (COLUMNS + 1)
    assert height == 8
    assert len(data) < 20_000
    image = pytest.importorskip("PIL.Image")
    pixels = np.asarray(image.open(io.BytesIO(data)).convert("L"))
    share = (pixels[-1] > 200).mean()
    assert 0.55 < share < 0.65, "3 of 5 parts of the time were in the low bin"
