"""``vc`` on two directories that ``cad`` wrote: ``{operator}/{time}/{file}.npy``, one table row per pair of files."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path

from msprobe_engine.core.errors import ProbeError, SinkError
from msprobe_engine.core.io.output_files import write_file
from msprobe_engine.core.io.safe_cells import safe_cell
from msprobe_engine.formats.legacy.parse.elements import summary
from msprobe_engine.formats.tensors.saved_file import load_numpy

COLUMNS = ("NPU File Name", "Bench File Name", "Mean", "Bench Mean", "Md5 Consistency", "Max Abs Error", "Max Relative Error")
_NUMBER = re.compile(r"([0-9]+)")


def compare_directories(target: Path, golden: Path, output: Path) -> tuple[Path, list[str]]:
    """Write ``{output}/batch_compare_{unix time}.csv``.

    Operators belong together by name, times and files by their order. What has no partner or cannot be compared is a row with empty
    numbers and a problem; the rest is compared all the same.

    Returns:
        The table, and what could not be compared.

    Raises:
        SinkError: the table cannot be written.
    """
    problems: list[str] = []
    lines = [",".join(COLUMNS)]
    for a, b in _pairs(target, golden, problems):
        cells: list[str] = [a.name if a else "", b.name if b else "", *[""] * 5]
        if a and b:
            try:
                cells[2:] = map(str, summary(load_numpy(a), load_numpy(b)))
            except ProbeError as error:
                problems.append(f"{a} and {b}: {error}")
        else:
            problems.append(f"{a or b}: the other side has no such file")
        lines.append(",".join(map(safe_cell, cells)))
    path = output / f"batch_compare_{int(time.time())}.csv"
    try:
        write_file(path, ["\n".join(lines).encode() + b"\n"])
    except OSError as error:
        raise SinkError(f"cannot write {path}: {error.strerror or error}; name another directory with -out") from error
    return path, problems


def _pairs(target: Path, golden: Path, problems: list[str]) -> Iterator[tuple[Path | None, Path | None]]:
    ours, theirs = ({path.name: path for path in _listed(root, Path.is_dir)} for root in (target, golden))
    for name in sorted(ours.keys() | theirs.keys(), key=_natural):
        if name not in ours or name not in theirs:
            problems.append(f"operator {name}: only on {'the golden' if name in theirs else 'this'} side")
            continue
        for a, b in zip_longest(_listed(ours[name], Path.is_dir), _listed(theirs[name], Path.is_dir)):
            if a is None or b is None:
                problems.append(f"{a or b}: the other side has fewer times of this operator")
                continue
            yield from zip_longest(_listed(a, Path.is_file), _listed(b, Path.is_file))


def _listed(root: Path, kind: Callable[[Path], bool]) -> list[Path]:
    return sorted((path for path in root.iterdir() if kind(path) and not path.is_symlink()), key=lambda path: _natural(path.name))


def _natural(name: str) -> list[tuple[int, str]]:
    """Numbers by their size: ``input.10`` comes after ``input.2``."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in _NUMBER.split(name)]
