"""Framework-neutral names of the existing tool. Re-exports only."""

from msprobe_engine.compare.single import SingleComparator
from msprobe_integrations.common.single_save import SingleSave

__all__ = ["SingleComparator", "SingleSave"]
