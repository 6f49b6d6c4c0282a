"""What an installed package tells Python and a source tree does not: where the backend of torch is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path

_POINTS = """\
[msprobe.backends]
torch = msprobe_integrations.torch.backend:TorchBackend
"""


@contextmanager
def registered(folder: Path) -> Iterator[None]:
    """Inside, and in processes that get the path of this one, a folder on the path says it."""
    if any(point.name == "torch" for point in entry_points(group="msprobe.backends")):
        yield
        return
    place = folder / "msprobe_source_tree-0.dist-info"
    place.mkdir()
    (place / "METADATA").write_text("Metadata-Version: 2.1\nName: msprobe-source-tree\nVersion: 0\n")
    (place / "entry_points.txt").write_text(_POINTS)
    sys.path.append(str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
