"""Puts the example scripts and the fork pool on the path of the Megatron tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
for place in (Path(__file__).parent, ROOT / "tests" / "frameworks", ROOT / "tests" / "training", ROOT / "examples" / "megatron"):
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))
os.environ.setdefault("OMP_NUM_THREADS", "1")
