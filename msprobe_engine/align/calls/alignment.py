"""The one way to align two sides: record by record, or in common terms where two frameworks have written them."""

from __future__ import annotations

from msprobe_engine.align.calls.call_tree import Tree
from msprobe_engine.align.calls.cut_off import ends, leave_out_behind_cut
from msprobe_engine.align.calls.structure import Aligned, Matcher
from msprobe_engine.align.parallel import parameter_owner
from msprobe_engine.align.parallel.micro_batches import subset
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
    return align_trees(Tree(target), Tree(golden))


def align_trees(target: Tree, golden: Tree) -> Aligned:
    """Which record belongs to which, of one framework; of a side that is whole beside one that was cut off, those that can have a
    partner."""
    found = ends(target, golden)
    parts = [
        tree if end == len(tree.names) else Tree(subset(tree.side, range(end)), tree.names[:end])
        for tree, end in zip((target, golden), found)
    ]
    structure = parameter_owner.in_other_order(Matcher(parts[0], parts[1]).run(), parts[0], parts[1])
    leave_out_behind_cut(structure, target.side, golden.side, found)
    return Aligned(target, golden, structure)
