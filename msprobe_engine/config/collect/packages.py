"""Installed distributions, as entry ``pip`` has them: one line ``name=version`` each."""

from __future__ import annotations

import functools
from email.parser import HeaderParser
from importlib.metadata import distributions

from msprobe_engine.core.guard import raise_of_training

_FILES = "METADATA", "PKG-INFO", ""
"""Where `importlib.metadata` looks; the last is a file in the place of a directory."""


@functools.lru_cache(maxsize=1)
def list_installed() -> tuple[tuple[str, str], ...]:
    """(name, version) of every distribution on the path, sorted; of a name that is there twice the one that is imported comes first, and
    both are given. What has no readable metadata is left out."""
    installed: dict[tuple[str, str], None] = {}
    for distribution in distributions():
        try:
            text = next(filter(None, map(distribution.read_text, _FILES)), "")
            head = HeaderParser().parsestr(text.partition("\n\n")[0])  # what follows is a long description
            name, version = head["Name"], head["Version"]
        except Exception as error:  # a broken installation: metadata that is gone, or no metadata at all
            raise_of_training(error)
            continue
        if name and version:
            installed[str(name), str(version)] = None
    order = {pair: number for number, pair in enumerate(installed)}
    return tuple(sorted(installed, key=lambda pair: (pair[0].lower(), order[pair])))


def text() -> str:
    """Entry ``pip``. Of a name that is there twice the last line counts for the existing tool, so the imported one is last."""
    pairs = list_installed()
    order = {pair: -number for number, pair in enumerate(pairs)}
    return "".join(f"{name}={version}\n" for name, version in sorted(pairs, key=lambda pair: (pair[0].lower(), order[pair])))
