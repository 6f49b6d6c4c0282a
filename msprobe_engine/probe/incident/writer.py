"""Writes one rank's part of an incident directory.

::

    incidents/step12-nan_inf/
      ring_rank{R}.steps          calls of the ring's steps (always-on level), see `formats.dump.ring_file`
      step{N}/rank{R}/dump.json   calls of the captured steps, later; with stacks and tree inside
      samples_rank{R}.jsonl       monitor samples and scalars of the ring's steps, one per line, then what rank R says: "state" is
                                  "writing" in front of the samples until the calls of its ring are written. Only appended to, by
                                  whole blocks; the last line that says something counts
      finished                    a line for each rank that has finished its file
      incident.json  summary.md   made from all rank files by `merge`

A rank creates these three files and one directory, however many steps the ring keeps, and renames nothing: thousands do so at the same
moment. Everything here runs on the writer thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.io.regular_files import make_directories
from msprobe_engine.core.records import Frame, leaves
from msprobe_engine.core.statistics import rows as _rows
from msprobe_engine.formats.dump.ring_file import append_step, ring_file
from msprobe_engine.formats.dump.writing.step_text import StepText
from msprobe_engine.formats.dump.writing.template import Options
from msprobe_engine.probe.incident.event import VERSION, Event
from msprobe_engine.probe.incident.files import append_lines, rank_file
from msprobe_engine.probe.incident.merge import finish
from msprobe_engine.probe.rules.builtin.values.nan_inf import NanInfRule

WORST = 10


@dataclass(frozen=True)
class Capture:
    """What was armed: level, first step, number of steps, and whether this rank was late to the agreement."""

    level: str
    first_step: int
    steps: int
    late: bool = False


def write_incident(
    directory: Path,
    frames: Sequence[Frame],
    alerts: Sequence[Alert],
    *,
    event: Event,
    rank: int,
    world_size: int,
    capture: Capture | None = None,
    rank_info: Mapping[str, Any] | None = None,
    last: bool = True,
    steps: bool = True,
) -> None:
    """Write this rank's frames, samples and rank file, then merge all rank files when it is this rank's turn. May be repeated.

    Args:
        directory: of the incident, shared by all ranks.
        frames: the ring, oldest first.
        alerts: this rank's alerts of the step.
        rank_info: where this rank is: ``pp`` is the stage of the pipeline, ``dp``, ``tp``, ... tell pipelines apart.
        last: this rank will not write its file again; else there is nothing to merge yet.
        steps: False: the frames are looked at and not written; the rank file is the only one.

    Raises:
        OSError: something cannot be written. What was written before stays and the rank file says "writing".
    """
    make_directories(str(directory))
    written = frames if steps else []
    piece: dict[str, Any] = {
        "version": VERSION,
        "state": "writing",
        "event": event.to_json(),
        "rank": rank,
        "world_size": world_size,
        "rank_info": dict(rank_info or {}),
        "written_at": time.time(),
        "steps": [frame.step for frame in written],
        "levels": sorted({frame.level for frame in written if frame.entries}),
        "alerts": [asdict(alert) for alert in alerts],
        "capture": asdict(capture) if capture is not None else None,
        "lost": _count_lost(frames),
    }
    text = StepText(Options(), level="mix", single_file=True)
    if any(frame.entries for frame in written):  # takes a while; else the file is there at once
        append_lines(rank_file(directory, rank), [piece])
    for frame in written:
        if frame.entries:
            ((_, document),) = text.documents(text.prepare(frame, None, {"dump_data_dir": None}))
            append_step(ring_file(directory, rank), frame.step, document)
    piece["first_nonfinite"] = _first_nonfinite(frames)
    piece["worst"] = _worst([frame for frame in frames if frame.step == event.step] or list(frames[-1:]))
    piece["state"] = "complete"
    append_lines(rank_file(directory, rank), [*_samples(written), piece])
    if last:
        finish(directory, rank, world_size)


def _samples(frames: Sequence[Frame]) -> Iterator[dict[str, Any]]:
    for frame in frames:
        if frame.scalars:
            yield {"step": frame.step, "rank": frame.rank, "scalars": frame.scalars}
        for order, sample in enumerate(frame.samples):
            row = sample.ref.row
            yield {
                "step": frame.step, "rank": frame.rank, "order": order, "family": sample.family, "name": sample.name, "phase": sample.phase,
                "micro_step": sample.micro_step, "vpp_stage": sample.vpp_stage,
                "dtype": sample.ref.description.dtype, "shape": list(sample.ref.description.shape), "extra": dict(sample.extra),
                "statistics": _rows.read_row(frame.rows[row])._asdict() if row >= 0 else None,
            }  # fmt: skip


def _names(frame: Frame) -> Iterator[tuple[str, int]]:
    """(record name, row) of a frame in order, without reading rows."""
    for entry in frame.entries:
        for place, ref in leaves(entry):
            if ref.row >= 0:
                yield f"{entry.name}.{place}", ref.row
    for sample in frame.samples:
        if sample.ref.row >= 0:
            yield f"{sample.family}/{sample.name}", sample.ref.row


def _first_nonfinite(frames: Sequence[Frame]) -> dict[str, Any] | None:
    # What is no fault to the rule (attention masks, memory without content) must not be shown as where it began.
    rule = NanInfRule()
    for frame in frames:
        first = rule.first(frame)
        if first is not None:
            name, row = first
            return {"step": frame.step, "name": name, "statistics": _rows.read_row(row)._asdict()}
    return None


def _worst(frames: Sequence[Frame]) -> list[dict[str, Any]]:
    """The records with the largest share of NaN and Inf, then with the largest magnitude."""
    out: list[dict[str, Any]] = []
    for frame in frames:
        if not len(frame.rows):
            continue
        words = _rows.as_int64(frame.rows)
        share = _rows.nonfinite(frame.rows) / np.maximum(words[:, _rows.COUNT], 1)
        size = np.maximum(np.abs(frame.rows[:, _rows.MIN]), np.abs(frame.rows[:, _rows.MAX]))
        size[words[:, _rows.COUNT] == 0] = 0.0
        size[~np.isfinite(size)] = 0.0  # no finite element at all
        place = {int(row): n for n, row in enumerate(np.lexsort((-size, -share)))}
        # rows without a name may be no statistics: histograms hold counts
        named = sorted(((place[row], name, row) for name, row in _names(frame) if row in place), key=lambda item: item[0])
        for _, name, row in named[:WORST]:
            out.append({"step": frame.step, "name": name, "statistics": _rows.read_row(frame.rows[row])._asdict()})
    return out[:WORST]


def _count_lost(frames: Sequence[Frame]) -> dict[str, int]:
    out: dict[str, int] = {}
    for frame in frames:
        for reason, count in frame.lost.items():
            out[reason] = out.get(reason, 0) + count
    return out
