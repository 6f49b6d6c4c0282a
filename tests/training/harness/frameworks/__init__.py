"""One module per framework: what arms the probe in it, and how it trains a case."""

from __future__ import annotations

import os
import sys
from pathlib import Path

for _name in ("frameworks", "deepspeed"):
    if str(Path(__file__).parents[3] / _name) not in sys.path:
        sys.path.append(str(Path(__file__).parents[3] / _name))
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("LOCAL_SIZE", "2")  # else some versions of DeepSpeed ask numactl, which few machines have
