"""A dump of one rank in one step as a hierarchy of nodes, and two of them beside each other.

Columns with one item per node, as `formats.dump.dump_table.DumpTable` has columns with one item per row: 200,000 nodes are lists, no
objects. Numbers of nodes are positions in these columns. Node 0 is the root. What stands in the tensors and arguments of a node stays in
the columns of its `DumpTable`; a node names its record there.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from msprobe_engine.formats.dump.dump_table import OUTPUT, DumpTable

if TYPE_CHECKING:
    from msprobe_engine.find.difference.rank_walk import RankWalk

ROOT = 0
ROOT_NAME = "DefaultModel"
MODULE, API, MULTI_COLLECTION, API_COLLECTION = 0, 1, 8, 9
"""Types of nodes, with the numbers of the existing tool. Gradients of parameters are of type `MODULE`."""

TaskOfGraph = Literal["summary", "md5", "all", "structure"]
"""What two graphs were compared by, in the words of the existing files: statistics, checksums, saved tensors, nothing but structure."""

Cell = str | float | int | None
Items = dict[str, dict[str, str]]
"""Row name -> its fields and, in a comparison, its metrics, all as text: what the existing formats hold of a node's inputs or outputs."""


class Link(NamedTuple):
    """The calls of other ranks that a communication call belongs together with.

    Attributes:
        communications_type: ``send``, ``receive`` or ``send_receive``.
        nodes_info: rank -> (precision index or overflow level of that node, None when it has none; name of that node).
    """

    communications_type: str
    nodes_info: dict[int, tuple[Cell, str]]


@dataclass
class Graph:
    """Attributes, all columns with one item per node:

    names: record names, collections and the root under the names of the existing tool; each once.
    types: `MODULE`, `API`, `MULTI_COLLECTION`, `API_COLLECTION`.
    parents: the enclosing node, -1 of the root. A parent may stand behind its children.
    children: in order of execution.
    records: record of `side`, -1 of nodes without one (the root, collections, modules of which nothing was recorded).
    micro_steps: counted from 0.
    stacks: call stack, innermost line first; equal stacks are one object.
    overflow: ``critical``, ``high``, ``medium`` or None; all None unless they were asked for.

    And of the whole:
        step, rank: numbers; rank 0 when the dump names none.
        side: rows of the nodes; of a merged graph those that merging made. None: of structure nothing else is known.
        links: node -> the calls of other ranks it communicates with; several of a call that sends and receives at once
            (``batch_isend_irecv``).
        merge_notes: node -> sentences on how it was made of several ranks.
        micro_step_count: at least 1.
        problems: sentences about what could not be made of the dump.
        by_names: construct.json says nothing; the hierarchy was made of the names of modules and the order of calls.
        suspect: where the first NaN or Inf of the rank is made; None: none, or there are two sides (`Comparison.suspect`).
        suspect_text: a sentence on it, "" when there is none.
        leading: the suspect is the first one over all ranks and steps.
    """

    step: int
    rank: int
    side: DumpTable | None
    names: list[str] = field(default_factory=lambda: [ROOT_NAME])
    types: list[int] = field(default_factory=lambda: [MODULE])
    parents: list[int] = field(default_factory=lambda: [-1])
    children: list[list[int]] = field(default_factory=lambda: [[]])
    records: list[int] = field(default_factory=lambda: [-1])
    micro_steps: list[int] = field(default_factory=lambda: [0])
    stacks: list[tuple[str, ...]] = field(default_factory=lambda: [()])
    overflow: list[str | None] = field(default_factory=lambda: [None])
    links: dict[int, tuple[Link, ...]] = field(default_factory=dict)
    merge_notes: dict[int, list[str]] = field(default_factory=dict)
    micro_step_count: int = 1
    problems: list[str] = field(default_factory=list)
    by_names: bool = False
    suspect: int | None = None
    suspect_text: str = ""
    leading: bool = False

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def index(self) -> dict[str, int]:
        """Name -> node. Names must not change after the first use."""
        return {name: node for node, name in enumerate(self.names)}

    def add(self, name: str, kind: int, parent: int, record: int = -1, stack: tuple[str, ...] = ()) -> int:
        """Append a node as the last child of `parent` (-1: of none yet) and return its number."""
        node = len(self.names)
        self.names.append(name)
        self.types.append(kind)
        self.parents.append(parent)
        self.children.append([])
        self.records.append(record)
        self.micro_steps.append(0)
        self.stacks.append(stack)
        self.overflow.append(None)
        if parent >= 0:
            self.children[parent].append(node)
        return node

    def rows(self, node: int) -> range:
        """All rows of a node in `side`: inputs, parameters, outputs; empty when there is no record."""
        record = self.records[node]
        return range(0) if self.side is None or record < 0 else self.side.rows(record)

    def inputs(self, node: int) -> list[int]:
        """Rows that the existing tool shows as ``input_data``: arguments, parameters of a module, gradients of parameters."""
        return [] if self.side is None else [row for row in self.rows(node) if self.side.role[row] != OUTPUT]

    def outputs(self, node: int) -> list[int]:
        """Rows that the existing tool shows as ``output_data``."""
        return [] if self.side is None else [row for row in self.rows(node) if self.side.role[row] == OUTPUT]

    def ancestors(self, node: int, most: int) -> list[int]:
        """The root, ..., the parent of the node; empty for the root. Of more than `most` the nearest."""
        found: list[int] = []
        node = self.parents[node]
        while node >= 0 and len(found) < most:
            found.append(node)
            node = self.parents[node]
        return found[::-1]

    @cached_property
    def node_of_record(self) -> array[int]:
        """Record of `side` -> its node, -1 where it became none."""
        found = array("q", [-1]) * (len(self.side.ops) if self.side is not None else 0)
        for node, record in enumerate(self.records):
            if record >= 0:
                found[record] = node
        return found


Metrics = Callable[[int], Mapping[str, Mapping[str, Cell]]]
"""Target node -> row name of the target -> column -> value; nothing for a node without partner."""


def _no_metrics(_node: int) -> Mapping[str, Mapping[str, Cell]]:
    return {}


@dataclass
class Comparison:
    """Two graphs of one rank and step. All of it can be pickled: ranks are compared in other processes.

    Attributes:
        partners: target node -> golden node, -1 where it has none.
        golden_partners: golden node -> target node, -1.
        index: per target node 0 (pass), 0.5 (warning) or 1 (error) in the dialect of 26.2.0; None without a partner or record.
        index_of_811: makes the numbers of 8.1.1 when they are asked for (`index_811`).
        units: float64 per target node: largest difference of its outputs in multiples of round-off; NaN: nothing to compare, inf: a value
            that is not finite on one side only.
        suspect: target node where the first difference begins; None: none.
        suspect_text: a sentence on it, "" when there is none.
        leading: the suspect is the first one over all ranks and steps.
        metrics: per node, what the rows of both sides differ by.
        by_structure: target nodes whose partner has another name and was found by the place in the hierarchy, not by the rules of the
            existing tool.
        needless: nodes of the target and of the golden side without a partner that need none: of two frameworks, calls that compute
            nothing, or that the other one has as a part of another call.
        golden_rows: row of the target's side -> row of the golden's side, int64, -1 where it has none; None until they are matched.
        begun: the walk of the diagnosis through both sides, for that of all ranks; it does not go into other processes or files.
    """

    target: Graph
    golden: Graph
    task: TaskOfGraph
    partners: list[int]
    golden_partners: list[int]
    index: list[float | None]
    units: npt.NDArray[np.float64]
    index_of_811: Callable[[], list[float | None]] | None = None
    suspect: int | None = None
    suspect_text: str = ""
    leading: bool = False
    metrics: Metrics = _no_metrics
    by_structure: set[int] = field(default_factory=set)
    needless: tuple[set[int], set[int]] = field(default_factory=lambda: (set(), set()))
    golden_rows: npt.NDArray[np.int64] | None = None
    begun: RankWalk | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"begun": None}

    @cached_property
    def index_811(self) -> list[float | None]:
        """Per target node the number in [0, 1] of 8.1.1 (with checksums 1 means equal); None without a partner or record."""
        return self.index if self.index_of_811 is None else self.index_of_811()

    @property
    def step(self) -> int:
        return self.target.step

    @property
    def rank(self) -> int:
        return self.target.rank
