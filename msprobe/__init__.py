"""The names people already type. Re-exports only."""

from typing import Any

from msprobe_engine import __version__

__all__ = ["GradComparator", "__version__"]


def __getattr__(name: str) -> Any:
    if name != "GradComparator":  # it needs numpy, which a bare import should not wait for
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from msprobe_engine.formats.grad_probe.compare import GradComparator

    return GradComparator
