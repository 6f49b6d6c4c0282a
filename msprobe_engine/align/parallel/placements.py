"""What a dump says about the cuts of its tensors: ``parallel`` in the header (marks of Megatron's parameters, sizes of the layout), and
``placements`` of DTensors. Where it says nothing, shapes and numbers have to tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from msprobe_engine.align.calls.call_tree import Tree
from msprobe_engine.core.names import forward_twin
from msprobe_engine.formats.dump.dump_table import INPUT, OUTPUT, PARAMETERS, PARAMETERS_GRAD

PARTIAL = "Partial"


class Placements:
    """Of one rank.

    Args:
        tree: of its records.
        one_stage: the records are those of one stage of a pipeline, or of a model without stages, whatever the header says.
    """

    def __init__(self, tree: Tree, one_stage: bool = False) -> None:
        self._tree, self._side, self._one_stage = tree, tree.side, one_stage
        parallel = self._side.header.get("parallel")
        self._parallel: Mapping[str, Any] = parallel if isinstance(parallel, Mapping) else {}

    def size(self, axis: str) -> int | None:
        """Ranks along an axis (``tp``, ``dp``, ...); None when the dump does not say."""
        sizes = self._parallel.get("size")
        value = sizes.get(axis) if isinstance(sizes, Mapping) else None
        return value if type(value) is int and value > 0 else None

    @cached_property
    def _marks(self) -> dict[str, Mapping[str, Any]] | None:
        """Name of a parameter -> its marks; None when they were not recorded, or the records are those of several stages by now."""
        groups = self._parallel.get("parameters")
        if not isinstance(groups, list) or self.size("tp") is None or not (self._one_stage or self.size("pp") == 1):
            return None
        marks: dict[str, Mapping[str, Any]] = {}
        for group in groups:
            names = group.get("names") if isinstance(group, Mapping) else None
            for name in names if isinstance(names, list) else ():
                marks[str(name)] = group
        return marks

    def whole(self, row: int) -> list[int] | None:
        """Shape of the tensor that a row is a piece of; of what is no parameter and no DTensor, and of what the dump does not say, None."""
        shape = self._side.shape[row]
        if not isinstance(shape, list):
            return None
        known = self._side.extra.get(row, {}).get("global_shape")
        if isinstance(known, list) and len(known) == len(shape) and all(type(size) is int for size in known):
            return known
        return self._of_parameters.get((self._bytes(row), tuple(shape)))

    def of_parameter(self, row: int) -> list[int] | None:
        """Shape of the whole of a parameter, or of its gradient, by its name; None of any other row, and where the dump does not say."""
        shape = self._side.shape[row]
        if self._marks is None or self._side.role[row] not in (PARAMETERS, PARAMETERS_GRAD) or not isinstance(shape, list):
            return None
        name = f"{self._tree.kinds[self._side.op[row]][2]}.{self._side.name[row].rpartition('.')[2]}"
        return self._times(self._marks.get(name, {}), shape)

    def is_partial(self, row: int) -> bool:
        """A part of a sum that is still to come, as a DTensor says it."""
        placements = self._side.extra.get(row, {}).get("placements")
        return isinstance(placements, Sequence) and any(isinstance(placement, Mapping) and PARTIAL in placement for placement in placements)

    @cached_property
    def _of_parameters(self) -> dict[tuple[bytes, tuple[int, ...]], list[int]]:
        """Numbers and shape of a parameter -> shape of its whole: functions take parameters in without a name. Two parameters that only
        differ in their marks are told by nobody, and left out."""
        side, marks = self._side, self._marks
        shapes: dict[tuple[bytes, tuple[int, ...]], list[int]] = {}
        unclear = set()
        for row, role in enumerate(side.role) if marks is not None else ():
            shape = side.shape[row]
            if role != PARAMETERS or not isinstance(shape, list):
                continue
            name = f"{self._tree.kinds[side.op[row]][2]}.{side.name[row].rpartition('.')[2]}"
            whole = self._times((marks or {}).get(name, {}), shape)
            key = (self._bytes(row), tuple(shape))
            if whole is None or shapes.setdefault(key, whole) != whole:
                unclear.add(key)
        return {key: whole for key, whole in shapes.items() if key not in unclear}

    def _times(self, marks: Mapping[str, Any], shape: list[int]) -> list[int] | None:
        dim = marks.get("partition_dim")
        if dim is None:
            return list(shape)
        n = self.size("etp" if marks.get("expert") else "tp")
        if type(dim) is not int or not 0 <= dim < len(shape) or n is None:
            return None
        return [size * n if d == dim else size for d, size in enumerate(shape)]

    def _bytes(self, row: int) -> bytes:
        return self._side.numbers[4 * row : 4 * row + 4].tobytes()


def times_cut(target: Placements, i: int, golden: Placements, j: int, least: Sequence[int]) -> int | None:
    """How many times the whole is larger than the smallest shape that two rows can be pieces of; None when neither dump says it."""
    for whole in (target.whole(i), golden.whole(j)):
        if whole is not None and all(w % s == 0 for w, s in zip(whole, least) if s):
            n = 1
            for w, s in zip(whole, least):
                n *= w // s if s else 1
            return n
    return None


def twins(tree: Tree) -> dict[int, int]:
    """Row of a gradient -> row of what it is the gradient of: of backward calls those of the forward call, of parameter gradients the
    parameter."""
    side = tree.side
    parameters: dict[tuple[str, str], int] = {}
    for row, role in enumerate(side.role):
        if role == PARAMETERS:
            parameters.setdefault((tree.kinds[side.op[row]][2], side.name[row].rpartition(".")[2]), row)
    twin_rows: dict[int, int] = {}
    for op, kind in enumerate(tree.kinds):
        if kind[0] == "backward":
            twin = tree.index.get(forward_twin(side.ops[op]))
            if twin is None:
                continue
            free_rows = {
                role: [r for r in side.rows(twin) if side.role[r] == role and side.requires_grad[r] is not False]
                for role in (INPUT, OUTPUT)
            }
            for row in side.rows(op):
                candidates = free_rows[OUTPUT if side.role[row] == INPUT else INPUT]
                same = next((candidate for candidate in candidates if side.shape[candidate] == side.shape[row]), None)
                if same is not None:
                    candidates.remove(same)
                    twin_rows[row] = same
        elif tree.is_gradients(op) and len(kind) > 2:
            for row in side.rows(op):
                parameter_row = parameters.get((kind[2], side.name[row].rpartition(".")[2]))
                if parameter_row is not None:
                    twin_rows[row] = parameter_row
    return twin_rows
