"""The graph of the ranks of one job, and the pair of two such.

A whole in the form of the existing tool (26.2.0): what ranks do at the top stands side by side, and calls of functions bear their rank.

Calls between the modules at the top are not merged: the k-th run of them on each rank becomes ``Apis_Between_Modules_Rank{r}.k``, all of
those ``Apis_Between_Modules_All_Ranks.k``. ``Tensor.add.3.forward`` of rank 2 is ``Tensor.add_rank2.3.forward``; those of the first rank,
and of ranks that were merged with it, keep their names. Layers have the numbers of the whole model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from msprobe_engine.align.parallel import micro_batches
from msprobe_engine.align.parallel.experts import together
from msprobe_engine.align.parallel.merge_records import ORIGIN, origin_of
from msprobe_engine.core import names
from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find.difference.layouts import diverge_layouts
from msprobe_engine.formats.dump.dump_table import PARAMETERS, DumpTable
from msprobe_engine.formats.dump.read_table import read_side
from msprobe_engine.measure import distances
from msprobe_engine.report.graph.compare_graphs import compare
from msprobe_engine.report.graph.job import Job
from msprobe_engine.report.graph.merge import device_mesh
from msprobe_engine.report.graph.merge.jobs import Members
from msprobe_engine.report.graph.merge.merge_ranks import MergedRanks, in_order, merge_ranks
from msprobe_engine.report.graph.nodes.build import COLLECTION, build
from msprobe_engine.report.graph.nodes.model import API_COLLECTION, ROOT, Comparison, Graph
from msprobe_engine.report.graph.options import GraphOptions, Layout
from msprobe_engine.report.table.layout_tables import of_groups


def build_merged_graph(job: Job, options: GraphOptions, problems: list[str], notes: list[str]) -> Graph | Comparison:
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
        target = device_mesh.infer_meshes(target)
    if job.golden is None:
        return _graph(target, job.step, options, notes)
    golden = _sides(job.golden_members, given[-1], problems)
    if not job.across:
        golden = device_mesh.infer_meshes(golden)
    # merged graphs are matched without regard to the numbers of calls, which differ between ways to cut a model
    fuzzy = replace(options, fuzzy=True)
    if job.across:
        return _across(target, golden, job, fuzzy, notes)
    return compare(_graph(target, job.step, options, notes), _graph(golden, job.golden_step, options, notes), fuzzy)


def _sides(members: Members, given: Layout | None, problems: list[str]) -> dict[int, DumpTable]:
    side_of: dict[int, DumpTable] = {}
    for rank, path in members:
        try:
            side = read_side(path)
        except DumpFormatError as error:
            problems.append(f"{error}. The whole is without it")
            continue
        side_of[rank] = side if given is None else device_mesh.add_mesh_to_header(given, rank, side)
        problems += [problem for problem in side.problems if problem not in problems]
    if not side_of:
        raise DumpFormatError(f"{members[0][1].parent.parent}: none of the {len(members)} ranks can be read")
    return side_of


def _graph(sides: dict[int, DumpTable], step: int, options: GraphOptions, notes: list[str]) -> Graph:
    made = merge_ranks(sides)
    notes += made.said
    if options.merge == "given":
        return graph_of(made, sides, step)
    graph = build(made.side, step, made.ranks[0])
    for node, record in enumerate(graph.records):
        if record in made.notes:
            graph.merge_notes[node] = made.notes[record]
    return graph


def _across(target: dict[int, DumpTable], golden: dict[int, DumpTable], job: Job, options: GraphOptions, notes: list[str]) -> Comparison:
    """Two runs that were cut in different ways: what all ranks of each make together, in the same shapes. Rows that have no counterpart
    (parts of a sum, places within a cut table) are empty on both sides, and the notes of their nodes say why."""
    target_ranks, golden_ranks, _ = together(target, golden, notes, notes)
    divergence = diverge_layouts(target_ranks, golden_ranks)
    made = divergence.wholes[min(target_ranks)]
    graph = build(in_order(made.target), job.step, job.rank)
    golden_graph = build(in_order(made.golden), job.golden_step, job.golden_rank)
    target_table = made.target
    for table in (made.target, made.golden):  # columns that a copy shares with the ranks' own
        table.dtype, table.requires_grad = list(table.dtype), list(table.requires_grad)
    for row, reason in made.plan.skipped.items():
        _add_row_note(graph, row, Sentence("not compared: {0}", reason))
    for row in list(of_groups(target_table)):
        _add_row_note(graph, row, Sentence("not compared: of a group of ranks ({0})", target_table.values[row]))
        _empty(target_table, row)
    for row in list(of_groups(made.golden)):
        _empty(made.golden, row)
    _level(graph, target_table, made.golden, made.structure.pairs)
    for row, n in made.plan.made_of.items():
        _add_row_note(graph, row, Sentence("put together from {0} pieces", n))
    for row, rank in made.plan.rank.items():
        _add_row_note(graph, row, Sentence("rank {0} differs from the others", rank))
    if made.plan.factor != 1.0:
        notes.append(
            Sentence("the gradients are {0} times the golden run's until they are averaged; that was taken out.", f"{made.plan.factor:g}")
        )
    for op, node in enumerate(graph.node_of_record):
        origin = origin_of(target_table, op)
        if node >= 0 and origin is not None:
            graph.merge_notes.setdefault(node, []).insert(0, Sentence("is {0} of rank {1}", origin[1], origin[0]))
    return compare(graph, golden_graph, options, divergence)


def _level(graph: Graph, target: DumpTable, golden: DumpTable, pairs: Sequence[tuple[int, int]]) -> None:
    """Take out what differs between rows beside each other because of how the runs are cut: whether autograd follows a tensor that was
    gathered, and arguments that one of them gives as a number, as a tensor, or not at all."""
    paired = distances.paired_rows(target, golden, pairs)[0]
    target_rows, golden_rows = {target_row for target_row, _ in paired}, {golden_row for _, golden_row in paired}
    for target_record, golden_record in pairs:
        for row in (row for row in target.rows(target_record) if row not in target_rows):
            _add_row_note(graph, row, Sentence("not compared: the golden run has none"))
            _empty(target, row)
        for row in (row for row in golden.rows(golden_record) if row not in golden_rows):
            _empty(golden, row)
    for target_row, golden_row in paired:
        if target.requires_grad[target_row] != golden.requires_grad[golden_row]:
            target.requires_grad[target_row] = golden.requires_grad[golden_row] = None
        kinds = [(side.dtype[row] is None, row in side.values) for side, row in ((target, target_row), (golden, golden_row))]
        if kinds[0] != kinds[1]:
            _add_row_note(
                graph,
                target_row,
                Sentence("not compared: {0} here, {1} in the golden run", target.dtype[target_row], golden.dtype[golden_row]),
            )
            _empty(target, target_row)
            _empty(golden, golden_row)


def _empty(side: DumpTable, row: int) -> None:
    """Take a row out."""
    side.values.pop(row, None)
    side.requires_grad[row] = None
    side.dtype[row], side.shape[row], side.md5[row], side.nonfloat_stats[row] = None, None, None, (None, None, None, None)


def _add_row_note(graph: Graph, row: int, text: str) -> None:
    side = graph.side
    assert side is not None
    op = side.op[row]
    graph.merge_notes.setdefault(graph.node_of_record[op], []).append(Sentence("{0}: {1}", side.name[row][len(side.ops[op]) + 1 :], text))


ALL_RANKS, OF_RANK = f"{COLLECTION}_All_Ranks.", f"{COLLECTION}_Rank"
_KEPT = "Autograd."
"""Custom functions have calls inside of them and keep their names, as modules do."""


def graph_of(whole: MergedRanks, sides: Mapping[int, DumpTable], step: int) -> Graph:
    """Draw a whole in that form.

    Args:
        whole: of all ranks of a model copy.
        sides: those ranks, as they were dumped.
    """
    made = _Form(whole, sides)
    graph = build(made.side, step, whole.ranks[0])
    for node, name in enumerate(graph.names):
        if name.startswith((ALL_RANKS, OF_RANK)):
            graph.types[node] = API_COLLECTION
        if name in made.notes:
            graph.merge_notes[node] = made.notes[name]
    return graph


def with_rank(name: str, rank: int) -> str:
    """A record's name that says its rank.

    >>> with_rank("Tensor.add.3.forward", 2)
    'Tensor.add_rank2.3.forward'
    """
    parsed = names.parse(name)
    if isinstance(parsed, names.ApiName):
        return str(parsed._replace(api=f"{parsed.api}_rank{rank}"))
    if isinstance(parsed, (names.ModuleName, names.ParametersGradName)):
        return str(parsed._replace(cls=f"{parsed.cls}_rank{rank}"))
    return f"{name}_rank{rank}"


class _Form:
    """Writes the records of a whole into a side of its own, in the order of the graph."""

    def __init__(self, whole: MergedRanks, sides: Mapping[int, DumpTable]) -> None:
        self.whole, self.sides, self.first = whole, sides, whole.ranks[0]
        self.graph = build(whole.side)
        self.side = DumpTable(whole.side.path, header=whole.side.header, recovered=whole.side.recovered, problems=whole.side.problems)
        self.notes: dict[str, list[str]] = {}
        self.construct: dict[str, Any] = {}
        self.stacks: dict[str, list[str]] = {}
        mesh = device_mesh.mesh_of_header(sides[self.first].header)
        self.chunk = "0." if mesh is not None and mesh[1].get("vpp", 1) > 1 else ""
        self.named: dict[str, str] = {}  # record of the whole -> its name here
        self.taken: set[str] = set()
        # the names of the first rank come first: where two are called alike, the other one says its rank
        for record in sorted(range(len(whole.side.ops)), key=lambda one: self.origin(one)[0] != self.first):
            self.named[whole.side.ops[record]] = self.name(record)
        self.of_ranks = {rank: self.between(side, rank) for rank, side in sorted(sides.items())}
        self.write()
        self.side.construct, self.side.stacks = self.construct, self.stacks

    def origin(self, record: int) -> tuple[int, str]:
        """(rank, name there) of a record of the whole."""
        return origin_of(self.whole.side, record) or (self.first, self.whole.side.ops[record])

    def name(self, record: int) -> str:
        """Of a record of the whole: the call number of its rank, the path of the whole model, and where two are called alike its rank."""
        whole = self.whole.side.ops[record]
        rank, name = self.origin(record)
        parsed, own = names.parse(whole), names.parse(name)
        match parsed, own:
            case names.ModuleName(), names.ModuleName():
                full_name = str(parsed._replace(path=self.chunk + parsed.path, number=own.number))
            case names.ParametersGradName(), names.ParametersGradName():
                full_name = str(parsed._replace(path=self.chunk + parsed.path, number=own.number))
            case _:
                full_name = name if rank == self.first or name.startswith(_KEPT) else with_rank(name, rank)
        if full_name in self.taken:
            full_name = with_rank(full_name, rank)
        while full_name in self.taken:
            full_name += "_"
        self.taken.add(full_name)
        return full_name

    def between(self, side: DumpTable, rank: int) -> list[list[tuple[int, str]]]:
        """The runs of calls between modules that one rank makes: records of its dump, with their names here."""
        graph = build(side)
        runs = [node for node in graph.children[ROOT] if graph.types[node] == API_COLLECTION]
        rename = (lambda name: name) if rank == self.first else (lambda name: with_rank(name, rank))
        return [[(graph.records[child], rename(graph.names[child])) for child in graph.children[node]] for node in runs]

    def write(self) -> None:
        """All nodes at the top, in their order; runs of calls where the first rank has them."""
        graph = self.graph
        first_runs = {name: k for k, run in enumerate(self.of_ranks[self.first]) for _, name in run}
        in_runs = {name for runs in self.of_ranks.values() for run in runs for _, name in run}
        written: set[int] = set()
        for node in graph.children[ROOT]:
            if graph.types[node] != API_COLLECTION:
                self.write_tree(node)
                continue
            for child in graph.children[node]:
                name = self.named.get(graph.names[child], graph.names[child])
                k = first_runs.get(name)
                if name not in in_runs:
                    self.write_tree(child)  # alone between two modules on its rank
                elif k is not None and k not in written:
                    written.add(k)
                    self.write_run(k)
        for k in range(max(map(len, self.of_ranks.values()), default=0)):
            if k not in written:
                self.write_run(k)

    def write_run(self, k: int) -> None:
        """The k-th run of calls of each rank."""
        around = f"{ALL_RANKS}{k}"
        self.construct[around] = None
        for rank, runs in self.of_ranks.items():
            if k >= len(runs):
                continue
            inside = f"{OF_RANK}{rank}.{k}"
            self.construct[inside] = around
            side = self.sides[rank]
            for record, name in runs[k]:
                self.construct[name] = inside
                if record >= 0:
                    self.add(side, record, name)

    def write_tree(self, top: int) -> None:
        """A node at the top of the whole with all that is inside of it."""
        graph, side = self.graph, self.whole.side
        waiting: list[tuple[int, str | None]] = [(top, None)]
        while waiting:
            node, parent = waiting.pop()
            record = graph.records[node]
            name = self.named.get(graph.names[node], graph.names[node])
            gradients = record >= 0 and ".parameters_grad" in graph.names[node]
            if not gradients:
                value = side.construct.get(graph.names[node])
                self.construct[name] = [parent, *value[1:]] if isinstance(value, list) and value else parent
            if record >= 0:
                self.add(side, record, name)
                if record in self.whole.notes:
                    self.notes[name] = self.whole.notes[record]
            waiting += [(child, name) for child in reversed(graph.children[node])]

    def add(self, source: DumpTable, record: int, name: str) -> None:
        """Append a record under another name."""
        side, old = self.side, source.ops[record]
        micro_batches.append(side, source, record)
        place = len(side.ops) - 1
        side.ops[place] = name
        if name != old:
            side.tags[place] = {ORIGIN: {"rank": self.rank_of(source, record), "record": old}, **side.tags.get(place, {})}
            for row in side.rows(place):
                side.name[row] = name + side.name[row][len(old) :]
        side.data_name[side.offsets[place] :] = [""] * len(side.rows(place))  # saved tensors lie in the directories of several ranks
        lines = source.stacks.get(old)
        if lines is not None:
            self.stacks[name] = lines

    def rank_of(self, source: DumpTable, record: int) -> int:
        origin = origin_of(source, record)
        return origin[0] if origin else next((rank for rank, side in self.sides.items() if side is source), self.first)


def weights(made: Graph | Comparison) -> dict[str, bytes]:
    """Name of a parameter -> its statistics where it is first shown, of the target; nothing of ranks of which it is not known whether they
    hold the same."""
    graph = made.target if isinstance(made, Comparison) else made
    side = graph.side
    found: dict[str, bytes] = {}
    if side is not None and device_mesh.mesh_of_header(side.header) is not None:
        for row, role in enumerate(side.role):
            if role == PARAMETERS:
                found.setdefault(side.name[row], side.numbers[4 * row : 4 * row + 4].tobytes())
    return found
