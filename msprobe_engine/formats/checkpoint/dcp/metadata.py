"""Reads what ``torch.distributed.checkpoint`` says of a checkpoint (``.metadata``), and finds the pieces of its tensors in the files.

``.metadata`` is a pickle of ``Metadata`` (``torch/distributed/checkpoint/metadata.py``): ``state_dict_metadata`` has the size, dtype and
chunks of each tensor, ``storage_data`` file, offset and length of each chunk and object (``filesystem.py``), ``planner_data`` the path of
each flat key. An item of a file is a complete ``torch.save`` of the chunk or the object.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeGuard

from msprobe_engine.core.dtypes import item_size
from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.core.log import one_line
from msprobe_engine.core.process.garbage_collection import collection_paused
from msprobe_engine.formats.checkpoint.model import Box, Index
from msprobe_engine.formats.tensors.opaque_objects import Inert, Named, attributes
from msprobe_engine.formats.tensors.pt_parts import MOST_ELEMENTS, format_parts
from msprobe_engine.formats.tensors.torch_file import FileTensor, UnknownNameError, read_torch, regions

METADATA = ".metadata"


class Item(NamedTuple):
    """Where an item lies.

    Attributes:
        file: name inside the checkpoint.
        offset, length: its bytes.
    """

    file: str
    offset: int
    length: int


class Chunk(NamedTuple):
    """A piece of a tensor.

    Attributes:
        offsets, sizes: of it in the whole.
        item: None: the metadata do not say where it is.
    """

    offsets: Index
    sizes: Index
    item: Item | None


class TensorEntry(NamedTuple):
    """A tensor as the metadata have it."""

    shape: Index
    dtype: str
    chunks: list[Chunk]


@dataclass
class Metadata:
    """What ``.metadata`` says.

    Attributes:
        tensors: by flat key.
        objects: everything else, by flat key; None: the metadata do not say where it is.
        paths: of flat keys in the state dict that was saved; empty when they were not kept.
        problems: entries that cannot be.
    """

    directory: Path
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    objects: dict[str, Item | None] = field(default_factory=dict)
    paths: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


@dataclass
class Pieces:
    """The pieces of tensors in the files.

    Attributes:
        boxes: by flat key.
        problems: pieces that are missing or damaged.
    """

    boxes: dict[str, list[Box]] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read_metadata(directory: Path, trust: Collection[str] = ()) -> Metadata:
    """The metadata of a checkpoint.

    Raises:
        DumpFormatError: they cannot be read, or are none.
    """
    with collection_paused():  # of hundreds of thousands of pieces none is let go of
        return _read_metadata(directory, trust)


def _read_metadata(directory: Path, trust: Collection[str]) -> Metadata:
    path = directory / METADATA
    tree = read_torch(path, trust).tree
    found = attributes(tree)
    entries, storage = found.get("state_dict_metadata"), found.get("storage_data")
    if not isinstance(tree, Inert) or not isinstance(entries, dict) or not isinstance(storage, dict):
        raise DumpFormatError(f"{path}: holds no description of a distributed checkpoint; it is damaged or something else")
    out = Metadata(directory)
    items = _items(storage, path, out.problems)
    for key, entry in entries.items():
        _add_entry(out, str(key), entry, items, path)
    planner = found.get("planner_data")
    if isinstance(planner, dict):
        out.paths = {str(key): where for key, where in planner.items() if isinstance(where, tuple)}
    return out


def _items(storage: dict[Any, Any], path: Path, problems: list[str]) -> dict[tuple[str, Index | None], Item]:
    """Items by key and offsets of the chunk; of objects by key and None."""
    found: dict[tuple[str, Index | None], Item] = {}
    bad = 0
    inside: set[str] = set()
    for index, info in storage.items():
        place, where = _fields(index), _fields(info)
        name, offset, length = where.get("relative_path"), where.get("offset"), where.get("length")
        chunk = place.get("offset")
        if not (isinstance(name, str) and isinstance(offset, int) and isinstance(length, int) and isinstance(place.get("fqn"), str)):
            bad += 1
            continue
        if name not in inside and _is_outside(name):
            raise DumpFormatError(f"{path}: names the file {one_line(name)[:80]!r}, which is not inside the checkpoint; nothing is read")
        inside.add(name)
        if where.get("transform_descriptors"):
            problems.append(f"{path}: {place['fqn']} is stored compressed or transformed, which cannot be read in pieces")
            continue
        found[place["fqn"], tuple(chunk) if isinstance(chunk, tuple) else None] = Item(name, offset, length)
    if bad:
        problems.append(f"{path}: {bad} entries do not say where they lie; it is damaged")
    return found


def _is_outside(name: str) -> bool:
    path = PurePosixPath(name)
    return path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name


def _fields(value: Any) -> Mapping[str, Any]:
    """`attributes`, of the many objects that have nothing but a state without a copy."""
    if type(value) is Inert and type(value.state) is dict and not value.keywords and not value.items:
        return value.state
    return attributes(value)


def _add_entry(out: Metadata, key: str, entry: Any, items: dict[tuple[str, Index | None], Item], path: Path) -> None:
    found = _fields(entry)
    if "chunks" not in found:
        out.objects[key] = items.get((key, None))
        return
    properties = found.get("properties")
    state = properties.state if isinstance(properties, Inert) else None
    kind = state[0] if isinstance(state, tuple) and state else attributes(properties).get("dtype")
    dtype = kind.name.removeprefix("torch.") if isinstance(kind, Named) else ""
    shape, chunks = found.get("size"), found["chunks"]
    if not _is_index(shape) or not isinstance(chunks, list) or item_size(dtype) is None:
        out.problems.append(f"{path}: {key} is {dtype or 'of no type'} with shape {format_parts(shape)}, which cannot be; it is not read")
        return
    pieces: list[Chunk] = []
    item_of = items.get
    for chunk in chunks:
        place = _fields(chunk)
        offsets, sizes = place.get("offsets"), place.get("sizes")
        if not _is_index(offsets) or not _is_index(sizes) or not len(offsets) == len(sizes) == len(shape):
            out.problems.append(f"{path}: {key} has a piece at {format_parts(offsets)} of {format_parts(sizes)}, which cannot be")
            continue
        if not all(map(operator.le, map(operator.add, offsets, sizes), shape)):
            out.problems.append(
                f"{path}: {key} has a piece at {format_parts(offsets)} of {format_parts(sizes)}, outside its shape {list(shape)}"
            )
            continue
        pieces.append(Chunk(offsets, sizes, item_of((key, offsets))))
    out.tensors[key] = TensorEntry(shape, dtype, pieces)


def _is_index(value: Any) -> TypeGuard[tuple[int, ...]]:
    if not isinstance(value, tuple) or len(value) > 64:
        return False
    for part in value:  # noqa: SIM110 - of a million of them a call for each part is half a second
        if type(part) is not int or not 0 <= part < MOST_ELEMENTS:
            return False
    return True


def find_pieces(metadata: Metadata, keys: Iterable[str], trust: Collection[str] = ()) -> Pieces:
    """Where the pieces of tensors lie; each item's own description is read and has to fit the metadata.

    Args:
        trust: as `read_torch`.

    Raises:
        UnknownNameError: a pickle names what is not known.
    """
    out = Pieces()
    by_file: dict[str, list[tuple[Item, str, Chunk]]] = {}
    lost: list[str] = []
    for key in keys:
        out.boxes[key] = []
        for chunk in metadata.tensors[key].chunks:
            if chunk.item is None:
                lost.append(key)
            else:
                by_file.setdefault(chunk.item.file, []).append((chunk.item, key, chunk))
    if lost:
        out.problems.append(f"{metadata.directory / METADATA}: does not say where {len(lost)} pieces are, the first is one of {lost[0]}")
    for name, wanted in sorted(by_file.items()):
        file = metadata.directory / name
        wanted.sort(key=lambda entry: entry[0].offset)
        others: list[str] = []
        for (_, key, chunk), tree in _read_items(file, wanted, out.problems, trust):
            dtype = metadata.tensors[key].dtype
            if isinstance(tree, FileTensor) and tree.shape == chunk.sizes and tree.dtype == dtype:
                out.boxes[key].append(Box(chunk.offsets, chunk.sizes, file, tree.start, tree.strides))
            else:
                what = f"{tree.dtype} {list(tree.shape)}" if isinstance(tree, FileTensor) else f"a {type(tree).__name__}"
                others.append(f"holds {what} where {key} should have a piece of {dtype} {list(chunk.sizes)}")
        if others:
            more = f"; {len(others)} of its {len(wanted)} pieces do not fit" if len(others) > 1 else ""
            out.problems.append(f"{file}: {others[0]}, and it is not read{more}; do the files belong together?")
        out.files.append(file)
    return out


def read_objects(metadata: Metadata, keys: Iterable[str], trust: Collection[str] = ()) -> tuple[dict[str, Any], list[str]]:
    """Objects that are no tensors, by flat key, and what is wrong with those that could not be read.

    Raises:
        UnknownNameError: a pickle names what is not known.
    """
    found: dict[str, Any] = {}
    problems: list[str] = []
    by_file: dict[str, list[tuple[Item, str, None]]] = {}
    for key in keys:
        item = metadata.objects[key]
        if item is None:
            problems.append(f"{metadata.directory / METADATA}: does not say where {key} is")
        else:
            by_file.setdefault(item.file, []).append((item, key, None))
    for name, wanted in sorted(by_file.items()):
        wanted.sort(key=lambda entry: entry[0].offset)
        for (_, key, _), tree in _read_items(metadata.directory / name, wanted, problems, trust):
            found[key] = tree
    return found, problems


def _read_items(file: Path, wanted: list[Any], problems: list[str], trust: Collection[str]) -> Iterator[tuple[Any, Any]]:
    """Each of `wanted` (its first part is an `Item`) with what is in the file there; a damaged one is a problem and the next is tried."""
    at, damaged, first = 0, 0, ""
    while at < len(wanted):
        try:
            for tree in regions(file, ((entry[0].offset, entry[0].length) for entry in wanted[at:]), trust):
                at += 1
                yield wanted[at - 1], tree
        except UnknownNameError:
            raise
        except DumpFormatError as error:
            first = first or str(error)
            if not file.is_file():
                problems.append(f"{error} ({len(wanted)} pieces were in it, among them one of {wanted[0][1]})")
                return
            damaged += 1
            at += 1
    if damaged:
        more = f"; {damaged} pieces of {len(wanted)} cannot be read" if damaged > 1 else ""
        problems.append(f"{first}{more}")
