"""Lets the tests here import what lies next to them, and the comparison of dumps that torch's tests have."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
for path in (HERE, HERE.parents[1] / "compat"):
    if str(path) not in sys.path:
        sys.path.append(str(path))
