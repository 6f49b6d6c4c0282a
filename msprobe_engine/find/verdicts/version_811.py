"""Verdicts of version 8.1.1: Warning or nothing of statistics, pass or Different of checksums, Yes, No, ... of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_engine.measure.columns import UNMATCHED
from msprobe_engine.measure.statistics_mode import number

NO_GOLDEN = "No bench data matched."
FUZZY = "Fuzzy matching data, the comparison accuracy may be affected."
CHECK = "Need double check api accuracy."
WARNING, PASS, DIFFERENT = "Warning", "pass", "Different"


def statistics(matched: npt.NDArray[np.bool_], suspect: npt.NDArray[np.bool_]) -> tuple[list[str], list[str]]:
    """(results, messages); `suspect` as `statistics_mode.Differences` has it."""
    results, messages = [], []
    for paired, warned in zip(matched.tolist(), suspect.tolist()):
        results.append((WARNING if warned else "") if paired else UNMATCHED)
        messages.append((CHECK if warned else "") if paired else NO_GOLDEN)
    return results, messages


def checksums(matched: npt.NDArray[np.bool_], target: Sequence[Any], golden: Sequence[Any]) -> list[str]:
    """Results of a table of checksums. Two cells without one are equal, in rows that nothing matches too."""
    return [
        PASS if target_sum == golden_sum else DIFFERENT if paired else UNMATCHED
        for paired, target_sum, golden_sum in zip(matched.tolist(), target, golden)
    ]


def accuracy(cosine: Any, max_abs: Any) -> str:
    """``Accuracy Reached or Not`` of one row from its metrics."""
    if cosine == "shape unmatched":
        return "Unmatched"
    if cosine == "None" or max_abs == "None":
        return "None"
    if UNMATCHED in (cosine, max_abs):
        return "No"
    cosine_value, error_value = number(cosine), number(max_abs)
    if cosine_value is None or error_value is None:
        return "None"
    if (cosine_value < 0.99 and error_value > 0.001) or cosine_value < 0.9 or error_value > 1:
        return "No"
    return "Yes"
