"""Finds and reads saved tensors of one rank directory, whatever their format: ``files`` (``.pt``, MindSpore ``.npy``) or ``packed``.

The directory is not trusted: names from files are checked before they become paths, offsets and lengths are checked against the size
of the file, links in place of files are not followed, and nothing in a file is executed.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from msprobe_engine.core import names
from msprobe_engine.core.errors import DumpFormatError, UsageError
from msprobe_engine.core.io.damaged_files import guard_opening
from msprobe_engine.core.io.input_files import open_input
from msprobe_engine.core.io.json_text import parse_json
from msprobe_engine.core.io.npy_file import map_array
from msprobe_engine.formats.dump import layout
from msprobe_engine.formats.dump.writing.packed_files import DTYPES, FORMAT, INDEX, MINDSPORE, TORCH, VERSION, family
from msprobe_engine.formats.tensors.decoding import Array
from msprobe_engine.formats.tensors.pt_file import read_pt
from msprobe_engine.formats.tensors.safetensors_file import read_header

PT, NPY, SAFETENSORS = "pt", "npy", "safetensors"
_SHARD = re.compile(r"pack-[0-9]{5,9}\.safetensors")
_UNNAMED = re.compile(r"unnamed\.[0-9]+")
_SAFE_DTYPES = {kind: {safe: (name, size) for name, (safe, size) in DTYPES.items() if family(name) == kind} for kind in (TORCH, MINDSPORE)}
_LARGEST_INDEX = 1 << 30
_MOST_DIMENSIONS = 64


class TensorSource(NamedTuple):
    """Where a saved tensor is.

    Attributes:
        name: its ``data_name``.
        format: `PT`, `NPY` or `SAFETENSORS`.
        offset, nbytes: where its bytes are in the file, in C order; for `PT` and `NPY` the whole file.
        dtype, shape: as dump files have them (``torch.bfloat16``); None for `PT` and `NPY`, which say it themselves.
    """

    name: str
    path: Path
    format: str
    offset: int
    nbytes: int
    dtype: str | None = None
    shape: tuple[int, ...] | None = None


class Loader(Protocol):
    """What `TensorFiles.load` needs of a backend."""

    def load(self, path: Path) -> Any:
        """The tensor in a ``.pt`` file."""
        ...

    def from_bytes(self, data: bytes, dtype: str, shape: tuple[int, ...]) -> Any:
        """A tensor from its bytes in C order."""
        ...


class TensorFiles:
    """The saved tensors of one rank directory. Nothing is read before it is asked for.

    Args:
        directory: of one rank, the one that holds dump.json.
    """

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory) / layout.TENSORS
        self.shard: Path | None = None

    @classmethod
    def of_shard(cls, path: Path | str) -> TensorFiles:
        """The tensors of one packed file alone, by the keys in it.

        Raises:
            DumpFormatError: when they are asked for: the file is damaged.
        """
        files = cls(Path(path).parent)
        files.directory = Path(path).parent
        files.shard = Path(path)
        return files

    def names(self) -> list[str]:
        """All ``data_name`` that have their tensor here, sorted; of a killed run too.

        Raises:
            DumpFormatError: the directory or its index is damaged.
        """
        found = {name for name in self._packed if self.shard or not _UNNAMED.fullmatch(name)}
        for entry in () if self.shard else self._listed:
            if entry.endswith((".pt", ".npy")) and not entry.startswith("."):
                found.add(entry)
        return sorted(found)

    def sources(self) -> dict[str, TensorSource]:
        """Where the tensors in shards are, by name.

        Raises:
            DumpFormatError: a shard or the index is damaged.
        """
        return dict(self._packed)

    def source(self, name: str) -> TensorSource:
        """Where the tensor of this ``data_name`` is.

        Raises:
            UsageError: it is not here.
            DumpFormatError: the name is no file name, the file is no regular file, or the index is damaged.
        """
        names.check_file_name(name, str(self.directory))
        path = self.directory / name
        size = _regular(path) if self.shard is None else None
        if size is not None:
            return TensorSource(name, path, NPY if name.endswith(".npy") else PT, 0, size)
        found = self._packed.get(name)
        if found is None:
            raise UsageError(
                f"{self.directory}: there is no tensor '{name[:200]}' here; it was not saved ({layout.NOT_SAVED} says why), "
                "the process was killed before it was written, or it was removed"
            )
        return found

    def same(self, name: str) -> object:
        """Equal for names of one saved tensor: the place in a shard, or the file that has several names.

        Raises:
            UsageError, DumpFormatError: as `source`.
        """
        found = self.source(name)
        if found.format == SAFETENSORS:
            return found._replace(name="")
        status = os.stat(found.path)
        return status.st_dev, status.st_ino

    def read_bytes(self, name: str) -> bytes:
        """The bytes that `source` points to.

        Raises:
            UsageError, DumpFormatError: as `source`, or the file cannot be read.
        """
        return _read_bytes(self.source(name))

    def load(self, name: str, backend: Loader) -> Any:
        """The tensor, on the CPU, of the very type that was saved (of a ``.npy`` file: a numpy array).

        Raises:
            UsageError, DumpFormatError: as `source`, or the file is damaged.
        """
        source = self.source(name)
        if source.format == SAFETENSORS:
            assert source.dtype is not None
            assert source.shape is not None
            return backend.from_bytes(_read_bytes(source), source.dtype, source.shape)
        if source.format == NPY:
            return load_numpy(source.path)
        try:
            return backend.load(source.path)
        except Exception as error:  # whatever the framework says of a damaged file
            problem = (str(error).splitlines() or [""])[0][:200]
            raise DumpFormatError(f"{source.path}: cannot be loaded ({type(error).__name__}: {problem})") from None

    @cached_property
    def _listed(self) -> list[str]:
        with guard_opening(self.directory):
            return os.listdir(self.directory) if os.path.lexists(self.directory) else []

    @cached_property
    def _packed(self) -> dict[str, TensorSource]:
        """Tensors of shards, by data name; without an index (a killed run) by the names that the shards themselves hold."""
        if self.shard is not None:
            return _shard(self.shard)
        shards = {name: _shard(self.directory / name) for name in sorted(self._listed) if _SHARD.fullmatch(name)}
        index = self.directory / INDEX
        if not shards or _regular(index) is None:
            return {key: source for tensors in shards.values() for key, source in tensors.items()}
        return _read_index(index, shards)


def not_saved(directory: Path | str) -> list[dict[str, Any]]:
    """What a rank directory says was not saved: objects with ``name``, ``bytes`` and ``reason``; [] when everything was.

    Raises:
        DumpFormatError: the list is damaged.
    """
    path = Path(directory) / layout.NOT_SAVED
    if _regular(path) is None:
        return []
    document = _json(path, _LARGEST_INDEX)
    listed = document.get("not_saved") if isinstance(document, dict) else None
    if not isinstance(listed, list) or not all(isinstance(item, dict) and isinstance(item.get("name"), str) for item in listed):
        raise DumpFormatError(f"{path}: must hold a list 'not_saved' of objects with a name; it is damaged or was edited")
    return listed


def _regular(path: Path) -> int | None:
    """Size of a regular file, None when there is nothing.

    Raises:
        DumpFormatError: it is something else, or a link.
    """
    try:
        found = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise DumpFormatError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error}); check owner and mode") from None
    if not stat.S_ISREG(found.st_mode):
        kind = "a link" if stat.S_ISLNK(found.st_mode) else "no regular file"
        raise DumpFormatError(f"{path}: is {kind}; no dump has such a file, do not trust it")
    return found.st_size


def _read_bytes(source: TensorSource) -> bytes:
    with guard_opening(source.path), open_input(source.path, follow=False) as file:
        file.seek(source.offset)
        data = file.read(source.nbytes)
    if len(data) != source.nbytes:
        raise DumpFormatError(f"{source.path}: ends before the tensor '{source.name}' does; it was cut off")
    return data


def _json(path: Path, limit: int) -> Any:
    size = _regular(path)
    if size is None or size > limit:
        raise DumpFormatError(f"{path}: is {'not there' if size is None else f'{size} bytes long'}; do not trust this dump")
    with guard_opening(path), open_input(path, follow=False) as file:
        return _parse(file.read(), path)


def _parse(text: bytes, path: Path) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise DumpFormatError(
            f"{path}: is damaged ({type(error).__name__}: {str(error)[:120]}); the tensors in it cannot be found"
        ) from None


def _shard(path: Path) -> dict[str, TensorSource]:
    _regular(path)  # says what is wrong with a link
    document, start, size = read_header(path, follow=False)
    metadata = document.pop("__metadata__", {})
    # Types that safetensors does not have, by key
    text = metadata.get("dtypes", "{}") if isinstance(metadata, dict) else "{}"
    found = _parse(text.encode(), path) if isinstance(text, str) else {}
    odd, kind = found if isinstance(found, dict) else {}, metadata.get("format") if isinstance(metadata, dict) else TORCH
    known = _SAFE_DTYPES[MINDSPORE if kind == MINDSPORE else TORCH]
    return {key: _tensor(key, field, known, odd.get(key), path, start, size) for key, field in document.items()}


def _tensor(key: str, field: Any, known: Mapping[str, tuple[str, int]], odd: Any, path: Path, start: int, size: int) -> TensorSource:
    try:
        safe, shape, (begin, end) = field["dtype"], field["shape"], field["data_offsets"]
        whole = [begin, end, *shape]
        if set(map(type, whole)) != {int} or min(whole) < 0 or len(shape) > _MOST_DIMENSIONS or not begin <= end <= size - start:
            raise ValueError("numbers")
        dtype, item = known[safe]
        if math.prod(shape) * item != end - begin:
            raise ValueError("size")
        if odd is not None:
            dtype, shape = odd
            if not isinstance(dtype, str) or not all(type(n) is int and 0 <= n <= 1 << 62 for n in shape) or len(shape) > _MOST_DIMENSIONS:
                raise ValueError("type")
    except (KeyError, TypeError, ValueError):
        raise DumpFormatError(f"{path}: what its header says of '{str(key)[:120]}' cannot be; it is damaged or was tampered with") from None
    return TensorSource(key, path, SAFETENSORS, start + begin, end - begin, dtype, tuple(shape))


def _read_index(index: Path, shards: dict[str, dict[str, TensorSource]]) -> dict[str, TensorSource]:
    document = _json(index, _LARGEST_INDEX)
    if not isinstance(document, dict) or document.get("format") != FORMAT or document.get("version") != VERSION:
        raise DumpFormatError(
            f"{index}: is no index of packed tensors, version {VERSION}; read it with the version of msprobe that wrote it"
        )
    tensors, aliases = document.get("tensors"), document.get("aliases")
    if not isinstance(tensors, dict) or not isinstance(aliases, dict):
        raise DumpFormatError(f"{index}: 'tensors' and 'aliases' must be JSON objects; it is damaged")
    found: dict[str, TensorSource] = {}
    for name, entry in tensors.items():
        file = entry.get("file") if isinstance(entry, dict) else None
        key = entry.get("key", name) if isinstance(entry, dict) else None
        source = shards.get(file, {}).get(key) if isinstance(file, str) and isinstance(key, str) else None
        if source is None:
            raise DumpFormatError(f"{index}: '{name[:120]}' is in no shard that is here; a file was removed or the index was edited")
        found[name] = source._replace(name=name)
    for name, first in aliases.items():
        if not isinstance(first, str) or first not in tensors:
            raise DumpFormatError(f"{index}: '{name[:120]}' is an alias of a tensor that is not here; the index is damaged")
        found[name] = found[first]._replace(name=name)
    return found


def load_numpy(path: Path) -> Array:
    """The tensor in a file as numpy array; bfloat16 and float8 as float32, which holds all their values.

    Raises:
        DumpFormatError: the file is not there, damaged, or of a type numpy cannot hold.
    """
    return np.array(map_array(path)) if path.suffix == ".npy" else read_pt(path).values
