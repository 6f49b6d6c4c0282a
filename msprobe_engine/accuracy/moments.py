"""Numbers with given extremes, mean and norm, and rows that count: the arithmetic of `draw`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

POOL = 1 << 20
"""More values than a few times this many are chosen out of this many."""


def build_position_rows(
    shape: tuple[int, ...], low: float | None, high: float | None, mean: float | None, norm: float | None
) -> Floats | None:
    """Rows that count from the smallest value to the largest (positions), when the moments say so; else None."""
    if low is None or high is None or mean is None or norm is None or not shape or shape[-1] < 3 or high - low != shape[-1] - 1:
        return None
    row = np.arange(shape[-1], dtype=np.float64) + float(low)
    whole = float(np.sqrt((row * row).sum() * (math.prod(shape) // shape[-1])))
    if float(low) != int(low) or abs(mean - row.mean()) > 1e-6 * max(1.0, abs(high)) or abs(norm - whole) > 1e-6 * whole:
        return None
    return np.array(np.broadcast_to(row, shape))


def moments(rng: np.random.Generator, count: int, low: float, high: float, mean: float | None, norm: float | None) -> Floats:
    """`count` values between `low` and `high`, which both occur, with this mean and norm as far as that can be."""
    if count <= 0 or low == high:
        return np.full(max(count, 0), low)
    if count == 1:
        return np.array([high if mean is None or not low <= mean <= high else mean])
    ends = rng.choice(count, 2, replace=False) if count <= POOL else rng.integers(0, count // 2, 2) * 2 + np.array([0, 1])
    out = np.empty(count)
    rest = np.ones(count, bool)
    rest[ends] = False
    with np.errstate(over="ignore", invalid="ignore"):
        out[rest] = low + _unit(rng, count, low, high, mean, norm) * (high - low) if high - low < math.inf else low / 2 + high / 2
    np.clip(out, low, high, out=out)
    out[ends] = low, high
    return out


def _unit(rng: np.random.Generator, count: int, low: float, high: float, mean: float | None, norm: float | None) -> Floats:
    """The inner `count` - 2 values, moved to 0...1."""
    inner = count - 2
    if inner == 0:
        return np.empty(0)
    span = high - low
    centre = 0.5 if mean is None else (count * (mean - low) - span) / inner / span  # the extremes themselves add 0 and `span`
    if not 0 <= centre <= 1 and not -1e-6 <= centre <= 1 + 1e-6:
        return _many(rng, inner, lambda n: rng.random(n))
    centre = min(max(centre, 0.0), 1.0)
    if mean is None or norm is None:
        spread = min(1 / 12, centre * (1 - centre) / 3)
    else:  # second moment around `low`, in units of the span
        square = (norm * norm - low * low - high * high) / inner
        spread = (square - 2 * low * (low + centre * span) + low * low) / (span * span) - centre * centre
    most = centre * (1 - centre)
    if most <= 0 or spread <= 1e-13:
        return np.full(inner, centre)
    if spread >= 0.99 * most:
        values = np.zeros(inner)
        values[: round(inner * centre)] = 1.0
        rng.shuffle(values)
        return values
    shape = most / spread - 1
    alpha, beta = centre * shape, (1 - centre) * shape
    if min(alpha, beta) > 4:
        values = _many(rng, inner, lambda n: centre + math.sqrt(spread) * rng.standard_normal(n))
    else:
        values = _many(rng, inner, lambda n: rng.beta(alpha, beta, n))
    for _ in range(3 if inner > 1 else 0):
        np.clip(values, 0, 1, out=values)
        have = float(values.std())
        if have == 0:
            break
        values = (values - values.mean()) * (math.sqrt(spread) / have) + centre
    if inner == 1:
        values[0] = centre
    return np.clip(values, 0, 1)


def _many(rng: np.random.Generator, count: int, make: Any) -> Floats:
    """`count` values: many are chosen out of fewer, which is several times faster and as good."""
    if count <= 4 * POOL:
        values: Floats = make(count)
        return values
    pool: Floats = make(POOL)
    return pool[rng.integers(0, POOL, count, dtype=np.int32)]


def symmetric(values: Floats) -> Floats:
    """[..., n, n] made symmetric."""
    made: Floats = (values + values.swapaxes(-1, -2)) / 2
    return made


def definite(values: Floats) -> Floats:
    """Symmetric positive definite matrices, [..., n, n], of the size of `values`."""
    n = values.shape[-1]
    made: Floats = values @ values.swapaxes(-1, -2) / n + np.eye(n) * max(float(np.mean(values * values)), 1e-3)
    largest = float(np.max(np.abs(values)))
    return made * (largest / float(np.max(np.abs(made))) if largest else 1.0)


def dominant(values: Floats) -> Floats:
    """[..., n, n] with a strong diagonal: triangular systems with it do not grow without bounds."""
    n = values.shape[-1]
    diagonal = np.diagonal(values, axis1=-2, axis2=-1)
    strong = np.where(diagonal < 0, -1.0, 1.0) * np.maximum(np.abs(diagonal), float(np.max(np.abs(values))) / 2)
    made: Floats = values * (1 - np.eye(n)) / n + strong[..., None] * np.eye(n)
    return made
