"""Which tensors of an entry get a file, and what it is called. The template of dump.json and the writers of tensor files both ask
here, so ``data_name`` and the files agree."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from msprobe_engine import names
from msprobe_engine.errors import UsageError
from msprobe_engine.records import Entry, TensorRef

_PLACE = {"input_args": "input", "input_kwargs": "kwargs"}


def place_of(section: str) -> str:
    """First part of the place of a section's tensors: ``input_args`` is ``input``, ``input_kwargs`` is ``kwargs``."""
    return _PLACE.get(section, section)


def file_name(entry: str, place: str, suffix: str, gradients: bool = False) -> str | None:
    """Name of the file of one tensor; None when it cannot be a file name (longer than 255 bytes, with a separator,
    with half a surrogate pair).

    Args:
        entry: record name.
        place: way to the tensor inside the record, ``input.0``, ``kwargs.mask``; ``""``: the record is the tensor.
        suffix: ``.pt`` or ``.npy``.
        gradients: the record holds parameter gradients. The format wraps each in a list, its file has no index.
    """
    try:
        name = names.tensor_file(entry, place.removesuffix(".0") if gradients else place, suffix)
        name.encode()
    except (UsageError, UnicodeEncodeError):
        return None
    return name


def holds_gradients(entry: str) -> bool:
    """True for records of parameter gradients."""
    return isinstance(names.parse(entry), names.ParametersGradName)


def tensor_files(entry: Entry, sections: Collection[str], suffix: str = ".pt") -> Iterator[tuple[str, str | None, TensorRef]]:
    """The tensors of an entry that have a row, each with the name it would like (for messages) and its file name or None.

    Args:
        sections: those that dump.json has; tensors of others are not saved.
    """
    gradients = holds_gradients(entry.name)
    single = len(entry.sections) == 1 and isinstance(names.parse(entry.name), names.DebugName)
    for section, structure in entry.sections.items():
        if section in sections:
            for place, ref in _walk("" if single else place_of(section), structure):
                if ref.row >= 0:
                    yield (f"{entry.name}.{place}" if place else entry.name), file_name(entry.name, place, suffix, gradients), ref


def _walk(place: str, node: object) -> Iterator[tuple[str, TensorRef]]:
    if isinstance(node, TensorRef):
        yield place, node
    elif isinstance(node, dict):
        for key, child in node.items():
            yield from _walk(f"{place}.{key}" if place else str(key), child)
    elif isinstance(node, list):
        for i, child in enumerate(node):
            yield from _walk(f"{place}.{i}" if place else str(i), child)
