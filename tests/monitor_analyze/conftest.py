"""Puts the helpers of framework tests on the path."""

from __future__ import annotations

import os
import sys
from pathlib import Path

for _place in ("frameworks", "megatron"):
    if (_path := str(Path(__file__).parents[1] / _place)) not in sys.path:
        sys.path.insert(0, _path)
os.environ.setdefault("OMP_NUM_THREADS", "1")
