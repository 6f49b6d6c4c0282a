"""Rows whose values were left out (``redact: [tokens]``): they are compared by digests that were made with one key, or not at all."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.redaction import NO_KEY
from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.measure import factorize

Bools = npt.NDArray[np.bool_]


def of_other_keys(target: DumpTable, golden: DumpTable, left: factorize.Integers, right: factorize.Integers) -> tuple[Bools, Bools]:
    """Which pairs of rows are redacted on a side, and for which of them the two sides do not have one key."""
    a, b = _marks(target)[left], _marks(golden)[right]
    redacted = (a != "") | (b != "")
    return redacted, redacted & ((a != b) | (a == NO_KEY))


def _marks(side: DumpTable) -> npt.NDArray[np.str_]:
    """The key of each row, "" where nothing was left out."""
    found = np.zeros(len(side), "U16")
    for row, facts in side.extra.items():
        if "redacted" in facts:
            found[row] = str(facts["redacted"])[:16] or NO_KEY
    return found
