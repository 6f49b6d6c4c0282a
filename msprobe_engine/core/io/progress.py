"""Progress of long work, on the standard error: a bar on a terminal where rich is installed, else a line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

_SECONDS, _SECONDS_IN_LOG = 5.0, 10.0
"""A line of text at most this often, on a terminal and elsewhere: what is done by then says nothing at all."""

Advance = Callable[[str], None]


@contextmanager
def bar(what: str, total: int) -> Iterator[Advance]:
    """Yields a function to be called once per piece of work, with what is being done; it writes to the standard error only.

    Args:
        what: the work in one word, for example ``reading``.
        total: how many pieces there are.
    """
    if not sys.stderr.isatty():
        yield _lines(what, total, _SECONDS_IN_LOG)
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        yield _lines(what, total, _SECONDS)
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


def _lines(what: str, total: int, seconds: float) -> Advance:
    done, last = 0, time.monotonic()

    def advance(text: str) -> None:
        nonlocal done, last
        done += 1
        if time.monotonic() - last >= seconds:
            last = time.monotonic()
            of = f" of {total}" if total else ""
            print(f"{what}: {done}{of}" + (f" ({text})" if text else ""), file=sys.stderr, flush=True)

    return advance
