"""What another processor may round otherwise, where our dump of this machine is held against a kept one of another."""

from __future__ import annotations

import math
import re
from typing import Any

from matching import Difference, RankDump, is_tensor, same_number

ROUNDING = 1e-4
"""Of the tensor's own size."""
CANCELLED = 1e-5
"""Of the largest tensor in the record: what is zero but for round-off (the gradient of a key's bias: softmax does not see it) has any
value below that."""


def rounds_otherwise(d: Difference, theirs: RankDump, floating: str) -> bool:
    """Can this difference come from another processor?

    Args:
        d: the difference.
        theirs: the dump that `d` was found in.
        floating: regular expression of the dtypes that are rounded.
    """
    tensor = d.whole[1]
    if not isinstance(tensor, dict) or not re.match(floating, tensor["dtype"]):
        return False
    if d.kind == "checksum":
        return isinstance(d.ours, str) and isinstance(d.theirs, str) and len(d.ours) == len(d.theirs)
    if d.kind != "value":
        return False
    return same_number(d.ours, d.theirs, ROUNDING, norm(tensor)) or same_number(d.ours, d.theirs, CANCELLED, largest(theirs.data[d.record]))


def norm(tensor: dict[str, Any]) -> float:
    """The Norm of a tensor's description, 0 when there is none that is finite."""
    found = tensor.get("Norm")
    return abs(found) if isinstance(found, float) and math.isfinite(found) else 0.0


def largest(record: Any) -> float:
    """The largest finite Norm in a record."""
    if is_tensor(record):
        return norm(record)
    inner = record.values() if isinstance(record, dict) else record if isinstance(record, list) else ()
    return max(map(largest, inner), default=0.0)
