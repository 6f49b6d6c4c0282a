"""A merged graph as a dump: construct.json, dump.json and stack.json, as 26.2.0 writes them with ``--file_type json``."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msprobe_engine.core import names
from msprobe_engine.core.errors import SinkError, UsageError
from msprobe_engine.core.io.output_files import guard_writing, write_file
from msprobe_engine.core.io.regular_files import make_directories
from msprobe_engine.formats.dump import layout
from msprobe_engine.formats.dump.dump_table import OUTPUT, PARAMETERS, PARAMETERS_GRAD, DumpTable
from msprobe_engine.report.graph.nodes.model import ROOT, Comparison, Graph
from msprobe_engine.report.graph.writer import Plan

_STATISTICS = ("Max", "Min", "Mean", "Norm")
_GONE = ("dump_data_dir", "parallel", "rank", "world_size", "dumped_ranks", "run_began", "step_ended")
"""Keys of the header that say something of one rank."""


class MergedDumpWriter:
    """Writes each merged graph to ``step{n}/rank{r}`` below the output directory; r is the first of its ranks."""

    def __init__(self, plan: Plan) -> None:
        self._output = plan.output
        self._made: list[Path] = []
        for step, rank in plan.places:
            if (place := self._place(step, rank)).exists():
                raise SinkError(f"{place}: is there already; give another output directory, or take it away")

    def _place(self, step: int, rank: int) -> Path:
        return self._output / f"step{step}" / f"rank{rank}"

    def add(self, made: Graph | Comparison) -> None:
        """Write one.

        Raises:
            SinkError: it cannot be written.
            UsageError: it is a comparison.
        """
        if isinstance(made, Comparison) or made.side is None:
            raise UsageError("--file_type json writes the merged dump of one run; leave the golden run out")
        place = self._place(made.step, made.rank)
        documents = ((layout.DUMP, dump_of(made)), (layout.CONSTRUCT, construct_of(made)), (layout.STACK, stacks_of(made)))
        with guard_writing(place, "name another directory with -o"):
            make_directories(str(place))
            self._made.append(place)
            for name, document in documents:
                write_file(place / name, [json.dumps(document, indent=1, ensure_ascii=False).encode("utf-8", "surrogatepass")])

    def finish(self) -> list[Path]:
        return [place / name for place in self._made for name in (layout.DUMP, layout.CONSTRUCT, layout.STACK)]

    def abort(self) -> None:
        """Take away what was written."""
        for place in self._made:
            shutil.rmtree(place, ignore_errors=True)


def construct_of(graph: Graph) -> dict[str, Any]:
    """construct.json: node -> parent, the root by its name, as 26.2.0 has it; with the number of the micro step where there are several."""
    found: dict[str, Any] = {}
    for node, parent in enumerate(graph.parents):
        if node == ROOT or _is_gradients(graph, node):
            continue
        name = graph.names[parent]
        found[graph.names[node]] = [name, graph.micro_steps[node]] if graph.micro_step_count > 1 else name
    if graph.micro_step_count > 1:
        found[names.MICRO_STEP_KEY] = graph.micro_step_count
    return found


def stacks_of(graph: Graph) -> dict[str, Any]:
    """stack.json: number -> [names of nodes, lines]; equal stacks once."""
    nodes: dict[int, list[str]] = {}
    lines: dict[int, tuple[str, ...]] = {}
    for name, stack in zip(graph.names, graph.stacks):
        if stack:
            nodes.setdefault(id(stack), []).append(name)
            lines[id(stack)] = stack
    return {str(number): [nodes[key], list(lines[key])] for number, key in enumerate(nodes)}


def dump_of(graph: Graph) -> dict[str, Any]:
    """dump.json: the merged rows, with the notes of each record under ``parallel_merge_info``."""
    side = graph.side
    assert side is not None
    header = {key: value for key, value in side.header.items() if key not in _GONE}
    data: dict[str, Any] = {}
    for node, record in enumerate(graph.records):
        if record >= 0:
            data[graph.names[node]] = _record(side, record)
            if node in graph.merge_notes and not _is_gradients(graph, node):  # which have a key per parameter and no others
                data[graph.names[node]]["parallel_merge_info"] = graph.merge_notes[node]
    return {**header, "dump_data_dir": None, "is_merged": True, "data": data}


def _is_gradients(graph: Graph, node: int) -> bool:
    record, side = graph.records[node], graph.side
    if record < 0 or side is None:
        return False
    rows = side.rows(record)
    return bool(rows) and side.role[rows.start] == PARAMETERS_GRAD


def _record(side: DumpTable, record: int) -> dict[str, Any]:
    """A record's sections, put together from the names of its rows."""
    backward = ".backward" in side.ops[record]
    tags: dict[str, Any] = {key: value for key, value in side.tags.get(record, {}).items() if key != "origin"}
    first = "input" if backward else "input_args"
    sections: dict[str, Any] = {}
    for row in side.rows(record):
        parts = side.name[row][len(side.ops[record]) + 1 :].split(".")
        role = side.role[row]
        if role == PARAMETERS_GRAD:
            tags.setdefault(".".join(parts), []).append(_item(side, row))
            continue
        if role == OUTPUT:
            section, keys = "output", parts[1:]
        elif role == PARAMETERS:
            section, keys = "parameters", [".".join(parts[1:])]
        else:
            keys = parts[1:]
            section = first if backward or (keys and keys[0].isdecimal()) else "input_kwargs"
        _insert_item(sections.setdefault(section, {}), keys or ["0"], _item(side, row))
    if sections or not tags:
        for section in (first, *(() if backward else ("input_kwargs",)), "output"):
            sections.setdefault(section, {})
    for section, content in sections.items():
        tags[section] = content if section in ("input_kwargs", "parameters") else _list_by_number(content, True)
    return {key: _convert_nests(value) if key in sections else value for key, value in tags.items()}


def _insert_item(place: dict[str, Any], keys: list[str], item: Any) -> None:
    for key in keys[:-1]:
        inside = place.setdefault(key, {})
        if not isinstance(inside, _Nest):
            inside = place[key] = _Nest()
        place = inside
    place[keys[-1]] = item


class _Nest(dict[str, Any]):
    """Keys of a list, a tuple or a dictionary, until all of them are known."""


def _convert_nests(value: Any) -> Any:
    """Nests as lists where their keys count from 0, else as dictionaries."""
    if isinstance(value, _Nest):
        return _list_by_number(value, False)
    if isinstance(value, list):
        return [_convert_nests(one) for one in value]
    if isinstance(value, dict):
        return {key: _convert_nests(one) for key, one in value.items()}
    return value


def _list_by_number(content: Mapping[str, Any], always: bool) -> Any:
    """A list of what stands under 0, 1, ...; null where a number is missing. `always`: also where the keys are others."""
    numbers = {int(key) for key in content if key.isdecimal()}
    if len(numbers) == len(content) and (not content or max(numbers) < 10 * len(content) + 10):
        return [_convert_nests(content.get(str(n))) for n in range(max(numbers, default=-1) + 1)]
    return [_convert_nests(one) for one in content.values()] if always else {key: _convert_nests(one) for key, one in content.items()}


def _item(side: DumpTable, row: int) -> Any:
    """A tensor or an argument as the file has it."""
    dtype = side.dtype[row]
    facts = {key: value for key, value in side.extra.get(row, {}).items() if key != "digest"}
    if dtype is None:
        return None
    if row in side.values or dtype.startswith("<class '"):
        kind = dtype.removeprefix("<class '").removesuffix("'>")
        return {"type": kind, "value": side.values.get(row), **facts}
    if dtype.endswith("ProcessGroup"):
        return {"type": dtype, **facts}
    item = {"type": "mindspore.Tensor" if side.framework == "mindspore" else "torch.Tensor", "dtype": dtype, "shape": side.shape[row]}
    item |= dict(zip(_STATISTICS, side.stats_of(row)))
    if side.requires_grad[row] is not None:
        item["requires_grad"] = side.requires_grad[row]
    counts = {"nan_count": side.nans.get(row), "inf_count": side.infs.get(row)}
    trues = side.true_count(row)
    own = {} if trues is None else {"true_count": trues}
    return item | own | {key: value for key, value in counts.items() if value} | facts
