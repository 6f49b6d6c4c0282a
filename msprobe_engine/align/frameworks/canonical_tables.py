"""Two sides of different frameworks as two sides in common terms: one record per group, its rows with the same places on both sides."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import permutations

import numpy as np

from msprobe_engine.align.calls.structure import Aligned, Structure
from msprobe_engine.align.frameworks.canonical import Terms, near, of_row
from msprobe_engine.align.frameworks.common_terms import CommonSide, CommonTree
from msprobe_engine.align.frameworks.groups import Group, Grouped, Grouping
from msprobe_engine.align.parallel.micro_batches import add_rows, append_record
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


def align_frameworks(target: DumpTable, golden: DumpTable) -> Aligned:
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
        append_record(made, side, record.main)
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


_MOST = 5
"""Tensors of one size whose order is looked for."""


@dataclass(frozen=True)
class Joined:
    """Rows that belong together: of one side several, when they make one tensor of the other."""

    role: int
    mine: tuple[int, ...]
    theirs: tuple[int, ...]


def rows_of(first: Terms, second: Terms, group: Group) -> list[Joined]:
    """The rows of a group; rows that nothing belongs to are left out."""
    sides, ops = (first, second), (group.mine, group.theirs)
    found: list[Joined] = []
    entering = [_find_group_inputs(side, some) for side, some in zip(sides, ops)]
    found += _pair_rows(first, second, INPUT, entering[0], entering[1])
    found += _arguments(first, second, group)
    for role in (PARAMETERS, PARAMETERS_GRAD):
        found += _by_name(first, second, role, group)
    leaving = [_find_group_outputs(side, some) for side, some in zip(sides, ops)]
    back = first.direction(group.mains[0]) == "backward"
    return found + _pair_rows(first, second, OUTPUT, leaving[0], leaving[1], sums=back)


def _arguments(first: Terms, second: Terms, group: Group) -> list[Joined]:
    """Arguments that are no tensors: those of equal place and value, and numbers with a point in the order in which they stand."""
    sides, ops = (first, second), (group.mine, group.theirs)
    rows = [[row for op in some for row in side.plain(op)] for side, some in zip(sides, ops)]
    free = {(second.place(row), second.value(row)): row for row in reversed(rows[1])}
    found = []
    for row in rows[0]:
        other = free.pop((first.place(row), first.value(row)), None)
        if other is not None:
            found.append(Joined(first.side.role[row], (row,), (other,)))
    floats = [[row for row in some if type(side.side.values.get(row)) is float] for side, some in zip(sides, rows)]
    used = [{one.mine[0] for one in found}, {one.theirs[0] for one in found}]
    left = [[row for row in some if row not in taken] for some, taken in zip(floats, used)]
    if len(left[0]) == len(left[1]):
        found += [Joined(INPUT, (a,), (b,)) for a, b in zip(*left)]
    return found


def _find_group_inputs(side: Terms, ops: Sequence[int]) -> list[int]:
    """Tensors that go in from outside, each once."""
    if len(ops) == 1:
        return side.rows(ops[0], INPUT)
    made = [row for op in ops for row in side.rows(op, OUTPUT)]
    found: list[int] = []
    for op in ops:
        for row in side.rows(op, INPUT):
            if not any(side.same(row, other) for other in (*(m for m in made if side.side.op[m] != op), *found)):
                found.append(row)
    return found


def _find_group_outputs(side: Terms, ops: Sequence[int]) -> list[int]:
    """Tensors that come out and do not go into another call of the group."""
    if len(ops) == 1:
        return side.rows(ops[0], OUTPUT)
    taken = [row for op in ops for row in side.rows(op, INPUT)]
    found = []
    for op in ops:
        for row in side.rows(op, OUTPUT):
            if not any(side.same(row, other) for other in taken if side.side.op[other] > op):
                found.append(row)
    return found


def _by_name(first: Terms, second: Terms, role: int, group: Group) -> list[Joined]:
    """Parameters by what they are called; of several modules those of one name together."""
    names: list[dict[str, list[int]]] = [{}, {}]
    for side, ops, found in zip((first, second), (group.mine, group.theirs), names):
        for op in ops:
            for row in side.rows(op, role):
                found.setdefault(of_row(side, row, side.side.ops[op]), []).append(row)
    joined = []
    for name in [name for name in names[0] if name in names[1]]:
        joined += _pair_rows(first, second, role, names[0].pop(name), names[1].pop(name))
    rest = [[row for rows in found.values() for row in rows] for found in names]
    return joined + _pair_rows(first, second, role, rest[0], rest[1])


def _pair_rows(first: Terms, second: Terms, role: int, mine: list[int], theirs: list[int], sums: bool = False) -> list[Joined]:
    """By size; of one size in order, unless the numbers say another order.

    `sums`: where one side has more of them, they may be parts of what the other side has as a sum; then the numbers decide.
    """
    found = []
    left: list[list[int]] = [[], []]
    sizes = [first.size(row) for row in mine] + [second.size(row) for row in theirs]
    for size in dict.fromkeys(sizes):
        a = [row for row in mine if first.size(row) == size]
        b = [row for row in theirs if second.size(row) == size]
        pairs = _order_pairs_by_numbers(first, second, a, b)
        if sums and len(a) != len(b):
            pairs = [pair for pair in pairs if _near(first, second, pair)]
        found += [Joined(role, (x,), (y,)) for x, y in pairs]
        left[0] += [row for row in a if row not in {x for x, _ in pairs}]
        left[1] += [row for row in b if row not in {y for _, y in pairs}]
    for at, (side, other) in enumerate(((first, second), (second, first))):
        for row in list(left[at]):
            parts = _parts(side, other, row, left[1 - at])
            if parts:
                left[at].remove(row)
                left[1 - at] = [one for one in left[1 - at] if one not in parts]
                found.append(Joined(role, *((row,), parts) if at == 0 else (parts, (row,))))
    whole = [sum(side.size(row) for row in rows) for side, rows in zip((first, second), left)]
    if whole[0] == whole[1] and left[0] and left[1] and min(len(left[0]), len(left[1])) == 1:
        found.append(Joined(role, tuple(left[0]), tuple(left[1])))
    return sorted(found, key=lambda one: one.mine)


def _parts(side: Terms, other: Terms, row: int, rows: list[int]) -> tuple[int, ...]:
    """Rows of the other side that make a tensor when they are put together along the first dimension."""
    shape = side.side.shape[row]
    parts = tuple(one for one in rows if len(other.side.shape[one]) == len(shape) and other.side.shape[one][1:] == shape[1:])
    return parts if len(parts) > 1 and sum(other.size(one) for one in parts) == side.size(row) else ()


def _order_pairs_by_numbers(first: Terms, second: Terms, a: list[int], b: list[int]) -> list[tuple[int, int]]:
    plain = list(zip(a, b))
    alike = sum(_near(first, second, pair) for pair in plain)
    if not plain or alike == len(plain) == max(len(a), len(b)) or max(len(a), len(b)) > _MOST:
        return plain
    short, long = (a, b) if len(a) <= len(b) else (b, a)
    best = plain
    for order in permutations(long, len(short)):
        pairs = list(zip(short, order)) if short is a else list(zip(order, short))
        number = sum(_near(first, second, pair) for pair in pairs)
        if number > alike:
            best, alike = pairs, number
    return best


def _near(first: Terms, second: Terms, pair: tuple[int, int]) -> bool:
    return near(first.stats[pair[0]], second.stats[pair[1]])
