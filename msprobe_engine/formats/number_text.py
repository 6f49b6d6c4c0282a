"""Numbers as text, many at a time: by `msprobe_engine/native/_tabletext.c` where it was built, and else here, with the same result."""

from __future__ import annotations

import importlib
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt


@lru_cache(maxsize=1)
def load_native() -> ModuleType | None:
    """The compiled module, ready for use; None where it was not built."""
    try:
        module = importlib.import_module("msprobe_engine.native._tabletext")
    except ImportError:
        return None
    from msprobe_engine.formats.dump.writing.text import powers_of_ten

    module.set_powers(powers_of_ten())
    return module


def texts(values: npt.NDArray[np.float64], where: npt.NDArray[np.bool_], suffix: str = "", other: Any = None) -> list[Any]:
    """``repr`` of every number with `suffix` behind it.

    Args:
        values: float64 (n,).
        where: bool (n,); elsewhere stands `other`.
        suffix: ASCII.
    """
    module = load_native()
    if module is None:
        return [f"{value!r}{suffix}" if chosen else other for value, chosen in zip(values.tolist(), where.tolist())]
    found: list[Any] = module.texts(np.ascontiguousarray(values, np.float64), np.ascontiguousarray(where, bool), suffix.encode(), other)
    return found
