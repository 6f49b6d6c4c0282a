"""How much disk the tensor files of one rank may take over the whole run."""

from __future__ import annotations

import threading


class DiskQuota:
    """Bytes are taken before a file is written and given back when it turned out smaller: what is on the disk is never more than
    `used`, and `used` never more than `limit`.

    Args:
        limit: bytes, 0: no limit.
    """

    def __init__(self, limit: int = 0) -> None:
        self.limit = limit
        self.used = 0
        self._lock = threading.Lock()

    def reserve(self, nbytes: int) -> bool:
        """Take `nbytes`; False when they are not there, and nothing is taken."""
        with self._lock:
            if self.limit and self.used + nbytes > self.limit:
                return False
            self.used += nbytes
            return True

    def release(self, nbytes: int) -> None:
        """Give back what was taken and not used."""
        with self._lock:
            self.used -= nbytes
