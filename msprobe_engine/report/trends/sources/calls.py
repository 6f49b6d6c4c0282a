"""What the records of a dump are called on a trends page.

Calls of functions are numbered through a step in a dump, so one call more in any module shifts the numbers of all behind it, and rows of
two runs, or of two steps of one, would not be the same calls. Here a call is named after the module it runs in, and numbered within it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from msprobe_engine.find.nonfinite.trace import module_path
from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.formats.monitor.convert.dump2db import place_of
from msprobe_engine.report.trends.pairing import depth, unwrapped

OPTIMIZER = "optimizer"
"""Metric of the calls behind the last backward call, outside of all modules: the optimizer's. A dump calls them forward calls."""


class Call(NamedTuple):
    """A record of a dump."""

    metric: str
    """``forward``, ``backward``, ``recompute``, ``parameters_grad`` or `OPTIMIZER`."""
    name: str
    """``layers.3.mlp: Functional.linear``, ``Module.layers.3.mlp.MLP``."""
    number: int
    """Of the calls with this name in this micro step, from 0."""
    micro: int
    """Micro step: which call of its module at the top of the model this is a part of."""


def wrappers(table: DumpTable) -> int | None:
    """How often all modules of a dump have ``module.`` in front; None without any."""
    modules = {*map(module_path, table.ops), *(module_path(parent) for parent in table.parents.values() if parent)} - {""}
    return min((depth(f"{path}.") for path in modules), default=None)


def calls_of(table: DumpTable, times: int = 0) -> dict[str, Call]:
    """All records of one rank and step that belong to a pass, by their names in the dump.

    Args:
        times: how many ``module.`` are taken off the front of the names of modules. What ran in the wrapped module itself has no module
            then, and is numbered with what ran outside of it: a dump of the bare model does not tell them apart.
    """
    construct = table.parents
    recomputed = {table.ops[op] for op, tags in table.tags.items() if tags.get("is_recompute")}
    micro_of_root = _micro_steps(construct, recomputed)
    updates = _updates(table)
    found: list[tuple[str, Call]] = []
    roots: dict[str, str] = {}
    for name in table.ops:
        place = place_of(name, name in recomputed)
        if place is None:
            continue
        metric, prefix, number = place
        metric = OPTIMIZER if name in updates else metric
        # a backward call is where its forward call is: the same row of another metric
        node = name.replace(".backward", ".forward")
        node = node if node in construct else name
        micro = micro_of_root.get(_root(construct, node, roots), 0)
        if module_path(name):
            prefix = unwrapped(prefix, times)
        elif module := module_path(construct.get(node) or ""):
            module = unwrapped(f"{module}.", times).rstrip(".")
            prefix, micro = (f"{module}: {prefix}", micro) if module else (prefix, 0)
        found.append((name, Call(metric, prefix, number, micro)))
    numbers: dict[tuple[str, str, int], set[int]] = {}
    for _, call in found:
        numbers.setdefault((call.metric, call.name, call.micro), set()).add(call.number)
    ranks = {group: {number: i for i, number in enumerate(sorted(members))} for group, members in numbers.items()}
    return {name: call._replace(number=ranks[call.metric, call.name, call.micro][call.number]) for name, call in found}


def _updates(table: DumpTable) -> set[str]:
    """Calls behind everything of the model; none in a step without a backward pass."""
    names = table.ops
    if not any(".backward" in name for name in names):
        return set()
    last = max((i for i, name in enumerate(names) if ".backward" in name or module_path(name) or table.parents.get(name)), default=-1)
    return set(names[last + 1 :])


def _micro_steps(construct: Mapping[str, str | None], recomputed: set[str]) -> dict[str, int]:
    """Micro step of each forward call of a module at the top. One model may have several such modules, each called once in a micro step."""
    calls: dict[tuple[str, bool], list[tuple[int, str]]] = {}
    for name, parent in construct.items():
        head, _, number = name.rpartition(".")
        if parent is None and head.endswith(".forward") and number.isdigit():
            calls.setdefault((head, name in recomputed), []).append((int(number), name))
    return {name: i for members in calls.values() for i, (_, name) in enumerate(sorted(members))}


def _root(construct: Mapping[str, str | None], node: str, known: dict[str, str]) -> str:
    """The forward call at the top that a node is inside of.

    Args:
        known: what was found before, added to: a chain of parents is gone up once, however many of its nodes are asked for.
    """
    passed: dict[str, None] = {}
    while node not in known and node not in passed:  # a damaged file may go round in circles
        passed[node] = None
        parent = construct.get(node)
        if not parent:
            break
        node = parent.replace(".backward", ".forward")
    root = known.get(node, node)
    known.update(dict.fromkeys(passed, root))
    return root
