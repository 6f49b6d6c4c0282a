"""Of many ranks those that hold the same are looked at once: the others follow the first of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from msprobe_engine.formats.dump.replicas import StepTables

MANY = 64
"""Up to so many steps and ranks each is looked at for itself."""

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class Files(NamedTuple):
    """What one step and rank is made of: its dump files, of one side or of two. Those with another `where` are never the same."""

    where: Hashable
    step: int
    paths: tuple[Path, ...]


def leaders(files: Iterable[tuple[K, Files]], tables: StepTables) -> dict[K, K]:
    """Key -> key of the one before it whose files differ from its own only in the ranks that they name."""
    first: dict[Hashable, K] = {}
    found: dict[K, K] = {}
    for key, (where, step, paths) in files:
        templates = [tables.of(step).template(path) for path in paths]
        if None not in templates:
            leader = first.setdefault((where, step, *map(id, templates)), key)
            if leader != key:
                found[key] = leader
    return found


def run(
    items: Sequence[T],
    key: Callable[[T], K],
    led: Mapping[K, K],
    do: Callable[[Sequence[T]], None],
    stands: Callable[[K], bool],
) -> list[T]:
    """Do those that others follow, then the followers of those that came to nothing (`stands` says which did not) for themselves.

    Returns:
        Those that have followed.
    """
    do([item for item in items if key(item) not in led])
    alone = [item for item in items if key(item) in led and not stands(led[key(item)])]
    if alone:
        do(alone)
    known = {key(item) for item in alone}
    return [item for item in items if key(item) in led and key(item) not in known]
