"""Name of both versions. Re-exports only."""

from msprobe_engine.report.table.existing_api import compare as ms_compare

__all__ = ["ms_compare"]
