"""Puts the helpers of these tests on the path."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if str(Path(__file__).parent) not in sys.path:
    sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def own_debugger() -> Iterator[None]:
    """A process without a debugger, and no trace of the test's own behind it."""
    from msprobe_engine.core import log
    from msprobe_integrations.torch.dump.debugger import PrecisionDebugger

    PrecisionDebugger._instance = None
    log.forget_warnings()
    yield
    made = PrecisionDebugger._instance
    if made is not None and made._built:
        made.run.at_exit()
        atexit.unregister(made._at_exit)
    PrecisionDebugger._instance = None
    log.set_rank(None)
