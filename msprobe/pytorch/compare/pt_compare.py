"""Names of 8.1.1 (`compare`) and 26.2.0 (`pt_compare`). Re-exports only."""

from msprobe_engine.report.table.existing_api import compare, pt_compare

__all__ = ["compare", "pt_compare"]
