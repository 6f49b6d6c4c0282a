"""The ring of frames."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.core.errors import UsageError
from msprobe_engine.probe.incident.manager import Ring


@given(size=st.integers(1, 8), count=st.integers(0, 30))
def test_keeps_the_newest(frame: Any, size: int, count: int) -> None:
    """The newest `size` frames are kept, oldest first."""
    ring = Ring(size)
    for step in range(count):
        ring.append(frame(step))
    assert [f.step for f in ring.frames()] == list(range(count))[-size:]
    assert len(ring) == min(size, count)


def test_needs_room() -> None:
    """A ring for no step is refused."""
    with pytest.raises(UsageError, match="steps=0"):
        Ring(0)
