"""Dump directories: written while training, read afterwards.

`read` opens a dump for notebooks and scripts. What it needs is imported when it is called.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from msprobe_engine.formats.dump.notebook.api import Dump

__all__ = ["read"]


def read(path: Path | str) -> Dump:
    """Open a dump by any of its paths: the root, a step directory, a rank directory, or its dump.json or debug.json.

    Dumps of this tool and of the existing one (8.1.1, 26.2.0) are read, also unfinished steps and those of killed runs.

    Raises:
        DumpFormatError: there is no dump at this path.
    """
    from msprobe_engine.formats.dump.notebook import api

    return api.read(path)
