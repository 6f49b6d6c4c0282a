"""Data mapping (``-dm``): what a row of the target is called on the golden side.

Keys are row names. Without a row's own name among them its record's name counts, then its module as ``path.Class``, so a file of renamed
modules does as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msprobe_engine.core import names
from msprobe_engine.formats.mapping_file import read_mapping, texts


class DataMapping:
    """Row name -> row name."""

    def __init__(self, mapping: Mapping[str, str]) -> None:
        self.rows = dict(mapping)

    @classmethod
    def read(cls, source: Any) -> DataMapping | None:
        """From a file or a mapping; None without one.

        Raises:
            UsageError: it cannot be read, or is no mapping of names.
        """
        return cls(texts(read_mapping(source, "data mapping"), "data mapping")) if source else None

    def row_name(self, name: str, otherwise: str | None = None) -> str:
        """What the row is called on the golden side.

        Args:
            name: of the target, as its file has it.
            otherwise: the answer for what is not in the mapping; None: the name.
        """
        renamed = self.rows.get(name)
        if renamed is None:
            renamed = self._of_module(name)
        if renamed is None:
            return name if otherwise is None else otherwise
        return renamed

    def _of_module(self, name: str) -> str | None:
        if not name.startswith(("Module.", "Cell.")):
            return None
        kind, _, rest = name.partition(".")
        for word in (".forward.", ".backward.", ".parameters_grad"):
            place, separator, tail = rest.partition(word)
            if separator:
                golden_path = self.rows.get(place)
                return None if golden_path is None else f"{kind}.{golden_path}{separator}{tail}"
        return None


def module_place(record: str) -> str | None:
    """``path.Class`` of a module's record; None for others."""
    parsed = names.parse(record)
    return f"{parsed.path}.{parsed.cls}" if isinstance(parsed, (names.ModuleName, names.ParametersGradName)) else None
