"""Columns of the tables, by generation and by what the dumps can be compared by, in the order of the existing tool."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

from msprobe_engine.formats.dump.dump_table import DIGEST, MD5, TENSOR
from msprobe_engine.measure.options import OLD

Block: TypeAlias = dict[str, Any]
"""A piece of a table: column -> its cells, a list or an array of one length each; columns in table order. The key `COLOUR` is no
column: it has the colour of each row (8.1.1)."""

BLOCK_ROWS = 20_000
"""Rows that a block has at most."""

COLOUR = ""
"""Key of a block with ``""``, ``"red"`` or ``"yellow"`` per row; writers that know no colours leave it out."""

TARGET_NAME, GOLDEN_NAME = "NPU Name", "Bench Name"
TARGET_GRAD, GOLDEN_GRAD, GRAD_EQUAL = "NPU Requires_grad", "Bench Requires_grad", "Requires_grad Consistent"
TARGET_MD5, GOLDEN_MD5 = "NPU MD5", "BENCH MD5"
RESULT, ACCURACY, MESSAGE, STACK, DATA_NAME = "Result", "Accuracy Reached or Not", "Err_message", "NPU_Stack_Info", "Data_name"
COSINE, EUCLID, MAX_ABS, MAX_REL = "Cosine", "EucDist", "MaxAbsErr", "MaxRelativeErr"
ONE_THOUSANDTH, FIVE_THOUSANDTHS = "One Thousandth Err Ratio", "Five Thousandths Err Ratio"

NAMES = (TARGET_NAME, GOLDEN_NAME, "NPU Dtype", "Bench Dtype", "NPU Tensor Shape", "Bench Tensor Shape")
DIFFERENCES = ("Max diff", "Min diff", "Mean diff", "L2norm diff")
RELATIVE = ("MaxRelativeErr", "MinRelativeErr", "MeanRelativeErr", "NormRelativeErr")
TARGET_STATS = ("NPU max", "NPU min", "NPU mean", "NPU l2norm")
GOLDEN_STATS = ("Bench max", "Bench min", "Bench mean", "Bench l2norm")
METRICS = (COSINE, EUCLID, MAX_ABS, MAX_REL, ONE_THOUSANDTH, FIVE_THOUSANDTHS)

UNMATCHED = "N/A"
"""Stands in the cells of the side that has nothing there."""


def columns(generation: str, mode: str, stack: bool, metrics: Iterable[str] = ()) -> tuple[str, ...]:
    """Columns of a table.

    Args:
        generation: ``8.1.1`` or ``26.2.0``.
        mode: of a `DumpTable`. Digests take the columns of checksums.
        stack: with the call stack.
        metrics: names of further metrics of tensors.
    """
    old = generation == OLD
    grad: tuple[str, ...] = () if old else (TARGET_GRAD, GOLDEN_GRAD)
    equal: tuple[str, ...] = () if old else (GRAD_EQUAL,)
    tail: tuple[str, ...]
    if mode in (MD5, DIGEST):
        middle: tuple[str, ...] = (TARGET_MD5, GOLDEN_MD5)
        tail = (*equal, RESULT) if old else (*equal, RESULT, MESSAGE)
    elif mode == TENSOR:
        middle = (*METRICS, *metrics, *TARGET_STATS, *GOLDEN_STATS)
        tail = (ACCURACY, MESSAGE) if old else (*equal, RESULT, MESSAGE)
    else:
        middle = (*DIFFERENCES, *RELATIVE, *TARGET_STATS, *GOLDEN_STATS)
        tail = (*equal, RESULT, MESSAGE)
    last = (STACK,) if stack else ()
    return (*NAMES, *grad, *middle, *tail, *last, *((DATA_NAME,) if mode == TENSOR else ()))
