"""Progress bars of commands: rich where it is installed and somebody looks, else nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

T = TypeVar("T")


def progress(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """Hand `items` on, with a bar on stderr while that is a terminal.

    Args:
        what: what is done, one or two words.
        total: how many items there are; None: asked of `items`, if they know.
    """
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError:
        yield from items
        return
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield from items
        return
    if total is None and isinstance(items, Sized):
        total = len(items)
    yield from track(items, what, total=total, console=console, transient=True)
