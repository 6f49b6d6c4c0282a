"""Ranks by what they are in place of their numbers: ``one_replica``, ``first_of_node``, ``{sample: 16}``, ``{dp: 0, pp: [0, 3]}``.

They become numbers where settings are read in a process that a launcher has started, which says how many ranks there are. How the ranks
are laid out over the axes (tp, cp, ep, dp, pp) is told by ``sizes``, or by the options of Megatron in the command line of the training;
it is never guessed. The order is Megatron's: tensor parallel ranks follow each other, pipeline stages are the outermost.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from msprobe_engine.core.errors import SettingsError
from msprobe_engine.core.process.launch import WORLD_SIZE, number_of

ONE_REPLICA, FIRST_OF_NODE, SAMPLE, SIZES = "one_replica", "first_of_node", "sample", "sizes"
ROLES = (ONE_REPLICA, FIRST_OF_NODE)
AXES = ("tp", "cp", "ep", "dp", "pp")
NODE_SIZE = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE")
ALLOWED = "one_replica, first_of_node, {sample: 16}, or coordinates like {dp: 0, pp: [0, 3]}"
_OPTIONS = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
_STAGES_INNER = "use_tp_pp_dp_mapping"
_RANGE = re.compile(r"\s*([0-9]{1,7})\s*(?:-\s*([0-9]{1,7})\s*)?")
_MOST = 1_000_000


def is_choice(value: Any) -> bool:
    """Is it something that stands for ranks, and no number?"""
    return isinstance(value, Mapping) or (isinstance(value, str) and value in ROLES)


def ranks_of(choice: Any, argv: Sequence[str] | None = None) -> tuple[int, ...] | None:
    """The ranks that a choice stands for in this job; None: no launcher says how many ranks there are.

    Args:
        choice: as `is_choice`.
        argv: command line of the training.

    Raises:
        SettingsError: it is no choice, or how the ranks are laid out is not known.
    """
    wanted, sizes = _parse_axes({"dp": 0} if choice == ONE_REPLICA else choice)
    world = number_of(WORLD_SIZE)
    if world is None:
        return None
    if choice == FIRST_OF_NODE:
        node = number_of(NODE_SIZE)
        if not node:
            raise SettingsError("first_of_node: the launcher does not say how many ranks a node has (LOCAL_WORLD_SIZE)")
        return tuple(range(0, world, node))
    if SAMPLE in wanted:
        (count,) = wanted[SAMPLE]
        return tuple(sorted({i * world // count for i in range(min(count, world))} if count < world else range(world)))
    layout = _Layout(world, sizes, sys.argv if argv is None else argv)
    return tuple(rank for rank in range(world) if layout.is_at(rank, wanted, one_replica=choice == ONE_REPLICA))


def _parse_axes(choice: Any) -> tuple[dict[str, set[int]], dict[str, int] | None]:
    """Numbers by axis (or the size of a sample), and the sizes of the axes where they are told."""
    if choice == FIRST_OF_NODE:
        return {}, None
    if not choice:
        raise SettingsError(f"an empty mapping stands for no ranks; allowed: {ALLOWED}")
    sizes: dict[str, int] | None = None
    wanted: dict[str, set[int]] = {}
    for name, value in choice.items():
        if (
            name == SIZES
            and isinstance(value, Mapping)
            and all(axis in (*AXES, "etp") and type(size) is int and 0 < size <= _MOST for axis, size in value.items())
        ):
            sizes = dict(value)
        elif name == SAMPLE and type(value) is int and 0 < value <= _MOST and len(choice) == 1:
            wanted[name] = {value}
        elif name in AXES:
            wanted[name] = _numbers(name, value)
        else:
            raise SettingsError(
                f"{str(name)[:40]}: {str(value)[:40]} stands for no ranks; allowed: {ALLOWED}, with sizes: {{tp: 8, pp: 4}}"
            )
    if not wanted:
        raise SettingsError(f"sizes alone stand for no ranks; allowed: {ALLOWED}")
    return wanted, sizes


def _numbers(axis: str, value: Any) -> set[int]:
    numbers: set[int] = set()
    for item in value if isinstance(value, (list, tuple)) and value else [value]:
        match = _RANGE.fullmatch(item) if isinstance(item, str) else None
        first, last = (item, item) if type(item) is int else (int(match[1]), int(match[2] or match[1])) if match else (-1, -1)
        if not 0 <= first <= last <= _MOST:
            raise SettingsError(f"{axis}: {str(item)[:40]} is no coordinate; allowed: a number, a range like '0-3', or a list of them")
        numbers.update(range(first, last + 1))
    return numbers


class _Layout:
    """Where each rank is on the axes."""

    def __init__(self, world: int, sizes: dict[str, int] | None, argv: Sequence[str]) -> None:
        given = _sizes_of_command(argv) if sizes is None else sizes
        if given is None:
            raise SettingsError(
                "how the ranks are laid out is not known here: add the sizes, as in {dp: 0, sizes: {tp: 8, pp: 4}}; sizes: {} where there "
                "is data parallelism alone"
            )
        tp, cp, pp = (given.get(axis, 1) for axis in ("tp", "cp", "pp"))
        ep, etp = given.get("ep", 1), given.get("etp", tp)
        inner = any(word.lstrip("-").replace("-", "_") == _STAGES_INNER for word in argv)
        last = ("pp", "dp") if inner else ("dp", "pp")
        self._dense = _strides((("tp", tp), ("cp", cp)), last, pp, given.get("dp"), world)
        self._experts = _strides((("etp", etp), ("ep", ep)), last, pp, None, world)

    def is_at(self, rank: int, wanted: Mapping[str, set[int]], *, one_replica: bool) -> bool:
        """Is the rank at these coordinates? One replica has all experts too, which other ranks may hold than the rest of the model."""
        if one_replica and _at(self._experts["dp"], rank) == 0:
            return True
        return all(_at((self._experts if axis == "ep" else self._dense)[axis], rank) in numbers for axis, numbers in wanted.items())


def _strides(inner: Sequence[tuple[str, int]], last: tuple[str, str], pp: int, dp: int | None, world: int) -> dict[str, tuple[int, int]]:
    """Axis to distance between neighbours, and size."""
    block = math.prod(size for _, size in inner) * pp
    if world % block or (dp is not None and dp * block != world):
        names = " x ".join(f"{axis} {size}" for axis, size in (*inner, ("pp", pp), *((("dp", dp),) if dp is not None else ())))
        raise SettingsError(f"{names} do not make up the {world} ranks of this job")
    outer = {"pp": pp, "dp": world // block}
    strides, stride = {}, 1
    for axis, size in (*inner, *((axis, outer[axis]) for axis in last)):
        strides[axis] = stride, size
        stride *= size
    return strides


def _at(axis: tuple[int, int], rank: int) -> int:
    return rank // axis[0] % axis[1]


def _sizes_of_command(argv: Sequence[str]) -> dict[str, int] | None:
    """Of Megatron's options; None: there is none of them."""
    sizes: dict[str, int] = {}
    for word, following in zip(argv, [*argv[1:], ""]):
        name, equals, value = word.partition("=")
        axis = next((axis for axis, option in _OPTIONS.items() if name.lstrip("-").replace("-", "_") == option), None)
        text = value if equals else following
        if axis is not None and word.startswith("--") and text.isdecimal() and int(text[:9]) > 0:
            sizes[axis] = int(text[:9])
    return sizes or None
