"""Puts the harnesses of other tests on the path."""

from __future__ import annotations

import os
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
for place in (Path(__file__).parent, *(TESTS / n for n in ("frameworks", "monitor_torch", "replicas", "megatron", "deepspeed"))):
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
