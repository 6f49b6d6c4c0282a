"""A process without a debugger after each test, and `page_blocks` on the path."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_place = str(Path(__file__).parent.parent / "monitor_pages")
if _place not in sys.path:
    sys.path.insert(0, _place)


@pytest.fixture(autouse=True)
def _own_debugger() -> Iterator[None]:
    from msprobe_engine.core import log
    from msprobe_integrations.torch.dump.debugger import PrecisionDebugger

    PrecisionDebugger._instance = None
    yield
    made = PrecisionDebugger._instance
    if made is not None and made._built:
        atexit.unregister(made._at_exit)
        made._at_exit()
    PrecisionDebugger._instance = None
    log.set_rank(None)
