"""The table of one rank of one step: what two sides say about the rows that belong together, in blocks of whole records."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from msprobe_engine.align.calls.structure import Aligned
from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.find.difference.rank_walk import walk_rank
from msprobe_engine.find.rank_findings import RankFindings, find_in_rank
from msprobe_engine.find.verdicts import version_262, version_811
from msprobe_engine.find.verdicts.colours import RED, YELLOW, Highlight
from msprobe_engine.find.verdicts.rows import WARNING, RowProjection, RowVerdicts
from msprobe_engine.formats.dump.dump_table import DEBUG, DIGEST, INPUT, MD5, STATISTICS, STRUCTURE, TENSOR, DumpTable
from msprobe_engine.measure import columns as c
from msprobe_engine.measure import distances, factorize, missing_statistics
from msprobe_engine.measure.columns import BLOCK_ROWS, UNMATCHED, Block, columns
from msprobe_engine.measure.dump_dialects import say_contradictions
from msprobe_engine.measure.options import CompareOptions
from msprobe_engine.measure.statistics_mode import Shown, Statistics, differences
from msprobe_engine.measure.tensors.mode import TensorRows, metrics, plugin_names

Rows = npt.NDArray[np.int64]
_LEVELS = {True: ("", "Warning", "Warning"), False: ("pass", "warning", "error")}
_COLOURS = ("", YELLOW, RED)


class Matched(Protocol):
    """Which rows belong together: int64, one item per row of the table, -1 where a side has none. `messages`: row of the table -> what
    the matching has to say about it; `aligned`: the records, where the structure says which belong together."""

    target: Rows
    golden: Rows
    messages: dict[int, str]
    aligned: Aligned | None


def compare_pair(
    target: DumpTable,
    golden: DumpTable,
    matching: Matched,
    options: CompareOptions,
    findings: RankFindings | None = None,
    tensors: TensorRows | None = None,
) -> Iterator[Block]:
    """Compare one rank of one step.

    Args:
        matching: what belongs together, in the order of the table.
        findings: what was found in this rank and step, for our verdicts; None: found here.
        tensors: of all rows, where tensors were measured for `findings` (`measure_tensors`).

    Yields:
        Blocks of at most `BLOCK_ROWS` rows (more only when one record has more), columns in the order of `columns`.

    Raises:
        DumpFormatError: the sides hold things that cannot be compared.
        UsageError: a metric or mapping of the options cannot be used.
    """
    if findings is None and not options.compat:
        tensors = measure_tensors(target, golden, matching, options)
        findings = find_in_rank(walk_rank(target, golden, matching.aligned, None if tensors is None else tensors.figures), 0, 0)
    return _Table(target, golden, matching, options, findings, tensors).blocks()


def measure_tensors(target: DumpTable, golden: DumpTable, matching: Matched, options: CompareOptions) -> TensorRows | None:
    """What our verdicts on saved tensors are made of; None where both sides do not hold tensors."""
    if common_mode(target, golden, options.compat) != TENSOR:
        return None
    return metrics(target, golden, list(zip(matching.target.tolist(), matching.golden.tolist())), options)


def common_mode(target: DumpTable, golden: DumpTable, compat: bool) -> str:
    """What two sides can be compared by. Without `compat` sides of different kinds are compared by the statistics that both hold.

    Raises:
        DumpFormatError: by nothing.
    """
    modes = {target.mode, golden.mode}
    if modes == {STRUCTURE} and not compat:
        return STATISTICS
    if len(modes) == 1 and modes != {STRUCTURE}:
        return target.mode
    if not compat and STRUCTURE not in modes and _holds_statistics(target) and _holds_statistics(golden):
        return STATISTICS
    raise DumpFormatError(
        f"{target.path} holds {target.mode}, {golden.path} holds {golden.mode}; both need to hold the same of "
        f"{STATISTICS}, {MD5}, {DIGEST}, {TENSOR}. Dump both sides with the same task and summary_mode"
    )


def _holds_statistics(side: DumpTable) -> bool:
    """Also dumps with checksums do, but those with nothing else (xor)."""
    return not len(side.numbers) or bool(np.isfinite(side.stats).any())


class _Table:
    def __init__(
        self,
        target: DumpTable,
        golden: DumpTable,
        matching: Matched,
        options: CompareOptions,
        findings: RankFindings | None,
        tensors: TensorRows | None,
    ) -> None:
        self.found, self._tensors = findings, tensors
        self.target, self.golden, self.options, self.matching = target, golden, options, matching
        self.mode = common_mode(target, golden, options.compat)
        self.old = options.old
        self.rows, self.others = np.asarray(matching.target, np.int64), np.asarray(matching.golden, np.int64)
        target_records = np.frombuffer(target.op, np.int64) if len(target) else np.zeros(1, np.int64)
        golden_records = np.frombuffer(golden.op, np.int64) if len(golden) else np.zeros(1, np.int64)
        self.record = np.where(self.rows >= 0, target_records[self.rows], golden_records[self.others] + len(target.ops))
        self.stack = bool(target.stacks) if options.stack is None else options.stack
        self.columns = columns(options.columns, self.mode, self.stack, plugin_names(options) if self.mode == TENSOR else ())
        if self.mode not in (MD5, DIGEST):
            self._target_stats, self._golden_stats = Statistics(target, self.rows), Statistics(golden, self.others)
        nothing = "None" if self.old else UNMATCHED
        self._words = [
            (_texts(side.dtype, nothing), _texts(side.shape, nothing), _texts(side.requires_grad, UNMATCHED, str_of=None))
            for side in (target, golden)
        ]
        self._judged: RowVerdicts | None = None
        self.stacked: set[int] = set()
        self._damaged = 0
        self._first_damaged = ""
        if self.mode != TENSOR and (options.metrics or options.postprocess is not None):
            target.add_problem(f"metrics and matrices are for saved tensors; {target.path} and its counterpart are compared by {self.mode}")

    def blocks(self) -> Iterator[Block]:
        yield from self._blocks()
        if self._damaged:
            self.target.add_problem(
                f"{self._damaged:,} rows have a saved tensor that could not be read, the first is {self._first_damaged}"
            )

    def _blocks(self) -> Iterator[Block]:
        n = len(self.rows)
        if not n:
            return
        matched = np.stack((self.rows, self.others), axis=1)[(self.rows >= 0) & (self.others >= 0)]
        if not self.options.compat:
            if self._tensors is not None:
                self._say_damaged(self._tensors, slice(0, n))
            assert self.found is not None
            distance = None if self._tensors is None else self._tensors.distance
            self._judged = RowProjection(self.found, self.rows, self.others, self.record, distance).run()
            self._say_one_sided(self._judged.one_sided)
            if self._tensors is not None:
                for position in np.flatnonzero(self._tensors.damaged).tolist():
                    self._judged.raise_level(position, WARNING, "")  # Err_message has the reason
            for position, text in self.matching.messages.items():
                self._judged.said[position] = "; ".join(part for part in (self._judged.said.get(position, ""), text) if part)
        else:
            one_sided = distances.distances(self.target, self.golden, matched).one_sided
            if self.mode != STATISTICS:
                one_sided[:, : missing_statistics.REDACTED] = False  # the table of checksums shows what a side lacks
            self._say_one_sided(one_sided)
        say_contradictions(self.target, self.golden, list(map(tuple, matched.tolist())))
        ends = np.append(np.flatnonzero(np.diff(self.record)) + 1, n)
        start = 0
        while start < n:
            position = int(np.searchsorted(ends, start + BLOCK_ROWS, "right")) - 1
            end = int(ends[position]) if position >= 0 and ends[position] > start else int(ends[np.searchsorted(ends, start, "right")])
            yield self._block(slice(start, end))
            start = end

    def _say_one_sided(self, one_sided: npt.NDArray[np.bool_]) -> None:
        alone = (self.others < 0) | (self.rows < 0) if self._judged is None else self._judged.not_compared
        rows = (self.rows[alone & (self.others < 0)].tolist(), self.others[alone & (self.rows < 0)].tolist())
        rows = missing_statistics.with_content(self.target, self.golden, *rows)
        for sentence in missing_statistics.sentences(self.target, self.golden, one_sided, *rows):
            self.target.add_problem(sentence)

    def _measure(self, part: slice) -> TensorRows:
        found = metrics(self.target, self.golden, list(zip(self.rows[part].tolist(), self.others[part].tolist())), self.options)
        self._say_damaged(found, part)
        return found

    def _say_damaged(self, tensors: TensorRows, part: slice) -> None:
        damaged = np.flatnonzero(tensors.damaged)
        if len(damaged) and not self._damaged:
            first_damaged = int(damaged[0])
            self._first_damaged = f"{self.target.name[self.rows[part][first_damaged]]}: {tensors.columns[c.MESSAGE][first_damaged]}"
        self._damaged += len(damaged)

    def _block(self, part: slice) -> Block:
        rows, others = self.rows[part], self.others[part]
        matched = (rows >= 0) & (others >= 0)
        cells: Block = {}
        for name, side, where in ((c.TARGET_NAME, self.target, rows), (c.GOLDEN_NAME, self.golden, others)):
            cells[name] = [side.name[row] if row >= 0 else UNMATCHED for row in where.tolist()]
        for side_number, where in enumerate((rows, others)):
            for name, column in zip(
                (c.NAMES[2 + side_number], c.NAMES[4 + side_number], (c.TARGET_GRAD, c.GOLDEN_GRAD)[side_number]), self._words[side_number]
            ):
                cells[name] = column[where].tolist()
        cells[c.GRAD_EQUAL] = [target == golden for target, golden in zip(cells[c.TARGET_GRAD], cells[c.GOLDEN_GRAD])]
        if self.mode in (MD5, DIGEST):
            self._checksums(cells, part, matched)
        elif self.mode == TENSOR:
            self._tensor(cells, part)
        else:
            self._statistics(cells, part, matched)
        if self.stack:
            cells[c.STACK] = self._stacks(part)
        if self._judged is not None:
            self._add_verdicts(cells, part)
        made: Block = {name: cells[name] for name in self.columns}
        if c.COLOUR in cells:
            made[c.COLOUR] = cells[c.COLOUR]
        return made

    def _show_rows(self, part: slice) -> tuple[Shown, Shown]:
        return self._target_stats.format_cells(self.rows[part]), self._golden_stats.format_cells(self.others[part])

    def _statistics(self, cells: Block, part: slice, matched: npt.NDArray[np.bool_]) -> None:
        target_cells, golden_cells = self._show_rows(part)
        measured = differences(target_cells, golden_cells, matched, self.old, not self.options.compat)
        cells.update(measured.columns)
        if self._judged is not None:
            return
        if self.old:
            _fill(cells, matched)
            cells[c.RESULT], cells[c.MESSAGE] = version_811.statistics(matched, measured.suspect)
            self._highlight(cells, part, False)
        else:
            table = self._for_checks(cells, part, target_cells, golden_cells)
            table.norm, table.norm_cells = measured.norm, measured.columns[c.RELATIVE[3]]
            cells[c.RESULT], cells[c.MESSAGE] = version_262.table_verdicts(table)

    def _tensor(self, cells: Block, part: slice) -> None:
        target_cells, golden_cells = self._show_rows(part)
        cells.update(zip((*c.TARGET_STATS, *c.GOLDEN_STATS), (*target_cells.cells, *golden_cells.cells)))
        tensors = self._tensors
        if tensors is None:
            cells.update(self._measure(part).columns)
        else:
            cells.update((name, column[part]) for name, column in tensors.columns.items())
        files = zip(_files(self.target, self.rows[part]), _files(self.golden, self.others[part]))
        cells[c.DATA_NAME] = [str(list(pair)) for pair in files]
        if self._judged is not None:
            return
        if self.old:
            _fill(cells, (self.rows[part] >= 0) & (self.others[part] >= 0))
            if self.options.fuzzy:
                for position, (target, golden) in enumerate(zip(cells[c.TARGET_NAME], cells[c.GOLDEN_NAME])):
                    if target != golden and golden != UNMATCHED:
                        cells[c.MESSAGE][position] += f" {version_811.FUZZY}"
            cells[c.ACCURACY] = [version_811.accuracy(cosine, max_abs) for cosine, max_abs in zip(cells[c.COSINE], cells[c.MAX_ABS])]
            self._highlight(cells, part, True)
        else:
            table = self._for_checks(cells, part, target_cells, golden_cells)
            table.thousandth, table.cosine = cells[c.ONE_THOUSANDTH], cells[c.COSINE]
            cells[c.RESULT], cells[c.MESSAGE] = version_262.table_verdicts(table)

    def _checksums(self, cells: Block, part: slice, matched: npt.NDArray[np.bool_]) -> None:
        target_sums = cells[c.TARGET_MD5] = checksums(self.target, self.rows[part], self.mode)
        golden_sums = cells[c.GOLDEN_MD5] = checksums(self.golden, self.others[part], self.mode)
        if self._judged is not None:
            return
        if self.old:
            cells[c.RESULT] = version_811.checksums(matched, target_sums, golden_sums)
        else:
            table = version_262.Table(self.record[part], cells[c.TARGET_NAME], cells[c.GOLDEN_NAME], checksums=(target_sums, golden_sums))
            cells[c.RESULT], cells[c.MESSAGE] = version_262.table_verdicts(table)

    def _for_checks(self, cells: Block, part: slice, target_cells: Shown, golden_cells: Shown) -> version_262.Table:
        names = (*c.NAMES, c.TARGET_GRAD, c.GOLDEN_GRAD, c.TARGET_STATS[0], c.GOLDEN_STATS[0])
        table = version_262.Table(self.record[part], *(cells[name] for name in names))
        table.bad, table.golden_bad = target_cells.bad, golden_cells.bad
        return table

    def _highlight(self, cells: Block, part: slice, tensors: bool) -> None:
        roles = [self.target.role[row] if row >= 0 else INPUT for row in self.rows[part].tolist()]
        if DEBUG in roles:
            return
        cells[c.COLOUR], cells[c.MESSAGE] = Highlight(cells, self.record[part], roles, tensors).run(cells[c.MESSAGE])

    def _add_verdicts(self, cells: Block, part: slice) -> None:
        assert self._judged is not None
        levels = self._judged.level[part].tolist()
        said = [self._judged.said.get(position, "") for position in range(part.start, part.stop)]
        if self.mode == TENSOR:
            said = [_join_messages(text, more) for text, more in zip(said, cells[c.MESSAGE])]
        cells[c.MESSAGE] = said
        if not self.old:
            cells[c.RESULT] = [_LEVELS[False][level] for level in levels]
            return
        matched = [target != UNMATCHED and golden != UNMATCHED for target, golden in zip(cells[c.TARGET_NAME], cells[c.GOLDEN_NAME])]
        if self.mode in (MD5, DIGEST):
            words = (version_811.PASS, version_811.DIFFERENT, version_811.DIFFERENT)
            cells[c.RESULT] = [words[level] if m else UNMATCHED for m, level in zip(matched, levels)]
            return
        cells[c.RESULT] = [_LEVELS[True][level] if m else UNMATCHED for m, level in zip(matched, levels)]
        cells[c.ACCURACY] = [("No" if level else "Yes") if m else "Unmatched" for m, level in zip(matched, levels)]
        cells[c.COLOUR] = [_COLOURS[level] for level in levels]

    def _stacks(self, part: slice) -> list[str]:
        """On the first row of each record."""
        rows, records = self.rows[part], self.record[part]
        shown = [UNMATCHED] * len(rows)
        before = -1 if part.start == 0 else int(self.record[part.start - 1])
        stacks, ops = self.target.stacks, self.target.ops
        words: dict[int, str] = {}  # calls of one place share their lines
        for position in np.flatnonzero((rows >= 0) & (np.diff(records, prepend=before) != 0)).tolist():
            lines = stacks.get(ops[records[position]])
            if lines is not None:
                text = words.get(id(lines))
                if text is None:
                    text = words[id(lines)] = str(lines)
                shown[position] = text
        return shown


def _join_messages(text: str, more: str) -> str:
    """Both sentences, without the parts of the second that the first has."""
    return "; ".join([*([text] if text else []), *(part for part in more.split("; ") if part and part not in text)])


def _fill(cells: Block, matched: npt.NDArray[np.bool_]) -> None:
    """8.1.1 has no ``None`` in the statistics of rows that nothing matches."""
    for name in c.TARGET_STATS:
        column = cells[name]
        for at in np.flatnonzero(~matched).tolist():
            if column[at] == "None":
                column[at] = UNMATCHED


def _texts(values: Sequence[Any], nothing: str, str_of: Callable[[Any], Any] | None = str) -> npt.NDArray[np.object_]:
    """Cells of dtypes, shapes or flags, by row; the last one stands for a row that is not there. Equal objects are put into words once."""
    numbers, objects = factorize.number_objects(values)
    words = np.empty(len(objects) + 1, object)
    words[:-1] = [nothing if item is None else str_of(item) if str_of else item for item in objects]
    words[-1] = UNMATCHED
    return np.asarray(words[np.append(numbers, len(objects))])


def _files(side: DumpTable, rows: Rows) -> list[str]:
    return [UNMATCHED if row < 0 else side.data_name[row] or "-1" for row in rows.tolist()]


NO_VALUE = "00000000"
"""Of an argument that the file has no value of (a memory format): the CRC-32 of an empty text."""


def checksums(side: DumpTable, rows: npt.NDArray[np.int64], mode: str) -> list[str]:
    """One cell per row (-1: not there). A tensor without a checksum, and None, give ``N/A``; of other arguments see
    `DumpTable.checksum`."""
    cells = []
    for row in rows.tolist():
        if row < 0:
            cells.append(UNMATCHED)
        elif row in side.values:
            value = side.values[row]
            cells.append(NO_VALUE if value is None and side.md5[row] is None else side.checksum(row))
        elif mode == DIGEST:
            cells.append(str(side.extra.get(row, {}).get("digest", UNMATCHED)))
        else:
            cells.append(side.md5[row] or UNMATCHED)
    return cells
