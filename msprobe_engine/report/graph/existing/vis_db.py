"""Writes graphs as the SQLite file of 26.2.0 (``*.vis.db``), which its TensorBoard plugin opens; one file for all ranks and steps.

Tables, columns and indexes: section 8.8 of the description of the existing tool, held to its own files by `tests/graph`. Nodes are numbered
from the innermost outwards, a node after its children, and the plugin draws siblings in that order. The file is in rollback journal mode:
what sqlite keeps beside a file in the mode of the existing tool (WAL) would have to be copied along with it.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from msprobe_engine.core.errors import SinkError
from msprobe_engine.core.io.output_files import WholeFile
from msprobe_engine.core.io.regular_files import explain
from msprobe_engine.core.io.safe_cells import utf8
from msprobe_engine.core.io.sqlite_file import explain_database
from msprobe_engine.report.graph.existing import vis_texts
from msprobe_engine.report.graph.existing.items import saved_tensors, texts
from msprobe_engine.report.graph.nodes.model import ROOT, Comparison, Graph, Link
from msprobe_engine.report.graph.writer import Plan

TARGET, GOLDEN = "NPU", "Bench"
"""Names of the sides in the files of both releases."""

_NODES = (
    "id TEXT PRIMARY KEY, graph_id TEXT NOT NULL, node_order INTEGER NOT NULL, node_name TEXT NOT NULL, node_type TEXT NOT NULL, "
    "up_node TEXT, sub_nodes TEXT, precision_index INTEGER, overflow_level TEXT, micro_step_id INTEGER NOT NULL, "
    "matched_node_link TEXT, stack_id TEXT, parallel_merge_info TEXT, matched_distributed TEXT, modified INTEGER NOT NULL, "
    "input_data TEXT, output_data TEXT, data_source TEXT, dump_data_dir TEXT, step INTEGER NOT NULL, rank INTEGER NOT NULL, "
    "is_distributed INTEGER"
)
_STACKS = "id TEXT PRIMARY KEY, stack_info TEXT"
_CONFIG = (
    "id TEXT PRIMARY KEY, graph_type TEXT NOT NULL, task TEXT, tool_tip TEXT, micro_steps INTEGER, overflow_check INTEGER, "
    "node_colors TEXT NOT NULL, rank_list TEXT NOT NULL, step_list TEXT NOT NULL"
)
_INDEXES = (
    "step, rank, data_source, up_node, node_order",
    "step, rank, data_source, node_name",
    "step, rank, data_source, node_order",
    "step, rank, node_order",
    "step, rank, micro_step_id, node_order",
    "step, rank, modified, matched_node_link",
    "is_distributed",
)
_CALL = "Distributed."
_MOST_LEVELS = 100
_PAGE = 32768
"""Bytes of a page: a row of 2 KB leaves a quarter of the usual 4 KB empty, or fills a chain of them that every index has to walk."""


class VisDbWriter:
    """One file; graphs are in it as they come, and it has its name when all are.

    Raises:
        SinkError: the file cannot be made.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._path = plan.output / f"{plan.word}_{plan.stamp}.vis.db"
        self._task = ""
        self._micro_steps = 1
        try:
            # The name does not end in .vis.db, so that a plugin that looks at the directory does not open it half written.
            self._whole = WholeFile(self._path)
            self._connection = sqlite3.connect(self._whole.temporary, isolation_level=None)
            # A broken run leaves nothing, so nothing has to be rolled back.
            for line in (f"PRAGMA page_size={_PAGE}", "PRAGMA journal_mode=OFF", "PRAGMA synchronous=OFF", "BEGIN"):
                self._connection.execute(line)
            for table, columns in (("tb_nodes", _NODES), ("tb_stack", _STACKS), ("tb_config", _CONFIG)):
                self._connection.execute(f"CREATE TABLE {table} ({columns})")
        except OSError as error:
            raise self._build_sink_error(error) from error
        except sqlite3.Error as error:
            self.abort()
            raise self._build_sink_error(error) from error

    def add(self, made: Graph | Comparison) -> None:
        """Take the next one.

        Raises:
            SinkError: it cannot be written.
        """
        sides: list[tuple[str, Graph]] = [(TARGET, made)] if isinstance(made, Graph) else [(TARGET, made.target), (GOLDEN, made.golden)]
        if isinstance(made, Comparison):
            self._task = made.task
        self._micro_steps = max(self._micro_steps, *(graph.micro_step_count for _, graph in sides))
        marks = ",".join("?" * (_NODES.count(",") + 1))
        try:
            for source, graph in sides:
                stacks = _Stacks(f"{source}_{made.step}_{made.rank}")
                rows = _rows(source, graph, made, stacks)
                self._connection.executemany(f"INSERT INTO tb_nodes VALUES ({marks})", rows)
                self._connection.executemany("INSERT INTO tb_stack VALUES (?, ?)", stacks.rows())
        except (OSError, sqlite3.Error) as error:
            raise self._build_sink_error(error) from error

    def finish(self) -> list[Path]:
        """Indexes and the settings of the whole; then the file has its name.

        Raises:
            SinkError: it cannot be written.
        """
        steps, ranks = (sorted({place[i] for place in self._plan.places}) for i in range(2))
        comparing = self._plan.comparing
        config = (
            "1",
            self._plan.word,
            self._task,
            json.dumps(vis_texts.tool_tip(self._task)) if comparing else None,
            self._micro_steps,
            int(self._plan.options.overflow),
            json.dumps(vis_texts.colours_262(self._task) if comparing else None),
            json.dumps(ranks),
            json.dumps(steps),
        )
        try:
            self._connection.execute(f"INSERT INTO tb_config VALUES ({','.join('?' * len(config))})", config)
            for number, columns in enumerate(_INDEXES, 1):
                self._connection.execute(f"CREATE INDEX index{number} ON tb_nodes ({columns})")
            self._connection.execute("COMMIT")
            self._connection.execute("PRAGMA journal_mode=DELETE")
            self._connection.close()
            self._whole.commit()
        except (OSError, sqlite3.Error) as error:
            raise self._build_sink_error(error) from error
        return [self._path]

    def abort(self) -> None:
        with suppress(sqlite3.Error, AttributeError):
            self._connection.close()
        self._whole.abort()

    def _build_sink_error(self, error: OSError | sqlite3.Error) -> SinkError:
        why = explain_database(error, self._whole.temporary) if isinstance(error, sqlite3.Error) else explain(error, path=self._path)
        return SinkError(f"cannot write {self._path}: {why}")


class _Stacks:
    """Distinct stacks of one graph, numbered as they come."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._numbers: dict[tuple[str, ...], int] = {}

    def key(self, stack: tuple[str, ...]) -> str:
        return f"{self._prefix}_{self._numbers.setdefault(stack, len(self._numbers))}"

    def rows(self) -> Iterator[tuple[str, str]]:
        for stack, number in self._numbers.items():
            yield f"{self._prefix}_{number}", json.dumps(stack)


def outwards(graph: Graph) -> Iterator[int]:
    """All nodes, each after its children, which are in order of execution."""
    open_nodes = [(ROOT, 0)]
    while open_nodes:
        node, at = open_nodes.pop()
        if at < len(graph.children[node]):
            open_nodes += [(node, at + 1), (graph.children[node][at], 0)]
        else:
            yield node


def link_text(links: tuple[Link, ...]) -> str:
    """``matched_distributed`` of a node."""
    if not links:
        return "{}"
    encoded = [encode_link(link) for link in links]
    return json.dumps(encoded if len(encoded) > 1 else encoded[0])


def encode_link(link: Link) -> dict[str, Any]:
    """One link; the other node has no index or level: ``Nan``, as in the files of the existing tool."""
    info = {str(rank): ["Nan" if index is None else str(index), utf8(name)] for rank, (index, name) in link.nodes_info.items()}
    return {"communications_type": link.communications_type, "nodes_info": info}


def partner_path(made: Graph | Comparison, source: str, node: int) -> list[str]:
    """Names from the root of the other graph to the partner of a node (``matched_node_link``); empty without one, and for a partner that is
    more than `_MOST_LEVELS` deep: all paths together would be the square of the dump."""
    if isinstance(made, Graph):
        return []
    graph, partner = (made.golden, made.partners[node]) if source == TARGET else (made.target, made.golden_partners[node])
    if partner < 0:
        return []
    above = graph.ancestors(partner, _MOST_LEVELS + 1)
    return [] if len(above) > _MOST_LEVELS else [graph.names[one] for one in (*above, partner)]


def _rows(source: str, graph: Graph, made: Graph | Comparison, stacks: _Stacks) -> Iterator[tuple[Any, ...]]:
    step, rank = made.step, made.rank
    prefix = f"{source}_{step}_{rank}"
    compared = made if isinstance(made, Comparison) and source == TARGET else None
    directory = saved_tensors(graph)
    names = list(map(utf8, graph.names))  # sqlite takes no half of a surrogate pair, and a name is the same wherever it stands
    for order, node in enumerate(outwards(graph)):
        name, parent = names[node], graph.parents[node]
        given, results = texts(graph, node, compared.metrics(node) if compared is not None else None)
        below = [names[child] for child in graph.children[node]]
        notes = graph.merge_notes.get(node)
        yield (
            f"{prefix}_{name}",
            prefix,
            order,
            name,
            str(graph.types[node]),
            names[parent] if parent >= 0 else "",
            json.dumps(below) if below else "",
            compared.index[node] if compared is not None else None,
            graph.overflow[node],
            graph.micro_steps[node],
            json.dumps(list(map(utf8, partner_path(made, source, node)))),
            stacks.key(graph.stacks[node]),
            json.dumps(notes) if notes else "",
            link_text(graph.links.get(node, ())),
            0,
            given,
            results,
            source,
            None if directory is None else utf8(directory),
            step,
            rank,
            int(name.startswith(_CALL)),
        )
