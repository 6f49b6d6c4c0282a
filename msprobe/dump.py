"""Dumps in notebooks and scripts: `read` opens one, `estimate` says what one will cost, `open_dump` is the plain reader below `read`, and
`not_saved` says which tensors a rank could not save. What they need is imported when they are asked for."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from msprobe_engine.formats.dump import read
    from msprobe_engine.formats.dump.reader import open_dump
    from msprobe_engine.formats.tensors.reader import not_saved
    from msprobe_engine.probe.estimate import estimate

__all__ = ["estimate", "not_saved", "open_dump", "read"]
_MODULES = {
    "estimate": "msprobe_engine.probe.estimate",
    "not_saved": "msprobe_engine.formats.tensors.reader",
    "open_dump": "msprobe_engine.formats.dump.reader",
    "read": "msprobe_engine.formats.dump",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
