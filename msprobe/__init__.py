"""The names people already type. Re-exports only."""

from msprobe_engine import __version__

__all__ = ["__version__"]
