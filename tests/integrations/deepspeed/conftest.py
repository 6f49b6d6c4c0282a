"""Puts the small DeepSpeed model and the fork pool on the path."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
for place in (Path(__file__).parent, ROOT / "tests" / "deepspeed", ROOT / "tests" / "frameworks"):
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))
if os.environ.get("MSPROBE_DEEPSPEED_DIR"):  # another version, for `make test-matrix`
    sys.path.insert(0, os.environ["MSPROBE_DEEPSPEED_DIR"])
os.environ.setdefault("LOCAL_SIZE", "2")  # else some versions ask numactl, which few machines have
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
