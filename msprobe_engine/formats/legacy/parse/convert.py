"""``msprobe parse``: saved tensors of any kind as ``.pt`` or ``.npy``.

Read are ``.bin`` (ATB), ``.pt``, ``.npy``, packed ``.safetensors`` of this tool, and kernel dumps of Ascend through CANN. Nothing in a
file is executed and no object in it is rebuilt; links are not followed.

Tensors that ATB (Ascend Transformer Boost) writes: lines ``name=value``, the last of them ``$End=1``, then the bytes in C order.

    $Version=1.0
    $Object.Count=1
    $Object.Length=24
    format=2
    dtype=0
    dims=2,3
    $Object.data=0,24
    $End=1

Numbers of dtypes are those of ``aclDataType`` in CANN's ``acl/acl_base.h``. The existing tool 26.2.0 knows seven of them.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from msprobe_engine.core.backend import load_backend
from msprobe_engine.core.dtypes import item_size
from msprobe_engine.core.errors import DumpFormatError, SinkError, UsageError, needs_extra
from msprobe_engine.core.io.output_files import guard_writing, write_file
from msprobe_engine.core.io.progress import progress
from msprobe_engine.core.io.regular_files import make_directories
from msprobe_engine.formats.dump import layout
from msprobe_engine.formats.dump.rank_files import read_bytes
from msprobe_engine.formats.legacy.parse import ascend
from msprobe_engine.formats.tensors.decoding import Array, decoder
from msprobe_engine.formats.tensors.pt_file import read_pt
from msprobe_engine.formats.tensors.reader import TensorFiles, load_numpy

DTYPES = {
    0: "float32", 1: "float16", 2: "int8", 3: "int32", 4: "uint8", 6: "int16", 7: "uint16", 8: "uint32",
    9: "int64", 10: "uint64", 11: "float64", 12: "bool", 16: "complex64", 17: "complex128", 27: "bfloat16",
}  # fmt: skip
_LONGEST_HEADER = 1 << 16
_MOST_DIMENSIONS = 64


class Raw(NamedTuple):
    """A tensor as bytes in C order; `dtype` as dump files have it (``torch.bfloat16``)."""

    data: bytes
    dtype: str
    shape: tuple[int, ...]


def read_bin(path: Path) -> Raw:
    """The tensor in a ``.bin`` file.

    Raises:
        DumpFormatError: it cannot be read, is no such file, was cut off, or keeps its data in another file.
    """
    content = read_bytes(path)
    fields, start = _header(content, path)
    if "data" in fields:
        raise DumpFormatError(f"{path}: keeps its data in another file ({fields['data'][:120]!r}), which is not followed; give that file")
    number = _int(fields.get("dtype", "0"), "dtype", path)
    if number not in DTYPES:
        known = ", ".join(f"{n} {name}" for n, name in DTYPES.items())
        raise DumpFormatError(f"{path}: dtype={number} is unknown; known: {known}")
    shape = tuple(_int(n, "dims", path) for n in fields.get("dims", "").split(",") if n.strip())
    if len(shape) > _MOST_DIMENSIONS or any(n < 0 for n in shape):
        raise DumpFormatError(f"{path}: dims={fields['dims'][:120]} is no shape; the file is damaged")
    needed, data = math.prod(shape) * (item_size(DTYPES[number]) or 0), content[start:]
    if len(data) != needed:
        raise DumpFormatError(
            f"{path}: {DTYPES[number]} {list(shape)} takes {needed} bytes, {len(data)} follow the header; was it cut off?"
        )
    return Raw(data, f"torch.{DTYPES[number]}", shape)


def _header(content: bytes, path: Path) -> tuple[dict[str, str], int]:
    """Fields without those of the container (``$...``), and where the data begin."""
    fields: dict[str, str] = {}
    start = 0
    while (end := content.find(b"\n", start, _LONGEST_HEADER)) >= 0:
        name, found, value = content[start:end].decode("utf-8", "replace").partition("=")
        start = end + 1
        if not found:
            break
        if name == "$End":
            return fields, start
        if not name.startswith("$"):
            fields[name.strip()] = value.strip()
    raise DumpFormatError(f"{path}: has no header of lines name=value that ends with $End; it is no tensor file of ATB, or was cut off")


def _int(text: str, name: str, path: Path) -> int:
    try:
        return int(text)
    except ValueError:
        raise DumpFormatError(f"{path}: {name}={text[:120]!r} is no number; the file is damaged") from None


KINDS = ("npy", "pt")
_PACKED = ".safetensors"

Tensor = Raw | Array
"""Bytes with a dtype, or an array where numpy has the dtype."""


@dataclass
class Converted:
    """What became of everything that was found.

    Attributes:
        files: what was written.
        problems: what could not be read, one sentence each.
        skipped: files that hold no tensor.
    """

    files: list[Path] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    skipped: list[Path] = field(default_factory=list)


def convert(source: str | Path, output: str | Path, kind: str = "pt", script: str | Path | None = None) -> Converted:
    """Write every tensor at `source` as ``{output}/{name}.{kind}``; the directories below `source` are kept.

    bfloat16 and float8 have no type in numpy: in ``.npy`` they are float32, which holds all their values.

    Args:
        source: a file, or a directory that is searched through.
        kind: ``pt`` (needs torch) or ``npy``.
        script: ``msaccucmp.py`` for kernel dumps; None: that of the installed CANN.

    Raises:
        UsageError: `source` is not there or holds no tensor, or `kind` is unknown.
        MissingExtraError: ``pt`` without torch.
        SinkError: the output cannot be written.
    """
    if kind not in KINDS:
        raise UsageError(f"type {kind!r}: allowed are {', '.join(KINDS)}")
    source = Path(source)
    if not source.exists():
        raise UsageError(f"{source}: there is no such file or directory")
    work = _Conversion(Path(output), kind, script)
    jobs = work.jobs(source)
    if not jobs:
        raise UsageError(f"{source}: holds no tensor file (.bin, .pt, .npy, packed tensors, kernel dumps of Ascend)")
    for path, below in progress(jobs, "parse"):
        work.convert_path(path, below)
    return work.done


class _Conversion:
    def __init__(self, output: Path, kind: str, script: str | Path | None) -> None:
        self.output, self.kind, self.script = output, kind, script
        self.done = Converted()
        self._encode = _pt_encoder() if kind == "pt" else _npy
        self._taken: set[Path] = set()

    def jobs(self, source: Path) -> list[tuple[Path, Path]]:
        """What to read (of packed tensors the directory), and the directory below the output that its tensors go to."""
        if source.is_file():
            return [(source, Path())]
        jobs: list[tuple[Path, Path]] = []
        for root, directories, files in os.walk(source):
            directories.sort()
            directory = Path(root)
            below = directory.relative_to(source)
            if directory.resolve().name == layout.TENSORS and any(name.endswith(_PACKED) for name in files):
                jobs.append((directory, below))
                continue
            for name in sorted(files):
                path = directory / name
                if path.is_symlink():
                    self.done.problems.append(f"{path}: is a link; it is not followed")
                elif path.suffix.lower() in (*_READERS, _PACKED) or ascend.is_kernel_dump(name):
                    jobs.append((path, below))
                else:
                    self.done.skipped.append(path)
        return jobs

    def convert_path(self, path: Path, below: Path) -> None:
        """One job; what cannot be read becomes a problem."""
        suffix = path.suffix.lower()
        if path.is_dir():
            self._all(TensorFiles(path.resolve().parent), below)
        elif suffix == _PACKED:
            self._all(TensorFiles.of_shard(path), below)
        elif suffix in _READERS:
            self._one(path, below, path.name, lambda: _READERS[suffix](path))
        else:
            self._kernel(path, below)

    def _all(self, files: TensorFiles, below: Path) -> None:
        try:
            names = files.names()
        except DumpFormatError as error:
            self.done.problems.append(str(error))
            return
        for name in names:
            self._one(files.directory / name, below, name, lambda name=name: _of_files(files, name))  # type: ignore[misc]

    def _one(self, path: Path, below: Path, name: str, read: Callable[[], Tensor]) -> None:
        target = self.output / below / f"{os.path.splitext(name)[0]}.{self.kind}"
        try:
            if target in self._taken:
                raise DumpFormatError(f"{path}: another file here has the same name but for its ending; this one is left out")
            tensor = read()
            # a file that is of the kind already was read to know that it holds a tensor, and stays as it is
            content = path.read_bytes() if path.suffix == target.suffix and path.is_file() else self._encode(tensor)
        except (DumpFormatError, UsageError) as error:
            self.done.problems.append(str(error))
            return
        self._taken.add(target)
        with guard_writing(target, "name another directory with -o"):
            make_directories(str(target.parent))
            write_file(target, [content])
        self.done.files.append(target)

    def _kernel(self, path: Path, below: Path) -> None:
        directory = self.output / below
        try:
            script = ascend.find_script(self.script)
            make_directories(str(directory))
            before = set(_files(directory))
            ascend.convert(path, directory, script, self.kind)
            self.done.files += sorted(set(_files(directory)) - before)
        except (DumpFormatError, UsageError) as error:
            self.done.problems.append(f"{path}: {error}")
        except OSError as error:
            raise SinkError(f"cannot write {directory}: {error.strerror or error}; name another directory with -o") from error


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in directory.iterdir() if path.is_file())


def _of_files(files: TensorFiles, name: str) -> Tensor:
    source = files.source(name)
    if source.dtype is None:
        return _READERS[source.path.suffix.lower()](source.path)
    return Raw(files.read_bytes(name), source.dtype, source.shape or ())


def _of_pt(path: Path) -> Tensor:
    found = read_pt(path)
    if found.dtype == "torch.bfloat16":  # back to the bits of the file: nothing was lost on the way to float32
        words = np.ascontiguousarray(found.values).view(np.uint32) >> 16
        return Raw(words.astype(np.uint16).tobytes(), found.dtype, found.values.shape)
    return found.values


_READERS: dict[str, Callable[[Path], Tensor]] = {".bin": read_bin, ".pt": _of_pt, ".npy": load_numpy}


def _pt_encoder() -> Callable[[Tensor], bytes]:
    with needs_extra("torch", "torch", "writing .pt files"):
        backend: Any = load_backend("torch")

    def encode(tensor: Tensor) -> bytes:
        raw = tensor if isinstance(tensor, Raw) else _raw(tensor)
        content: bytes = backend.to_bytes(backend.from_bytes(raw.data, raw.dtype, raw.shape))
        return content

    return encode


def _raw(array: Array) -> Raw:
    native = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
    return Raw(native.tobytes(), f"torch.{native.dtype}", array.shape)


def _npy(tensor: Tensor) -> bytes:
    """The file; bfloat16 and float8 as float32."""
    if isinstance(tensor, Raw):
        found = decoder(tensor.dtype)
        if found is None:
            raise DumpFormatError(f"a tensor of type {tensor.dtype}: numpy has no type for it; write it as pt")
        words: Array = np.frombuffer(tensor.data, found.words).reshape(tensor.shape)
        tensor = words if found.values is None else found.values(words)
    buffer = io.BytesIO()
    np.save(buffer, tensor, allow_pickle=False)
    return buffer.getvalue()
