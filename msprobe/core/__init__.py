"""Framework-neutral names of the existing tool. Re-exports only."""

from msprobe_engine.report.table.single_save import SingleComparator
from msprobe_integrations.common.dump.single_save import SingleSave

__all__ = ["SingleComparator", "SingleSave"]
