"""Which row of the target is compared with which row of the golden side, and in what order the table shows them.

Without ``compat`` records are matched by structure (`match_structure`) and their rows by role and place; rows that nothing matches are
kept, on both sides. With it, or by name, rows are joined as the existing tool joins them (`join_rows`, `joined_fuzzily`). Mappings say
what a name of the target is called on the golden side; of several the api mapping comes first, then the cell mapping, then the data
mapping, which a layer mapping replaces.

Rows joined by equal keys, as a left join of tables is: each row of the target with every row of the golden side of its key.

Rows matched by name without the call number, in one pass over both sides and never backwards (``-f``, ``-fm``).

Both sides wait in a queue each. When the newest row of one side equals one that waits on the other, they are matched, and all that waited
before them on either side stays without a partner. The existing tool looks through the queues one by one; here a table of what waits makes
the pass linear.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from msprobe_engine.align.calls import match_structure
from msprobe_engine.align.calls.alignment import align_sides
from msprobe_engine.align.calls.row_order import Pairs
from msprobe_engine.align.calls.structure import Aligned
from msprobe_engine.align.mapping.api import ApiMapping
from msprobe_engine.align.mapping.cell import CellMapping
from msprobe_engine.align.mapping.data import DataMapping
from msprobe_engine.align.mapping.layer import rows_by_layer
from msprobe_engine.core.errors import UsageError
from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.measure.comparable_dtypes import comparable
from msprobe_engine.measure.options import CompareOptions

FUZZY_MESSAGE = "Fuzzy matching data, the comparison accuracy may be affected."
Integers = npt.NDArray[np.int64]


@dataclass
class Matching:
    """Rows of the table, in its order.

    Attributes:
        target, golden: int64 (n,), row of each side; -1 where that side has none. Never -1 on both.
        messages: position among the n -> what is to be said about the match.
        records: int64, record of each row of the target and of the golden side.
        renamed: ``path.Class`` of modules of the target -> what they are called on the golden side, where that differs. Saved with
            `mapping_file.write_mapping` it is a cell mapping, which ``-cm`` and ``-dm`` read.
        rows: the data mapping that a layer mapping came to (row name -> row name or ``N/A``); None without one.
        aligned: the records, when the structure alone said which belong together.
        common: the rows are of the sides of `align_frameworks`; see `sides`.
    """

    target: Integers
    golden: Integers
    messages: dict[int, str]
    records: tuple[Integers, Integers]
    renamed: dict[str, str] = field(default_factory=dict)
    rows: dict[str, str] | None = None
    aligned: Aligned | None = None
    common: bool = False

    def __len__(self) -> int:
        return len(self.target)

    @property
    def sides(self) -> tuple[DumpTable, DumpTable] | None:
        """The sides that the rows are of, when they are not those that were given: two frameworks are compared in common terms."""
        return (self.aligned.target.side, self.aligned.golden.side) if self.common and self.aligned is not None else None

    @cached_property
    def ops(self) -> Integers:
        """int64 (m, 2), records of the target and of the golden side that belong together; -1 where one side has none. In the order of
        the table."""
        return _records(*self.records, self.target, self.golden)


def match(target: DumpTable, golden: DumpTable, options: CompareOptions) -> Matching:
    """Match two sides.

    Raises:
        UsageError: mappings that exclude each other, or that are none.
    """
    if options.fuzzy and options.data_mapping:
        raise UsageError("compare: fuzzy matching and a data mapping exclude each other; give one of them")
    cross = target.framework != golden.framework
    cell, api = CellMapping.read(options.cell_mapping, options.old), ApiMapping.read(options.api_mapping, options.old)
    data = DataMapping.read(options.data_mapping)
    layers = rows_by_layer(target, golden, options.layer_mapping) if options.layer_mapping else None
    if layers is not None:
        data = DataMapping(layers)
    if not options.compat and options.match == "structure":
        if cross and layers is None:
            return _in_common(target, golden, cell, api, data)
        pairs, renamed, aligned = match_structure.match_rows(target, golden, cell, api, data, layered=layers is not None)
    else:
        keys = keys_of(target, golden, api, cell, data, options)
        pairs, renamed, aligned = _by_name(target, golden, keys, data is not None, cross, options), {}, None
    messages = dict(pairs.messages)
    if options.fuzzy and (options.compat or options.match == "name"):
        messages.update({row: FUZZY_MESSAGE for row, (i, j) in enumerate(zip(pairs.target, pairs.golden)) if i >= 0 and j >= 0})
    records = np.array(target.op, np.int64), np.array(golden.op, np.int64)
    return Matching(np.array(pairs.target, np.int64), np.array(pairs.golden, np.int64), messages, records, renamed, layers, aligned)


def _in_common(
    target: DumpTable, golden: DumpTable, cell: CellMapping | None, api: ApiMapping | None, data: DataMapping | None
) -> Matching:
    """Of two frameworks."""
    names, places = match_structure.taken_for(target, golden, cell, api)
    if names is not None:
        target.aliases, target.positions = names, places or {}
    aligned = align_sides(target, golden)
    pairs = match_structure.aligned_rows(aligned, data)
    target_side, golden_side = aligned.target.side, aligned.golden.side
    records = np.array(target_side.op, np.int64), np.array(golden_side.op, np.int64)
    renamed = match_structure.renamed_modules(aligned)
    return Matching(
        np.array(pairs.target, np.int64), np.array(pairs.golden, np.int64), pairs.messages, records, renamed, None, aligned, True
    )


def _by_name(target: DumpTable, golden: DumpTable, keys: Keys, mapped: bool, cross: bool, options: CompareOptions) -> Pairs:
    """Rows joined by name; what is left of the golden side is kept without `compat`."""
    if mapped:
        pairs = join_rows(keys, keep_order=True)
    elif options.fuzzy:
        pairs = joined_fuzzily(keys, [str(s) for s in target.shape], [str(s) for s in golden.shape], options.old, options.compat)
    elif options.old:
        target_shapes, golden_shapes = target.shape, golden.shape
        shaped = Keys(
            list(zip(keys.target, map(str, target_shapes))), list(zip(keys.golden, map(str, golden_shapes))), keys.rows, keys.golden_rows
        )
        pairs = join_rows(shaped, keep_order=False)
    else:
        pairs = join_rows(keys, keep_order=True)
    if not mapped:
        for row, (i, j) in enumerate(zip(pairs.target, pairs.golden)):
            if j >= 0 and not comparable(target.dtype[i], golden.dtype[j], cross, with_double=not options.old):
                pairs.golden[row] = -1
    return pairs if options.compat else pairs.with_rest(range(len(golden)))


def _records(target_records: Integers, golden_records: Integers, target_rows: Integers, golden_rows: Integers) -> Integers:
    """Records of the rows; a record that several rows speak of counts once, with the partner of the first row that has one."""
    partner_of: dict[int, int] = {}
    order: list[tuple[int, int]] = []
    partners: set[int] = set()
    for i, j in zip(target_rows.tolist(), golden_rows.tolist()):
        target_record, golden_record = (int(target_records[i]) if i >= 0 else -1), (int(golden_records[j]) if j >= 0 else -1)
        if target_record >= 0:
            if target_record not in partner_of:
                order.append((target_record, -1))
                partner_of[target_record] = -1
            if partner_of[target_record] < 0 <= golden_record:
                partner_of[target_record] = golden_record
            partners.add(golden_record)
        elif golden_record not in partners:
            partners.add(golden_record)
            order.append((-1, golden_record))
    pairs = [(target_record, partner_of[target_record] if target_record >= 0 else golden_record) for target_record, golden_record in order]
    taken = {golden_record for target_record, golden_record in pairs if target_record >= 0}
    return np.array(
        [(target_record, golden_record) for target_record, golden_record in pairs if target_record >= 0 or golden_record not in taken],
        np.int64,
    ).reshape(-1, 2)


def join_rows(keys: Keys, keep_order: bool) -> Pairs:
    """Pair rows of equal keys.

    Args:
        keys: one per row.
        keep_order: rows of equal keys stay where they are (26.2.0 and data mappings); else they stand together, where the first of them
            is (8.1.1).
    """
    places: dict[object, list[int]] = {}
    for j, key in zip(keys.golden_rows, keys.golden):
        places.setdefault(key, []).append(j)
    pairs = Pairs()
    if keep_order:
        for i, key in zip(keys.rows, keys.target):
            for j in places.get(key, (-1,)):
                pairs.add(i, j)
        return pairs
    groups: dict[object, list[int]] = {}
    for i, key in zip(keys.rows, keys.target):
        groups.setdefault(key, []).append(i)
    for key, rows in groups.items():
        for i in rows:
            for j in places.get(key, (-1,)):
                pairs.add(i, j)
    return pairs


def without_call(name: str) -> str:
    """The row name without what stands before ``.forward`` or ``.backward``: the call number of a function, the class of a module."""
    word = "forward" if "forward" in name else "backward"
    if word not in name:
        return name
    parts = name.split(word)
    return f"{parts[0].rsplit('.', 2)[0]}.{word}{parts[1]}"


def joined_fuzzily(keys: Keys, shapes: Sequence[str], golden_shapes: Sequence[str], shaped: bool, compat: bool) -> Pairs:
    """Match.

    Args:
        keys: row names, one per row.
        shapes, golden_shapes: shapes as texts, by row.
        shaped: shapes must be equal too (8.1.1).
        compat: rows of the target behind the end of the golden side are left out when nothing waits there, as the existing tool does.
    """
    target_keys = [(without_call(str(key)), shapes[i] if shaped else "") for i, key in zip(keys.rows, keys.target)]
    golden_keys = [(without_call(str(key)), golden_shapes[j] if shaped else "") for j, key in zip(keys.golden_rows, keys.golden)]
    pairs = Pairs()
    target_queue, golden_queue = _Queue(target_keys), _Queue(golden_keys)
    for position in range(max(len(target_keys), len(golden_keys))):
        target_queue.push(position)
        golden_queue.push(position)
        if target_queue.empty != golden_queue.empty:
            break
        if target_queue.empty:
            continue
        golden_position = golden_queue.earliest(target_keys[target_queue.end - 1])
        i, j = target_queue.end - 1, golden_position
        if golden_position < 0:
            i, j = target_queue.earliest(golden_keys[golden_queue.end - 1]), golden_queue.end - 1
        if i < 0:
            continue
        for skipped in range(target_queue.start, i):
            pairs.add(keys.rows[skipped], -1)
        pairs.add(keys.rows[i], keys.golden_rows[j])
        target_queue.start, golden_queue.start = i + 1, j + 1
    for rest in range(target_queue.start, target_queue.end if compat else len(target_keys)):
        pairs.add(keys.rows[rest], -1)
    return pairs


class _Queue:
    """Positions ``start ... end - 1`` of a list of keys."""

    def __init__(self, keys: Sequence[tuple[str, str]]) -> None:
        self._keys = keys
        self._places: dict[tuple[str, str], deque[int]] = {}
        self.start = self.end = 0

    @property
    def empty(self) -> bool:
        return self.start == self.end

    def push(self, position: int) -> None:
        """Take the next one in, if there is one."""
        if position < len(self._keys):
            self._places.setdefault(self._keys[position], deque()).append(position)
            self.end = position + 1

    def earliest(self, key: tuple[str, str]) -> int:
        """The first that waits with this key, or -1."""
        places = self._places.get(key)
        while places and places[0] < self.start:
            places.popleft()
        return places[0] if places else -1


@dataclass
class Keys:
    """Keys of the rows `rows` of the target and `golden_rows` of the golden side, one each."""

    target: Sequence[Hashable]
    golden: Sequence[Hashable]
    rows: Sequence[int]
    golden_rows: Sequence[int]


def keys_of(
    target: DumpTable,
    golden: DumpTable,
    api: ApiMapping | None,
    cell: CellMapping | None,
    data: DataMapping | None,
    options: CompareOptions,
) -> Keys:
    """Keys by name.

    26.2.0 counts backward calls anew in the order they come (a recomputed forward call has no backward call of its own). When a mapping
    renames the target it does so on the golden side only, which pairs backward calls wrongly; that is kept with ``compat`` alone.
    """
    rows, golden_rows = list_rows_with_direction(target, options), list_rows_with_direction(golden, options)
    target_names, golden_names = list(target.name), list(golden.name)
    mapped = bool(api or cell or data)
    if not options.old and not options.fuzzy and target.path.name != "debug.json":
        if not (mapped and options.compat):
            target_names = renumber_backward_calls(target)
        golden_names = renumber_backward_calls(golden)
    names = [target_names[i] for i in rows]
    if api is not None:
        names = api.row_names(names, [target.ops[target.op[i]] for i in rows], golden)
    elif cell is not None:
        names = [cell.row_name(name) for name in names]
    elif data is not None:
        names = [data.row_name(target.name[i], name) for i, name in zip(rows, names)]
    return Keys(names, [golden_names[j] for j in golden_rows], rows, golden_rows)


def list_rows_with_direction(side: DumpTable, options: CompareOptions) -> Sequence[int]:
    """All rows; with ``compat`` 26.2.0 leaves out records whose name says no direction."""
    if options.old or not options.compat or side.path.name == "debug.json":
        return range(len(side))
    keep = [bool(_split_call_and_direction(name)[0]) for name in side.ops]
    return [i for i in range(len(side)) if keep[side.op[i]]]


def renumber_backward_calls(side: DumpTable) -> list[str]:
    """Row names with backward calls counted in the order of the file, by function or module."""
    names = list(side.name)
    counts: dict[str, int] = {}
    for op, name in enumerate(side.ops):
        head, call = _split_call_and_direction(name)
        if not head or "backward" not in call:
            continue
        count = counts.get(head, 0)
        counts[head] = count + 1
        before, last = call
        if not before.isdigit() and not last.isdigit():
            continue
        new = f"{head}.{count if before.isdigit() else before}.{count if last.isdigit() else last}"
        if new != name:
            for i in side.rows(op):
                names[i] = new + names[i].replace(name, "")
    return names


def _split_call_and_direction(name: str) -> tuple[str, tuple[str, str]]:
    """A record name without its last two parts, and those; ("", ...) when they say no direction."""
    parts = name.split(".")
    last, before = parts[-1], parts[-2] if len(parts) > 1 else ""
    if "parameters_grad" in (last, before):
        return ".".join(parts[:-1]), ("", "parameters_grad")
    if last in ("forward", "backward") or before in ("forward", "backward"):
        return ".".join(parts[:-2]), (before, last)
    return "", (before, last)
