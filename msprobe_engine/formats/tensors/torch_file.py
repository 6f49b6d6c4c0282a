"""Reads files of ``torch.save`` without torch: what they say, and where their tensors lie. No tensor data are read, nothing is executed.

Three formats (``torch/serialization.py``): since torch 1.6 an uncompressed zip archive with ``{top}/data.pkl``, ``{top}/data/{key}`` and
``{top}/byteorder``; before, a row of pickles (a magic number, the protocol, facts of the machine, the object, the keys of its storages)
followed by the storages; and plain pickles, as ``.metadata`` of distributed checkpoints. An item of a ``.distcp`` file is such a zip, too.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from msprobe_engine.core.dtypes import item_size
from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.core.io.archives import MEMBER, read_members, stored_begin
from msprobe_engine.core.io.input_files import FilePart, open_input
from msprobe_engine.core.text.words import some
from msprobe_engine.formats.checkpoint.flat_tables import plain
from msprobe_engine.formats.tensors.opaque_objects import Inert, Named, attributes
from msprobe_engine.formats.tensors.pickle_machine import Wrong
from msprobe_engine.formats.tensors.pt_parts import ARCHIVE, format_parts, guard_torch_file, is_size
from msprobe_engine.formats.tensors.torch_pickle import FileTensor, Storage, TorchHooks
from msprobe_engine.formats.tensors.unpickle import load

__all__ = [
    "FileTensor", "Inert", "Named", "Storage", "TorchFile", "UnknownNameError", "attributes", "plain", "read_torch", "regions",
]  # fmt: skip

_MAX_PICKLE = 4 << 30
"""The description of the largest checkpoints (``.metadata`` of thousands of ranks) is a few hundred MB."""
_FIRST_READ = 256 << 20
_END = 4096
_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001


class UnknownNameError(DumpFormatError):
    """A pickle names a class or function that checkpoints do not hold."""


class _Unknown(Wrong):
    """As `UnknownNameError`, before the file is known."""

    named = UnknownNameError


@dataclass(frozen=True)
class TorchFile:
    """What a file of ``torch.save`` or a pickle holds.

    Attributes:
        tree: the object: dicts, lists, plain values, numpy arrays, `FileTensor`, `Named`, `Inert`.
    """

    tree: Any
    files: list[Path]


class _Window(FilePart):
    """An archive in a file. What it says of itself is at its two ends: these are read at once, for a distributed checkpoint has very many
    small archives."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        super().__init__(file, start, length)
        self._head = self._read_at(0, min(length, 2 * _END if length <= 2 * _END else _END))
        self._tail_at = max(len(self._head), length - _END)
        self._tail = self._read_at(self._tail_at, length - self._tail_at)

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._length - self._at)
        count = left if size is None or size < 0 else min(size, left)
        if self._at + count <= len(self._head):
            data = self._head[self._at : self._at + count]
        elif self._at >= self._tail_at:
            data = self._tail[self._at - self._tail_at : self._at - self._tail_at + count]
        else:
            data = self._read_at(self._at, count)
        self._at += len(data)
        return data


def read_torch(path: Path, trust: Collection[str] = ()) -> TorchFile:
    """What a ``torch.save`` file (any version) or a plain pickle holds.

    Args:
        trust: classes (``module.Class``) or modules beyond the known ones that may occur; they are not executed either.

    Raises:
        UnknownNameError: it names something that is not known.
        DumpFormatError: it cannot be read or is damaged.
    """
    with guard_torch_file(path), open_input(path) as file:
        return TorchFile(_read_tree(file, path, 0, os.fstat(file.fileno()).st_size, trust), [path])


def regions(path: Path, spans: Iterable[tuple[int, int]], trust: Collection[str] = ()) -> Iterator[Any]:
    """What each of several stretches (offset, length) of a file holds, with the file opened once.

    Raises:
        DumpFormatError: as `read_torch`, at the first one that is damaged.
    """
    known: dict[bytes, _Known] = {}
    with guard_torch_file(path), open_input(path) as file:
        size = os.fstat(file.fileno()).st_size
        for offset, length in spans:
            if offset < 0 or length < 0 or offset + length > size:
                raise Wrong(f"ends after {size} bytes, and bytes {offset} to {offset + length} should be in it; it was cut off")
            yield _read_tree(file, path, offset, length, trust, known)


def _read_tree(
    file: BinaryIO, path: Path, start: int, length: int, trust: Collection[str], known: dict[bytes, _Known] | None = None
) -> Any:
    file.seek(start)
    head = file.read(min(4, length))
    if head == MEMBER:
        return _Zip(file, path, start, length).tree(trust, {} if known is None else known)
    if head[:1] not in (b"\x80", b"(", b"}", b"]", b"c"):
        raise Wrong("begins like no file of torch.save and no pickle; was the file cut off or written by something else?")
    most = _FIRST_READ
    while True:  # pickles are at the beginning; the data behind them, which old torch files have, need not be read
        file.seek(start)
        data = file.read(min(most, length))
        try:
            return _rows_of_pickles(data, file, path, start, length, trust)
        except _Unknown:
            raise
        except Wrong:
            if most >= min(length, _MAX_PICKLE):
                raise
        most *= 4


def _load_pickle(data: bytes, hooks: TorchHooks, at: int = 0) -> tuple[Any, int]:
    value, end = load(data, hooks, at)
    if hooks.refused:
        names = sorted(hooks.refused)
        options = " ".join(f"--trust {name}" for name in names[:8])
        raise _Unknown(
            f"names {some(names)} in its pickle, which checkpoints of the known frameworks do not. Nothing was executed. "
            f"If the file comes from code that you know, go on with {options} (nothing is executed then either); "
            "otherwise never load it with torch.load"
        )
    return value, end


class _Known(NamedTuple):
    """A description of one tensor that was met before: pieces of one shape have the same, and there are very many.

    Attributes:
        storage, tensor: as they were then.
    """

    key: str
    elements: int
    storage: Storage
    tensor: FileTensor


class _Zip:
    """The archive of one ``torch.save``."""

    def __init__(self, file: BinaryIO, path: Path, start: int, length: int) -> None:
        self.file, self.path, self.start, self.length = _Window(file, start, length), path, start, length
        self.members = read_members(self.file, ARCHIVE)
        self.places: dict[str, tuple[int, int]] = {}

    def tree(self, trust: Collection[str], known: dict[bytes, _Known]) -> Any:
        pickles = [name for name in self.members if name.rpartition("/")[2] == "data.pkl" and name.count("/") <= 1]
        if len(pickles) != 1:
            raise Wrong(f"is a zip archive with {len(pickles)} members called data.pkl; a file of torch.save has one")
        top = pickles[0][: -len("data.pkl")]
        if f"{top}constants.pkl" in self.members:
            raise Wrong("is a TorchScript program, no checkpoint; save the state_dict of the module it was made of")
        place, size = self.place(pickles[0])
        if size > _MAX_PICKLE:
            raise Wrong(f"has a description of {size} bytes; it is damaged")
        data = self.bytes_at(place, size)
        order = self.bytes_at(*self.place(f"{top}byteorder")) if f"{top}byteorder" in self.members else b"little"

        found: list[tuple[str, int, Storage]] = []

        def locate(key: str, dtype: str, count: int, _: Any = None) -> Storage:
            name = f"{top}data/{key}"
            if name not in self.members:
                raise Wrong(f"has no member data/{key[:80]}, which its description names; it is damaged")
            if order.strip() != b"little":
                raise Wrong("was written on a big-endian machine; write it again on one of the usual kind (torch.load, torch.save)")
            begin, nbytes = self.place(name)
            wanted = count * (item_size(dtype) or 1 if dtype else 1)
            if wanted > nbytes:
                raise Wrong(f"has a storage data/{key[:80]} of {nbytes} bytes, which should have {wanted}; it is damaged")
            storage = Storage(dtype, self.path, self.start + begin, nbytes)
            found.append((key, count, storage))
            return storage

        before = known.get(data)
        if before is not None:
            storage = locate(before.key, before.storage.dtype, before.elements)
            if storage.nbytes == before.storage.nbytes:
                self.check_apart()
                return replace(before.tensor, start=storage.start + before.tensor.start - before.storage.start)
        tree, _ = _load_pickle(data, TorchHooks(locate, trust))
        self.check_apart()
        if isinstance(tree, FileTensor) and len(found) == 1 and len(data) <= _END:
            known[data] = _Known(*found[0], tree)
        return tree

    def bytes_at(self, place: int, size: int) -> bytes:
        self.file.seek(place)
        data = self.file.read(size)
        if len(data) < size:
            raise Wrong(f"ends after {place + len(data)} bytes, inside a member of its archive; it was cut off")
        return data

    def place(self, name: str) -> tuple[int, int]:
        """Byte of the archive at which the data of a member begin, and how many there are."""
        if name in self.places:
            return self.places[name]
        info = self.members[name]
        begin = stored_begin(self.file, info)
        if begin + info.file_size > self.length:
            raise Wrong(f"has a member {name[-80:]!r} that reaches behind the end of the file; it was cut off")
        self.places[name] = begin, info.file_size
        return self.places[name]

    def check_apart(self) -> None:
        """Members that lie over each other were not written by torch."""
        end = 0
        for begin, size in sorted(self.places.values()):
            if size and begin < end:
                raise Wrong("has members that lie over each other; it is damaged, or made to mislead")
            end = max(end, begin + size)


def _rows_of_pickles(data: bytes, file: BinaryIO, path: Path, start: int, length: int, trust: Collection[str]) -> Any:
    """The object of a torch file without zip, or of a plain pickle, of which `data` are the first bytes."""
    value, at = _load_pickle(data, TorchHooks(_no_storage, trust))
    if value != _MAGIC:
        return value
    version, at = _load_pickle(data, TorchHooks(_no_storage, trust), at)
    if version != _LEGACY_PROTOCOL:
        raise Wrong(f"is of version {format_parts(version)} of torch's old format; {_LEGACY_PROTOCOL} is known")
    machine, at = _load_pickle(data, TorchHooks(_no_storage, trust), at)
    if isinstance(machine, dict) and machine.get("little_endian") is False:
        raise Wrong("was written on a big-endian machine; write it again on one of the usual kind (torch.load, torch.save)")

    # Where a storage lies is known only behind the object: it is read once for the kinds of its storages, and again with their places.
    widths: dict[str, int] = {}

    def first(key: str, dtype: str, *_: Any) -> Storage:
        widths[key] = item_size(dtype) or 1 if dtype else 1
        return Storage(dtype, path, 0, 1 << 62)

    _, behind = _load_pickle(data, TorchHooks(first, trust), at)
    keys, behind = _load_pickle(data, TorchHooks(_no_storage, trust), behind)
    if not isinstance(keys, list):
        raise Wrong("has no list of its storages; it is damaged")
    places: dict[str, tuple[int, int]] = {}
    for key in keys:
        if not isinstance(key, str):
            raise Wrong("has a list of storages with a key that is no text; it is damaged")
        file.seek(start + behind)
        count = int.from_bytes(file.read(8), "little", signed=True)
        size = count * widths.get(key, 1)
        if not is_size(count) or behind + 8 + size > length:
            raise Wrong(f"ends inside storage {key[:40]}; it was cut off")
        places[key] = behind + 8, size
        behind += 8 + size

    def second(key: str, dtype: str, _: int, view: Any) -> Storage:
        if key not in places:
            raise Wrong(f"has no storage {key[:80]}, which its description names; it is damaged")
        begin, size = places[key]
        if view is not None:  # (key, first element, elements): a storage within another
            if not (isinstance(view, tuple) and len(view) == 3 and is_size(view[1]) and is_size(view[2])):
                raise Wrong("has a storage of an unknown kind")
            width = widths[key]
            if (view[1] + view[2]) * width > size:
                raise Wrong("has a storage that reaches out of the one it is in; it is damaged")
            begin, size = begin + view[1] * width, view[2] * width
        return Storage(dtype, path, start + begin, size)

    return _load_pickle(data, TorchHooks(second, trust), at)[0]


def _no_storage(*_: Any) -> Storage:
    raise Wrong("is a pickle that refers to storages outside it; only files of torch.save are read")
