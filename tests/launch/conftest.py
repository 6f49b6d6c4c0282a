"""Puts the helpers of these tests, and those that run ranks, on the path."""

from __future__ import annotations

import os
import sys
from pathlib import Path

for _directory in (Path(__file__).parent, Path(__file__).parents[1] / "probe", Path(__file__).parents[1] / "monitor_pages"):
    if str(_directory) not in sys.path:
        sys.path.insert(0, str(_directory))
os.environ.setdefault("OMP_NUM_THREADS", "1")
