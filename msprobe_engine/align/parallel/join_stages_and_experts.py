"""Runs with stages and experts on several ranks as runs that could be cut by tensor, sequence and data parallelism alone."""

from __future__ import annotations

from collections.abc import Mapping

from msprobe_engine.align.parallel import experts, stages
from msprobe_engine.formats.dump.dump_table import DumpTable


def together(
    target: Mapping[int, DumpTable], golden: Mapping[int, DumpTable], problems: list[str], notes: list[str]
) -> tuple[Mapping[int, DumpTable], Mapping[int, DumpTable], bool]:
    """Both runs with one rank per pipeline, where they are not cut into the same stages. The last item: something was put together.

    Args:
        problems: sentences about what cannot be put together are added.
        notes: sentences about what was left out on purpose are added.
    """
    found = False
    if stages.signature(target, golden) != stages.signature(golden, target):
        target, golden = stages.joined(target, golden, problems, notes), stages.joined(golden, target, problems, notes)
        found = True
    elif min(len(target), len(golden)) > 1:
        target, golden = (stages.without_passes_for_shapes(*sides, notes) for sides in ((target, golden), (golden, target)))
    held = [experts.experts_of(side[min(side)]) for side in (target, golden)]
    if all(held) and held[0] != held[1]:
        target, golden, found = experts.gathered(target), experts.gathered(golden), True
    return target, golden, found
