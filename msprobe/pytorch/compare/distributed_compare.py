"""Name of both versions. Re-exports only."""

from msprobe_engine.report.table.existing_api import compare_distributed

__all__ = ["compare_distributed"]
