"""Re-export under the existing module name."""

from msprobe_engine.formats.grad_probe.compare import GradComparator

__all__ = ["GradComparator"]
