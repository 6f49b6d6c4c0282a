"""`LogProbMonitor`: log probabilities of the rollout beside those of the trainer, batch by batch, in a training loop of torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from msprobe_engine.accuracy.rl.causes import FINE, SHIFT, Cause, cause_of
from msprobe_engine.accuracy.rl.mismatch import Batch, Mismatch, measure
from msprobe_engine.accuracy.rl.tables import Tables
from msprobe_engine.core import log
from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.guard import Faults
from msprobe_integrations.torch.tensors.arrays import as_array

_PART = "log probabilities"


class LogProbMonitor:
    """Compares log probabilities of the same tokens and writes what it finds, one row a batch.

    ::

        {output_path}/logprob_mismatch_rank{R}.csv       figures of each batch and the cause they point to
                     /logprob_worst_tokens_rank{R}.csv   the tokens that differ most
                     /logprob_positions_rank{R}.csv      by position in the response
                     /logprob_sequences_rank{R}.csv      the sequences that differ most

    The first batch of a cause that is not fine is said in the log. The training is never changed or stopped; a fault in here switches the
    monitor off, with one message.

    Args:
        output_path: directory of the files.
        clip: epsilon of the clipped importance ratio.
        worst: tokens and sequences listed of each batch.
        buckets: ranges of positions.
        strict: raise faults, for tests.

    Raises:
        UsageError: an argument is wrong.
    """

    def __init__(
        self, output_path: str | Path = "./msprobe_rl", *, clip: float = 0.2, worst: int = 20, buckets: int = 8, strict: bool = False
    ) -> None:
        if isinstance(clip, bool) or not isinstance(clip, (int, float)) or not 0 < clip < math.inf:
            raise UsageError(f"LogProbMonitor: clip is {clip!r}; allowed: a number > 0")
        for name, value in (("worst", worst), ("buckets", buckets)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(f"LogProbMonitor: {name} is {value!r}; allowed: an int >= 1")
        self._clip, self._worst, self._buckets = float(clip), worst, buckets
        self._directory = Path(output_path)
        self._faults = Faults(strict)
        self._tables: Tables | None = None
        self._said: set[str] = set()
        self._batch = 0
        self._updated = self._shifted = False
        self.step_count = 0
        self.cause: Cause | None = None
        """What the last batch points to."""

    def observe(self, rollout: Any, trainer: Any, mask: Any = None, tokens: Any = None) -> Mismatch | None:
        """Compare a batch. Call it before the update, with the log probabilities that the trainer computes for the ratio.

        Args:
            rollout, trainer: tensors of shape [sequences, positions] (or [positions]), of the response only; any float type.
            mask: not 0 where a token counts.
            tokens: their numbers.

        Returns:
            The figures; None when the monitor has switched itself off.

        Raises:
            UsageError: the shapes do not fit.
        """
        if not self._faults.is_enabled(_PART):
            return None
        mismatch = arrays = None
        with self._faults.guard(_PART):
            arrays = [_array(value) for value in (rollout, trainer, mask, tokens)]
        if arrays is None:
            return None
        batch = Batch.of(*arrays)
        with self._faults.guard(_PART):
            mismatch = measure(batch, self._clip)
            self.cause = cause_of(mismatch, first=not self._updated or self._shifted)
            self._shifted |= not self._updated and self.cause.name == SHIFT
            if self._tables is None:
                distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
                self._tables = Tables(self._directory, torch.distributed.get_rank() if distributed else 0)
            self._tables.add(self.step_count, self._batch, batch, mismatch, self.cause, self._worst, self._buckets)
            self._batch += 1
            if self.cause.name not in FINE and self.cause.name not in self._said:
                self._said.add(self.cause.name)
                where = self._tables.paths["logprob_mismatch"]
                log.warning(
                    f"log probabilities of rollout and trainer, step {self.step_count}: {self.cause.name}: {self.cause.evidence} ({where})"
                )
        return mismatch

    def step(self) -> None:
        """The weights were updated: what comes now belongs to the next step."""
        self.step_count += 1
        self._batch = 0
        self._updated = True

    def close(self) -> None:
        if self._tables is not None:
            self._tables.close()
            self._tables = None


def _array(value: Any) -> Any:
    with torch.no_grad(), torch._C.DisableTorchFunction():
        return as_array(value)
