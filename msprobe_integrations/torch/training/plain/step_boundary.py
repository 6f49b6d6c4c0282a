"""When a step of a loop is over that nobody describes: the rule, without torch."""

from __future__ import annotations

from collections.abc import Iterable


class StepBoundary:
    """A step is one update of every optimizer. It ends at the first training pass (forward, or a backward that had none before it)
    after the last of them.

    Who is waited for is learnt: optimizers that are called one after the other (Muon and AdamW), or each after passes of its own
    (the two of a GAN), make one step. When one comes round again and others have not updated meanwhile, these are waited for no
    longer: with five updates of the critic per update of the generator each of the critic's is a step.
    """

    def __init__(self) -> None:
        self.expected: set[int] = set()
        self.updated: set[int] = set()

    def expect(self, optimizers: Iterable[int]) -> None:
        """These train from now on."""
        self.expected = set(optimizers)

    def first(self, optimizer: int) -> bool:
        """Would this be its first update in the step?"""
        return optimizer not in self.updated

    def update(self, optimizer: int) -> None:
        """It has updated, or left an update out."""
        if optimizer in self.updated:
            self.expected = (self.expected & self.updated) | {optimizer}
        self.updated.add(optimizer)

    @property
    def over(self) -> bool:
        """Does the next training pass belong to another step?"""
        return bool(self.updated) and self.expected <= self.updated

    def next(self) -> None:
        """Another step begins."""
        self.updated.clear()
