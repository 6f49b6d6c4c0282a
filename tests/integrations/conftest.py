"""Puts the harness of trainings, and the helpers of these folders and of others, on the path."""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE, TESTS = Path(__file__).parent, Path(__file__).parents[1]
SHARED = ("training", "frameworks", "torch", "distributed", "megatron", "deepspeed", "trainer_mon", "grad_probe", "monitor_torch")
for place in (HERE, *(HERE / name for name in ("torch", "deepspeed", "mindspeed")), *(TESTS / name for name in SHARED)):
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("LOCAL_SIZE", "2")  # else some versions of DeepSpeed ask numactl, which few machines have
