"""Is a path a pack? Torch's checkpoints are zips too, so the entries decide where the name does not."""

from __future__ import annotations

import os
from pathlib import Path

from msprobe_engine.core.errors import ArchiveError
from msprobe_engine.core.io.archives import read_directory
from msprobe_engine.core.io.input_files import open_input

OWN = ("env", "pip", "hyperparameters/", "dataset/", "weights/", "random/", "msprobe/")
"""Names of the entries of a pack, or how they begin."""


NAME = "config_check_pack.zip"
"""What a probe calls the pack of its run."""


def pack_of(path: str | Path) -> Path:
    """The pack that a path means: of the output directory of a run the one in it."""
    inside = Path(path) / NAME
    return inside if inside.is_file() else Path(path)


def is_pack(path: str | Path) -> bool:
    """A path that ends in the letters ``zip``, as the existing tool tells it, or a zip whose entries are those of a pack."""
    if os.fspath(path).endswith("zip") and not os.path.isdir(path):
        return True
    try:
        with open_input(path) as file:
            names = [entry.filename for entry in read_directory(file)[0]]
    except (OSError, ArchiveError):
        return False
    return bool(names) and all(name.startswith(OWN) for name in names)
