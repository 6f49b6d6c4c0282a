"""Is the other end alive, and does what it sends come fast enough? Time in which this end did not read does not count."""

from __future__ import annotations


class Pace:
    """See the module. Times are those of `time.monotonic`.

    Args:
        silence: seconds without a byte that are too many.
        least_rate: bytes per second that a message needs on average, after `silence`.
    """

    def __init__(self, now: float, silence: float, least_rate: float) -> None:
        self._silence = silence
        self._rate = least_rate
        self._heard = now
        self._began: float | None = None
        self._paused: float | None = None

    def look(self, now: float, *, reading: bool, heard: bool, complete: bool, inside: int) -> str:
        """What is wrong, "" when nothing is.

        Args:
            reading: this end takes what comes.
            heard: something has come since the last look.
            complete: a frame has become complete since then.
            inside: bytes of the frame that has begun.
        """
        if heard:
            self._heard = now
        if not reading:
            self._paused = now if self._paused is None else self._paused
            return ""
        if self._paused is not None:
            self._heard += now - self._paused
            if self._began is not None:
                self._began += now - self._paused
            self._paused = None
        if not inside:
            self._began = None
        elif complete or self._began is None:
            self._began = now
        if now - self._heard > self._silence:
            return f"nothing was heard for {self._silence:g} s"
        if self._began is not None and now - self._began > self._silence + inside / self._rate:
            return f"a message of {inside} bytes has not come within {now - self._began:.0f} s, which is too slow"
        return ""
