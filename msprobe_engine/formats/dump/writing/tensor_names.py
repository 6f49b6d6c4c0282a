"""Which tensors of an entry get a file, and what it is called. The template of dump.json and the writers of tensor files both ask
here, so ``data_name`` and the files agree."""

from __future__ import annotations

import re
from collections.abc import Collection

from msprobe_engine.core import names
from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.records import Entry, TensorRef, place_of

_COMMON = re.compile(r"\w[\w.]*", re.ASCII).fullmatch  # what needs no closer look


def file_name(entry: str, place: str, suffix: str, gradients: bool = False) -> str | None:
    """Name of the file of one tensor; None when it cannot be a file name (longer than 255 bytes, with a separator,
    with half a surrogate pair).

    Args:
        place: way to the tensor inside the record, ``input.0``, ``kwargs.mask``; ``""``: the record is the tensor.
        suffix: ``.pt`` or ``.npy``.
        gradients: the record holds parameter gradients. The format wraps each in a list, its file has no index.
    """
    if gradients:
        place = place.removesuffix(".0")
    name = f"{entry}.{place}{suffix}" if place else f"{entry}{suffix}"
    if len(name) < 256 and _COMMON(name):
        return name
    try:
        name = names.tensor_file(entry, place, suffix)
        name.encode()
    except (UsageError, UnicodeEncodeError):
        return None
    return name


def holds_gradients(entry: str) -> bool:
    """True for records of parameter gradients."""
    return "parameters_grad" in entry and isinstance(names.parse(entry), names.ParametersGradName)


def tensor_files(entry: Entry, sections: Collection[str], suffix: str = ".pt") -> list[tuple[str, str | None, TensorRef]]:
    """The tensors of an entry that have a row, each with the name it would like (for messages) and its file name or None.

    Args:
        sections: those that dump.json has; tensors of others are not saved.
    """
    gradients = holds_gradients(entry.name)
    record = entry.name
    single = record.endswith(".debug") and len(entry.sections) == 1 and isinstance(names.parse(record), names.DebugName)
    found: list[tuple[str, TensorRef]] = []
    for section, structure in entry.sections.items():
        if section in sections:
            _walk("" if single else place_of(section), structure, found)
    return [(f"{record}.{place}" if place else record, file_name(record, place, suffix, gradients), ref) for place, ref in found]


def _walk(place: str, node: object, found: list[tuple[str, TensorRef]]) -> None:
    kind = type(node)
    if kind is TensorRef:
        if node.row >= 0:  # type: ignore[attr-defined]
            found.append((place, node))  # type: ignore[arg-type]
    elif kind is dict:
        for key, child in node.items():  # type: ignore[attr-defined]
            _walk(f"{place}.{key}" if place else str(key), child, found)
    elif kind is list:
        for i, child in enumerate(node):  # type: ignore[arg-type]
            _walk(f"{place}.{i}" if place else str(i), child, found)
