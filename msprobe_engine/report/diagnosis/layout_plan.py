"""How the tensors of runs of different layouts were put together, as a table."""

from __future__ import annotations

from pathlib import Path

from msprobe_engine.align.parallel.unshard.plan import PlanLine
from msprobe_engine.find.findings import Diagnosis
from msprobe_engine.report.table_files import open_table

FILE = "layout_plan.csv"


def write(found: Diagnosis, path: Path) -> Path | None:
    """Write a line per tensor and argument that depends on the layout (mode 0640); None when none does.

    Raises:
        SinkError: it cannot be written.
    """
    if not found.layout:
        return None
    table = open_table(path, PlanLine._fields, "csv")
    try:
        table.write({column: list(values) for column, values in zip(PlanLine._fields, zip(*found.layout))})
        table.close()
    except BaseException:
        table.abort()
        raise
    return path
