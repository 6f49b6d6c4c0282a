"""The graph of the ranks of one job, and the pair of two such."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from msprobe_engine.align.parallel.join_stages_and_experts import together
from msprobe_engine.align.parallel.merge_records import origin_of
from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find.difference.layouts import diverge_layouts
from msprobe_engine.formats.dump.dump_table import DumpTable, read_side
from msprobe_engine.measure import distances
from msprobe_engine.report.graph.compare_graphs import compare
from msprobe_engine.report.graph.merge import device_mesh, existing
from msprobe_engine.report.graph.merge.jobs import Members
from msprobe_engine.report.graph.merge.whole import in_order, whole
from msprobe_engine.report.graph.nodes.build import build
from msprobe_engine.report.graph.nodes.model import Comparison, Graph
from msprobe_engine.report.graph.options import GraphOptions, Layout
from msprobe_engine.report.graph.source import Job
from msprobe_engine.report.table.layout_tables import of_groups


def merged(job: Job, options: GraphOptions, problems: list[str], notes: list[str]) -> Graph | Comparison:
    """Make the graph of a job whose ranks are put together, or the comparison of two.

    Args:
        job: with `Job.members`.
        options: `layouts` says where each rank stands; without them the dumps do.
        problems: sentences about what could not be read are added.
        notes: sentences about what was left out, or differs between ranks that should agree, are added.

    Raises:
        DumpFormatError: no rank of a side can be read.
        UsageError: what was given contradicts the dumps, or they cannot be put together.
    """
    given: tuple[Layout | None, ...] = options.layouts or (None, None)
    target = _sides(job.members, given[0], problems)
    if not job.across:
        target = device_mesh.inferred(target)
    if job.golden is None:
        return _graph(target, job.step, options, notes)
    golden = _sides(job.golden_members, given[-1], problems)
    if not job.across:
        golden = device_mesh.inferred(golden)
    # merged graphs are matched without regard to the numbers of calls, which differ between ways to cut a model
    fuzzy = replace(options, fuzzy=True)
    if job.across:
        return _across(target, golden, job, fuzzy, notes)
    return compare(_graph(target, job.step, options, notes), _graph(golden, job.golden_step, options, notes), fuzzy)


def _sides(members: Members, given: Layout | None, problems: list[str]) -> dict[int, DumpTable]:
    found: dict[int, DumpTable] = {}
    for rank, path in members:
        try:
            side = read_side(path)
        except DumpFormatError as error:
            problems.append(f"{error}. The whole is without it")
            continue
        found[rank] = side if given is None else device_mesh.placed(given, rank, side)
        problems += [problem for problem in side.problems if problem not in problems]
    if not found:
        raise DumpFormatError(f"{members[0][1].parent.parent}: none of the {len(members)} ranks can be read")
    return found


def _graph(sides: dict[int, DumpTable], step: int, options: GraphOptions, notes: list[str]) -> Graph:
    made = whole(sides)
    notes += made.said
    if options.merge == "given":
        return existing.graph_of(made, sides, step)
    graph = build(made.side, step, made.ranks[0])
    for node, record in enumerate(graph.records):
        if record in made.notes:
            graph.merge_notes[node] = made.notes[record]
    return graph


def _across(target: dict[int, DumpTable], golden: dict[int, DumpTable], job: Job, options: GraphOptions, notes: list[str]) -> Comparison:
    """Two runs that were cut in different ways: what all ranks of each make together, in the same shapes. Rows that have no counterpart
    (parts of a sum, places within a cut table) are empty on both sides, and the notes of their nodes say why."""
    first, second, _ = together(target, golden, notes, notes)
    found = diverge_layouts(first, second)
    made = found.wholes[min(first)]
    graph = build(in_order(made.target), job.step, job.rank)
    other = build(in_order(made.golden), job.golden_step, job.golden_rank)
    side = made.target
    for one in (made.target, made.golden):  # columns that a copy shares with the ranks' own
        one.dtype, one.requires_grad = list(one.dtype), list(one.requires_grad)
    for row, reason in made.skipped.items():
        _note(graph, row, Sentence("not compared: {0}", reason))
    for row in list(of_groups(side)):
        _note(graph, row, Sentence("not compared: of a group of ranks ({0})", side.values[row]))
        _empty(side, row)
    for row in list(of_groups(made.golden)):
        _empty(made.golden, row)
    _level(graph, side, made.golden, made.structure.pairs)
    for row, n in made.made_of.items():
        _note(graph, row, Sentence("put together from {0} pieces", n))
    for row, rank in made.rank.items():
        _note(graph, row, Sentence("rank {0} differs from the others", rank))
    if made.factor != 1.0:
        notes.append(
            Sentence("the gradients are {0} times the golden run's until they are averaged; that was taken out.", f"{made.factor:g}")
        )
    for op, node in enumerate(graph.node_of_record):
        origin = origin_of(side, op)
        if node >= 0 and origin is not None:
            graph.merge_notes.setdefault(node, []).insert(0, Sentence("is {0} of rank {1}", origin[1], origin[0]))
    return compare(graph, other, options, found)


def _level(graph: Graph, target: DumpTable, golden: DumpTable, pairs: Sequence[tuple[int, int]]) -> None:
    """Take out what differs between rows beside each other because of how the runs are cut: whether autograd follows a tensor that was
    gathered, and arguments that one of them gives as a number, as a tensor, or not at all."""
    beside = distances.paired_rows(target, golden, pairs)[0]
    here, there = {i for i, _ in beside}, {j for _, j in beside}
    for x, y in pairs:
        for row in (row for row in target.rows(x) if row not in here):
            _note(graph, row, Sentence("not compared: the golden run has none"))
            _empty(target, row)
        for row in (row for row in golden.rows(y) if row not in there):
            _empty(golden, row)
    for i, j in beside:
        if target.requires_grad[i] != golden.requires_grad[j]:
            target.requires_grad[i] = golden.requires_grad[j] = None
        kinds = [(side.dtype[row] is None, row in side.values) for side, row in ((target, i), (golden, j))]
        if kinds[0] != kinds[1]:
            _note(graph, i, Sentence("not compared: {0} here, {1} in the golden run", target.dtype[i], golden.dtype[j]))
            _empty(target, i)
            _empty(golden, j)


def _empty(side: DumpTable, row: int) -> None:
    """Take a row out."""
    side.values.pop(row, None)
    side.requires_grad[row] = None
    side.dtype[row], side.shape[row], side.md5[row], side.nonfloat_stats[row] = None, None, None, (None, None, None, None)


def _note(graph: Graph, row: int, text: str) -> None:
    side = graph.side
    assert side is not None
    op = side.op[row]
    graph.merge_notes.setdefault(graph.node_of_record[op], []).append(Sentence("{0}: {1}", side.name[row][len(side.ops[op]) + 1 :], text))
