"""Log probabilities of the same tokens from two sides: the rollout, which has drawn them, and the trainer, which has them computed anew.

With ``d = trainer - rollout`` and ``r = exp(d)``, all over the tokens of the mask:

* three estimators of the Kullback-Leibler divergence of the rollout's distribution from the trainer's, for tokens drawn by the rollout:
  ``k1 = mean(-d)``, ``k2 = mean(d * d) / 2``, ``k3 = mean(r - 1 - d)`` (k1 and k3 are unbiased, k3 has no negative terms);
* the importance ratio r: its mean is 1 for distributions that belong together; clip fractions are the shares of tokens above
  ``1 + clip`` and below ``1 - clip``; the effective sample size is ``sum(r)**2 / (n * sum(r * r))``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.errors import UsageError

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Batch:
    """Log probabilities of both sides, checked.

    Attributes:
        rollout, trainer: float64 of shape (sequences, positions).
        mask: bool, tokens that count.
        tokens: integers of the same shape; None: they are not known.
    """

    rollout: Array
    trainer: Array
    mask: Array
    tokens: Array | None = None

    @staticmethod
    def of(rollout: Any, trainer: Any, mask: Any = None, tokens: Any = None) -> Batch:
        """From arrays of the shape (positions) or (sequences, positions).

        Args:
            mask: not 0 where a token counts; None: all do.

        Raises:
            UsageError: shapes differ, or what is given holds no numbers.
        """
        made: dict[str, Array] = {}
        for name, value in (("rollout", rollout), ("trainer", trainer), ("mask", mask), ("tokens", tokens)):
            if value is None:
                continue
            array = np.asarray(value)
            if array.dtype.kind not in "biuf" or array.ndim not in (1, 2):
                description = f"{array.dtype} of shape {list(array.shape)}"
                raise UsageError(f"log probabilities: {name} is {description}; allowed: numbers of shape [sequences, positions]")
            made[name] = array[np.newaxis] if array.ndim == 1 else array
            if made[name].shape != made["rollout"].shape:
                raise UsageError(
                    f"log probabilities: {name} has shape {list(array.shape)}, rollout {list(np.shape(rollout))}; they must be the same: "
                    "cut both to the response, without the prompt"
                )
        counts = np.ones(made["rollout"].shape, bool) if mask is None else made["mask"] != 0
        return Batch(made["rollout"].astype(np.float64), made["trainer"].astype(np.float64), counts, made.get("tokens"))

    @property
    def finite(self) -> Array:
        """Tokens that count and have numbers on both sides."""
        found: Array = self.mask & np.isfinite(self.rollout) & np.isfinite(self.trainer)
        return found

    @property
    def difference(self) -> Array:
        """``trainer - rollout``, 0 where a token does not count."""
        with np.errstate(invalid="ignore"):
            return np.where(self.finite, self.trainer - self.rollout, 0.0)


@dataclass(frozen=True)
class Mismatch:
    """Figures of a batch; nan where there are no tokens.

    Attributes:
        tokens, sequences: that count.
        not_finite_rollout, not_finite_trainer: tokens of the mask with NaN or Inf, which are left out.
        mean, absolute, largest: of d, of its absolute value, and its largest.
        k1, k2, k3: see the module.
        ratio_mean, ratio_least, ratio_most, effective: importance ratio, and effective sample size as a share.
        clip_high, clip_low: shares of tokens.
        probability_mean, probability_most: of the absolute difference of probabilities.
        correlation, slope: of the trainer's log probabilities with the rollout's; explained: correlation of d with the rollout's.
        shifted: best correlation with the neighbouring position instead.
        zero_rollout, zero_trainer: tokens of the mask whose log probability is exactly 0 on this side only: padding, most often.
        without_zeros: `absolute` without these.
        outside: tokens outside of the mask that have a log probability other than 0 on both sides.
        sequence_most: largest absolute sum of d over a sequence.
        late: mean of ``|d|`` of the last quarter of positions by that of the first.
    """

    tokens: int
    sequences: int
    not_finite_rollout: int
    not_finite_trainer: int
    mean: float
    absolute: float
    largest: float
    k1: float
    k2: float
    k3: float
    ratio_mean: float
    ratio_least: float
    ratio_most: float
    effective: float
    clip_high: float
    clip_low: float
    probability_mean: float
    probability_most: float
    correlation: float
    slope: float
    explained: float
    shifted: float
    zero_rollout: int
    zero_trainer: int
    without_zeros: float
    outside: int
    sequence_most: float
    late: float

    @staticmethod
    def names() -> tuple[str, ...]:
        return tuple(field.name for field in fields(Mismatch))


def measure(batch: Batch, clip: float = 0.2) -> Mismatch:
    """The figures of a batch.

    Args:
        clip: of the importance ratio, as in PPO.
    """
    chosen, mask = batch.finite, batch.mask
    rollout, trainer = batch.rollout[chosen], batch.trainer[chosen]
    d = trainer - rollout
    zero_rollout, zero_trainer = (rollout == 0) & (trainer != 0), (trainer == 0) & (rollout != 0)
    outside = ~mask & (batch.rollout != 0) & (batch.trainer != 0) & np.isfinite(batch.rollout) & np.isfinite(batch.trainer)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        r = np.exp(d)
        p = np.abs(np.exp(trainer) - np.exp(rollout))
        sums = np.abs(batch.difference.sum(1))
        return Mismatch(
            tokens=int(chosen.sum()),
            sequences=int(chosen.any(1).sum()),
            not_finite_rollout=int((mask & ~np.isfinite(batch.rollout)).sum()),
            not_finite_trainer=int((mask & ~np.isfinite(batch.trainer)).sum()),
            mean=_mean(d),
            absolute=_mean(np.abs(d)),
            largest=_most(np.abs(d)),
            k1=_mean(-d),
            k2=_mean(np.square(d)) / 2,
            k3=_mean(np.expm1(d) - d),
            ratio_mean=_mean(r),
            ratio_least=float(r.min()) if r.size else math.nan,
            ratio_most=_most(r),
            effective=float(np.square(r.sum()) / (r.size * np.square(r).sum())) if r.size else math.nan,
            clip_high=_mean(r > 1 + clip),
            clip_low=_mean(r < 1 - clip),
            probability_mean=_mean(p),
            probability_most=_most(p),
            correlation=_correlation(rollout, trainer),
            slope=float(np.mean((rollout - rollout.mean()) * (trainer - trainer.mean())) / rollout.var())
            if rollout.size > 1 and rollout.var() > 0
            else math.nan,
            explained=_correlation(rollout, d),
            shifted=_correlate_shifted(batch),
            zero_rollout=int(zero_rollout.sum()),
            zero_trainer=int(zero_trainer.sum()),
            without_zeros=_mean(np.abs(d[~(zero_rollout | zero_trainer)])),
            outside=int(outside.sum()),
            sequence_most=_most(sums),
            late=_late(batch),
        )


def _mean(values: Array) -> float:
    return float(values.mean()) if values.size else math.nan


def _most(values: Array) -> float:
    return float(values.max()) if values.size else math.nan


def _correlation(x: Array, y: Array) -> float:
    if x.size < 2:
        return math.nan
    x, y = x - x.mean(), y - y.mean()
    size = math.sqrt(float(np.square(x).sum()) * float(np.square(y).sum()))
    return float((x * y).sum()) / size if size > 0 else math.nan


def _correlate_shifted(batch: Batch) -> float:
    """The better of the correlations with the position before and behind."""
    correlations = []
    chosen = batch.finite[:, 1:] & batch.finite[:, :-1]
    for rollout, trainer in ((batch.rollout[:, 1:], batch.trainer[:, :-1]), (batch.rollout[:, :-1], batch.trainer[:, 1:])):
        value = _correlation(rollout[chosen], trainer[chosen])
        correlations += [] if math.isnan(value) else [value]
    return max(correlations, default=math.nan)


def _late(batch: Batch) -> float:
    quarter = batch.mask.shape[1] // 4
    if not quarter:
        return math.nan
    size = np.abs(batch.difference)
    first, last = (_mean(size[:, part][batch.finite[:, part]]) for part in (slice(0, quarter), slice(-quarter, None)))
    return last / first if first > 0 else math.nan


def worst(batch: Batch, count: int) -> list[tuple[int, int, int | None, float, float, float]]:
    """Tokens with the largest ``|d|``, the largest first: (sequence, position, token, rollout, trainer, d)."""
    size = np.where(batch.finite, np.abs(batch.difference), -1.0).reshape(-1)
    count = min(count, int((size > 0).sum()))
    if count <= 0:
        return []
    order = np.argpartition(-size, count - 1)[:count]
    order = order[np.argsort(-size[order], kind="stable")]
    tokens = []
    for index in order:
        row, column = divmod(int(index), batch.mask.shape[1])
        token = None if batch.tokens is None else int(batch.tokens[row, column])
        old, new = float(batch.rollout[row, column]), float(batch.trainer[row, column])
        tokens.append((row, column, token, old, new, new - old))
    return tokens


def by_position(batch: Batch, buckets: int) -> list[tuple[int, int, int, float, float, float]]:
    """The response in ranges of positions: (first, last, tokens, mean d, mean ``|d|``, largest)."""
    edges = np.unique(np.linspace(0, batch.mask.shape[1], buckets + 1).astype(int))
    found = []
    for first, end in zip(edges[:-1].tolist(), edges[1:].tolist()):
        d = batch.difference[:, first:end][batch.finite[:, first:end]]
        found.append((first, end - 1, int(d.size), _mean(d), _mean(np.abs(d)), _most(np.abs(d))))
    return found


def by_sequence(batch: Batch) -> list[tuple[int, int, float, float, float, float]]:
    """(sequence, tokens, sum of d, mean d, mean ``|d|``, largest ``|d|``) of every sequence with tokens that count."""
    found = []
    for row in range(batch.mask.shape[0]):
        d = batch.difference[row][batch.finite[row]]
        if d.size:
            found.append((row, int(d.size), float(d.sum()), _mean(d), _mean(np.abs(d)), _most(np.abs(d))))
    return found
