"""The graph of one rank of one step: every call below the call it ran in, in order of execution.

The rules are those of the existing tool (what they are is in `docs/guide/graph.md`), so that both make the same nodes of one dump. Where
its files say nothing, ours go on: a dump without construct.json is put together from the paths of the modules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from msprobe_engine.core import names
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.report.graph.nodes.micro_steps import set_micro_steps
from msprobe_engine.report.graph.nodes.model import API, API_COLLECTION, MODULE, ROOT, Graph

COLLECTION = "Apis_Between_Modules"
"""Name, without its number, of consecutive calls of functions between the modules at the top."""

_MODULES = ("Module.", "Cell.")
_WITH_CALLS = (*_MODULES, "Autograd.")
_FORWARD, _BACKWARD = f".{names.FORWARD}.", f".{names.BACKWARD}."
_FORWARD_END, _BACKWARD_END, _DEBUG_END = f".{names.FORWARD}", f".{names.BACKWARD}", ".debug"
_MOST_LEVELS = 200
"""Of modules within modules; of a name with more no parent is looked for by its path, which would take the square of its length."""


def build(side: DumpTable, step: int = 0, rank: int = 0, old: bool = False) -> Graph:
    """Make the graph of a side.

    Args:
        side: of any level and task; of task ``structure`` construct.json has all.
        step, rank: put into the graph.
        old: as 8.1.1, which leaves backward calls of modules where construct.json has them.

    Returns:
        A graph with at least the root; `Graph.problems` says what construct.json has that cannot be.
    """
    graph = Graph(step, rank, side)
    construct = {name: value for name, value in side.construct.items() if name != names.MICRO_STEP_KEY}
    parents = {name: parent for name, value in construct.items() if (parent := names.node_parent(value)) is not None}
    order, gradients = _in_order(side, construct)
    if not construct:
        parents = _parents_by_paths(order)
        graph.by_names = any(not name.endswith(_DEBUG_END) for name in side.ops)
    elif not old:
        _undo_displacements(parents, construct)
    _Builder(graph, side, parents, order).run()
    _add_gradients(graph, side, gradients)
    _collect_functions(graph)
    set_micro_steps(graph, construct)
    return graph


def type_of(name: str) -> int:
    """`MODULE` or `API`, by the name alone; nodes that are no record (``optimizer``), and custom autograd functions, which have calls
    inside of them, are of type `MODULE`, as in the existing tool."""
    if name.startswith(_WITH_CALLS):
        return MODULE
    return API if name.endswith((_FORWARD_END, _BACKWARD_END, _DEBUG_END)) else MODULE


def forward_of(name: str) -> str | None:
    """The forward call that a backward record belongs to; None of any other record."""
    if name.endswith(_BACKWARD_END):
        return f"{names.of_first_pass(name[: -len(_BACKWARD_END)])}{_FORWARD_END}"
    head, found, number = name.rpartition(_BACKWARD)
    return names.of_first_pass(f"{head}{_FORWARD}{number}") if found and number.isdecimal() else None


def backward_of(name: str) -> str | None:
    """The backward record of a forward call, first pass; None of any other record."""
    if name.endswith(_FORWARD_END):
        return f"{name[: -len(_FORWARD_END)]}{_BACKWARD_END}"
    head, found, number = name.rpartition(_FORWARD)
    return f"{head}{_BACKWARD}{number}" if found and number.isdecimal() else None


def _undo_displacements(parents: dict[str, str], construct: Mapping[str, object]) -> None:
    """A module whose backward hook is never called (it works in place) is never left: construct.json has the backward calls of all modules
    behind it inside of it. They go where their forward calls are: into the backward call of what encloses these, or, when they were made
    again in a backward pass, into the same one."""
    for name in construct:
        call = forward_of(name) if name.startswith(_MODULES) else None
        if call is None or call not in construct:
            continue
        above = parents.get(call)
        there = None if above is None else (backward_of(above) or above)
        if there is None:
            parents.pop(name, None)
        elif there in construct:
            parents[name] = there


def _in_order(side: DumpTable, construct: Mapping[str, object]) -> tuple[list[str], list[int]]:
    """Names of all nodes but gradients of parameters, in the order of construct.json, which also has calls that were not recorded; records
    that it has not come behind the record before them. And the records of gradients."""
    gradients = [record for record, name in enumerate(side.ops) if is_gradients(name)]
    skipped = set(gradients)
    if not construct:
        return [name for record, name in enumerate(side.ops) if record not in skipped], gradients
    behind: dict[str, list[str]] = {}
    before = ""
    for record, name in enumerate(side.ops):
        if record in skipped:
            continue
        if name in construct:
            before = name
        else:
            behind.setdefault(before, []).append(name)
    if not behind:
        return list(construct), gradients
    order = behind.pop("", [])
    for name in construct:
        order.append(name)
        order += behind.get(name, ())
    return order, gradients


def is_gradients(name: str) -> bool:
    """``X.parameters_grad`` or ``X.parameters_grad.<n>``."""
    return ".parameters_grad" in name and name.startswith(_MODULES) and "parameters_grad" in name.split(".")[-2:]


class _Builder:
    """Adds the nodes, parents before their children."""

    def __init__(self, graph: Graph, side: DumpTable, told: Mapping[str, str], order: list[str]) -> None:
        self.graph, self.side, self.told, self.order = graph, side, told, order
        self.known: dict[str, int] = {graph.names[ROOT]: ROOT}
        self.records = {name: record for record, name in enumerate(side.ops)}
        self.names = {*order, *told.values()}
        self.stack = stack_finder(side)
        self.circles = 0

    def run(self) -> None:
        for name in self.order:
            if name not in self.known:
                self.place(name)
        self.sort()
        if self.circles:
            self.graph.problems.append(
                Sentence(
                    "{0}: {1} records enclose each other; they hang below the root",
                    self.side.path.parent / "construct.json",
                    f"{self.circles:,}",
                )
            )

    def sort(self) -> None:
        """Children in the order of construct.json; those that are no records themselves are where the first of what they enclose is."""
        at = {name: place for place, name in enumerate(self.order)}
        graph = self.graph
        places = [at.get(name, -1) for name in graph.names]
        for node in range(len(graph) - 1, 0, -1):  # parents stand before their children
            if places[node] < 0:
                places[node] = min((places[child] for child in graph.children[node]), default=len(at))
        for children in graph.children:
            if len(children) > 1:
                children.sort(key=places.__getitem__)

    def place(self, name: str) -> None:
        """Add a node and what encloses it and is not there yet."""
        chain, seen, above = [name], {name}, self.parent(name)
        while above is not None and above not in self.known:
            if above in seen:
                self.circles += 1
                above = None
                break
            chain.append(above)
            seen.add(above)
            above = self.parent(above)
        node = ROOT if above is None else self.known[above]
        for ancestor in reversed(chain):
            node = self.known[ancestor] = self.graph.add(
                ancestor, type_of(ancestor), node, self.records.get(ancestor, -1), self.stack(ancestor)
            )

    def parent(self, name: str) -> str | None:
        """What encloses a node. A backward record of which it is not told has its place where its forward call has its own."""
        found = self.told.get(name)
        if found is not None:
            return found
        call = forward_of(name)
        above = self.told.get(call) if call is not None else None
        twin = backward_of(above) if above is not None else None
        return twin if twin in self.names else None


def stack_finder(side: DumpTable) -> Callable[[str], tuple[str, ...]]:
    """Name -> its call stack, innermost line first; a backward record has that of its forward call. Equal stacks are one object."""
    made: dict[int, tuple[str, ...]] = {}
    stacks = side.stacks

    def find(name: str) -> tuple[str, ...]:
        lines = stacks.get(name)
        if lines is None:
            call = forward_of(name)
            lines = stacks.get(call) if call is not None else None
            if lines is None:
                return ()
        found = made.get(id(lines))
        if found is None:
            found = made[id(lines)] = tuple(map(str, lines))
        return found

    return find


def _parents_by_paths(order: list[str]) -> dict[str, str]:
    """Of a dump without construct.json: a module's call ran in the call of the nearest module whose path begins its own. Which of several
    calls is told by the numbers: of twice as many calls two belong to each."""
    calls: Counter[tuple[str, str, str]] = Counter()
    modules: list[tuple[str, names.ModuleName]] = []
    for name in order:
        parsed = names.parse(name) if name.startswith(_MODULES) else None
        if isinstance(parsed, names.ModuleName):
            modules.append((name, parsed))
            calls[parsed.kind, parsed.path, parsed.direction] += 1
    classes = {(parsed.kind, parsed.path): parsed.cls for _, parsed in modules}
    existing = {name for name, _ in modules}
    parents = {}
    for name, parsed in modules:
        above = parsed.path.rpartition(".")[0] if parsed.path.count(".") <= _MOST_LEVELS else ""
        while above and (parsed.kind, above, parsed.direction) not in calls:
            above = above.rpartition(".")[0]
        if not above:
            continue
        outer, own = calls[parsed.kind, above, parsed.direction], calls[parsed.kind, parsed.path, parsed.direction]
        number = names.of_first_pass(f".{parsed.number}").lstrip(".")
        found = f"{parsed.kind}.{above}.{classes[parsed.kind, above]}.{parsed.direction}.{int(number) * outer // own}"
        if found in existing:
            parents[name] = found
    return parents


def _add_gradients(graph: Graph, side: DumpTable, records: list[int]) -> None:
    """Gradients of a module's parameters are a child of its last backward call, else of its last forward call, else of the root. Those that
    were never filled in become no node."""
    records = [record for record in records if any(side.dtype[row] is not None for row in side.rows(record))]
    if not records:
        return
    there = set(graph.names)  # a damaged construct.json may say that something ran inside of gradients
    last: dict[tuple[str, str], int] = {}
    for node, name in enumerate(graph.names):
        if name.startswith(_MODULES):
            for word in (_FORWARD, _BACKWARD):
                head, found, _ = name.rpartition(word)
                if found:
                    last[word, head] = node
    for record in records:
        name = side.ops[record]
        if name in there:
            continue
        there.add(name)
        head = name.rpartition(".parameters_grad")[0]
        parent = last.get((_BACKWARD, head), last.get((_FORWARD, head), ROOT))
        graph.add(name, MODULE, parent, record)


def _collect_functions(graph: Graph) -> None:
    """Two or more calls of functions that follow each other at the top become children of a collection."""
    if graph.side is not None and graph.side.ops and all(name.endswith(_DEBUG_END) for name in graph.side.ops):
        return  # what was saved one by one is looked at one by one
    at_top: list[int] = []
    run: list[int] = []
    number = 0

    def flush_run() -> None:
        nonlocal number
        if len(run) < 2:
            at_top.extend(run)
        else:
            node = graph.add(f"{COLLECTION}.{number}", API_COLLECTION, -1)
            number += 1
            graph.parents[node] = ROOT
            graph.children[node] = list(run)
            for child in run:
                graph.parents[child] = node
            at_top.append(node)
        run.clear()

    for node in graph.children[ROOT]:
        if graph.types[node] == API:
            run.append(node)
        else:
            flush_run()
            at_top.append(node)
    flush_run()
    graph.children[ROOT] = at_top
