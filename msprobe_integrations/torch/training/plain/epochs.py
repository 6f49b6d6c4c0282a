"""Whether a sampler that shuffles for several ranks gives the order of the epoch before: nobody has called its set_epoch."""

from __future__ import annotations

import weakref
from typing import Any

from msprobe_engine.core.guard import suppress_faults


class Epochs:
    """Looks at the number of the epoch with which a `DistributedSampler` makes its order."""

    def __init__(self) -> None:
        self._order_kept = False
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def begin(self, following: Any, sampler: Any, *args: Any, **kwargs: Any) -> Any:
        """In the place of its ``__iter__``."""
        with suppress_faults():  # a subclass may have neither
            if sampler.shuffle:
                self._order_kept |= self._numbers.get(sampler) == sampler.epoch
                self._numbers[sampler] = sampler.epoch
        return following(sampler, *args, **kwargs)

    def take_order_kept(self) -> bool:
        """Has one begun a further epoch with the same number since the last call?"""
        found, self._order_kept = self._order_kept, False
        return found
