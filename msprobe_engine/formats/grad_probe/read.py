"""Reads what a gradient probe wrote for one rank, ours or the existing tool's. Trusts nothing in the directory: no pickle, no links,
sizes checked before memory is taken."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.errors import DumpFormatError, TextError
from msprobe_engine.core.io.csv_text import read_rows
from msprobe_engine.core.io.json_text import parse_json
from msprobe_engine.core.io.npy_file import map_array
from msprobe_engine.formats.grad_probe import layout
from msprobe_engine.formats.grad_probe.signs import Bytes, packed_size
from msprobe_engine.formats.tensors.safetensors_file import read_safetensors
from msprobe_engine.formats.tensors.torch_pickle import FileTensor

_MOST_TABLE_BYTES = 256 << 20


class Direction(NamedTuple):
    """The signs of one gradient: packed, or as ``gradient > 0`` where nothing else was kept."""

    shape: tuple[int, ...]
    packed: Bytes | None
    positive: npt.NDArray[np.bool_] | None


class RankFiles:
    """The directory of one rank.

    Args:
        directory: ``{dump_path}/rank{R}``.

    Raises:
        DumpFormatError: it is not there, or is no directory.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            self._entries = sorted(os.listdir(directory))
        except OSError as error:
            raise DumpFormatError(f"{directory}: cannot be read ({error.strerror}); give a rank directory of task grad_probe") from None

    @cached_property
    def steps(self) -> list[int]:
        """Steps that have signs, ascending."""
        found = {int(m[1]) for e in self._entries if (m := layout.STEP.fullmatch(e)) and (self.directory / e).is_dir()}
        return sorted(found | {int(m[1]) for e in self._entries if (m := layout.SIGNS.fullmatch(e))})

    @cached_property
    def tables(self) -> list[int]:
        """Steps that have a table, ascending."""
        return sorted(int(m[1]) for e in self._entries if (m := layout.SUMMARY.fullmatch(e)))

    def parameters(self, step: int) -> list[str]:
        """Names in the table of a step, in its order.

        Raises:
            DumpFormatError: the table is damaged.
        """
        path = self.directory / layout.summary_name(step)
        _check_file(path, _MOST_TABLE_BYTES)
        try:
            lines = read_rows(path, most=_MOST_TABLE_BYTES)
            if next(lines, ["param_name"])[:1] != ["param_name"]:
                raise DumpFormatError(f"{path}: the first column is not 'param_name'; it is no table of task grad_probe")
            return [line[0] for line in lines if line]
        except (OSError, TextError) as error:
            raise DumpFormatError(f"{path}: cannot be read ({error})") from None

    def step(self, step: int) -> StepSigns:
        """The signs of a step."""
        return StepSigns(self.directory, step)


class StepSigns:
    """The signs of one step, read when they are asked for."""

    def __init__(self, directory: Path, step: int) -> None:
        self._folder = directory / f"step{step}"
        self._path = directory / layout.signs_name(step)
        self._packed: dict[str, FileTensor] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        if os.path.lexists(self._path):
            self._open()

    def _open(self) -> None:
        _check_file(self._path)
        file = read_safetensors(self._path)
        try:
            shapes = parse_json(file.metadata.get(layout.SHAPES, "{}"))
            self._shapes = {name: tuple(shapes[name]) for name in file.tensors}
            if not all(type(n) is int and n >= 0 for shape in self._shapes.values() for n in shape):
                raise ValueError("a shape is no list of sizes")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DumpFormatError(f"{self._path}: is damaged ({error}); the run may have been killed while copying it") from None
        self._packed = file.tensors

    def names(self) -> Iterator[str]:
        """Parameters with packed signs."""
        yield from self._shapes

    def get(self, name: str) -> Direction | None:
        """The signs of a parameter; None when there are none.

        Raises:
            DumpFormatError: its file is damaged.
        """
        if name in self._shapes:
            shape = self._shapes[name]
            stored = self._packed[name]
            if stored.dtype != "uint8" or stored.shape != (packed_size(math.prod(shape)),):
                raise DumpFormatError(f"{self._path}: '{name}' has {stored.shape} {stored.dtype}, which are not the signs of {list(shape)}")
            packed = np.fromfile(self._path, np.uint8, stored.shape[0], offset=stored.start)
            if len(packed) < stored.shape[0]:
                raise DumpFormatError(f"{self._path}: became shorter while it was read; it is being written or copied")
            return Direction(shape, packed, None)
        for stem in (layout.file_stem(name), *([name] if _plain(name) else [])):
            path = self._folder / f"{stem}.npy"
            if os.path.lexists(path):
                # A bool array, mapped: a header that promises more than the file holds is refused before memory is taken
                positive = map_array(path, follow=False)
                if positive.dtype != np.bool_:
                    raise DumpFormatError(f"{path}: holds {positive.dtype}; directions are bool")
                return Direction(positive.shape, None, positive)
        return None


def _plain(name: str) -> bool:
    return bool(name) and "/" not in name and "\0" not in name and len(os.fsencode(name)) < 250


def _check_file(path: Path, most: int | None = None) -> None:
    try:
        status = os.lstat(path)
    except OSError as error:
        raise DumpFormatError(f"{path}: cannot be read ({error.strerror})") from None
    if not stat.S_ISREG(status.st_mode):
        raise DumpFormatError(f"{path}: is no regular file (links are not followed)")
    if most is not None and status.st_size > most:
        raise DumpFormatError(f"{path}: has {status.st_size} bytes; a table has at most {most}")
