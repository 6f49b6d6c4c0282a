"""Puts the helpers of these tests, and the harnesses of others, on the path."""

from __future__ import annotations

import os
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
for place in (
    Path(__file__).parent,
    *(TESTS / n for n in ("frameworks", "torch", "distributed", "megatron", "deepspeed", "trainer_mon", "grad_probe")),
):
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
