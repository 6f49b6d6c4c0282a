"""Of many ranks those that hold the same are looked at once: the others follow the first of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, TypeVar

from msprobe_engine.formats.dump.replicas.reader import StepTables

MANY = 64
"""Up to so many steps and ranks each is looked at for itself."""

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class Files(NamedTuple):
    """What one step and rank is made of: its dump files, of one side or of two."""

    step: int
    paths: tuple[Path, ...]


def leaders(
    items: Sequence[T], key: Callable[[T], K], files: Callable[[T], Files], where: Callable[[T], Hashable], tables: StepTables
) -> dict[K, K]:
    """Key -> key of the one before it whose files differ from its own only in the ranks that they name.

    Args:
        where: those for which it gives something else are never the same.
    """
    first: dict[Hashable, K] = {}
    leader_of: dict[K, K] = {}
    for step, of_step in groupby(items, key=lambda item: files(item).step):
        some = list(of_step)
        tables.of(step).expect([path for item in some for path in files(item).paths])
        for item in some:
            templates = [tables.of(step).template(path) for path in files(item).paths]
            if None not in templates:
                leader = first.setdefault((where(item), step, *map(id, templates)), key(item))
                if leader != key(item):
                    leader_of[key(item)] = leader
    return leader_of


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
