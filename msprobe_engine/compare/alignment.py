"""The one way to align two sides: record by record, or in common terms where two frameworks have written them."""

from __future__ import annotations

from msprobe_engine.compare.side import Side
from msprobe_engine.compare.structure import Aligned, Matcher
from msprobe_engine.compare.tree import Tree


def crossed(target: Side, golden: Side) -> bool:
    """The sides are of different frameworks."""
    return target.framework != golden.framework


def align_sides(target: Side, golden: Side) -> Aligned:
    """Which record belongs to which. The trees of the result have the sides that its indices count in: those given, or, of different
    frameworks, sides in common terms (`frameworks.common`)."""
    if crossed(target, golden):
        from msprobe_engine.compare.frameworks.rebuilt import aligned

        return aligned(target, golden)
    trees = Tree(target), Tree(golden)
    return Aligned(*trees, Matcher(*trees).run())
