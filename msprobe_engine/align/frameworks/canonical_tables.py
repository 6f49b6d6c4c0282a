"""Two sides of different frameworks as two sides in common terms: one record per group, its rows with the same places on both sides."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from msprobe_engine.align.calls.structure import Aligned, Structure
from msprobe_engine.align.frameworks.canonical import Terms
from msprobe_engine.align.frameworks.common_terms import CommonSide, CommonTree
from msprobe_engine.align.frameworks.groups import Grouped, Grouping
from msprobe_engine.align.frameworks.row_pairs import Joined, rows_of
from msprobe_engine.align.parallel.micro_batches import add_rows, begin
from msprobe_engine.formats.dump.dump_table import INPUT, OUTPUT, PARAMETERS, PARAMETERS_GRAD, DumpTable

_WORDS = {INPUT: ".input", PARAMETERS: ".parameters", OUTPUT: ".output", PARAMETERS_GRAD: ".gradient"}
_INNER = "goes from one call to the next within what {} does at once"
_PART = "a part of what the other side has as one tensor; compared as a whole"
_ARGUMENT = "an argument; the frameworks write it otherwise"
_ALONE = "the other framework has no such {}"
_ROLES = {INPUT: "input", PARAMETERS: "parameter", OUTPUT: "result", PARAMETERS_GRAD: "gradient"}


@dataclass
class _Record:
    """A record of the new side.

    Attributes:
        ops: the records that it stands for; `main` is the one whose name it has.
        joined: its rows that have a partner, in order: the rows of the file that each is made of.
        partner: name of its partner; "" without one.
        quiet: why it needs none.
    """

    ops: tuple[int, ...]
    main: int
    joined: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    partner: str = ""
    quiet: str = ""


def aligned(target: DumpTable, golden: DumpTable) -> Aligned:
    """Align two sides of different frameworks; the trees of the result have sides of their own (`CommonSide`)."""
    first, second = Terms(target, golden.framework), Terms(golden, target.framework)
    grouped = Grouping(first, second).run()
    joined = [rows_of(first, second, group) for group in grouped.groups]
    sides = []
    numbers: list[dict[tuple[int, ...], int]] = []
    only: list[list[int]] = []
    for at, terms in enumerate((first, second)):
        records = _records(terms, at, grouped, joined, (second, first)[at])
        numbers.append({record.ops: number for number, record in enumerate(records)})
        only.append([number for number, record in enumerate(records) if not record.partner and not record.quiet])
        sides.append(_rebuilt(terms, at, records))
    structure = Structure(sorted((numbers[0][group.mine], numbers[1][group.theirs]) for group in grouped.groups), only[0], only[1])
    trees = CommonTree(sides[0]), CommonTree(sides[1])
    for i, j in structure.pairs:
        x, y = trees[0].kinds[i], trees[1].kinds[j]
        if len(x) == len(y) == 4 and x[2] != y[2]:
            structure.renamed.setdefault(x[2], y[2])
    return Aligned(*trees, structure)


def _records(terms: Terms, at: int, grouped: Grouped, joined: Sequence[Sequence[Joined]], other: Terms) -> list[_Record]:
    """All records of one side, in the order in which they ended; several that stand for one as early as what goes into them is there, so
    that they come before everything that takes in what one of them gives out."""
    found: dict[tuple[int, int], _Record] = {}
    for group, rows in zip(grouped.groups, joined):
        ops, partner = (group.mine, group.theirs)[at], other.side.ops[group.mains[1 - at]]
        chosen = [(one.role, (one.mine, one.theirs)[at]) for one in rows]
        found[_place(terms, ops), min(ops)] = _Record(ops, group.mains[at], chosen, partner)
    known = {op for record in found.values() for op in record.ops}
    for op in range(len(terms.side.ops)):
        if op not in known:
            found[op, op] = _Record((op,), op, quiet=grouped.quiet[at].get(op, ""))
    return [found[op] for op in sorted(found)]


def _place(terms: Terms, ops: tuple[int, ...]) -> int:
    if len(ops) == 1:
        return ops[0]
    members = set(ops)
    sources = {terms.maker(row) for op in ops for row in terms.rows(op, INPUT)}
    return max([min(ops), *(source for source in sources if source is not None and source not in members and source < max(ops))])


def _rebuilt(terms: Terms, at: int, records: Sequence[_Record]) -> CommonSide:
    side = terms.side
    made = CommonSide(side.path, header=side.header, recovered=side.recovered, problems=side.problems)
    made.stacks, made.construct, made.files = side.stacks, side.construct, side.files
    places: dict[int, str] = {}
    for number, record in enumerate(records):
        begin(made, side, record.main)
        made.members.append(record.ops)
        if record.quiet:
            made.quiet.add(number)
        for count, (role, rows) in enumerate(record.joined):
            places[len(made)] = f"{_WORDS.get(role, '')}.{count}"
            _add(made, side, rows)
        used = {row for _, rows in record.joined if len(rows) == 1 for row in rows}
        parts = {row for _, rows in record.joined if len(rows) > 1 for row in rows}
        for row in [row for op in record.ops for row in side.rows(op) if row not in used]:
            new = len(made)
            places[new] = f".{at}.{side.name[row]}"
            why = record.quiet or (_PART if row in parts else _why(terms, record, row) if record.partner else "")
            if why:
                made.told[new] = why
            _add(made, side, (row,))
    made.positions = places
    if side.aliases is not side.ops:
        made.aliases = [side.aliases[record.main] for record in records]
    return made


def _why(terms: Terms, record: _Record, row: int) -> str:
    """Why a row of a record that has a partner has none."""
    side = terms.side
    if not isinstance(side.shape[row], list) or row in side.values:
        return _ARGUMENT
    return _INNER.format(record.partner) if len(record.ops) > 1 else _ALONE.format(_ROLES.get(side.role[row], "value"))


def _add(made: CommonSide, side: DumpTable, rows: tuple[int, ...]) -> None:
    """Add a row to the last record: one of the file, or what several make together."""
    if len(rows) == 1:
        add_rows(made, side, range(rows[0], rows[0] + 1))
        made.rows_before.append(rows)
        return
    new, first = len(made), rows[0]
    add_rows(made, side, range(first, first + 1))
    made.rows_before.append(rows)
    names = [side.name[row] for row in rows]
    made.name[new] = _together(names)
    shapes = [side.shape[row] for row in rows]
    made.shape[new] = _joined_shape(shapes)
    counts = np.array([max(int(np.prod(shape)), 1) for shape in shapes], np.float64)
    stats = side.stats[list(rows)]
    with np.errstate(all="ignore"):
        whole = (stats[:, 0].max(), stats[:, 1].min(), (stats[:, 2] * counts).sum() / counts.sum(), np.sqrt(np.square(stats[:, 3]).sum()))
    made.numbers[4 * new : 4 * new + 4] = array("d", [float(value) for value in whole])
    made.md5[new], made.data_name[new] = None, ""
    for counted, source in ((made.nans, side.nans), (made.infs, side.infs)):
        number = sum(source.get(row, 0) for row in rows)
        counted.pop(new, None)
        if number:
            counted[new] = number
    made.extra.pop(new, None)
    made.nonfloat_stats.pop(new, None)


def _together(names: Sequence[str]) -> str:
    """``a.q.weight`` and ``a.k.weight`` -> ``a.q+k.weight``; names that differ in more than one part one behind the other."""
    parts = [name.split(".") for name in names]
    differ = [at for at in range(len(parts[0])) if len({part[at] for part in parts}) > 1] if len({len(p) for p in parts}) == 1 else []
    if len(differ) != 1:
        return "+".join(names)
    found = list(parts[0])
    found[differ[0]] = "+".join(part[differ[0]] for part in parts)
    return ".".join(found)


def _joined_shape(shapes: Sequence[list[int]]) -> list[int]:
    """The shape of tensors put together along the one dimension in which they may differ, the first if none says more."""
    if len({len(shape) for shape in shapes}) != 1:
        return [sum(int(np.prod(shape)) for shape in shapes)]
    if len(shapes[0]) < 2:
        return [sum(shape[0] if shape else 1 for shape in shapes)]
    return [sum(shape[0] for shape in shapes), *shapes[0][1:]]
