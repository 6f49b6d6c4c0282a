"""The names people already type. Re-exports only. ``msprobe.open(path)`` opens what a run has left."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from msprobe_engine import __version__

if TYPE_CHECKING:
    from msprobe_engine.find.opened import open_path as open  # noqa: F401
    from msprobe_engine.formats.grad_probe.compare import GradComparator

__all__ = ["GradComparator", "__version__"]  # not open: import * would hide the built-in one
_PLACES = {
    "GradComparator": ("msprobe_engine.formats.grad_probe.compare", "GradComparator"),
    "open": ("msprobe_engine.find.opened", "open_path"),
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:  # they need numpy, which a bare import should not wait for
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, own_name = _PLACES[name]
    return getattr(import_module(module), own_name)
