"""Installed distributions, as entry ``pip`` has them: one line ``name=version`` each."""

from __future__ import annotations

import functools
from importlib.metadata import distributions

from msprobe_engine.core.guard import raise_of_training


@functools.lru_cache(maxsize=1)
def installed() -> tuple[tuple[str, str], ...]:
    """(name, version) of every distribution on the path, sorted; of a name that is there twice the one that is imported comes first, and
    both are given. What has no readable metadata is left out."""
    found: dict[tuple[str, str], None] = {}
    for one in distributions():
        try:
            name, version = one.metadata["Name"], one.version
        except Exception as error:  # a broken installation: metadata that is gone, or no metadata at all
            raise_of_training(error)
            continue
        if name and version:
            found[str(name), str(version)] = None
    order = {pair: number for number, pair in enumerate(found)}
    return tuple(sorted(found, key=lambda pair: (pair[0].lower(), order[pair])))


def text() -> str:
    """Entry ``pip``. Of a name that is there twice the last line counts for the existing tool, so the imported one is last."""
    pairs = installed()
    order = {pair: -number for number, pair in enumerate(pairs)}
    return "".join(f"{name}={version}\n" for name, version in sorted(pairs, key=lambda pair: (pair[0].lower(), order[pair])))
