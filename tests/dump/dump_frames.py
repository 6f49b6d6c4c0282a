"""Synthetic frames for the tests of the dump format."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from msprobe_engine.core.records import Entry, Frame, Opaque, TensorDescription, TensorRef
from msprobe_engine.core.statistics import rows as R

F32 = TensorDescription("torch.Tensor", "torch.float32", (4, 128, 256), True)
I64 = TensorDescription("torch.Tensor", "torch.int64", (4, 128), False)


def row_of(values: Any, digest: int | None = None) -> R.Rows:
    """The statistics row ([1, 16]) of a small array, taken the slow and obvious way."""
    a = np.asarray(values)
    row = R.empty(1)
    ints = R.as_int64(row)
    ints[0, R.COUNT], ints[0, R.FLAGS] = a.size, R.WRITTEN
    if a.dtype.kind in "biu" and a.size:
        ints[0, R.IMIN], ints[0, R.IMAX] = int(a.min()), int(a.max())
        ints[0, R.FLAGS] |= R.HAS_INTEGERS
    values64 = np.abs(a) if a.dtype.kind == "c" else a.astype(np.float64)
    finite = values64[np.isfinite(values64)]
    ints[0, R.NANS], ints[0, R.ZEROS] = np.isnan(values64).sum(), (values64 == 0).sum()
    ints[0, R.POS_INF], ints[0, R.NEG_INF] = (values64 == math.inf).sum(), (values64 == -math.inf).sum()
    if finite.size:
        row[0, R.MIN], row[0, R.MAX], row[0, R.SUM], row[0, R.SUMSQ] = finite.min(), finite.max(), finite.sum(), (finite**2).sum()
    if digest is not None:
        ints[0, R.DIGEST] = np.uint64(digest).astype(np.int64)
        ints[0, R.FLAGS] |= R.HAS_DIGEST
    return row


def random_rows(n: int, seed: int = 0) -> R.Rows:
    """`n` plausible rows of float32 tensors."""
    rng = np.random.default_rng(seed)
    rows = R.empty(n)
    ints = R.as_int64(rows)
    ints[:, R.COUNT], ints[:, R.FLAGS] = 4 * 128 * 256, R.WRITTEN
    rows[:, R.MAX] = np.abs(rng.normal(size=n)).astype(np.float32)
    rows[:, R.MIN] = -np.abs(rng.normal(size=n)).astype(np.float32)
    rows[:, R.SUM], rows[:, R.SUMSQ] = rng.normal(size=n), rng.random(n) * 1e5
    return rows


def big_frame(step: int, entries: int = 650, seed: int = 0, shift: int = 0) -> Frame:
    """A frame of `entries` records with about three tensors each, all objects new. `shift` moves every row index."""
    made, row = [], shift
    for i in range(entries):
        refs = [TensorRef(row + k, F32) for k in range(3)]
        row += 3
        number = i // 2
        if i % 2:
            name, parent = f"Functional.linear.{number}.forward", f"Module.layers.{number}.fc.Linear.forward.0"
        else:
            name, parent = f"Module.layers.{number}.fc.Linear.forward.0", f"Module.layers.{number}.Block.forward.0"
        sections = {
            "input_args": [refs[0], refs[1], Opaque({"type": "int", "value": 3}), None],
            "input_kwargs": {"scale": Opaque({"type": "float", "value": 0.5 + step}), "eps": Opaque({"type": "str", "value": "x"})},
            "output": [refs[2]],
        }
        made.append(Entry(name, sections, parent, i % 40))
    stacks = [[f"File /job/net.py, line {line}, in forward, \n y = f(x)" for line in range(s, s + 12)] for s in range(40)]
    return Frame(step, 0, random_rows(row, seed), made, stacks=stacks, level="mix")
