"""Name of both versions. Re-exports only."""

from msprobe_engine.compare.existing import compare_distributed

__all__ = ["compare_distributed"]
