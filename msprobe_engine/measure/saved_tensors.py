"""Distances of pairs of rows from the saved tensors themselves, where both sides have them.

Statistics do not see that elements changed places, or that many small ones differ below a large one; the elements do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from msprobe_engine.core.errors import DumpFormatError, UsageError
from msprobe_engine.core.process.cores import usable_cores
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.formats.dump.dump_table import TENSOR, DumpTable
from msprobe_engine.formats.tensors.blocks import check_dumped, open_elements
from msprobe_engine.measure import distances, roundoff
from msprobe_engine.measure.distances import Distances
from msprobe_engine.measure.tensors.metrics import Figures, TensorDiff

_BATCH = 4096
_SLACK = 1e-3
"""Of a number's size: statistics are summed in float32, in any order."""


def refine(
    differences: Distances,
    target: DumpTable,
    golden: DumpTable,
    rows: Sequence[tuple[int, int]],
    measured: Mapping[tuple[int, int], Figures] | None = None,
) -> int:
    """Put the distance of the elements in place of that of the statistics, for pairs whose tensors are saved and of equal shape.

    Tensors that cannot be read, or are not of the shape and type that the dump says, keep the distance they have; `target.problems` says
    how many.

    Args:
        differences: as `distances.distances` made it of `rows`; changed.
        measured: pair of rows -> what was measured of its tensors; None: they are read here.

    Returns:
        Number of pairs that were measured so.
    """
    if target.mode != TENSOR or golden.mode != TENSOR:
        return 0
    facts = differences.shape | differences.argument
    whole = [target.shape[i] is not None and golden.shape[j] is not None for i, j in rows]  # else parts of something
    to_read = [k for k, (i, j) in enumerate(rows) if whole[k] and target.data_name[i] and golden.data_name[j] and not facts[k]]
    measured_pairs = unread = 0
    first_problem = ""
    contradicting: list[int] = []
    with ThreadPoolExecutor(usable_cores()) as pool:
        for part in _batches(to_read):
            read = pool.map(lambda k: _figures(target, golden, *rows[k]), part)
            for k, figures in zip(part, read if measured is None else [measured.get(rows[k]) for k in part]):
                if isinstance(figures, str):
                    unread, first_problem = unread + 1, first_problem or figures
                if figures is None or isinstance(figures, str):
                    continue
                measured_pairs += 1
                if not figures.bad_target and not figures.bad_golden and _contradict(figures, target, golden, *rows[k]):
                    contradicting.append(k)
                # NaN on both sides are no difference to a walk, which asks where they come from; what is left of the tensor is
                distance = replace(figures, apart=0).distance if figures.bad_target and figures.bad_golden else figures.distance
                if figures.bad_target and figures.bad_golden and _nan_on_one_side(target, golden, *rows[k]):
                    continue  # and Inf on the other, which `distances.distances` has told
                differences.distance[k] = distance
                differences.bad_target[k], differences.bad_golden[k] = bool(figures.bad_target), bool(figures.bad_golden)
                differences.known[k] = differences.elements[k] = True
    if contradicting:
        name = target.name[rows[contradicting[0]][0]]
        template = "{0} against {1}: the statistics of {2} rows contradict the saved tensors, which count; the first is {3}"
        target.add_problem(Sentence(template, target.path, golden.path, f"{len(contradicting):,}", name))
    if unread:
        target.add_problem(
            Sentence(
                "{0} pairs of saved tensors could not be read and are measured by their statistics, the first is {1}",
                f"{unread:,}",
                first_problem,
            )
        )
    return measured_pairs


def _contradict(figures: Figures, target: DumpTable, golden: DumpTable, i: int, j: int) -> bool:
    """Do the statistics that stand in the dumps not belong to the tensors that were read? A norm is that of its tensor, and maxima, minima
    and means are no further apart than the elements are."""
    if target.dtype[i] != golden.dtype[j] or not str(target.dtype[i]).rpartition(".")[2].startswith(("float", "bfloat")):
        return False
    target_stats, golden_stats = target.stats[i], golden.stats[j]
    slack = _SLACK + 4 * roundoff.eps(target.dtype[i])
    for said, squares in ((target_stats[3], figures.target_squares), (golden_stats[3], figures.golden_squares)):
        norm = math.sqrt(squares)
        if math.isfinite(said) and abs(said - norm) > slack * max(norm, said):
            return True
    apart = np.abs(target_stats[:3] - golden_stats[:3])
    size = max((abs(value) for value in (*target_stats[:3], *golden_stats[:3]) if math.isfinite(value)), default=0.0)
    return bool((apart[np.isfinite(apart)] > figures.worst + slack * size).any())


def _nan_on_one_side(target: DumpTable, golden: DumpTable, i: int, j: int) -> bool:
    """Of two rows that hold NaN or Inf."""
    target_nan, golden_nan = (distances.nans(side, np.array([row]), side.stats[[row]]) for side, row in ((target, i), (golden, j)))
    return bool(target_nan[0] != golden_nan[0]) and all(
        bool(distances.nonfinite(side, [row])[0]) for side, row in ((target, i), (golden, j))
    )


def _batches(positions: Sequence[int]) -> Iterator[Sequence[int]]:
    for start in range(0, len(positions), _BATCH):
        yield positions[start : start + _BATCH]


def _figures(target: DumpTable, golden: DumpTable, i: int, j: int) -> Figures | str | None:
    """None: shapes that do not fit; a text: why a file could not be read."""
    try:
        with (
            open_elements(target.files, target.data_name[i]) as target_tensor,
            open_elements(golden.files, golden.data_name[j]) as golden_tensor,
        ):
            check_dumped(target_tensor, target.data_name[i], target.shape[i], target.dtype[i])
            check_dumped(golden_tensor, golden.data_name[j], golden.shape[j], golden.dtype[j])
            if target_tensor.shape != golden_tensor.shape:
                return None
            return TensorDiff(target_tensor, golden_tensor, None).run()
    except (DumpFormatError, UsageError) as error:
        return f"{target.name[i]}: {error}"
