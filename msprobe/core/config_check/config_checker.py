"""Re-export under the existing module name."""

from msprobe_integrations.config_checker import ConfigChecker

__all__ = ["ConfigChecker"]
