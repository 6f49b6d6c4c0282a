"""Puts the fork pool and the small trainings of other tests on the path."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
for place in (Path(__file__).parent, TESTS / "frameworks", TESTS / "monitor_torch"):
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))
