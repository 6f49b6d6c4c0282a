"""Re-export under the existing module name."""

from msprobe.core.config_check.config_checker import ConfigChecker

__all__ = ["ConfigChecker"]
