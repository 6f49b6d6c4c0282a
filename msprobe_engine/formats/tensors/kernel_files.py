"""Files of the kernel dump that MindSpore makes of a compiled graph (``MINDSPORE_DUMP_CONFIG``): names, directories, statistics.

A tensor is a file ``{op type}.{op name}.{task}.{stream}.{time}.{input|output}.{index}[.{slot}].{format}[.{dtype}].npy`` (MindSpore,
"Dump" of its tutorials; 2.x on a CPU has no slot and a dtype). The op name is the full name with scope, with ``_`` for ``/``. A name
that is too long for the file system is a number, and ``mapping.csv`` beside it has the rest. Statistics are rows of ``statistic.csv``.
Directories are ``rank_{R}/{net}/{graph}/{iteration}``, or ``step{N}/rank{R}/...`` below the dump path of a debugger.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from msprobe_engine.core.errors import DumpFormatError, TextError
from msprobe_engine.core.io import csv_text

STATISTIC, MAPPING = "statistic.csv", "mapping.csv"
MAX_BYTES = 1 << 30
"""Of a csv file; one of gigabytes is none that MindSpore has written."""
_RANK = re.compile(r"(?:rank_?|device_?)(\d{1,9})", re.ASCII)
_STEP = re.compile(r"step_?(\d{1,9})", re.ASCII)


class KernelFile(NamedTuple):
    """What the name of a tensor file says.

    Attributes:
        op_type: ``MatMul``; ``Parameter`` of what is no operator.
        op_name: full name with scope, ``_`` for ``/``: ``Default_fc1-Dense_MatMul-op0``.
        task, stream: of the device; 0 on a CPU.
        time: microseconds.
        place: ``input`` or ``output``.
        slot: which of the inputs or outputs.
        dtype: as MindSpore writes it (``Float32``), "" when the name has none.
    """

    op_type: str
    op_name: str
    task: int
    stream: int
    time: int
    place: str
    slot: int
    dtype: str
    path: Path


def parse_name(path: Path, name: str | None = None) -> KernelFile | None:
    """The parts of a file's name (`name`: the whole one, of a file whose name is a number); None when it is no kernel file."""
    parts = (name or path.name).removesuffix(".npy").split(".")
    for i in range(len(parts) - 2, 4, -1):
        # ASCII digits only, and no more than a 64-bit number has
        if parts[i] in ("input", "output") and all(_is_number(part) for part in (*parts[i - 3 : i], parts[i + 1])):
            dtype = parts[i + 3] if len(parts) > i + 3 and not _is_number(parts[i + 2]) else parts[i + 4] if len(parts) > i + 4 else ""
            task, stream, time = (int(part) for part in parts[i - 3 : i])
            return KernelFile(parts[0], ".".join(parts[1 : i - 3]), task, stream, time, parts[i], int(parts[i + 1]), dtype, path)
    return None


def _is_number(text: str) -> bool:
    return 0 < len(text) <= 20 and text.isascii() and text.isdecimal()


def kernel_files(directory: Path) -> tuple[list[KernelFile], list[str]]:
    """The tensor files of one directory, in order of execution, and the names of ``.npy`` files that are none.

    Raises:
        DumpFormatError: ``mapping.csv`` is damaged.
    """
    long_names = read_mapping(directory / MAPPING)
    found: list[KernelFile] = []
    others: list[str] = []
    for entry in os.scandir(directory):
        if entry.name.endswith(".npy") and os.path.isfile(entry.path):
            name = entry.name.removesuffix(".npy")
            parsed = parse_name(Path(entry.path), long_names.get(name))
            if parsed is None:
                others.append(entry.name)
            else:
                found.append(parsed)
    return in_order(found), sorted(others)


def in_order(files: Iterable[KernelFile]) -> list[KernelFile]:
    """In order of execution. Parameters are read at the end of an iteration, and hold its results."""
    return sorted(files, key=lambda file: (file.op_type == "Parameter", file.time, file.op_name, file.place, file.slot))


class KernelCall(NamedTuple):
    """One run of a kernel.

    Attributes:
        name: of its record, ``{op type}.{op name}.{n}.forward``; n counts the runs of a kernel that runs several times.
        inputs, outputs: the files by slot, None where there is none.
    """

    name: str
    inputs: list[KernelFile | None]
    outputs: list[KernelFile | None]


_MOST_SLOTS = 10_000


def kernel_calls(kernels: Iterable[KernelFile]) -> list[KernelCall]:
    """The calls that tensor files in order of execution belong to."""
    calls: dict[tuple[str, str, int], dict[str, dict[int, KernelFile]]] = {}
    again: dict[tuple[str, str, str, int], int] = {}
    for file in kernels:
        if file.slot >= _MOST_SLOTS:  # no kernel of MindSpore's
            continue
        key = (file.op_type, file.op_name, file.place, file.slot)
        number = again[key] = again.get(key, -1) + 1
        calls.setdefault((file.op_type, file.op_name, number), {"input": {}, "output": {}})[file.place][file.slot] = file
    return [
        KernelCall(f"{kind}.{name}.{number}.forward", _by_slot(places["input"]), _by_slot(places["output"]))
        for (kind, name, number), places in calls.items()
    ]


def _by_slot(files: dict[int, KernelFile]) -> list[KernelFile | None]:
    return [files.get(slot) for slot in range(max(files, default=-1) + 1)]


def read_mapping(path: Path) -> dict[str, str]:
    """``mapping.csv``: number in place of a name -> name, both without ``.npy``. Empty without the file.

    Raises:
        DumpFormatError: it is no such file.
    """
    if not os.path.lexists(path):
        return {}
    return {row[0].strip().removesuffix(".npy"): row[1].strip().removesuffix(".npy") for row in read_rows(path) if len(row) == 2}


def read_rows(path: Path) -> Iterator[list[str]]:
    """Rows of a csv file of MindSpore, one at a time.

    Raises:
        DumpFormatError: it cannot be read, is larger than `MAX_BYTES`, or is no csv.
    """
    try:
        yield from filter(None, csv_text.read_rows(path, most=MAX_BYTES, errors="backslashreplace"))
    except (OSError, TextError) as error:
        raise DumpFormatError(f"{path}: cannot be read as csv ({error}); give the file that MindSpore wrote") from error


def rank_and_step(directory: Path, root: Path) -> tuple[int | None, int | None, str]:
    """Rank, step and graph that a directory of kernel files is of, by the directories from `root` on; None where they do not say it.

    >>> rank_and_step(Path("d/rank_0/Net/1/3"), Path("d"))
    (0, 3, '1')
    """
    parts = directory.relative_to(root).parts
    if not parts or not _is_number(parts[-1]):  # the root may be inside: rank_0/Net/1/3 itself
        parts = (*directory.absolute().parts[-4 - len(parts) : len(directory.absolute().parts) - len(parts)], *parts)
    rank = next((int(match[1]) for part in parts if (match := _RANK.fullmatch(part))), None)
    step = next((int(match[1]) for part in parts if (match := _STEP.fullmatch(part))), None)
    numbers = [part for part in parts if _is_number(part)]
    if step is None and numbers:
        step = int(numbers[-1])
    return rank, step, numbers[-2] if len(numbers) > 1 else ""


def kernel_directories(root: Path) -> list[Path]:
    """Directories at or below `root` that hold kernel files or ``statistic.csv``, sorted; links are not followed."""
    found: list[Path] = []
    for path, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in ("execution_order", ".dump_metadata"))
        if STATISTIC in files or any(name.endswith(".npy") for name in files):
            found.append(Path(path))
    return found
