"""Where the gradient probe puts what, and the columns of its tables.

======================================  ==========================================================================================
file                                    content
======================================  ==========================================================================================
``rank{R}/grad_summary_{step}.csv``     one row per parameter, see `header`; UTF-8 with a byte order mark; written last
``rank{R}/step{step}/{parameter}.npy``  ``gradient > 0``, bool, of the gradient's shape (levels L1 and L2)
``rank{R}/step{step}.signs``            signs of all parameters of the step in two bits per element: a safetensors file, per
                                        parameter a flat uint8 tensor (`msprobe_engine.formats.grad_probe.signs`); its metadata hold the
                                        shapes (levels L1 and L2; additive)
======================================  ==========================================================================================

The first two are those of the existing tool (8.1.1).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from itertools import pairwise

SUMMARY = re.compile(r"grad_summary_([0-9]{1,10})\.csv")
RANK = re.compile(r"rank([0-9]{1,10})")
STEP = re.compile(r"step([0-9]{1,10})")
SIGNS = re.compile(r"step([0-9]{1,10})\.signs")
SHAPES = "shapes"
"""Key of the metadata of a signs file: JSON, parameter to shape."""
_LONGEST = 255 - len("_similarities.png")
_SAFE = re.compile(r"[^A-Za-z0-9_.\-]")


def summary_name(step: int) -> str:
    """File name of a step's table."""
    return f"grad_summary_{step}.csv"


def signs_name(step: int) -> str:
    """File name of a step's packed signs."""
    return f"step{step}.signs"


def file_stem(parameter: str) -> str:
    """The name of a parameter as part of a file name. Names of letters, digits, ``_``, ``-`` and ``.`` stay as they are; other
    characters become ``_``, and a digest of the name keeps changed and shortened ones apart."""
    stem = _SAFE.sub("_", parameter)
    if stem == parameter and len(stem) <= _LONGEST and not stem.startswith("."):
        return stem
    digest = hashlib.blake2b(parameter.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
    return f"{stem.lstrip('.')[: _LONGEST - 9]}_{digest}"


def header(level: str, bounds: Sequence[float], shards: bool = False) -> list[str]:
    """Columns of a step's table.

    Those of the existing tool, and behind them what it has not: ``NaN`` at level L2 (share of NaN, which belongs to no interval; there
    it counts for the last one), and ``shard`` where gradients are parts of parameters: ``[lo, hi) of n``, flat elements.
    """
    columns = {"L0": ["MD5"], "L1": [], "L2": [*intervals(bounds), "=0"]}[level]
    return ["param_name", *columns, "max", "min", "norm", "shape", *["NaN"] * (level == "L2"), *["shard"] * shards]


def intervals(bounds: Sequence[float]) -> list[str]:
    """Names of the intervals: ``(-inf, -1]``, ``(-1, 0]``, ..., ``(1, inf)``; none without bounds."""
    if not bounds:
        return []
    inner = [f"({low}, {high}]" for low, high in pairwise(bounds)]
    return [f"(-inf, {bounds[0]}]", *inner, f"({bounds[-1]}, inf)"]
