"""Console messages: ``YYYY-mm-dd HH:MM:SS (pid) [rank N] [LEVEL] message`` on stderr, one line format for the whole project.

Underneath is the standard logger ``msprobe``. It does not propagate, so the root logger of the training script is left alone and
no line appears twice. ``MSPROBE_LOG_LEVEL`` (0 debug, 1 info, 2 warning, 3 error, 4 nothing) is the level from the start.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from typing import TYPE_CHECKING, TextIO

from msprobe_engine.core.guard import raise_of_training

if TYPE_CHECKING:
    _StreamHandler = logging.StreamHandler[TextIO]
else:
    _StreamHandler = logging.StreamHandler  # cannot be subscripted at run time before Python 3.11

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR, "silent": logging.CRITICAL + 1}
ENVIRONMENT_LEVELS = {"0": "debug", "1": "info", "2": "warning", "3": "error", "4": "silent"}

_seen: set[str] = set()
_lock = threading.Lock()
_rank: int | None = None


class _Formatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s (%(process)d)%(rank)s [%(levelname)s] %(message)s", "%Y-%m-%d %H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        rank = current_rank()
        record.rank = "" if rank is None else f" [rank {rank}]"
        return printable(super().format(record))


class _StderrHandler(_StreamHandler):
    """Writes to what `sys.stderr` is when the line is written, so that redirection works."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr

    def handleError(self, record: logging.LogRecord) -> None:
        """A line that cannot be written costs nothing; an exception of the program's signal handler passes."""
        error = sys.exc_info()[1]
        if error is not None:
            raise_of_training(error)
        super().handleError(record)


def printable(text: str) -> str:
    """Text for a terminal: names come from models and files, and what a terminal would obey is shown as an escape. Lines stay."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode("ascii") for c in text)


def one_line(text: str) -> str:
    """`printable`, and a line break is shown as an escape too: for names inside a line."""
    return printable(text).replace("\n", "\\n")


def current_rank() -> int | None:
    """The rank shown in messages: what `set_rank` was given, else ``RANK`` of a launcher with more than one process."""
    if _rank is not None:
        return _rank
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdigit() and os.environ.get("WORLD_SIZE", "1") not in ("", "1") else None


def set_rank(rank: int | None) -> None:
    """Show this rank in every line from now on; None: as the launcher says."""
    global _rank
    _rank = rank


def set_level(level: str) -> None:
    """Show messages of this level and above: ``debug``, ``info``, ``warning``, ``error`` or ``silent``."""
    get_logger().setLevel(LEVELS[level])


def level_from_environment() -> str | None:
    """The level that ``MSPROBE_LOG_LEVEL`` asks for, None when it is not set. Any value but 0..4 counts as 1, as it always did."""
    value = os.environ.get("MSPROBE_LOG_LEVEL", "").strip()
    return ENVIRONMENT_LEVELS.get(value, "info") if value else None


def get_logger() -> logging.Logger:
    """The logger ``msprobe`` with its stderr handler."""
    logger = logging.getLogger("msprobe")
    with _lock:
        if not any(isinstance(h, _StderrHandler) for h in logger.handlers):
            handler = _StderrHandler()
            handler.setFormatter(_Formatter())
            logger.addHandler(handler)
            logger.propagate = False
            logger.setLevel(LEVELS[level_from_environment() or "info"])
    return logger


def debug(message: str) -> None:
    """Write a line of level DEBUG."""
    get_logger().debug("%s", message)


def info(message: str) -> None:
    """Write a line of level INFO."""
    get_logger().info("%s", message)


def warning(message: str) -> None:
    """Write a line of level WARNING."""
    get_logger().warning("%s", message)


def error(message: str) -> None:
    """Write a line of level ERROR."""
    get_logger().error("%s", message)


def warn_once(key: str, message: str) -> bool:
    """Write a warning the first time `key` is seen in this process; returns whether it was written."""
    with _lock:
        if key in _seen:
            return False
        _seen.add(key)
    warning(message)
    return True


def forget_warnings() -> None:
    """Let every `warn_once` speak again (a new run in the same process, tests)."""
    with _lock:
        _seen.clear()
