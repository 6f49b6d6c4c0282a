"""Which slots a checkpoint would fill with tensors whose file is missing or damaged: of these only the names are known, not the shapes."""

from __future__ import annotations

from collections.abc import Mapping

from msprobe_engine.align.parameters import rules
from msprobe_engine.align.parameters.model_facts import Model
from msprobe_engine.align.parameters.prefixes import bare

_FUSED = {"attention.qkv": ("attention.q", "attention.k", "attention.v")}
"""Slots of whole tensors that others keep apart; gate and up are told by the form."""


def lost_slots(lost: Mapping[str, str], model: Model) -> dict[str, str]:
    """Slot -> why what lies there was not read; of stacked experts the slot of the stack (``layers.0.experts.up.weight``).

    Args:
        lost: of a checkpoint, see `Checkpoint.lost`; under ``""`` what is of tensors without known names, which stays there.
        model: of the same checkpoint.
    """
    found: dict[str, str] = {}
    for name, why in lost.items():
        if not name:
            found[""] = why
            continue
        spot = model.spot(name)
        if spot is None:
            found[bare(name)] = why
            continue
        slot = spot.rule.slot
        slots = [slot, *_FUSED.get(slot, ())]
        if spot.rule.form in (rules.FC1, rules.HALVES, rules.STACK_HALVES, rules.STACK_TURNS):
            slots.append(f"{slot[:-2]}gate")
        found.update({f"{spot.layer}{part}.{spot.kind}": why for part in slots})
    return found
