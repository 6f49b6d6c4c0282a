"""The monitor_v2 of the existing tool. Re-exports only."""

from msprobe.core.monitor_v2.trainer import TrainerMonitorV2

__all__ = ["TrainerMonitorV2"]
