"""Strategy files of MindSpore: how the ranks of a distributed training have cut the parameters.

Written with ``strategy_ckpt_config`` (``save_file``) as JSON or as a message ``ParallelStrategyMap``, whose ``parallel_layout_item = 3``
are names with ``ParallelLayouts`` (``mindspore/train/node_strategy_pb2.py``). The numbers mean what ``mindspore/parallel/_tensor.py`` makes
of them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.core.io.damaged_files import guard_opening
from msprobe_engine.core.io.input_files import open_input
from msprobe_engine.formats.checkpoint.files.small_files import entries, read_json
from msprobe_engine.formats.checkpoint.mindspore.proto_wire import BYTES, Field, Source
from msprobe_engine.formats.checkpoint.model import Index

_DIRECTORIES = ("strategy", "src_strategy", "src_strategy_list", "strategies")


@dataclass(frozen=True)
class Layout:
    """How a parameter is cut.

    Attributes:
        devices: the ranks of a pipeline stage as a matrix; the last axis counts fastest.
        axes: of each dimension the axes of `devices` that cut it, the outer one first.
        shards: how many ranks share the rows of a piece because of the parallel optimizer; 1: none, 0: as many as there are.
    """

    devices: Index
    axes: tuple[Index, ...]
    shards: int = 1

    def cuts(self) -> list[int]:
        """Pieces of each dimension."""
        found = [math.prod(self.devices[axis] for axis in axes) for axes in self.axes]
        return [found[0] * self._optimizer_ranks(), *found[1:]] if found else []

    def piece(self, rank: int) -> list[int]:
        """Which piece of each dimension a rank has, counted over all stages."""
        place = _coordinates(rank % math.prod(self.devices), self.devices)
        found = []
        for axes in self.axes:
            number = 0
            for axis in axes:
                number = number * self.devices[axis] + place[axis]
            found.append(number)
        if found:
            found[0] = found[0] * self._optimizer_ranks() + self._optimizer_rank(place)
        return found

    def _free(self) -> list[int]:
        """Axes that cut no dimension: their ranks would have the same."""
        used = {axis for axes in self.axes for axis in axes}
        return [axis for axis, size in enumerate(self.devices) if axis not in used and size > 1]

    def _optimizer_ranks(self) -> int:
        free = math.prod(self.devices[axis] for axis in self._free())
        return free if self.shards == 0 else min(self.shards, free) if free % max(1, self.shards) == 0 else 1

    def _optimizer_rank(self, place: Sequence[int]) -> int:
        """Number of a rank among those that share a piece's rows: the free axes, the last one first, as many as are needed."""
        left, number, weight = self._optimizer_ranks(), 0, 1
        for axis in reversed(self._free()):
            size = min(left, self.devices[axis])
            if size > 1:
                number += place[axis] % size * weight
                weight *= size
                left //= size
        return number


def _coordinates(rank: int, devices: Index) -> list[int]:
    found = []
    for size in reversed(devices):
        found.append(rank % size)
        rank //= size
    return found[::-1]


def strategy_files(directory: Path) -> list[Path]:
    """Files that look like strategies, in a directory of ``rank_*`` directories or beside it."""
    found = []
    for place in (directory, *(directory / name for name in _DIRECTORIES), *(directory.parent / name for name in _DIRECTORIES)):
        if place.is_dir():
            every = place.name in _DIRECTORIES
            names = [name for name in sorted(entries(place)) if name.endswith((".ckpt", ".json")) and (every or "strategy" in name)]
            found += [place / name for name in names if (place / name).is_file()]
    return found


def read_strategy(path: Path) -> dict[str, Layout]:
    """The layouts of a strategy file, by name of the parameter.

    Raises:
        DumpFormatError: it cannot be read or is something else.
    """
    if path.suffix == ".json":
        items = read_json(path).get("parallel_layout_item")
        found = {}
        for name, item in items.items() if isinstance(items, dict) else ():
            if isinstance(item, dict):
                found[_name(str(name))] = _layout(
                    path, name, item.get("dev_matrix"), item.get("tensor_map"), item.get("opt_weight_shard_size")
                )
        return found
    try:
        with guard_opening(path), open_input(path) as opened:
            return dict(_items(Source(opened, os.fstat(opened.fileno()).st_size), path))
    except DumpFormatError as error:
        raise DumpFormatError(
            str(error) if str(path) in str(error) else f"{path}: {error}; it is no strategy of MindSpore or damaged"
        ) from None


def _items(source: Source, path: Path) -> Iterator[tuple[str, Layout]]:
    for item in source.fields(0, source.size):
        if item.number != 3 or item.kind != BYTES:
            continue
        name, shards = "", 0
        devices: list[int] = []
        maps: list[list[int]] = []
        for inner in source.fields(item.start, item.end):
            if inner.number == 1:
                name = source.text(inner)
            elif inner.number == 2 and inner.kind == BYTES:
                for part in source.fields(inner.start, inner.end):
                    if part.number == 1 and not devices:
                        devices = _dims(source, part)
                    elif part.number == 2:
                        maps.append(_dims(source, part))
                    elif part.number == 7:
                        shards = source.numbers(part)[0]
        # One map of all dimensions; of layouts with several axes for a dimension one map each.
        yield _name(name), _layout(path, name, devices, maps[0] if len(maps) == 1 else [row for row in maps if row], _int32(shards))


def _dims(source: Source, part: Field) -> list[int]:
    return [_int32(n) for field in source.fields(part.start, part.end) if field.number == 1 for n in source.numbers(field)]


def _int32(value: int) -> int:
    return value - (1 << 32) if 1 << 31 <= value < 1 << 32 else value


def _name(name: str) -> str:
    """Merged strategies of pipelines have the number of the stage before the name: ``1-layers.3.weight``."""
    stage, dash, rest = name.partition("-")
    return rest if dash and stage.isdigit() else name


def _layout(path: Path, name: Any, devices: Any, maps: Any, shards: Any) -> Layout:
    size = shards if isinstance(shards, int) else 0
    try:
        matrix = tuple(int(n) for n in devices)
        axes = tuple(tuple(len(matrix) - 1 - m for m in (row if isinstance(row, (list, tuple)) else [row]) if m != -1) for row in maps)
    except (TypeError, ValueError):
        matrix, axes = (), ()
    if (
        not matrix
        or any(n < 1 for n in matrix)
        or math.prod(matrix) > 1 << 30
        or any(not 0 <= axis < len(matrix) for row in axes for axis in row)
    ):
        raise DumpFormatError(
            f"{path}: the layout of {str(name)[:80]} is none: device matrix {str(devices)[:60]}, tensor map {str(maps)[:60]}"
        )
    return Layout(matrix, axes, 0 if size == -1 else max(1, size))
