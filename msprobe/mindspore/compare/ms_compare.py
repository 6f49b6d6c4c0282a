"""Name of both versions. Re-exports only."""

from msprobe_engine.compare.existing import compare as ms_compare

__all__ = ["ms_compare"]
