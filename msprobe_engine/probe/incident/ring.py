"""The last N frames, in memory."""

from __future__ import annotations

from collections import deque

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.records import Frame


class Ring:
    """Keeps the newest `steps` frames. Frames are never changed after they were made, so keeping one costs a reference: 128 bytes
    of statistics per tensor plus its entry.

    Used on the training thread only; `frames` returns a copy that may go to another thread.
    """

    def __init__(self, steps: int) -> None:
        if steps < 1:
            raise UsageError(f"Ring(steps={steps}): at least one step must be kept")
        self._frames: deque[Frame] = deque(maxlen=steps)

    def append(self, frame: Frame) -> None:
        self._frames.append(frame)

    def frames(self) -> list[Frame]:
        """Oldest first."""
        return list(self._frames)

    def last(self) -> Frame | None:
        """The newest, None when there is none yet."""
        return self._frames[-1] if self._frames else None

    def __len__(self) -> int:
        return len(self._frames)
