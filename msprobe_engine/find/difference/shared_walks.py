"""Walks of ranks that run one program hold the same pairs and the same trees: they are kept once, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from msprobe_engine.align.calls.call_tree import Tree
from msprobe_engine.find.difference.walk import DifferenceWalk

_OF_PROGRAM = ("index", "known_as", "parents", "children", "kinds", "gradients", "functions")
"""What a tree has found of names and of what encloses what; numbers have no part in it."""


class SharedWalks:
    """What has been seen of the walks of one step, whose tables share their columns (`formats.dump.shared_columns`)."""

    def __init__(self) -> None:
        self._trees: dict[Hashable, tuple[Any, dict[str, Any]]] = {}
        self._pairs: dict[Hashable, list[Any]] = {}

    def share(self, walker: DifferenceWalk) -> None:
        """Put what an earlier walk has in the place of what is the same. Nothing of it is changed in place."""
        for tree in (walker.target, walker.golden):
            self._share_tree(tree)
        program = id(walker.side.name), id(walker.golden.side.name)
        walker.rows = self._same(program, walker.rows)
        walker.structure.pairs = self._same(program, walker.structure.pairs)
        walker.back = self._same(program, walker.back)

    def _share_tree(self, tree: Tree) -> None:
        side = tree.side
        if tree.names is not side.ops:  # a mapping takes its records for others
            return
        side.construct = self._same(("construct", id(side.ops)), side.construct)
        columns = (side.ops, side.construct, side.role, side.offsets)
        _, known = self._trees.setdefault(tuple(map(id, columns)), (columns, {}))
        for name in _OF_PROGRAM:
            if name in tree.__dict__:
                tree.__dict__[name] = known.setdefault(name, tree.__dict__[name])

    def _same(self, program: Hashable, found: Any) -> Any:
        """One that is equal; of the ranks of one program few have other pairs."""
        known = self._pairs.setdefault((program, type(found)), [])
        for one in known:
            if one == found:
                return one
        known.append(found)
        return found
