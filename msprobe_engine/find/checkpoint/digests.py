"""A manifest: what stays of a checkpoint when its data may not be kept. A digest per tensor that does not depend on how it was cut, so a
checkpoint of any layout can be compared with it by reading that checkpoint once.

The digest is that of `msprobe_engine.core.statistics.digest`, of the whole tensor in C order; with it stand counts of NaN and Inf, and the
norm.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from msprobe_engine.core.dtypes import plain_name
from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.core.io.damaged_files import DAMAGED
from msprobe_engine.core.io.input_files import open_input, read_input
from msprobe_engine.core.io.json_text import parse_json
from msprobe_engine.core.io.output_files import guard_writing, write_named
from msprobe_engine.core.statistics import host_kernel, rows
from msprobe_engine.core.statistics.digest import digest_array, words_per_element
from msprobe_engine.find.checkpoint.result import strict
from msprobe_engine.formats.checkpoint.blocks import Block, Boxes, Room, blocks_of, fill, width_of
from msprobe_engine.formats.checkpoint.model import Checkpoint, StoredTensor
from msprobe_engine.formats.tensors.file_reads import FileReads
from msprobe_engine.measure.stored.threads import Job, Plan, Pool

KIND = "msprobe checkpoint digests"
VERSION = 2
"""2: says how many tensors and values it has. Those of version 1 are read."""
_MOST_BYTES = 4 << 30


@dataclass(slots=True)
class Digest:
    """Of one tensor.

    Attributes:
        digest: 64 bits; see `msprobe_engine.core.statistics.digest`.
        norm: over finite elements; None for types whose values are not known.
        missing: elements that are in no file.
        trouble: why it could not be read; the rest says nothing then.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    digest: int = 0
    norm: float | None = None
    nan: int = 0
    inf: int = 0
    missing: int = 0
    trouble: str = ""


class _Reducing(Job):
    def __init__(self, number: int, name: str, tensor: StoredTensor) -> None:
        super().__init__()
        self.number, self.tensor = number, tensor
        self.result = Digest(name, tensor.shape, tensor.dtype)
        self._boxes = Boxes(tensor.boxes)
        self._squares = 0.0
        self._covered = 0
        self._code = host_kernel.CODES.get(plain_name(tensor.dtype))

    def blocks(self, most_bytes: int) -> Iterator[Block]:
        """Stretches of the tensor in C order: a digest needs the place of its first element only."""
        yield from blocks_of(self.tensor.shape, max(1, most_bytes // width_of(self.tensor)))

    def work(self, block: Block, rooms: Sequence[Room], reads: FileReads) -> None:
        """Read and reduce a block."""
        words, pieces = fill(self._boxes, block, self.tensor.dtype, rooms[0], reads)
        first_element = int(np.ravel_multi_index(block.offsets, self.tensor.shape)) if block.offsets else 0
        covered = sum(math.prod(piece.sizes) for piece in pieces)
        if self._code is None:
            digest, squares, nan, inf = digest_array(words, first_element * words_per_element(words.itemsize)), None, 0, 0
        else:
            row = rows.empty(1)
            host_kernel.reduce(words.ctypes.data, words.size, self._code, row.ctypes.data, host_kernel.WANT_DIGEST, first_element)
            numbers = rows.as_int64(row)[0]
            digest = int(numbers[rows.DIGEST]) & 0xFFFFFFFFFFFFFFFF
            squares, nan = float(row[0, rows.SUMSQ]), int(numbers[rows.NANS])
            inf = int(numbers[rows.POS_INF] + numbers[rows.NEG_INF])
        with self.lock:
            self.result.digest = (self.result.digest + digest) & 0xFFFFFFFFFFFFFFFF
            self.result.nan += nan
            self.result.inf += inf
            self._squares += squares or 0.0
            self._covered += covered

    def finish_digest(self) -> Digest:
        """The result."""
        self.result.trouble = self.trouble
        self.result.norm = math.sqrt(self._squares) if self._code is not None else None
        self.result.missing = max(0, self.tensor.numel - self._covered)
        return self.result


class _Digesting(Pool[_Reducing]):
    def __init__(self, how: Plan, results: list[Digest | None], report_result: Callable[[Digest], None]) -> None:
        super().__init__(how)
        self._results, self._report_result = results, report_result

    def finish_job(self, job: _Reducing) -> None:
        """Keep the digest."""
        result = self._results[job.number] = job.finish_digest()
        self._report_result(result)


def digests_of(
    tensors: Iterable[tuple[str, StoredTensor]], how: Plan, report_result: Callable[[Digest], None] = lambda _found: None
) -> tuple[list[Digest], int]:
    """Read tensors once.

    Args:
        tensors: with the names their digests get.
        report_result: called with each digest as soon as it is there, one call at a time.

    Returns:
        the digests in the order of `tensors`, and how many bytes were read.
    """
    named = list(tensors)
    results: list[Digest | None] = [None] * len(named)
    order = sorted(range(len(named)), key=lambda i: _place(named[i][1]))
    nbytes = _Digesting(how, results, report_result).run(_Reducing(i, *named[i]) for i in order)
    return [digest for digest in results if digest is not None], nbytes


def _place(tensor: StoredTensor) -> tuple[str, int]:
    return (str(tensor.boxes[0].file), tensor.boxes[0].start) if tensor.boxes else ("", 0)


def write_manifest(path: Path, checkpoint: Checkpoint, digests: Sequence[Digest]) -> None:
    """Write the manifest of a checkpoint.

    Raises:
        SinkError: the file cannot be written.
    """
    tensors = {}
    for key, digest in zip(checkpoint.tensors, digests):
        tensor = checkpoint.tensors[key]
        entry = {"name": tensor.name, "state": tensor.state, "group": tensor.group, "part": tensor.part, "padding": tensor.padding}
        numbers = {k: v for k, v in asdict(digest).items() if k not in ("name", "digest", "shape")}
        tensors[key] = {**entry, **numbers, "shape": list(tensor.shape), "digest": f"{digest.digest:016x}"}
    data = {
        "kind": KIND, "version": VERSION, "path": str(checkpoint.path), "format": checkpoint.format, "naming": checkpoint.naming,
        "facts": strict(checkpoint.facts), "tensors": strict(tensors), "values": strict(checkpoint.values), "notes": checkpoint.notes,
        "problems": checkpoint.problems, "counts": {"tensors": len(tensors), "values": len(checkpoint.values)},
    }  # fmt: skip
    with guard_writing(path, "name another place"):
        write_named(path, [json.dumps(data, indent=1, allow_nan=False).encode()])


def is_manifest(path: Path) -> bool:
    """Is this file a manifest?"""
    try:
        with open_input(path) as file:
            head = file.read(200)
    except OSError:
        return False
    return head.lstrip()[:1] == b"{" and f'"{KIND}"'.encode() in head


def read_manifest(path: Path) -> tuple[Checkpoint, dict[str, Digest]]:
    """A checkpoint without data, and the digests of its tensors by key.

    Raises:
        DumpFormatError: it is no manifest of a version that is known, or damaged.
    """
    try:
        data = parse_json(read_input(path, _MOST_BYTES))
        if data.get("version") not in (1, VERSION):
            raise DumpFormatError(f"{path}: is a manifest of version {data.get('version')!r}; this tool knows versions 1 and {VERSION}")
        checkpoint = Checkpoint(
            path, f"digests of {data['format']}", values=dict(data["values"]), facts=dict(data["facts"]), naming=str(data["naming"]),
            files=[path], notes=[str(note) for note in data["notes"]], problems=[str(problem) for problem in data["problems"]],
        )  # fmt: skip
        digests = {str(key): _entry(checkpoint, str(key), entry) for key, entry in data["tensors"].items()}
        if data["version"] == VERSION:
            for word, count in (("tensors", len(digests)), ("values", len(checkpoint.values))):
                if count != data["counts"][word]:
                    checkpoint.problems.append(f"{path}: {count} {word} are in it, and {data['counts'][word]} were when it was written")
    except OSError as error:
        raise DumpFormatError(f"{path}: cannot be read: {error.strerror or error}") from error
    except DAMAGED as error:
        raise DumpFormatError(f"{path}: is damaged as a manifest of digests: {type(error).__name__}: {error}") from error
    return checkpoint, digests


def _entry(checkpoint: Checkpoint, key: str, entry: Mapping[str, Any]) -> Digest:
    shape = tuple(int(n) for n in entry["shape"])
    padding = entry["padding"]
    if min(shape, default=0) < 0 or not isinstance(padding, int | None):
        raise ValueError(f"{key} has the shape {list(shape)} and padding from row {padding!r}")
    checkpoint.tensors[key] = StoredTensor(
        str(entry["name"]), shape, str(entry["dtype"]), (), state=str(entry["state"]), group=str(entry["group"]), part=str(entry["part"]),
        padding=padding,
    )  # fmt: skip
    norm = entry["norm"]
    return Digest(
        key, shape, str(entry["dtype"]), int(entry["digest"], 16), None if norm is None else float(norm), int(entry["nan"]),
        int(entry["inf"]), int(entry["missing"]), str(entry["trouble"]),
    )  # fmt: skip
