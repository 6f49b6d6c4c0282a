"""The one way to align two sides: record by record, or in common terms where two frameworks have written them."""

from __future__ import annotations

from msprobe_engine.align.calls.call_tree import Tree
from msprobe_engine.align.calls.structure import Aligned, Matcher
from msprobe_engine.formats.dump.dump_table import DumpTable


def crossed(target: DumpTable, golden: DumpTable) -> bool:
    """The sides are of different frameworks."""
    return target.framework != golden.framework


def align_sides(target: DumpTable, golden: DumpTable) -> Aligned:
    """Which record belongs to which. The trees of the result have the sides that its indices count in: those given, or, of different
    frameworks, sides in common terms (`frameworks.common`)."""
    if crossed(target, golden):
        from msprobe_engine.align.frameworks.canonical_tables import aligned

        return aligned(target, golden)
    trees = Tree(target), Tree(golden)
    return Aligned(*trees, Matcher(*trees).run())
