"""Puts the float64 references of the monitor's tests on the path."""

from __future__ import annotations

import sys
from pathlib import Path

for place in (Path(__file__).parent, Path(__file__).parents[2] / "monitor_torch"):
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))
