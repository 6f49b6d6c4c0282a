"""A step cut into pieces: one per rank and micro batch.

A step of several micro batches repeats the calls of a step of one. What is called outside of the repetition (the batch, the optimizer) is
part of the first piece, so that the first piece of a rank has everything that a step of one micro batch has.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from msprobe_engine.align.calls.call_tree import ROOT, Kind, Tree, calls_function
from msprobe_engine.align.calls.structure import ADDING
from msprobe_engine.align.parallel import pipeline_schedule
from msprobe_engine.align.parameters.prefixes import strip_wrappers
from msprobe_engine.core.dtypes import is_not_float
from msprobe_engine.core.names import forward_twin
from msprobe_engine.formats.dump.dump_table import DumpTable

T = TypeVar("T")


@dataclass(frozen=True)
class Piece:
    """Attributes:
    rank, micro: where and when.
    side: the records of the piece alone; names are those of the dump.
    """

    rank: int
    micro: int
    side: DumpTable


def cut_into_micro_batches(sides: Mapping[int, DumpTable], other: Mapping[int, DumpTable]) -> list[Piece]:
    """All pieces of a step, by rank and micro batch. `other`: the run that says how many calls make one micro batch."""
    reference = _counts(other[min(other)])
    other_passes = pipeline_schedule.passes(other[min(other)])
    reordered = count_reordered(sides, other)
    if reordered and other_passes == 1:  # only calls of functions were recorded
        other_passes = reordered
        reference = Counter({kind: count // reordered for kind, count in reference.items() if count % reordered == 0})
    pieces = []
    for rank, side in sorted(sides.items()):
        n, own_passes = micro_batches(_counts(side), reference), pipeline_schedule.passes(side)
        if min(other_passes, own_passes) > 1 and (other_passes != own_passes or reordered):
            n = own_passes  # micro batch m of one process may be one of another rank's: all of them apart
        parts = [list(range(len(side.ops)))] if n == 1 else _parts(side, reference, n)
        pieces += [Piece(rank, micro, side if n == 1 else subset(side, ops)) for micro, ops in enumerate(parts)]
    return pieces


def count_reordered(sides: Mapping[int, DumpTable], other: Mapping[int, DumpTable]) -> int:
    """The number of micro batches of a step, if they are those of the other run in another order, as the integers say that a module takes
    in (a function, where no modules were recorded), or the numbers where no module is given integers (pictures); else 0."""
    batches, other_batches = (_taken_in(tables[min(tables)]) for tables in (sides, other))
    return len(batches) if batches != other_batches and sorted(batches) == sorted(other_batches) else 0


def _taken_in(side: DumpTable) -> list[bytes]:
    """Statistics of the integers that each call of the first module takes in that is given some; of numbers where none is; nothing where
    there are no modules and no integers."""
    tree = Tree(side)
    return _taken_by_first(tree, is_not_float) or (_taken_by_first(tree, lambda _dtype: True) if tree.has_modules else [])


def _taken_by_first(tree: Tree, counts: Callable[[str], bool]) -> list[bytes]:
    """Of the first kind of calls that is given tensors of these types."""
    side, taken, first = tree.side, list[bytes](), None
    for op, kind in enumerate(tree.kinds):
        if kind[0] != "forward" or (kind != first if first else tree.has_modules and len(kind) != 4):
            continue
        rows = [row for row in tree.tensors_in(op) if counts(str(side.dtype[row]))]
        if rows:
            first = kind
            taken.append(b"".join(side.stats[row].tobytes() for row in rows))
    return taken


def micro_batches(counts: Mapping[Kind, int], reference: Mapping[Kind, int]) -> int:
    """How many times more often this side makes its calls; 1 when it is no whole number or most calls do not say so.

    Modules decide where both sides have some, else the backward pass: forward calls of functions are made by the optimizer too.
    """
    calls: list[Kind] = [kind for kind in counts if kind in reference and kind[0] == "forward"]
    modules: list[Kind] = [kind for kind in calls if len(kind) == 4]
    backward: list[Kind] = [kind for kind in counts if kind in reference and kind[0] == "backward"]
    passed = modules or backward
    ratios = Counter(counts[kind] / reference[kind] for kind in passed or calls)
    if not ratios:
        return 1
    ratio, votes = ratios.most_common(1)[0]
    enough = 2 * votes > sum(ratios.values()) if passed else ratio > 1
    return int(ratio) if enough and ratio > 1 and ratio == int(ratio) else 1


def last_backward(tree: Tree) -> int:
    """The last record of the backward pass, with what it adds to buffers; the number of records when there is none."""
    last = tree.last_backward
    while last + 1 < len(tree.kinds) and (tree.is_gradients(last + 1) or tree.kinds[last + 1][-1] in ADDING):
        last += 1
    return last


def _counts(side: DumpTable) -> Counter[Kind]:
    return Counter(kind for op, kind in enumerate(_kinds(Tree(side))) if not side.tags.get(op, {}).get("is_recompute"))


def _kinds(tree: Tree) -> list[Kind]:
    """`Tree.kinds`, without what a wrapper around the model puts before the paths of modules."""
    return [(*kind[:2], strip_wrappers(kind[2]), kind[3]) if len(kind) == 4 else kind for kind in tree.kinds]


def _parts(side: DumpTable, reference: Mapping[Kind, int], n: int) -> list[list[int]]:
    tree = Tree(side)
    segments = (
        pipeline_schedule.segments(tree, pipeline_schedule.whole) if tree.has_modules else pipeline_schedule.segments_in_turn(tree, n)
    )
    micros = pipeline_schedule.count(segments) if segments else 0
    if segments and micros and micros % n == 0:
        return _parts_of_passes(tree, segments, n, micros)
    kinds = _kinds(tree)
    counts = _counts(side)
    seen: Counter[Kind] = Counter()
    micro: dict[str, int] = {}
    last = last_backward(Tree(side))
    parts: list[list[int]] = [[] for _ in range(n)]
    current = 0
    firsts = _first_calls(side, kinds, reference, counts, n)
    for op, kind in enumerate(kinds):
        name = side.ops[op]
        repeated = counts[kind] == n * reference.get(kind, 0)
        if kind[0] == "backward" and forward_twin(name) in micro:
            batch = micro[forward_twin(name)]
        elif repeated:
            batch = seen[kind] // reference[kind]
            if kind[0] == "forward":
                current = max(current, batch) if len(kind) != 4 else batch
        elif op > last and kind[0] == "forward":
            batch = 0
        else:
            current = max(current, firsts.get(op, current))
            batch = current
        seen[kind] += 1
        micro[name] = min(batch, n - 1)
        parts[micro[name]].append(op)
    return parts


def _parts_of_passes(tree: Tree, segments: Sequence[pipeline_schedule.Segment], n: int, micros: int) -> list[list[int]]:
    """The records of each of `n` pieces of a step of `micros` micro batches, by what each takes in where its segment does not tell."""
    side, batches = tree.side, [list[int]() for _ in range(n)]
    of = [segment[0] * n // micros if segment != pipeline_schedule.TAIL else 0 for segment in segments]
    forward = [segment[1] == pipeline_schedule.FORWARD for segment in segments]
    first = tree.first_of_modules if tree.has_modules else pipeline_schedule.first_pass(tree)
    given, behind = _inputs_of_one_batch(tree, of), _last_forward_of_modules(tree)
    current, joined = n - 1, set[int]()
    for op, segment in enumerate(segments):
        made_of = _sources(tree, op, first)
        if segment == pipeline_schedule.TAIL:
            if made_of and all(forward[source] for source in made_of):
                of[op] = max(of[source] for source in made_of)  # the last loss, for the log
            else:
                forward[op] = False
        elif op > behind and forward[op]:
            own = {given[content] for row in tree.tensors_in(op) if (content := _content(side, row)) in given}
            current = max(own, default=current)
            of[op] = min(of[op], current)
            if not own and (len({of[source] for source in made_of if source > behind}) > 1 or not joined.isdisjoint(made_of)):
                joined.add(op)  # of all batches, once
        else:
            of[op] = min(of[op], max((of[source] for source in made_of), default=of[op]))
        if op in joined or (tree.kinds[op][0] == "backward" and tree.index.get(forward_twin(side.ops[op])) in joined):
            of[op] = 0
        batches[of[op]].append(op)
    return batches


def _inputs_of_one_batch(tree: Tree, of: Sequence[int]) -> dict[bytes, int]:
    """Numbers that outermost modules take in for one batch alone -> which one: a model behind them whose modules were not recorded (a
    reference) is given these, too, and its calls are told apart by them."""
    batches: dict[bytes, set[int]] = {}
    for op, kind in enumerate(tree.kinds):
        if len(kind) == 4 and kind[0] == "forward" and tree.parents[op] == ROOT:
            for row in tree.tensors_in(op):
                batches.setdefault(_content(tree.side, row), set()).add(of[op])
    return {content: min(some) for content, some in batches.items() if len(some) == 1}


def _content(side: DumpTable, row: int) -> bytes:
    numbers: bytes = side.stats[row].tobytes()
    return numbers


def _last_forward_of_modules(tree: Tree) -> int:
    """The last record of a module's forward pass; the number of records where there is none."""
    forward = (op for op in range(len(tree.kinds) - 1, -1, -1) if len(tree.kinds[op]) == 4 and tree.kinds[op][0] == "forward")
    return next((op for op in forward if not tree.side.tags.get(op, {}).get("is_recompute")), len(tree.kinds))


def _sources(tree: Tree, op: int, first: int) -> list[int]:
    """Records of the passes, from the first one on, that have made what a call of no module takes in: what follows a pass (its loss, for
    the log) belongs to it, and not to the next one."""
    if tree.parents[op] != ROOT or not calls_function(tree.kinds[op]):
        return []
    sources = (tree.producers.get(row) for row in tree.tensors_in(op))
    return [source for source in sources if source is not None and source > first]


def _first_calls(
    side: DumpTable, kinds: Sequence[Kind], reference: Mapping[Kind, int], counts: Mapping[Kind, int], n: int
) -> dict[int, int]:
    """Record -> the micro batch of the call that encloses it; of records inside of repeated modules."""
    index = {name: i for i, name in enumerate(side.ops)}
    number: dict[int, int] = {}
    seen: Counter[Kind] = Counter()
    for op, kind in enumerate(kinds):
        if len(kind) == 4 and kind[0] == "forward" and counts[kind] == n * reference.get(kind, 0):
            number[op] = seen[kind] // reference[kind]
        seen[kind] += 1
    batch_of_record = {}
    for op, name in enumerate(side.ops):
        parent = side.parent(name)
        if parent in index and index[parent] in number:
            batch_of_record[op] = number[index[parent]]
    return batch_of_record


def subset(side: DumpTable, ops: Iterable[int]) -> DumpTable:
    """A side of some of the records, in their order."""
    part = DumpTable(side.path, header=side.header, recovered=side.recovered)
    part.stacks, part.construct = side.stacks, side.construct
    chosen = list(ops)
    for op in chosen:
        append(part, side, op)
    if side.aliases is not side.ops:
        part.aliases = [side.aliases[op] for op in chosen]
    return part


def append(part: DumpTable, side: DumpTable, op: int) -> None:
    """Add a record of another side at the end."""
    append_record(part, side, op)
    add_rows(part, side, side.rows(op))


def append_record(part: DumpTable, side: DumpTable, op: int) -> None:
    """Add a record of another side at the end, without its rows."""
    new = len(part.ops)
    part.ops.append(side.ops[op])
    if op in side.tags:
        part.tags[new] = side.tags[op]
    if op in side.collectives:
        part.collectives[new] = side.collectives[op]
    part.offsets.append(part.offsets[-1])


def add_rows(part: DumpTable, side: DumpTable, rows: range) -> None:
    """Add rows of another side to the last record."""
    start = len(part.name)
    part.op.extend(array("q", [len(part.ops) - 1]) * len(rows))
    span = slice(rows.start, rows.stop)
    part.role += side.role[span]
    part.name += side.name[span]
    part.dtype += side.dtype[span]
    part.shape += side.shape[span]
    part.numbers.extend(side.numbers[4 * rows.start : 4 * rows.stop])
    part.md5 += side.md5[span]
    part.requires_grad += side.requires_grad[span]
    part.data_name += side.data_name[span]
    for row in rows:
        new = start + row - rows.start
        _copy_value(part.nonfloat_stats, side.nonfloat_stats, new, row)
        _copy_value(part.values, side.values, new, row)
        _copy_value(part.nans, side.nans, new, row)
        _copy_value(part.infs, side.infs, new, row)
        _copy_value(part.extra, side.extra, new, row)
    part.offsets[-1] = len(part.name)


def _copy_value(copied: dict[int, T], original: dict[int, T], new: int, row: int) -> None:
    if row in original:
        copied[new] = original[row]
