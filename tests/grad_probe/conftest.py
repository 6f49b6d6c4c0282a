"""A process without a debugger before and after each test, and the helpers of these tests on the path."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

for _place in (Path(__file__).parent, Path(__file__).parents[1] / "frameworks"):
    if str(_place) not in sys.path:
        sys.path.insert(0, str(_place))
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def _own_debugger() -> Iterator[None]:
    from msprobe_engine.core import log
    from msprobe_integrations.torch.dump.debugger import PrecisionDebugger

    PrecisionDebugger._instance = None
    log.forget_warnings()
    yield
    made = PrecisionDebugger._instance
    if made is not None and made._built:
        atexit.unregister(made._at_exit)
        made._at_exit()
    PrecisionDebugger._instance = None
    log.set_rank(None)
