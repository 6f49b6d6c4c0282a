"""Ranks that hold the same parameters, all of them, and were given the same batch: each must have a part of the data.

Such ranks sum the gradients of all their parameters, or have the same numbers of each: those that share one model hold parts.

What modules take in and give is looked at as far as the first dropout, whose masks each rank draws by itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from msprobe_engine.align.calls.call_tree import Kind, Tree
from msprobe_engine.core.operator_traits import RANDOM_MASKS
from msprobe_engine.core.text.ranges import ranks_text
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.core.text.source_line import source_of
from msprobe_engine.find.collectives import replicas
from msprobe_engine.find.difference.explain import module_around, stack_of
from msprobe_engine.find.findings import Suspect
from msprobe_engine.formats.dump.dump_table import INPUT, OUTPUT, DumpTable
from msprobe_engine.formats.dump.replicas.reader import of_each


@dataclass
class _Group:
    """Attributes:
    suspect: of the first step.
    batches: digests of what its ranks were given, one per step in which these were the same on all of them.
    alike: they were so in all steps.
    """

    suspect: Suspect | None = None
    batches: set[bytes] = field(default_factory=set)
    alike: bool = True


class SameBatch:
    """Collects over the steps of a run what its ranks were given."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, ...], _Group] = {}

    def add_step(self, step: int, sides: Mapping[int, DumpTable], all_equal: bool) -> None:
        """Look at one step; nothing where no ranks are known to hold all parameters. `all_equal`: these have the same numbers on all of
        them."""
        groups = [ranks for ranks in replicas.summing_groups(sides) if all(rank in sides for rank in ranks)]
        if not groups and all_equal:
            groups = [tuple(sorted(sides))]
        given = of_each(sides, _digest_of_modules) if groups else {}
        for ranks in groups:
            group = self._groups.setdefault(ranks, _Group())
            digests = {given[rank] for rank in ranks}
            if len(digests) > 1 or None in digests:
                group.alike = False
                continue
            digest, record = next(pair for pair in digests if pair is not None)
            group.batches.add(digest)
            group.suspect = group.suspect or _suspect(step, ranks, sides[ranks[0]], record)

    def suspects(self) -> list[Suspect]:
        """Of groups whose ranks had the same batch in every step, another one in each or some."""
        return [suspect for group in self._groups.values() if (suspect := group.suspect) and group.alike and len(group.batches) > 1]

    def problems(self) -> list[Sentence]:
        """Of groups whose steps all had one batch, which may be meant, to see whether the model can learn it."""
        template = "{0} hold the same parameters and were given the same batch, and all steps that were looked at have this one"
        once = [ranks for ranks, group in self._groups.items() if group.suspect and group.alike and len(group.batches) == 1]
        return [Sentence(template, ranks_text(ranks)) for ranks in once]


def _digest_of_modules(side: DumpTable) -> tuple[bytes, str] | None:
    """Digest of the tensors, and the first record that takes one in whose numbers are not all the same; None: no module takes any."""
    tree, digest, first = Tree(side), hashlib.sha256(), ""
    for op, kind in enumerate(tree.kinds):
        draws = kind[0] == "forward" and _draws(kind)
        if kind[0] == "backward":
            break
        if not draws and (len(kind) != 4 or kind[0] != "forward"):
            continue
        for row in side.rows(op):
            if side.role[row] not in (INPUT, OUTPUT) or (draws and side.role[row] == OUTPUT) or not isinstance(side.shape[row], list):
                continue
            digest.update(repr((side.name[row], side.shape[row], side.md5[row])).encode() + side.stats[row].tobytes())
            if not first and side.role[row] == INPUT and side.stats[row][0] > side.stats[row][1]:
                first = side.ops[op]
        if draws:
            break
    return (digest.digest(), first) if first else None


def _draws(kind: Kind) -> bool:
    """A call of a function, or of a module, that draws which elements it leaves out."""
    return kind[-1] in RANDOM_MASKS or "dropout" in kind[-1].lower()


def describe_same_batch(ranks: tuple[int, ...]) -> tuple[Sentence, Sentence]:
    """What happened, and why it is a fault."""
    template = "{0} hold the same parameters, and were given the same batch in every step: each must have a part of the data of its own"
    return Sentence("{0} were given the same batch", ranks_text(ranks)), Sentence(template, ranks_text(ranks))


def _suspect(step: int, ranks: tuple[int, ...], side: DumpTable, record: str) -> Suspect:
    cause, why = describe_same_batch(ranks)
    stack = stack_of(side, record)
    return Suspect(
        record,
        module_around(side, record),
        ranks[0],
        step,
        source_of(stack),
        "data",
        why,
        cause=cause,
        stack=stack,
        ranks=list(ranks),
    )
