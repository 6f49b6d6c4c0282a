"""Lets the tests here import `dump_frames`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
