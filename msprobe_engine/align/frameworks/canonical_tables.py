"""Two sides of different frameworks as two sides in common terms: one record per group, its rows with the same places on both sides."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import permutations

import numpy as np

from msprobe_engine.align.calls.structure import Aligned, Structure
from msprobe_engine.align.frameworks.align_groups import Group, Grouped, Grouping
from msprobe_engine.align.frameworks.canonical import Terms, near, of_row
from msprobe_engine.align.frameworks.common_terms import CommonSide, CommonTree
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
    target_terms, golden_terms = Terms(target, golden.framework), Terms(golden, target.framework)
    grouped = Grouping(target_terms, golden_terms).run()
    joined = [rows_of(target_terms, golden_terms, group) for group in grouped.groups]
    sides = []
    numbers: list[dict[tuple[int, ...], int]] = []
    only: list[list[int]] = []
    for side_index, terms in enumerate((target_terms, golden_terms)):
        records = _records(terms, side_index, grouped, joined, (golden_terms, target_terms)[side_index])
        numbers.append({record.ops: number for number, record in enumerate(records)})
        only.append([number for number, record in enumerate(records) if not record.partner and not record.quiet])
        sides.append(_rebuilt(terms, side_index, records))
    structure = Structure(sorted((numbers[0][group.target], numbers[1][group.golden]) for group in grouped.groups), only[0], only[1])
    trees = CommonTree(sides[0]), CommonTree(sides[1])
    for i, j in structure.pairs:
        target_kind, golden_kind = trees[0].kinds[i], trees[1].kinds[j]
        if len(target_kind) == len(golden_kind) == 4 and target_kind[2] != golden_kind[2]:
            structure.renamed.setdefault(target_kind[2], golden_kind[2])
    return Aligned(*trees, structure)


def _records(terms: Terms, side_index: int, grouped: Grouped, joined: Sequence[Sequence[Joined]], other: Terms) -> list[_Record]:
    """All records of one side, in the order in which they ended; several that stand for one as early as what goes into them is there, so
    that they come before everything that takes in what one of them gives out."""
    records: dict[tuple[int, int], _Record] = {}
    for group, rows in zip(grouped.groups, joined):
        ops, partner = (group.target, group.golden)[side_index], other.side.ops[group.mains[1 - side_index]]
        chosen = [(pair.role, (pair.target, pair.golden)[side_index]) for pair in rows]
        records[_place(terms, ops), min(ops)] = _Record(ops, group.mains[side_index], chosen, partner)
    known = {op for record in records.values() for op in record.ops}
    for op in range(len(terms.side.ops)):
        if op not in known:
            records[op, op] = _Record((op,), op, quiet=grouped.quiet[side_index].get(op, ""))
    return [records[op] for op in sorted(records)]


def _place(terms: Terms, ops: tuple[int, ...]) -> int:
    if len(ops) == 1:
        return ops[0]
    members = set(ops)
    sources = {terms.maker(row) for op in ops for row in terms.rows(op, INPUT)}
    return max([min(ops), *(source for source in sources if source is not None and source not in members and source < max(ops))])


def _rebuilt(terms: Terms, side_index: int, records: Sequence[_Record]) -> CommonSide:
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
            places[new] = f".{side_index}.{side.name[row]}"
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
    new, first_row = len(made), rows[0]
    add_rows(made, side, range(first_row, first_row + 1))
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
    differ = (
        [position for position in range(len(parts[0])) if len({part[position] for part in parts}) > 1]
        if len({len(p) for p in parts}) == 1
        else []
    )
    if len(differ) != 1:
        return "+".join(names)
    merged = list(parts[0])
    merged[differ[0]] = "+".join(part[differ[0]] for part in parts)
    return ".".join(merged)


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
    target: tuple[int, ...]
    golden: tuple[int, ...]


def rows_of(target: Terms, golden: Terms, group: Group) -> list[Joined]:
    """The rows of a group; rows that nothing belongs to are left out."""
    sides, ops = (target, golden), (group.target, group.golden)
    joined: list[Joined] = []
    entering = [_find_group_inputs(side, some) for side, some in zip(sides, ops)]
    joined += _pair_rows(target, golden, INPUT, entering[0], entering[1])
    joined += _arguments(target, golden, group)
    for role in (PARAMETERS, PARAMETERS_GRAD):
        joined += _by_name(target, golden, role, group)
    leaving = [_find_group_outputs(side, some) for side, some in zip(sides, ops)]
    back = target.direction(group.mains[0]) == "backward"
    return joined + _pair_rows(target, golden, OUTPUT, leaving[0], leaving[1], sums=back)


def _arguments(target: Terms, golden: Terms, group: Group) -> list[Joined]:
    """Arguments that are no tensors: those of equal place and value, and numbers with a point in the order in which they stand."""
    sides, ops = (target, golden), (group.target, group.golden)
    rows = [[target_row for op in some for target_row in side.plain(op)] for side, some in zip(sides, ops)]
    free = {(golden.place(target_row), golden.value(target_row)): target_row for target_row in reversed(rows[1])}
    joined = []
    for target_row in rows[0]:
        golden_row = free.pop((target.place(target_row), target.value(target_row)), None)
        if golden_row is not None:
            joined.append(Joined(target.side.role[target_row], (target_row,), (golden_row,)))
    floats = [[target_row for target_row in some if type(side.side.values.get(target_row)) is float] for side, some in zip(sides, rows)]
    used = [{pair.target[0] for pair in joined}, {pair.golden[0] for pair in joined}]
    remaining = [[target_row for target_row in some if target_row not in taken] for some, taken in zip(floats, used)]
    if len(remaining[0]) == len(remaining[1]):
        joined += [Joined(INPUT, (target_float,), (golden_float,)) for target_float, golden_float in zip(*remaining)]
    return joined


def _find_group_inputs(side: Terms, ops: Sequence[int]) -> list[int]:
    """Tensors that go in from outside, each once."""
    if len(ops) == 1:
        return side.rows(ops[0], INPUT)
    made = [row for op in ops for row in side.rows(op, OUTPUT)]
    inputs: list[int] = []
    for op in ops:
        for row in side.rows(op, INPUT):
            if not any(side.same(row, other) for other in (*(m for m in made if side.side.op[m] != op), *inputs)):
                inputs.append(row)
    return inputs


def _find_group_outputs(side: Terms, ops: Sequence[int]) -> list[int]:
    """Tensors that come out and do not go into another call of the group."""
    if len(ops) == 1:
        return side.rows(ops[0], OUTPUT)
    taken = [row for op in ops for row in side.rows(op, INPUT)]
    outputs = []
    for op in ops:
        for row in side.rows(op, OUTPUT):
            if not any(side.same(row, other) for other in taken if side.side.op[other] > op):
                outputs.append(row)
    return outputs


def _by_name(target: Terms, golden: Terms, role: int, group: Group) -> list[Joined]:
    """Parameters by what they are called; of several modules those of one name together."""
    names: list[dict[str, list[int]]] = [{}, {}]
    for side, ops, rows_by_name in zip((target, golden), (group.target, group.golden), names):
        for op in ops:
            for row in side.rows(op, role):
                rows_by_name.setdefault(of_row(side, row, side.side.ops[op]), []).append(row)
    joined = []
    for name in [name for name in names[0] if name in names[1]]:
        joined += _pair_rows(target, golden, role, names[0].pop(name), names[1].pop(name))
    rest = [[row for rows in rows_by_name.values() for row in rows] for rows_by_name in names]
    return joined + _pair_rows(target, golden, role, rest[0], rest[1])


def _pair_rows(target: Terms, golden: Terms, role: int, target_rows: list[int], golden_rows: list[int], sums: bool = False) -> list[Joined]:
    """By size; of one size in order, unless the numbers say another order.

    `sums`: where one side has more of them, they may be parts of what the other side has as a sum; then the numbers decide.
    """
    joined = []
    remaining: list[list[int]] = [[], []]
    sizes = [target.size(row) for row in target_rows] + [golden.size(row) for row in golden_rows]
    for size in dict.fromkeys(sizes):
        target_of_size = [row for row in target_rows if target.size(row) == size]
        golden_of_size = [row for row in golden_rows if golden.size(row) == size]
        pairs = _order_pairs_by_numbers(target, golden, target_of_size, golden_of_size)
        if sums and len(target_of_size) != len(golden_of_size):
            pairs = [pair for pair in pairs if _near(target, golden, pair)]
        joined += [Joined(role, (target_row,), (golden_row,)) for target_row, golden_row in pairs]
        remaining[0] += [row for row in target_of_size if row not in {target_row for target_row, _ in pairs}]
        remaining[1] += [row for row in golden_of_size if row not in {golden_row for _, golden_row in pairs}]
    for side_index, (side, other) in enumerate(((target, golden), (golden, target))):
        for row in list(remaining[side_index]):
            parts = _parts(side, other, row, remaining[1 - side_index])
            if parts:
                remaining[side_index].remove(row)
                remaining[1 - side_index] = [item for item in remaining[1 - side_index] if item not in parts]
                joined.append(Joined(role, *((row,), parts) if side_index == 0 else (parts, (row,))))
    whole = [sum(side.size(row) for row in rows) for side, rows in zip((target, golden), remaining)]
    if whole[0] == whole[1] and remaining[0] and remaining[1] and min(len(remaining[0]), len(remaining[1])) == 1:
        joined.append(Joined(role, tuple(remaining[0]), tuple(remaining[1])))
    return sorted(joined, key=lambda item: item.target)


def _parts(side: Terms, other: Terms, row: int, rows: list[int]) -> tuple[int, ...]:
    """Rows of the other side that make a tensor when they are put together along the first dimension."""
    shape = side.side.shape[row]
    parts = tuple(part for part in rows if len(other.side.shape[part]) == len(shape) and other.side.shape[part][1:] == shape[1:])
    return parts if len(parts) > 1 and sum(other.size(part) for part in parts) == side.size(row) else ()


def _order_pairs_by_numbers(target: Terms, golden: Terms, target_rows: list[int], golden_rows: list[int]) -> list[tuple[int, int]]:
    plain = list(zip(target_rows, golden_rows))
    alike = sum(_near(target, golden, pair) for pair in plain)
    if not plain or alike == len(plain) == max(len(target_rows), len(golden_rows)) or max(len(target_rows), len(golden_rows)) > _MOST:
        return plain
    short, long = (target_rows, golden_rows) if len(target_rows) <= len(golden_rows) else (golden_rows, target_rows)
    best = plain
    for order in permutations(long, len(short)):
        pairs = list(zip(short, order)) if short is target_rows else list(zip(order, short))
        number = sum(_near(target, golden, pair) for pair in pairs)
        if number > alike:
            best, alike = pairs, number
    return best


def _near(target: Terms, golden: Terms, pair: tuple[int, int]) -> bool:
    return near(target.stats[pair[0]], golden.stats[pair[1]])
