"""Statistics of rows as text: the shortest that reads back as the same number."""

from __future__ import annotations

from msprobe_engine.core.statistics import columns
from msprobe_engine.core.statistics.rows import Rows


def statistic_cells(rows: Rows, op: str) -> list[str]:
    """One statistic of every row as Python prints it: counts and bounds of integer tensors as whole numbers, ``nan``, ``inf``; the
    digest as ``0x`` and 16 digits."""
    if op == "digest":
        return [f"0x{digest}" if digest else "nan" for digest in columns.digests(rows)]
    values = columns.column(rows, op)
    if op in ("nans", "infs"):
        return [str(int(v)) for v in values.tolist()]
    out = [repr(v) for v in values.tolist()]
    if op in ("min", "max"):
        # float64 rounds integers above 2**53; the row holds them exactly.
        low, high = columns.integer_bounds(rows)
        exact = columns.exact_integers(rows).nonzero()[0].tolist()
        for i in exact:
            out[i] = str(int(low[i] if op == "min" else high[i]))
    return out
