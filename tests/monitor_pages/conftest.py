"""Puts the helpers of these tests, and those that run ranks, on the path."""

from __future__ import annotations

import os
import sys
from pathlib import Path

for directory in (Path(__file__).parent, Path(__file__).parents[1] / "probe"):
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))
os.environ.setdefault("OMP_NUM_THREADS", "1")
