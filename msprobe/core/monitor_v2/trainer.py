"""The monitor_v2 of the existing tool. Re-exports only."""

from importlib.util import find_spec

from msprobe_engine.core.errors import MissingExtraError

if find_spec("torch") is None:
    raise MissingExtraError("torch", "torch", "TrainerMonitorV2")

from msprobe_integrations.torch.compat.trainer_monitor_v2 import TrainerMonitorV2

__all__ = ["TrainerMonitorV2"]
