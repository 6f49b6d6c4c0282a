"""The gradients of one update: what every framework keeps of them until they are written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from msprobe_engine.formats.grad_probe.files import StepFiles
from msprobe_engine.formats.grad_probe.signs import packed_size

_PER_GRADIENT = 512  # bytes of bookkeeping and of the row
Backend = TypeVar("Backend")


class GradientStep(Generic[Backend]):
    """Gradients of one update.

    Args:
        backend: takes the rows; this step is its current one.
        signs: take signs (levels L1 and L2).
        bounds: count elements below each of these (level L2); empty: not.
        reserve: takes so many bytes from the budget for a job that has the second number already; False when there are none.

    Attributes:
        nbytes: memory that was reserved.
        left_out: name to the reason why a gradient has no row.
    """

    def __init__(self, backend: Backend, signs: bool, bounds: Sequence[float], reserve: Callable[[int, int], bool]) -> None:
        self.nbytes = 0
        self.left_out: dict[str, str] = {}
        self._backend, self._signs, self._bounds, self._reserve = backend, signs, bounds, reserve
        self._taken: list[tuple[str, tuple[int, ...], int, Any, Any, str]] = []

    @property
    def count(self) -> int:
        """How many gradients were taken."""
        return len(self._taken)

    def add_gradient(self, name: str, gradient: Any, shard: str = "") -> None:
        """Take one gradient as it is now. Raises TimeoutError: the memory for signs is used up and nothing is written."""
        raise NotImplementedError

    def finish(self) -> Callable[[StepFiles, int], None]:
        """Everything is taken: what puts it into files, on another thread."""
        raise NotImplementedError

    def _room_for(self, name: str, numel: int) -> int:
        """Bytes of the signs of a gradient, which are reserved.

        Raises:
            TimeoutError: the memory for signs is used up and nothing is written.
        """
        size = packed_size(numel) if self._signs else 0
        if not self._reserve(size + _PER_GRADIENT, self.nbytes):
            raise TimeoutError(f"signs of {name} ({size} bytes) found no memory: nothing is written for a while")
        self.nbytes += size + _PER_GRADIENT
        return size
