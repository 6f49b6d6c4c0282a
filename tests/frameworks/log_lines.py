"""What the probe writes to its log, as lines of text."""

from __future__ import annotations

import logging


def heard() -> list[str]:
    """Lines that are written from now on, to the end of this process."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("msprobe").addHandler(handler)
    return said
