"""A saved good pack against now: is this environment, with these scripts, the one that run was started in?"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from msprobe_engine.config.collect.pack import collect
from msprobe_engine.config.pack.reader import read_pack
from msprobe_engine.find.config import difference
from msprobe_engine.find.config.comparison import Comparison
from msprobe_engine.find.config.pack_settings import PackSide
from msprobe_engine.find.config.packs import compare_packs

STARTED = (difference.ENV, difference.PIP, difference.SETTINGS, difference.SYSTEM)
"""What is there before a training runs."""


def verify(
    good: str | Path,
    paths: Sequence[str | Path] = (),
    pack: str | Path | None = None,
    arguments: Sequence[str] | None = None,
    *,
    added: Sequence[str] = (),
    key: bytes = b"",
) -> Comparison:
    """Compare a good pack with another one, or with this environment and these scripts as they are now.

    What the good pack has and cannot be there before the training runs (weights, samples, random calls) is not compared, which is said
    and is no difference.

    Args:
        good: a saved pack.
        paths: launch scripts and settings files; used when there is no `pack`.
        pack: a pack to be verified.
        arguments: what the scripts would be called with; None: not known.
        added, key: see `environment.collect`.

    Raises:
        DumpFormatError: a path is no pack, or a script cannot be read.
    """
    first = read_pack(good)
    if pack is not None:
        return compare_packs(first, read_pack(pack))
    with tempfile.TemporaryDirectory(prefix="msprobe_verify_") as place:
        now, notes = collect(paths, Path(place) / "now.zip", arguments, added=added, key=key)
        found = compare_packs(first, read_pack(now), only=STARTED)
        found.cmp = "now"
        found.sides["cmp"] = {**found.sides.get("cmp", {}), "path": "this environment, now"}
    side = PackSide(first)
    for name in (difference.DATASET, difference.WEIGHTS, difference.RANDOM):
        if side.has(name):
            found.not_compared[name] = f"{name} of the good pack: there are none before the training runs"
    found.notes += notes
    return found
