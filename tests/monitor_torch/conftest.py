"""Puts the fork pool and the helpers of these tests on the path."""

from __future__ import annotations

import os
import sys
from pathlib import Path

for place in (Path(__file__).parent, Path(__file__).parents[1] / "frameworks"):
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))
os.environ.setdefault("OMP_NUM_THREADS", "1")
