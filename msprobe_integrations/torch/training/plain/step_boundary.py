"""When a step of a loop with several optimizers is over."""

from __future__ import annotations

from collections.abc import Iterable


class StepBoundary:
    """A step is one update of every optimizer. It ends at the first training pass (forward, or a backward that had none before it)
    after the last of them.

    Who is waited for is learnt: optimizers that are called one after the other (Muon and AdamW), or each after passes of its own
    (the two of a GAN), make one step. When one comes round again, those that had not updated before the passes of its second update are
    waited for no more: with five updates of the critic per update of the generator each of the critic's is a step.
    """

    def __init__(self) -> None:
        self.expected: set[int] = set()
        self._passes = 0
        self._given_up: set[int] = set()
        self._updated: dict[int, int] = {}  # after how many passes of the step, the first time
        self._round: set[int] = set()

    def expect(self, optimizers: Iterable[int]) -> None:
        """These train from now on."""
        found = set(optimizers)
        self._given_up &= found
        self.expected = found - self._given_up

    def count_pass(self) -> None:
        """A training pass of the step has begun."""
        self._passes += 1

    def first(self, optimizer: int) -> bool:
        """Would this be its first update in the step?"""
        return optimizer not in self._updated

    def update(self, optimizer: int) -> set[int]:
        """It has updated, or left an update out. Where it is the first to come round again, after passes: returns who was waited for until
        now, and is no longer; the step lasts until the others of its round have come round, too."""
        before = self.expected
        again = self._passes > self._updated.setdefault(optimizer, self._passes)
        if again and self._round == self._updated.keys():
            earlier = {other for other, passes in self._updated.items() if passes < self._passes}
            self.expected, self._round = before & earlier | {optimizer}, {optimizer}
            missed = before - self.expected
            self._given_up |= missed
            return missed
        if optimizer in self._round and not again:
            self.expected = before & self._updated.keys() | {optimizer}
        self._round.add(optimizer)
        return set()

    def stranger(self, optimizer: int) -> None:
        """One that is not followed has updated: who has not is waited for no longer."""
        self._updated.setdefault(optimizer, self._passes)
        self._round.add(optimizer)
        self.expected &= self._updated.keys()

    @property
    def begun(self) -> bool:
        """Has an optimizer updated in the step?"""
        return bool(self._updated)

    @property
    def over(self) -> bool:
        """Does the next training pass belong to another step?"""
        return self.begun and self.expected <= self._round

    def next(self) -> None:
        """Another step begins."""
        self._updated.clear()
        self._round.clear()
        self._passes = 0
