"""Statistics of dumps as a trend data base. The rules are those of the existing tool: what a micro step, a target and a metric is.

Metrics are ``forward``, ``backward``, ``recompute`` and ``parameters_grad``. A target is a record without direction and call number, with
the place of the tensor behind: ``Module.layers.3.mlp.MLP.input.0``; the number of the call is its `micro_step` column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from msprobe_engine.core.errors import DumpFormatError, UsageError
from msprobe_engine.core.io.progress import bar
from msprobe_engine.core.names import is_number
from msprobe_engine.formats.dump.completeness import missing_ranks, missing_steps
from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.formats.dump.read_table import read_side
from msprobe_engine.formats.dump.reader import DumpDirectory, open_dump
from msprobe_engine.formats.monitor.convert.monitor2db import DUMP_DB, Imported, Options, open_database
from msprobe_engine.formats.monitor.series import Key
from msprobe_engine.formats.monitor.trend_db import Tags, TrendDatabase

STATISTICS = {"norm": 3, "max": 0, "min": 1, "mean": 2}
"""The statistics that are kept, and the column of `DumpTable.stats` that has each."""
_ROOTS = ("Module", "Cell", "optimizer")


class Place(NamedTuple):
    """Where a tensor of a dump goes."""

    metric: str
    key: Key


def dump2db(directory: Path, source: Path, options: Options) -> Imported:
    """Convert a dump.

    Raises:
        DumpFormatError: there is none.
        UsageError: another data base is there.
        SinkError: the data base cannot be written.
    """
    dump = open_dump(source)
    database = open_database(directory, DUMP_DB, source, options, tags_of=record_tags)
    done = Imported(database.path)
    try:
        _convert(dump, database, options, done)
    finally:
        database.close()
    done.left_out = len(done.problems)
    return done


def _convert(dump: DumpDirectory, database: TrendDatabase, options: Options, done: Imported) -> None:
    known = database.read_imports()
    units = [(step, rank, name) for step in dump.steps for rank, name in ranks_of(dump, step)]
    missing = [*missing_steps(dump), *(sentence for step in dump.steps for sentence in missing_ranks(dump, step))]
    done.problems |= dict.fromkeys(missing, 1)
    start, longest, present = 0, 1, -1
    with bar("reading", len(units)) as advance:
        for step, rank, name in units:
            if step != present:
                start, longest, present = (start + longest if present >= 0 else 0), 1, step
            begin = start if options.micro_step else step
            unit, state = f"step {step} rank {rank}", f"{begin} "
            if known.get(unit, "").startswith(state):
                longest = max(longest, int(known[unit].split()[1]))
                done.skipped += 1
            else:
                try:
                    table = read_side(dump.file(step, name))
                    micro = _add(table, rank, begin, database, options, done, unit)
                except (DumpFormatError, UsageError) as error:
                    done.problems[f"{unit}: {error}"] = 1
                    continue
                done.problems |= dict.fromkeys(table.problems, 1)
                longest = max(longest, micro)
            advance(unit)


def ranks_of(dump: DumpDirectory, step: int) -> list[tuple[int, int | str]]:
    """Ranks of a step and what the dump calls them; directories that do not say their rank follow the last one that does."""
    names = dump.ranks(step)
    after = max((r for r in names if isinstance(r, int)), default=-1) + 1
    return [(name if isinstance(name, int) else after + i, name) for i, name in enumerate(names, -sum(isinstance(n, int) for n in names))]


def _add(table: DumpTable, rank: int, begin: int, database: TrendDatabase, options: Options, done: Imported, unit: str) -> int:
    """Write one rank of one step; how many micro steps it has."""
    rows: dict[str, list[tuple[int, Key, int]]] = {}
    for place, row, micro in tensors_of(table, options.micro_step, options.name):
        rows.setdefault(place.metric, []).append((begin + micro, place.key, row))
    count = max(micro_steps_of(table.parents).values(), default=0) + 1 if options.micro_step else 1
    with database.transaction():
        for metric, found in rows.items():
            metrics, targets = zip(*(database.place(metric, key) for _, key, _ in found))
            numbers = table.stats[[row for _, _, row in found]]
            values = {name: numbers[:, column] for name, column in STATISTICS.items()}
            done.rows += database.add(rank, metrics[0], [step for step, _, _ in found], targets, values)
        database.set_imported(unit, f"{begin} {count}")
    done.units += 1
    return count


def tensors_of(table: DumpTable, micro_steps: bool, name_of: Callable[[str], str] = str) -> Iterator[tuple[Place, int, int]]:
    """The rows with statistics of one rank and step: where each goes, and its micro step.

    Args:
        micro_steps: tell micro steps apart and count calls in each of them; False: all are micro step 0.
        name_of: what a record is to be called.
    """
    of_node = micro_steps_of(table.parents) if micro_steps else {}
    renamed = renumber_calls(of_node)
    stated = table.stated[:, 0] | table.stated[:, 3]
    for op, record in enumerate(table.ops):
        name = node = record
        if renamed:
            if name in renamed:
                name = renamed[name]
            elif "parameters_grad" in name:  # no node of the tree: its module's forward call is
                node = name.replace(".parameters_grad", ".forward")
            else:
                continue  # no node of the tree of modules: the existing tool leaves it out
        found = place_of(name_of(name), bool(table.tags.get(op, {}).get("is_recompute")))
        if found is None:
            continue
        metric, prefix, call = found
        for row in table.rows(op):
            if stated[row]:
                yield Place(metric, Key(0, f"{prefix}.{table.place(row)}", call)), row, of_node.get(node, 0)


def place_of(name: str, recompute: bool) -> tuple[str, str, int] | None:
    """Metric, target and call number of a record; None when it is none of a pass.

    >>> place_of("Module.fc.Linear.forward.3", False)
    ('forward', 'Module.fc.Linear', 3)
    """
    parts = name.split(".")
    metric = ""
    for word in ("forward", "backward"):
        if word in parts[1:]:
            metric = word
            parts = [p for i, p in enumerate(parts) if i == 0 or p != word]
            break
    if not metric and "parameters_grad" in parts[-2:]:
        metric = "parameters_grad"
        parts.remove("parameters_grad")
    if not metric:
        return None
    call = int(parts.pop()) if is_number(parts[-1]) else 0
    return "recompute" if metric == "forward" and recompute else metric, ".".join(parts), call


def micro_steps_of(construct: Mapping[str, str | None]) -> dict[str, int]:
    """Micro step of every node: each module call at the top of the forward pass begins one."""
    parents: dict[str, str | int | None] = {}
    count = 0
    for name, parent in construct.items():
        if parent is not None:
            parents[name] = parent
        elif ".backward" in name:
            parents[name] = None
        elif name.startswith(_ROOTS):
            parents[name] = count
            count += 1
    roots: dict[str, int] = {}
    for name in construct:
        node: str | int | None = name
        for _ in range(len(construct) + 1):  # a damaged file may go round in circles
            if not isinstance(node, str):
                break
            node = node.replace(".backward", ".forward").replace(".parameters_grad", ".forward")
            if node not in parents:
                break
            node = parents[node]
        if isinstance(node, int):
            roots[name] = node
    return roots


def renumber_calls(micro_steps: Mapping[str, int]) -> dict[str, str]:
    """Names with call numbers that begin at 0 in every micro step, so that the same call of every micro step is one target."""
    groups: dict[tuple[int, str], list[tuple[int, str, int]]] = {}
    out: dict[str, str] = {}
    for name, micro in micro_steps.items():
        parts = name.split(".")
        at = next((i for i in (len(parts) - 1, len(parts) - 2) if i >= 0 and is_number(parts[i])), -1)
        if at < 0:
            out[name] = name
            continue
        prefix = ".".join([*parts[:at], "*", *parts[at + 1 :]])
        groups.setdefault((micro, prefix), []).append((int(parts[at]), name, at))
    for members in groups.values():
        for new, (_, name, at) in enumerate(sorted(members, key=lambda member: member[0])):
            parts = name.split(".")
            parts[at] = str(new)
            out[name] = ".".join(parts)
    return out


_TYPES = ("Module", "Cell")


def record_tags(name: str) -> Tags:
    """Tags of a tensor of a dump, like ``Module.blocks.3.conv.Conv2d.input.2``.

    >>> sorted(record_tags("Module.blocks.3.conv.Conv2d.input.2"))
    [('Module', 'default'), ('blocks.3', 'layer'), ('conv.Conv2d', 'module'), ('input.2', 'index')]
    """
    parts = name.split(".")
    if len(parts) < 3:
        return set()
    tags: Tags = {(".".join(parts[-2:]), "index")}
    if "parameters" in parts:
        tags.add(("parameters", "default"))
    tags.update((part, "default") for part in parts[:-2] if part in _TYPES)
    words = [part for part in parts[:-2] if part not in _TYPES]
    if not words:
        return set()
    if len(words) == len(parts) - 2:
        tags.add((".".join(words), "function"))
        return tags
    begin = 0
    number_before = True  # a number needs a word in front to be a layer
    for i, word in enumerate(words):
        if not word.isdigit():
            number_before = False
            continue
        if not number_before:
            tags.add((f"{words[i - 1]}.{word}", "layer"))
            if module := ".".join(words[begin : i - 1]):
                tags.add((module, "module"))
        number_before = True
        begin = i + 1
    if rest := ".".join(words[begin:]):
        tags.add((rest, "module"))
    return tags
