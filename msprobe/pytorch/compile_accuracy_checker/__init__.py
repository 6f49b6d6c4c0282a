"""Names of the existing tool (26.2.0). Re-exports only."""

from msprobe_integrations.torch.compile_check.checker import PrecisionChecker

__all__ = ["PrecisionChecker"]
