"""Two monitored runs that cut the batch in other ways (ranks, micro batches): what each pass sees cannot be compared, what they make of the
whole batch can."""

from __future__ import annotations

from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find.monitor.kinds import world_size
from msprobe_engine.formats.monitor.reader import Run

_MOST = 0.5
"""Part of the activations with another shape from which on the batch is cut in another way; a module alone is a fault."""


def not_comparable(target: Run, golden: Run) -> tuple[frozenset[str], list[str]]:
    """Families of which the runs have numbers of other parts of the batch, and what is to be said of them; none where most activations have
    the same shapes, or where parameters have other ones. Of several ranks the loss is one of these, too: each has that of its own part,
    unless activations of the same shapes say that all ranks see the whole batch."""
    families = sorted({family for run in (target, golden) for rank in run.ranks for family in run.families(rank)})
    of_passes = [family for family in families if family.startswith("actv") or "unreduced" in family]
    if any(other for other, _, _ in (_shapes(target, golden, family) for family in families if family.startswith("param"))):
        return frozenset(), []
    counts = [_shapes(target, golden, family) for family in of_passes if family.startswith("actv")]
    other, both = sum(count[0] for count in counts), sum(count[1] for count in counts)
    sizes = [world_size(run) for run in (target, golden)]
    if not both and all(sizes) and sizes[0] != sizes[1]:
        template = "the runs have {0} and {1} ranks and no activations, so that loss cannot be compared: each rank has that of its own part"
        return frozenset(("loss",)), [Sentence(template, *sizes)]
    if not other or other < _MOST * both:
        return frozenset(), []
    not_compared = [*of_passes, *(["loss"] if max(len(target.ranks), len(golden.ranks)) > 1 else [])]
    first = next(count[2] for count in counts if count[2])
    template = "the runs cut the batch in other ways, so that {0} cannot be compared: {1} of {2} activations have another shape ({3})"
    return frozenset(not_compared), [Sentence(template, ", ".join(not_compared), f"{other:,}", f"{both:,}", first)]


def _shapes(target: Run, golden: Run, family: str) -> tuple[int, int, str]:
    """How many tensors of a family have another shape of as many dimensions, how many both have, and the first of these."""
    other, both, first = 0, 0, ""
    for rank in sorted(set(target.ranks) & set(golden.ranks)):
        if family not in target.families(rank) or family not in golden.families(rank):
            continue
        golden_kinds = golden.kinds(rank, family)
        for key, kinds in target.kinds(rank, family).items():
            target_shapes, golden_shapes = ({kind.shape for kind in some if kind.shape} for some in (kinds, golden_kinds.get(key, ())))
            if not target_shapes or not golden_shapes:
                continue
            both += 1
            if not target_shapes & golden_shapes:
                other += 1
                first = first or f"{family}/{key.name} {min(target_shapes)}, {min(golden_shapes)}"
    return other, both, first
