"""Cell mapping (``-cm``): modules of the target by ``path.Class`` -> ``path.Class`` of the golden side; ``Cell`` is read as ``Module``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from msprobe_engine.formats.mapping_file import read_mapping, texts

_END = re.compile(r"\.(?:forward|backward|parameters_grad)\.")
_DIRECTION = re.compile(r"\.(?:forward|backward)\.")


class CellMapping:
    """Renames modules.

    Args:
        mapping: ``path.Class`` -> ``path.Class``; empty: nothing but ``Cell`` -> ``Module``.
        exact: only whole ``path.Class`` are renamed (8.1.1). Else, where no whole one fits, every key that is part of it is replaced
            (26.2.0).
    """

    def __init__(self, mapping: Mapping[str, str], exact: bool) -> None:
        self.modules, self.exact = dict(mapping), exact
        self._known: dict[str, str] = {}

    @classmethod
    def read(cls, source: Any, exact: bool) -> CellMapping | None:
        """From a file or a mapping; True: no renaming but of ``Cell``. None without one.

        Raises:
            UsageError: it cannot be read, or is no mapping of names.
        """
        if source is None or source is False or source == "":
            return None
        return cls({} if source is True else texts(read_mapping(source, "cell mapping"), "cell mapping"), exact)

    def row_name(self, name: str) -> str:
        """What a row is called on the golden side; ``N/A`` for a name without a direction, as in the existing tool."""
        if not _DIRECTION.search(name) and "parameters_grad" not in name.split("."):
            return "N/A"
        name = name.replace("Cell", "Module", 1)
        if not self.modules:
            return name
        place = _END.split(name.partition(".")[2], maxsplit=1)[0]
        other = self._place(place)
        return name if other == place else name.replace(place, other, 1)

    def record_name(self, name: str) -> str:
        """The same of a record's name; one without a direction stays."""
        renamed = self.row_name(f"{name}.")
        return name if renamed == "N/A" else renamed[:-1]

    def _place(self, place: str) -> str:
        known = self._known.get(place)
        if known is None:
            known = self.modules.get(place)
            if known is None:
                known = place
                for part, other in () if self.exact else self.modules.items():
                    if part in known:
                        known = known.replace(part, other, 1)
            self._known[place] = known
        return known
