"""What a rule says: one thing that is wrong, where it was seen, and what would have been fine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Alert:
    """One thing that is wrong.

    Attributes:
        rule: name of the rule, as in settings (``nan_inf``, ``turbulence``, ``extreme_value``, ``no_progress``).
        severity: ``warning`` or ``critical``; critical ones start an incident.
        kind: what kind of tensor: ``activation``, ``activation_grad``, ``grad``, ``param``, ``opt_state``, ``collective``, ``loss``,
            ``step``.
        name: record or scalar name.
        step, rank, micro_step: where; micro_step -1 when unknown.
        value: the value seen.
        expected: what would have been fine, in words.
        message: one line for the console, names what, where, value and limit.
        order: position within the step's execution (index of the entry or sample): the smaller, the earlier.
    """

    rule: str
    severity: str
    kind: str
    name: str
    step: int
    rank: int
    value: float
    expected: str
    message: str
    micro_step: int = -1
    order: int = -1
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """It and those of its rule that have no alert of their own in this step: there is a largest number (``max_alerts``)."""
        return 1 + int(self.extra.get("more", 0))
