"""Puts the trainings of the frameworks' own tests on the path."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
for place in (
    HERE,
    *(HERE.parent / name for name in ("deepspeed", "transformers", "lightning", "torch")),
    HERE.parents[1] / "monitor_torch",
):
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))
