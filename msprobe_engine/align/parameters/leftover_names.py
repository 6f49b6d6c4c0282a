"""Names that no table knows and that differ only in what stands before them (a module inside of another, an attribute's name), and slots
that a checkpoint would fill with tensors whose file is missing or damaged: of these only the names are known, not the shapes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from msprobe_engine.align.parameters import rules
from msprobe_engine.align.parameters.model_facts import Model
from msprobe_engine.align.parameters.prefixes import bare

_LONGEST = 12
"""Parts of a name, from its end, that are looked at."""


def prefixes(target: Mapping[str, tuple[int, ...]], golden: Mapping[str, tuple[int, ...]]) -> tuple[str, str] | None:
    """What stands before names of A and of B that are otherwise the same, for most of them; None: there is no such pair.

    Args:
        target, golden: shapes by name, of tensors that have no counterpart yet.
    """
    if not target or not golden:
        return None
    ends: defaultdict[str, list[str]] = defaultdict(list)
    for name in golden:
        for end in _ends(name):
            ends[end].append(name)
    votes: Counter[tuple[str, str]] = Counter()
    for name, shape in target.items():
        for end in _ends(name):
            candidates = ends.get(end, ())
            if len(candidates) == 1 and golden[candidates[0]] == shape:
                votes[name[: len(name) - len(end)], candidates[0][: len(candidates[0]) - len(end)]] += 1
            if candidates:
                break
    for (target_prefix, golden_prefix), count in votes.most_common(1):
        whole = all(not prefix or prefix.endswith(".") for prefix in (target_prefix, golden_prefix))
        if target_prefix != golden_prefix and whole and 2 * count > min(len(target), len(golden)):
            return target_prefix, golden_prefix
    return None


def _ends(name: str) -> Iterable[str]:
    """The ends of a dotted name, the longest first."""
    parts = name.split(".")[-_LONGEST:]
    head = len(name) - len(".".join(parts))
    for i in range(len(parts)):
        yield ".".join(parts[i:]) if i or head == 0 else name[head:]


_FUSED = {"attention.qkv": ("attention.q", "attention.k", "attention.v")}
"""Slots of whole tensors that others keep apart; gate and up are told by the form."""


def lost_slots(lost: Mapping[str, str], model: Model) -> dict[str, str]:
    """Slot -> why what lies there was not read; of stacked experts the slot of the stack (``layers.0.experts.up.weight``).

    Args:
        lost: of a checkpoint, see `Checkpoint.lost`; under ``""`` what is of tensors without known names, which stays there.
        model: of the same checkpoint.
    """
    reasons: dict[str, str] = {}
    for name, why in lost.items():
        if not name:
            reasons[""] = why
            continue
        spot = model.spot(name)
        if spot is None:
            reasons[bare(name)] = why
            continue
        slot = spot.rule.slot
        slots = [slot, *_FUSED.get(slot, ())]
        if spot.rule.form in (rules.FC1, rules.HALVES, rules.STACK_HALVES, rules.STACK_TURNS):
            slots.append(f"{slot[:-2]}gate")
        reasons.update({f"{spot.layer}{part}.{spot.kind}": why for part in slots})
    return reasons
