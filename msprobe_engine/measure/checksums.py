"""Checksums as the tables show them; digests of this tool take the same columns."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from msprobe_engine.formats.dump.dump_table import DIGEST, DumpTable
from msprobe_engine.measure.columns import UNMATCHED

NO_VALUE = "00000000"
"""Of an argument that the file has no value of (a memory format): the CRC-32 of an empty text."""


def checksums(side: DumpTable, rows: npt.NDArray[np.int64], mode: str) -> list[str]:
    """One cell per row (-1: not there). A tensor without a checksum, and None, give ``N/A``; of other arguments see
    `DumpTable.checksum`."""
    cells = []
    for row in rows.tolist():
        if row < 0:
            cells.append(UNMATCHED)
        elif row in side.values:
            value = side.values[row]
            cells.append(NO_VALUE if value is None and side.md5[row] is None else side.checksum(row))
        elif mode == DIGEST:
            cells.append(str(side.extra.get(row, {}).get("digest", UNMATCHED)))
        else:
            cells.append(side.md5[row] or UNMATCHED)
    return cells
