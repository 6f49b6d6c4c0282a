"""TensorBoard event files: one event per step with all values of the step.

Tags are those of the existing tool, so that dashboards keep working::

    {vpp}:{name}[:{micro step}]/rank{R}/{word}_{statistic}

with the words actv, actv_grad, acc_grad or pre_grad (unreduced gradients, accumulated or of one micro batch), post_grad (reduced),
param_origin, param_updated, exp_avg, exp_avg_sq, mg_direction (momentum agreement). Ours are ``unscaled_grad``, ``clipped_grad``,
``update``, ``ratio``, the names of further optimizer states, and::

    {vpp}:{name}[:{micro step}]/rank{R}/{column}                  derived numbers of modules (entropy, kernel_norm, ...)
    {name}/rank{R}/{tag}_{statistic}                              collectives, tag {pre|post}_{i}
    {vpp}:{name}[:{micro step}]/rank{R}/{word}_histogram          histograms
    {vpp}:{name}/rank{R}/adam_update, .../adam_ratio              images: histograms of `update` and `ratio` over all steps so far
    scalars/{name}                                                loss, grad_norm, ...
    alerts/{rule}                                                 alerts in this step

Images come every `IMAGE_STEPS` steps and at the end.

Heat maps of histograms over the steps, as small PNG images: one column per step, the highest bin on top, bright where much is.
"""

from __future__ import annotations

import struct
import zlib
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.errors import SinkError
from msprobe_engine.core.io.output_files import make_directory
from msprobe_engine.core.io.safe_cells import Names, plain_tag, utf8
from msprobe_engine.core.records import Frame, Sample
from msprobe_engine.core.settings.schema import MonitorSettings, TensorBoardSettings
from msprobe_engine.core.statistics import histograms
from msprobe_engine.core.statistics.columns import OPS, column
from msprobe_engine.core.statistics.rows import MAX, MIN
from msprobe_engine.formats.monitor.event_files import EventFile, tag_bytes
from msprobe_engine.formats.monitor.losses import FILE, LossFile
from msprobe_engine.probe.sinks.base import Sink
from msprobe_engine.probe.sinks.csv.features import FEATURES

IMAGE_STEPS = 100
"""Steps from one set of images to the next."""
_IMAGES = {"update": "adam_update", "ratio": "adam_ratio"}


class TensorBoardSink(Sink):
    """Writes samples, scalars and alert counts. One directory per rank, because TensorBoard reads one file per directory.

    Args:
        settings: section ``sinks.tensorboard``.
        output_dir: root of the run's output.
        rank: global rank.

    Raises:
        MissingExtraError: the package tensorboard is not installed.
        SinkError: an unknown statistic, or the directory cannot be created.
    """

    name = "tensorboard"
    losses: LossFile

    def __init__(self, settings: TensorBoardSettings, *, output_dir: Path, rank: int, monitor: MonitorSettings | None = None) -> None:
        unknown = [op for op in settings.ops if op not in OPS]
        if unknown:
            raise SinkError(f"sinks.tensorboard.ops: {unknown[0]!r} is no number to plot; allowed: {', '.join(OPS)}")
        self._ops = tuple(dict.fromkeys(settings.ops))
        self._rank = rank
        self._names = Names(monitor is not None and monitor.squash_name)
        self.directory = Path(settings.path or output_dir / "tensorboard") / f"rank{rank}"
        """Where the event file is."""
        make_directory(self.directory, "tensorboard sink")
        self.losses = LossFile(self.directory / FILE)
        self._file = self._new_file()
        self._summary = self._file.summary
        self._rules: set[str] = set()
        self._maps: dict[str, Heatmap] = {}
        self._fresh: set[str] = set()
        self._next_images = self._last = 0
        self._tags: dict[tuple[Any, ...], tuple[bytes, ...]] = {}

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return self._file.size

    @property
    def home(self) -> Path:
        return self.directory

    def make_again(self) -> None:
        make_directory(self.directory, "tensorboard sink")
        before, self._file = self._file, self._new_file()
        before.close()
        self.losses.make_again()

    def _new_file(self) -> EventFile:
        return EventFile(self.directory, f"rank{self._rank}", "tensorboard sink")

    def write(self, frame: Frame, alerts: Sequence[Alert]) -> None:
        """Append one event.

        Raises:
            SinkError: it could not be written; the file ends with the event before it.
        """
        self._last = frame.step
        summary = self._summary()
        add = summary.value.add
        for name, value in frame.scalars.items():
            add(tag=utf8(f"scalars/{name}"), simple_value=value)
        fired = Counter(alert.rule for alert in alerts)
        self._rules |= fired.keys()
        for rule in sorted(self._rules):
            add(tag=f"alerts/{rule}", simple_value=float(fired[rule]))
        samples = [s for s in self._names.samples(frame.samples) if s.ref.row >= 0]
        numbers = [s for s in samples if s.family in FEATURES]
        samples = [s for s in samples if s.family not in FEATURES] if numbers else samples
        for sample, value in zip(numbers, column(frame.rows[[s.ref.row for s in numbers]], "mean").tolist() if numbers else ()):
            add(tag=utf8(f"{where_of(sample, self._rank)}/{sample.extra.get('column', 'value')}"), simple_value=value)
        tags: list[bytes] = []
        rows = frame.rows[[s.ref.row for s in samples]]
        present = rows.view("int64")[:, 0] != 0
        for sample, is_present in zip(samples, present.tolist()):
            if is_present:
                tags += self._tags_of(sample)
                if sample.extra and "histogram" in sample.extra:
                    self._histogram(frame, sample, add)
        rows = rows[present]
        values = np.stack([column(rows, op) for op in self._ops], axis=1).ravel() if tags else ()
        if self._maps and frame.step >= self._next_images:
            self._images(add)
        if tags or len(summary.value):
            self._file.append(frame.step, tags, values, summary)

    def close(self) -> None:
        """Write the images of the last steps, close the file."""
        if self._fresh:
            summary = self._summary()
            self._images(summary.value.add)
            with suppress(SinkError):  # a full disk; what the images show is in the histograms, too
                self._file.append(self._last, (), (), summary)
        self._file.close()
        self.losses.close()

    def _histogram(self, frame: Frame, sample: Sample, add: Any) -> None:
        reference = sample.extra["histogram"]
        kind = reference["kind"]
        counts, edges = histograms.counts(frame.rows, reference["row"], kind), histograms.edges(kind)
        row = frame.rows[sample.ref.row]
        proto = add(tag=utf8(f"{tag_of(sample, self._rank)}_histogram")).histo
        # A bucket of TensorBoard begins where the one before ends: an empty one gives the first its beginning.
        proto.bucket_limit.extend(edges.tolist())
        proto.bucket.extend([0, *counts.tolist()])
        middle = (edges[1:] + edges[:-1]) / 2
        proto.min, proto.max, proto.num = float(edges[0]), float(edges[-1]), float(counts.sum())
        proto.sum, proto.sum_squares = float(counts @ middle), float(counts @ (middle * middle))
        if kind == "linear" and np.isfinite(row[MIN]) and np.isfinite(row[MAX]):
            proto.min, proto.max = max(float(row[MIN]), proto.min), min(float(row[MAX]), proto.max)
        if (image := _IMAGES.get(sample.family)) is not None:
            tag = utf8(f"{where_of(sample, self._rank)}/{image}")
            if tag not in self._maps:
                self._maps[tag] = Heatmap(len(counts))
                if not self._next_images:
                    self._next_images = frame.step + IMAGE_STEPS
            self._maps[tag].add(counts)
            self._fresh.add(tag)

    def _images(self, add: Any) -> None:
        for tag in sorted(self._fresh):
            data, width, height = self._maps[tag].png()
            image = add(tag=tag).image
            image.encoded_image_string, image.width, image.height, image.colorspace = data, width, height, 3
        self._fresh.clear()
        self._next_images = self._last + IMAGE_STEPS

    def _tags_of(self, sample: Sample) -> tuple[bytes, ...]:
        detail = (sample.extra.get("state"), sample.extra.get("tag")) if sample.extra else None
        key = (sample.family, sample.name, sample.phase, sample.micro_step, sample.vpp_stage, detail)
        tags = self._tags.get(key)
        if tags is None:
            tags = self._tags[key] = tuple(tag_bytes(f"{tag_of(sample, self._rank)}_{op}") for op in self._ops)
        return tags


def tag_of(sample: Sample, rank: int) -> str:
    """The tag of a sample without ``_{statistic}``."""
    return f"{where_of(sample, rank)}/{_word(sample)}"


def where_of(sample: Sample, rank: int) -> str:
    """The tag of a sample without its last part."""
    if sample.family == "other" and sample.extra.get("tag", "mg_direction") != "mg_direction":
        return f"{sample.name}/rank{rank}"
    micro = f":{sample.micro_step}" if sample.micro_step >= 0 else ":0" if sample.family in ("actv", "actv_grad") else ""
    return f"{sample.vpp_stage}:{sample.name}{micro}/rank{rank}"


def _word(sample: Sample) -> str:
    if sample.family == "grad_unreduced":
        return "acc_grad" if sample.phase == "accumulated" else "pre_grad"
    if sample.family == "grad_reduced":
        # at the entry of the optimizer's step it is called so in the existing tool, whatever was done to it before
        return "post_grad" if sample.phase in ("", "reduced") or "entry" in sample.extra else f"{sample.phase}_grad"
    if sample.family == "opt_state":
        return str(sample.extra.get("state", sample.family))
    if sample.family == "other":
        return plain_tag(sample.name, str(sample.extra.get("tag", sample.family)))
    return sample.family


COLUMNS = 256
"""Steps an image shows one by one; beyond that neighbours are put together, so an image and its memory never grow."""
_PIXELS = 4
"""Width and height of a cell."""


class Heatmap:
    """The steps of one histogram so far.

    Args:
        bins: number of bins.
    """

    def __init__(self, bins: int) -> None:
        self._cells = np.zeros((bins, COLUMNS), np.uint8)
        self._count = 0
        self._per_column = 1
        self._open: list[npt.NDArray[np.uint8]] = []

    def add(self, counts: npt.NDArray[np.int64]) -> None:
        """One step; counts are int64 [bins]."""
        total = int(counts.sum())
        # The square root of the share keeps bins with few values visible.
        self._open.append(np.sqrt(counts / total * 255.0 * 255.0).astype(np.uint8) if total else np.zeros(len(counts), np.uint8))
        if len(self._open) < self._per_column:
            return
        if self._count == COLUMNS:
            halves = self._cells.astype(np.uint16)
            self._cells[:, : COLUMNS // 2] = (halves[:, ::2] + halves[:, 1::2]) // 2
            self._cells[:, COLUMNS // 2 :] = 0
            self._count = COLUMNS // 2
            self._per_column *= 2
            if len(self._open) < self._per_column:
                return
        self._cells[:, self._count] = np.mean(self._open, axis=0)
        self._count += 1
        self._open.clear()

    def png(self) -> tuple[bytes, int, int]:
        """The image, its width and height in pixels."""
        cells = self._cells[::-1, : self._count]
        if self._open:
            cells = np.concatenate([cells, np.mean(self._open, axis=0).astype(np.uint8)[::-1, None]], axis=1)
        pixels = np.repeat(np.repeat(cells, _PIXELS, axis=0), _PIXELS, axis=1)
        height, width = pixels.shape
        lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels], axis=1)  # filter 0 before every line
        head = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)  # 8 bits, palette
        chunks = ((b"IHDR", head), (b"PLTE", _PALETTE), (b"IDAT", zlib.compress(lines.tobytes(), 1)), (b"IEND", b""))
        return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks), width, height


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _palette() -> bytes:
    # Dark blue over red to pale yellow: lightness grows all the way, so a grey print reads the same.
    places = [0, 64, 128, 192, 255]
    colours = np.array([[8, 8, 40], [90, 20, 110], [190, 50, 80], [245, 140, 30], [252, 250, 190]])
    return np.stack([np.interp(np.arange(256), places, colours[:, i]) for i in range(3)], axis=1).astype(np.uint8).tobytes()


_PALETTE = _palette()
