"""The one way to align two sides: record by record, or in common terms where two frameworks have written them."""

from __future__ import annotations

from msprobe_engine.align.calls.call_tree import Tree
from msprobe_engine.align.calls.structure import Aligned, Matcher, Structure
from msprobe_engine.align.parallel import parameter_owner
from msprobe_engine.align.parallel.micro_batches import subset
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.formats.dump.rank_files import was_cut_off


def are_of_different_frameworks(target: DumpTable, golden: DumpTable) -> bool:
    return target.framework != golden.framework


def align_sides(target: DumpTable, golden: DumpTable) -> Aligned:
    """Which record belongs to which. The trees of the result have the sides that its indices count in: those given, or, of different
    frameworks, sides in common terms (`frameworks.common`)."""
    if are_of_different_frameworks(target, golden):
        from msprobe_engine.align.frameworks.canonical_tables import align_frameworks

        return align_frameworks(target, golden)
    return align_trees(Tree(target), Tree(golden))


def align_trees(target: Tree, golden: Tree) -> Aligned:
    """Which record belongs to which, of one framework; of a side that is whole beside one that was cut off, those that can have a
    partner."""
    ends = _ends(target, golden)
    parts = [
        tree if end == len(tree.names) else Tree(subset(tree.side, range(end)), tree.names[:end])
        for tree, end in zip((target, golden), ends)
    ]
    structure = parameter_owner.in_other_order(Matcher(parts[0], parts[1]).run(), parts[0], parts[1])
    _leave_out_behind_cut(structure, target.side, golden.side, ends)
    return Aligned(target, golden, structure)


# A side whose run ended in the midst of a step: what the other side did after that place has no partner, and is no difference.
_ONE_PROGRAM = 0.9
"""Share of the records of what was cut off that the other side has under the same names: they are one program."""


def _ends(target: Tree, golden: Tree) -> tuple[int, int]:
    """How many records of both sides, from the first one, can have a partner: all, or where the other side was cut off those up to its last
    one. Records of one program have the same names, in the order in which the calls end."""
    return _count_calls_before_cut(target, golden), _count_calls_before_cut(golden, target)


def _count_calls_before_cut(tree: Tree, other: Tree) -> int:
    whole, side = len(tree.names), other.side
    if not other.names or not was_cut_off(side.path, side.header, side.recovered):
        return whole
    known = [tree.known_as[name] for name in other.names if name in tree.known_as]
    return max(known) + 1 if len(known) >= _ONE_PROGRAM * len(other.names) else whole


def _leave_out_behind_cut(structure: Structure, target: DumpTable, golden: DumpTable, ends: tuple[int, int]) -> None:
    """Note in `structure` which records lie behind the place where the other side was cut off, and let that side say how many they are.

    Args:
        ends: how many records of both sides were matched, see `_ends`.
    """
    behind = tuple(frozenset(range(end, len(side.ops))) for side, end in zip((target, golden), ends))
    structure.behind_cut = behind[0], behind[1]
    for cut, other, records in ((golden, target, behind[0]), (target, golden, behind[1])):
        if records:
            template = "{0}: {1} records of {2} lie behind the place where it was cut off, and are not compared"
            cut.add_problem(Sentence(template, cut.path, f"{len(records):,}", other.path))
