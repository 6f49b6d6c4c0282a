"""Names of the existing tool (26.2.0). Re-exports only."""

from msprobe_integrations.torch.op_tools.compile_check.checker import PrecisionChecker

__all__ = ["PrecisionChecker"]
