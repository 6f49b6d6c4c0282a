"""Comparison with an earlier dump while dumping (``bench_path``): only records that differ where they should not are written.

A call whose inputs have the checksums they had in the earlier dump and whose output has another one made the difference itself. Calls
whose inputs differ already only pass it on. With two runs that ought to be equal, the first differing record is the operation to look at.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from msprobe_engine.core import names
from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.errors import ProbeError
from msprobe_engine.core.io.output_files import write_file
from msprobe_engine.core.log import get_logger, one_line
from msprobe_engine.core.records import Entry, Frame, Opaque, TensorRef, leaves, place_of
from msprobe_engine.core.statistics import rows as _rows
from msprobe_engine.core.statistics.rows import Rows
from msprobe_engine.formats.dump import layout
from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.formats.dump.layout import DumpWriteError
from msprobe_engine.formats.dump.read_table import read_side
from msprobe_engine.formats.dump.reader import DumpDirectory, open_dump
from msprobe_engine.formats.dump.stream import open_records
from msprobe_engine.formats.dump.writing.tensor_names import holds_gradients
from msprobe_engine.formats.dump.writing.tensors import TensorStore
from msprobe_engine.probe.sinks.base import Sink
from msprobe_engine.probe.sinks.dump.dump_files import DumpSink
from msprobe_engine.probe.sinks.dump.filter_sink import ChosenRecords

_log = get_logger()
EQUAL, DIFFERING, INHERITED, ABSENT, UNDECIDED = "equal", "differing", "inherited", "absent", "undecided"
KINDS = (EQUAL, DIFFERING, INHERITED, ABSENT, UNDECIDED)
"""What a record can be: everything equal; inputs equal and an output not; inputs differ; not in the earlier dump; a checksum is missing."""

_MOST_NAMES = 100


class Verdict(NamedTuple):
    """How one record compares.

    Attributes:
        kind: `EQUAL`, `DIFFERING`, ...
        places: differing tensors, place to (checksum here, checksum there); a shape or type that differs is shown in its place. Of a
            differing record also numbers and texts among its arguments that are not what they were.
    """

    kind: str
    places: dict[str, tuple[str, str]]


_EQUAL = Verdict(EQUAL, {})


class Bench:
    """The earlier dump.

    Args:
        path: its ``dump_path``.
        most: how many differing records are wanted, -1: all.
    """

    def __init__(self, path: Path | str, most: int) -> None:
        self.path = Path(path)
        self.left = most
        self._dump: DumpDirectory | None = None

    @property
    def done(self) -> bool:
        """True when enough differing records were found."""
        return self.left == 0

    def judge(self, frame: Frame, rank: int | None) -> dict[str, Verdict]:
        """The verdict about each record of `frame`, by name, in the order of the frame. `rank` None: of the one rank there is.

        Raises:
            ProbeError: the earlier dump cannot be read, or does not have this step and rank.
        """
        golden = self._read_step(frame.step, rank)
        verdicts: dict[str, Verdict] = {}
        gradients: list[Entry] = []
        for entry in frame.entries:
            verdicts[entry.name] = Verdict(UNDECIDED, {})  # keeps the order
            if holds_gradients(entry.name):
                gradients.append(entry)  # they come before the backward record that explains them
            else:
                verdicts[entry.name] = _judge(entry, frame.rows, golden, verdicts)
        spoiled = {_base(n) for n, v in verdicts.items() if v.kind in (INHERITED, DIFFERING, ABSENT)}
        for entry in gradients:
            verdict = _judge(entry, frame.rows, golden, verdicts)
            if verdict.kind == DIFFERING and _base(entry.name) in spoiled:
                verdict = verdict._replace(kind=INHERITED)
            verdicts[entry.name] = verdict
        return verdicts

    def select_differing(self, verdicts: dict[str, Verdict]) -> list[str]:
        """Names of the differing records that are still wanted; counts them."""
        names = [name for name, verdict in verdicts.items() if verdict.kind == DIFFERING]
        if self.left >= 0:
            names = names[: self.left]
            self.left -= len(names)
        return names

    def _read_step(self, step: int, rank: int | None) -> _Step:
        if self._dump is None:
            self._dump = open_dump(self.path)
        ranks = self._dump.ranks(step)
        # a dump made without a process group does not know its rank
        return _Step(read_side(self._dump.file(step, None if len(ranks) == 1 and isinstance(ranks[0], str) else rank)))


class _Step:
    """One rank of one step of the earlier dump."""

    def __init__(self, table: DumpTable) -> None:
        self.table = table
        self.ops = {name: op for op, name in enumerate(table.ops)}

    @cached_property
    def records(self) -> dict[str, Any]:
        """As the file has them; read where a call makes a difference, for its arguments that are no tensors."""
        with open_records(self.table.path) as records:
            return {name: record for block in records for name, record in block.items()}


def _judge(entry: Entry, rows: Rows, golden: _Step, before: dict[str, Verdict]) -> Verdict:
    op = golden.ops.get(entry.name)
    if op is None:
        return Verdict(ABSENT, {})
    table = golden.table
    other = {table.place(row): row for row in table.rows(op) if row not in table.values and table.dtype[row] is not None}
    differ: dict[str, tuple[str, str]] = {}
    inherits = undecided = False
    for place, ref in _tensors(entry):
        if ref.row < 0:  # never read by the call, or no values: says nothing
            continue
        equal, sums = _compare(ref, rows, table, other.get(place))
        is_output = place.startswith("output") or holds_gradients(entry.name)
        if equal is False:
            differ[place] = sums
            inherits |= not is_output
        elif equal is None:
            undecided = True
    forward = before.get(_forward(entry.name), _EQUAL).kind
    if inherits or (differ and forward in (INHERITED, DIFFERING)):
        return Verdict(INHERITED, differ)
    if undecided or (differ and forward != EQUAL):
        return Verdict(UNDECIDED, differ)
    if not differ:
        return _EQUAL
    for section in ("input_args", "input_kwargs"):
        differ |= _plain(place_of(section), entry.sections.get(section), golden.records[entry.name].get(section))
    return Verdict(DIFFERING, differ)


def _plain(place: str, target: Any, golden: Any) -> dict[str, tuple[str, str]]:
    """Numbers and texts among the arguments that differ: they are the program's, no other record explains them."""
    if isinstance(target, Opaque):
        is_structure = (
            golden is None or isinstance(golden, list) or (isinstance(golden, dict) and ("type" not in golden or "dtype" in golden))
        )
        target_text, golden_text = json.dumps(target.json, default=str), json.dumps(golden)
        return {} if is_structure or target_text == golden_text else {place: (target_text, golden_text)}
    if isinstance(target, list) and isinstance(golden, list):
        target, golden = dict(enumerate(target)), dict(enumerate(golden))
    if isinstance(target, dict) and isinstance(golden, dict):
        return {p: d for key, child in target.items() for p, d in _plain(f"{place}.{key}", child, golden.get(key)).items()}
    return {}


def _tensors(entry: Entry) -> Iterator[tuple[str, TensorRef]]:
    """The tensors with the places that `DumpTable.place` gives them."""
    gradients = holds_gradients(entry.name)
    for place, ref in leaves(entry):
        yield (place.removesuffix(".0") if gradients else place), ref


def _forward(name: str) -> str:
    """The forward record of a backward one: a gradient depends on what the forward call saw. "" for other records."""
    parsed = names.parse(name)
    if isinstance(parsed, (names.ApiName, names.ModuleName)) and parsed.direction == names.BACKWARD:
        return str(parsed._replace(direction=names.FORWARD))
    return ""


def _base(name: str) -> str:
    parsed = names.parse(name)
    if isinstance(parsed, (names.ModuleName, names.ParametersGradName)):
        return f"{parsed.kind}.{parsed.path}.{parsed.cls}"
    return ""


def _compare(ref: TensorRef, rows: Rows, table: DumpTable, row: int | None) -> tuple[bool | None, tuple[str, str]]:
    """Equal, not equal, or None: cannot be told; and what was compared."""
    if row is None:
        return None, ("", "")
    description = ref.description
    for target, golden in ((list(description.shape), table.shape[row] or []), (description.dtype, table.dtype[row])):
        if target != golden:
            return False, (str(target), str(golden))
    statistics = _rows.read_row(rows[ref.row])
    md5, digest = table.md5[row], table.extra.get(row, {}).get("digest")
    sums = (
        (None if statistics.crc32 is None else f"{statistics.crc32:08x}", md5),
        (None if statistics.xor is None else f"0x{statistics.xor:016x}", md5),
        (None if statistics.digest is None else f"{statistics.digest:016x}", digest),
    )
    for mine_sum, its_sum in sums:
        if mine_sum is not None and isinstance(its_sum, str) and len(mine_sum) == len(its_sum):
            return mine_sum == its_sum, (mine_sum, its_sum)
    return None, ("", "")


class DifferenceSink(ChosenRecords):
    """Keeps of every frame the differing records only, their tensors included. Comparing is done on the writer thread.

    Each rank directory also gets ``bench.json``: how many records were equal, differed, inherited a difference, were not in the earlier
    dump or could not be decided, and the checksums of what differs.

    Args:
        sink, files, tensors: see `ChosenRecords`.
    """

    def __init__(self, sink: Sink, files: DumpSink, bench: Bench, tensors: TensorStore | None, rank: Callable[[], int | None]) -> None:
        super().__init__(sink, files, tensors)
        self._bench = bench
        self._rank = rank

    @property
    def done(self) -> bool:
        return self._bench.done

    def choose(self, frame: Frame, alerts: Sequence[Alert]) -> None:
        try:
            verdicts = self._bench.judge(frame, self._rank())
        except ProbeError as error:
            _log.warning("bench_path: step %d cannot be compared, none of its records is written: %s", frame.step, error)
            self._only(frame, [], alerts, {"problem": str(error)})
            return
        kept = self._bench.select_differing(verdicts)
        self._log_step(frame.step, verdicts, kept)
        kinds = [v.kind for v in verdicts.values()]
        facts: dict[str, object] = {kind: kinds.count(kind) for kind in KINDS}
        facts["records"] = {
            name: {p: {"here": target, "bench": golden} for p, (target, golden) in verdicts[name].places.items()} for name in kept
        }
        facts["not_in_bench"] = [name for name, v in verdicts.items() if v.kind == ABSENT][:_MOST_NAMES]
        self._only(frame, kept, alerts, facts)

    def _only(self, frame: Frame, kept: Sequence[str], alerts: Sequence[Alert], facts: dict[str, object]) -> None:
        self.write_only(frame, kept, alerts)
        file = self._files.directory(frame.step) / layout.BENCH
        if not file.parent.is_dir():  # a frame without records whose step was never begun
            return
        try:
            write_file(file, [json.dumps({"bench_path": str(self._bench.path), **facts}, indent=1).encode()])
        except OSError as error:
            raise DumpWriteError(error, file) from error

    def _log_step(self, step: int, verdicts: dict[str, Verdict], kept: Sequence[str]) -> None:
        if verdicts and all(v.kind in (ABSENT, UNDECIDED) for v in verdicts.values()):
            _log.warning("bench_path: step %d: no record could be compared; was the earlier dump made with the same summary_mode?", step)
        elif kept:
            more = f" and {len(kept) - 1} more" if len(kept) > 1 else ""
            _log.info("bench_path: step %d: outputs differ although the inputs are equal: %s%s", step, one_line(kept[0]), more)
        if self._bench.done:
            _log.info("bench_path: as many differing records as diff_nums asks for were found")
