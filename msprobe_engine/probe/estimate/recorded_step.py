"""One step of a dump as what it was before it was written: entries with rows, so that it can be written again, on paper, under
other settings."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.core.process.garbage_collection import collection_paused
from msprobe_engine.core.records import Entry, TensorRef
from msprobe_engine.core.statistics import rows as R
from msprobe_engine.formats.dump import frame_log, layout
from msprobe_engine.formats.dump.notebook.shapes import with_shapes
from msprobe_engine.formats.dump.notebook.step_dump import DumpedEntry, DumpedTensor, StepDump, load_rank_directory
from msprobe_engine.formats.dump.rank_files import read_bytes
from msprobe_engine.formats.dump.reader import Rank, open_dump
from msprobe_engine.formats.dump.writing import text

ROWS, CHECKSUMS, STATISTICS, UNKNOWN = "rows", "checksums", "statistics", ""
"""How tensors were told to be the same one: by the run itself, by equal checksums, by equal statistics, not at all."""
_MOST_RANKS = 8  # read of a large job; the others are taken to be like them
_Rows = list[int] | None


@dataclass(frozen=True)
class SourceStep:
    """One rank of one step.

    Attributes:
        dump: what the files hold; of a structure task with the records of shapes.json.
        entries: the records, in file order; `TensorRef.row` is an index into `rows` and `contents`, -1 where there was nothing to
            read (meta tensors).
        rows: [n, 16] float64; made up ones of usual length where the dump has no statistics.
        contents: [n] int64; tensors with the same number are the same one.
        told_by: how that is known: `ROWS`, `CHECKSUMS`, `STATISTICS` or `UNKNOWN` (all differ).
        stacks: call stacks; entries refer to them by index.
        ours: written by this tool, which records more functions than the existing one.
    """

    dump: StepDump
    rank: Rank
    entries: list[Entry]
    rows: R.Rows
    contents: npt.NDArray[np.int64]
    told_by: str
    stacks: list[list[str]]
    ours: bool


class Source(NamedTuple):
    """One step of a dump: the ranks that were read, and all that it has."""

    step: int
    ranks: list[SourceStep]
    all_ranks: list[Rank]


def load_source(path: Path | str, step: int | None = None) -> Source:
    """One step of a dump; of many ranks, eight spread over all.

    Args:
        path: any path of a dump, or a frame log (``.frame.bin``).
        step: which one; None: the first that is finished, else the first.

    Raises:
        DumpFormatError: no dump here, a damaged one, or one without records.
        UsageError: no such step; or a structure dump without shapes.
    """
    path = Path(path)
    dump = open_dump(path.parent if path.name == layout.FRAME_LOG else path)
    if step is None:
        finished = (s for s in dump.steps if not any((dump.path(s, r) / layout.MARKER).exists() for r in dump.ranks(s)))
        step = next(finished, dump.steps[0])
    ranks = dump.ranks(step)
    chosen = ranks[:: math.ceil(len(ranks) / _MOST_RANKS)]
    with collection_paused():
        loaded = [_load(dump.path(step, rank), rank) for rank in chosen]
    if not any(part.entries for part in loaded):
        raise DumpFormatError(f"{path}: step {step} has no records; give a step that was dumped to its end")
    return Source(step, loaded, ranks)


def _load(directory: Path, rank: Rank) -> SourceStep:
    loaded = load_rank_directory(directory)
    rows: _Rows = None
    if loaded.recovered:
        rows = _logged_rows(directory / layout.FRAME_LOG)
    elif loaded.task == "structure" and not loaded.entries:
        loaded, rows = with_shapes(loaded)
    return _source(loaded, rank, rows)


def _logged_rows(file: Path) -> list[int]:
    """Row of each tensor of a frame log, in the order of the text."""
    logged = frame_log.decode(read_bytes(file), str(file))
    tensors = logged.template.ops[logged.template.ops[:, 1] == text.TAIL]
    rows: list[int] = logged.slots[tensors[:, 3]].tolist()
    return rows


class _Tensors:
    def __init__(self, given: _Rows, absent: bool) -> None:
        self.found: list[DumpedTensor] = []
        self._given = given
        self._absent = absent

    def add(self, tensor: DumpedTensor) -> TensorRef:
        unread = tensor.max is None and tensor.md5 is None and 0 not in tensor.description.shape
        if self._given is None and self._absent and unread:
            return TensorRef(-1, tensor.description)  # this tool describes every tensor that has data
        self.found.append(tensor)
        return TensorRef(len(self.found) - 1, tensor.description)

    def structure(self, node: Any) -> Any:
        """A section with references in place of tensors."""
        if isinstance(node, DumpedTensor):
            return self.add(node)
        if isinstance(node, list):
            return [self.structure(child) for child in node]
        if isinstance(node, dict):
            return {key: self.structure(child) for key, child in node.items()}
        return node


def _source(dump: StepDump, rank: Rank, given: _Rows) -> SourceStep:
    counts_nonfinite = dump.header.get("nonfinite_counts") is True
    total = sum(1 for entry in dump.entries.values() for _ in entry.tensors())
    given = given if given is not None and len(given) == total else None
    tensors = _Tensors(given, absent=counts_nonfinite and dump.task != "structure")
    stacks: dict[tuple[str, ...], int] = {}
    entries = [_entry(entry, tensors, stacks) for entry in dump.entries.values()]
    contents, told_by = _contents(tensors.found, given)
    rows = _rows(tensors.found)
    if given is not None:
        entries = [_without(entry, given) for entry in entries] if -1 in given else entries
    return SourceStep(dump, rank, entries, rows, contents, told_by, [list(lines) for lines in stacks], counts_nonfinite)


def _entry(entry: DumpedEntry, tensors: _Tensors, stacks: dict[tuple[str, ...], int]) -> Entry:
    sections = {key: tensors.structure(node) for key, node in entry.sections.items()}
    stack = stacks.setdefault(entry.stack, len(stacks)) if entry.stack else -1
    return Entry(entry.name, sections, entry.parent, stack, entry.micro_step, entry.tags)


def _without(entry: Entry, given: list[int]) -> Entry:
    """References to tensors that had no row in the run get none here."""

    def walk(node: Any) -> Any:
        if isinstance(node, TensorRef):
            return node if node.row < 0 or given[node.row] >= 0 else TensorRef(-1, node.description)
        if isinstance(node, list):
            return [walk(child) for child in node]
        return {key: walk(child) for key, child in node.items()} if isinstance(node, dict) else node

    return entry._replace(sections={key: walk(node) for key, node in entry.sections.items()})


def _contents(tensors: list[DumpedTensor], given: _Rows) -> tuple[npt.NDArray[np.int64], str]:
    if given is not None:
        return np.array(given, np.int64), ROWS
    numbers: dict[Any, int] = {}
    told_by: set[str] = set()
    contents = np.empty(len(tensors), np.int64)
    for i, (key, how) in enumerate(_keys(tensors)):
        told_by.add(how)
        contents[i] = numbers.setdefault(key, len(numbers))
    return contents, CHECKSUMS if CHECKSUMS in told_by else STATISTICS if STATISTICS in told_by else UNKNOWN


def _keys(tensors: list[DumpedTensor]) -> Iterator[tuple[Any, str]]:
    for i, t in enumerate(tensors):
        about = t.description.dtype, t.description.shape
        if t.digest is not None or t.md5 is not None:
            yield (*about, t.digest, t.md5), CHECKSUMS
        elif t.max is not None:
            yield (*about, *map(repr, (t.max, t.min, t.mean, t.norm))), STATISTICS
        else:
            yield i, UNKNOWN


def _rows(tensors: list[DumpedTensor]) -> R.Rows:
    """Rows whose text is as long as that of these tensors' statistics."""
    rows = R.empty(len(tensors))
    ints = R.as_int64(rows)
    usual = np.modf(np.arange(1.0, 4 * len(tensors) + 1) * 0.6180339887498949)[0].astype(np.float32).astype(np.float64).reshape(-1, 4)
    for i, t in enumerate(tensors):
        count = elements(t.description.shape)
        integers = isinstance(t.max, int) and isinstance(t.min, int)
        ints[i, R.COUNT], ints[i, R.FLAGS] = count, R.WRITTEN | (R.HAS_INTEGERS if integers else 0)
        ints[i, R.NANS] = t.nan_count or (1 if t.max != t.max else 0)
        ints[i, R.POS_INF] = t.inf_count or (1 if t.max == math.inf else 0)
        ints[i, R.NEG_INF] = 1 if t.min == -math.inf else 0
        if integers:
            ints[i, R.IMAX], ints[i, R.IMIN] = (max(-(1 << 63), min(int(v or 0), (1 << 63) - 1)) for v in (t.max, t.min))
        known = [_finite(v, u) for v, u in zip((t.max, t.min, t.mean, t.norm), usual[i])]
        rows[i, R.MAX], rows[i, R.MIN], rows[i, R.SUM], rows[i, R.SUMSQ] = known[0], known[1], known[2] * count, known[3] ** 2
    return rows


def elements(shape: tuple[int, ...]) -> int:
    """Number of elements; a damaged file may claim more than any number type holds."""
    return min(math.prod(shape), 1 << 62) if all(n >= 0 for n in shape) else 0  # a symbolic size (-1): there are no values


def _finite(value: Any, usual: float) -> float:
    if value is None or not math.isfinite(value) or abs(value) > 1e150:
        return float(usual)
    return float(value)
