"""Progress of long work on a terminal: a bar where rich is installed, a line every few seconds where it is not, nothing in a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

_SECONDS = 5.0
"""A line of text at most this often."""

Advance = Callable[[str], None]


@contextmanager
def bar(what: str, total: int) -> Iterator[Advance]:
    """Yields a function to be called once per piece of work, with what is being done; it writes to the standard error only.

    Args:
        what: the work in one word, for example ``reading``.
        total: how many pieces there are.
    """
    if not sys.stderr.isatty():
        yield lambda _text: None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        yield _lines(what, total)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda text: progress.update(task, advance=1, description=f"{what} {text[:40]}")


def progress(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """Hand `items` on with a bar.

    Args:
        total: how many items there are; None: asked of `items`, if they know.
    """
    if total is None:
        total = len(items) if isinstance(items, Sized) else 0
    with bar(what, total) as advance:
        for item in items:
            yield item
            advance("")


def _lines(what: str, total: int) -> Advance:
    done, last = 0, time.monotonic()

    def advance(text: str) -> None:
        nonlocal done, last
        done += 1
        if time.monotonic() - last >= _SECONDS:
            last = time.monotonic()
            print(f"{what}: {done} of {total} ({text})", file=sys.stderr)

    return advance
