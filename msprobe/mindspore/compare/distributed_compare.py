"""Name of both versions. Re-exports only."""

from msprobe_engine.report.table.existing_api import compare_distributed as ms_compare_distributed

__all__ = ["ms_compare_distributed"]
