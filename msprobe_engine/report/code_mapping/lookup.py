"""From the name of an operator in a kernel dump to the nodes of the graph that it is.

A dump has the full name of a node with ``_`` for ``/``. Names of kernels that a device has changed contain it; ``Add-op1`` is not part of
``Add-op10``. Graphs that were written before their nodes had names are looked up by path and kind of operator.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from msprobe_engine.report.code_mapping.ir import Node

_END = re.compile(r"-op\d+(?!\d)", re.ASCII)
_LONGEST_NAME = 4096
_MOST_STARTS = 512


class Found(NamedTuple):
    """The nodes of an operator, and whether its name is theirs (else it only contains it, or only path and kind are the same)."""

    nodes: tuple[Node, ...]
    exact: bool


class Lookup:
    """Nodes of one or more IR files of a program, by the names of a dump."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._named: dict[str, list[Node]] = {}
        self._placed: dict[tuple[str, str], list[Node]] = {}
        for node in nodes:
            if not node.scope:
                continue
            key = node.scope.replace("/", "_")
            if node.named:
                self._named.setdefault(key, []).append(node)
            else:
                self._placed.setdefault((key, node.op), []).append(node)
        self._known: dict[tuple[str, str], Found] = {}

    def find(self, op_name: str, op_type: str = "") -> Found:
        """The nodes that `op_name` of a dump stands for, none when the graph does not know it.

        Args:
            op_name: as the dump has it, with ``_`` or ``/``.
            op_type: kind of operator (``MatMul``), for graphs without names.
        """
        key = (op_name, op_type)
        if key not in self._known:
            self._known[key] = self._find(op_name.replace("/", "_"), op_type)
        return self._known[key]

    def _find(self, name: str, op_type: str) -> Found:
        if name in self._named:
            return Found(_distinct(self._named[name]), True)
        inside = self._inside(name[:_LONGEST_NAME])
        if inside:
            return Found(_distinct(inside), False)
        path = name.rpartition("_")[0]
        return Found(_distinct(self._placed.get((path, op_type), ())), False)

    def _inside(self, name: str) -> list[Node]:
        """Nodes whose name is the longest part of this one: parts begin at the front or after a ``_`` or ``.``."""
        starts = [0, *(i + 1 for i, c in enumerate(name) if c in "_.")][:_MOST_STARTS]
        for start in starts:
            for end in reversed([match.end() for match in _END.finditer(name)][:_MOST_STARTS]):
                found = self._named.get(name[start:end])
                if found is not None:
                    return found
        return []


def _distinct(nodes: Iterable[Node]) -> tuple[Node, ...]:
    """One of those with the same name and the same lines; with lines first."""
    kept = {(node.scope, tuple(node.lines)): node for node in nodes}
    return tuple(sorted(kept.values(), key=lambda node: not node.lines))
