"""Lets the tests here import what lies next to them, and the driver of the existing tool's compare."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
for path in (HERE, HERE.parent / "dump"):
    if str(path) not in sys.path:
        sys.path.insert(0, str(path))
