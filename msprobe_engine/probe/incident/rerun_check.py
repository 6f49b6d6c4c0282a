"""A step that runs a second time: is what was wrong there again? The answer tells a fault of numbers or code from one of hardware."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.records import Frame
from msprobe_engine.core.settings.schema import ProbeSettings, RuleSettings
from msprobe_engine.core.statistics import rows as _rows
from msprobe_engine.core.statistics.rows import Rows
from msprobe_engine.probe.incident.files import append_lines, rank_file
from msprobe_engine.probe.incident.merge import finish
from msprobe_engine.probe.incident.pieces import read_piece
from msprobe_engine.probe.rules.base import Rule
from msprobe_engine.probe.rules.build import build_rules
from msprobe_engine.probe.rules.layout import LayoutCache

AT_ONCE = ("extreme_value", "nan_inf")
"""Rules that need no history, the graver last."""
NAMED = 10
_EXACT = (_rows.COUNT, _rows.NANS, _rows.POS_INF, _rows.NEG_INF, _rows.ZEROS)


class RerunCheck:
    """The configured rules that need no history, apart from those that see every frame.

    Args:
        settings: of the probe; a probe that watches anything and names no rules has ``nan_inf``.
    """

    def __init__(self, settings: ProbeSettings) -> None:
        wanted = tuple(rule for rule in settings.rules or (RuleSettings(),) if rule.rule in AT_ONCE)
        self.rules: list[Rule] = build_rules(replace(settings, rules=wanted)) if wanted else []

    def check(self, frame: Frame) -> list[Alert]:
        """What the rules say, critical alerts first, in order of execution."""
        alerts = [alert for rule in self.rules for alert in rule.check(frame)]
        return sorted(alerts, key=lambda alert: (alert.severity != "critical", alert.order < 0, alert.order))

    def compare(self, first: Frame, second: Frame, *, fired: bool) -> dict[str, Any]:
        """Both runs of a step at the records they have in common.

        Args:
            first, second: what was seen; the second run usually shows more.
            fired: this rank is one that asked for the second run.

        Returns:
            JSON-ready facts: ``verdict`` (``reproduced``: the fault came again where it had shown first; ``transient``: it did not
            come again; ``differs``: it came again, but not there; ``clean``: nothing was wrong on this rank), ``compared`` and
            ``different`` (numbers of common records), ``differences`` (names, the first few in order of execution).
        """
        first_layout, second_layout = LayoutCache().of(first), LayoutCache().of(second)
        place = {key: i for i, key in reversed(list(enumerate(second_layout.keys)))}
        pairs = [(i, place[key]) for i, key in enumerate(first_layout.keys) if key in place]
        different: list[str] = []
        if pairs:
            first_rows, second_rows = (
                first_layout.order_rows(first)[[i for i, _ in pairs]],
                second_layout.order_rows(second)[[j for _, j in pairs]],
            )
            different = [first_layout.names[pairs[n][0]] for n in np.flatnonzero(~equal(first_rows, second_rows)).tolist()]
        shared = [name for name in first.scalars if name in second.scalars]
        different += [n for n in shared if not np.array_equal(first.scalars[n], second.scalars[n], equal_nan=True)]
        names, keys = {entry.name for entry in first.entries}, set(first_layout.keys)
        common = replace(
            second,
            entries=[entry for entry in second.entries if entry.name in names],
            samples=[s for s in second.samples if f"{s.family} {s.vpp_stage} {s.micro_step} {s.phase} {s.name}" in keys],
        )
        before = [alert for alert in self.check(first) if alert.severity == "critical"]
        after = {(alert.rule, alert.name) for alert in self.check(common) if alert.severity == "critical"}
        if before:
            verdict = "transient" if not after else "reproduced" if (before[0].rule, before[0].name) in after else "differs"
        elif fired:  # asked for by something that the rules do not know
            verdict = "differs" if different else "reproduced"
        else:
            verdict = "clean"
        return {
            "verdict": verdict,
            "compared": len(pairs) + len(shared),
            "different": len(different),
            "differences": different[:NAMED],
        }


def equal(first: Rows, second: Rows) -> Any:
    """Do the rows tell of equal data? [n] bool. Counts, bounds and the digest (when both have one) exactly; sums to 1e-9, because
    a device may add in another order."""
    first_words, second_words = _rows.as_int64(np.ascontiguousarray(first)), _rows.as_int64(np.ascontiguousarray(second))
    same = (first_words[:, _EXACT] == second_words[:, _EXACT]).all(1) & (
        first[:, (_rows.MIN, _rows.MAX)] == second[:, (_rows.MIN, _rows.MAX)]
    ).all(1)
    same &= np.isclose(first[:, (_rows.SUM, _rows.SUMSQ)], second[:, (_rows.SUM, _rows.SUMSQ)], rtol=1e-9, atol=0.0, equal_nan=True).all(1)
    digests = (first_words[:, _rows.FLAGS] & second_words[:, _rows.FLAGS] & _rows.HAS_DIGEST) != 0
    return same & (~digests | (first_words[:, _rows.DIGEST] == second_words[:, _rows.DIGEST]))


def add_second_run(directory: Path, rank: int, facts: Mapping[str, Any]) -> None:
    """Add what the second run showed to this rank's file, then merge when it is its turn. On the writer thread, after `write_incident`.

    Raises:
        OSError, ValueError: the rank file cannot be read or written.
    """
    path = rank_file(directory, rank)
    piece = read_piece(path)
    if piece is None:
        raise ValueError(f"{path}: says nothing of this rank, so what the second run showed has no place")
    append_lines(path, [{**piece, "rerun": dict(facts)}])
    finish(directory, rank, max(int(piece.get("world_size", 1)), 1))
