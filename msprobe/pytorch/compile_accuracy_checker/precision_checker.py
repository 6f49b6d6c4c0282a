"""Names of the existing tool (26.2.0). Re-exports only."""

from msprobe_engine.accuracy.compile_report import CompareResult, ModuleDiff, TensorDiff
from msprobe_integrations.torch.op_tools.compile_check.checker import PrecisionChecker

__all__ = ["CompareResult", "ModuleDiff", "PrecisionChecker", "TensorDiff"]
