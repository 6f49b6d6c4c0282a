"""Framework-neutral names of the existing tool. Re-exports only; what needs a framework is imported when it is asked for."""

from importlib.util import find_spec
from typing import Any

from msprobe_engine.compare.single import SingleComparator
from msprobe_engine.errors import MissingExtraError

__all__ = ["SingleComparator", "SingleSave"]


def __getattr__(name: str) -> Any:
    if name != "SingleSave":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if find_spec("torch") is None:
        raise MissingExtraError("torch", "torch", "SingleSave")
    from msprobe_integrations.torch.single_save import SingleSave

    return SingleSave
