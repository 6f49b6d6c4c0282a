"""Results that were measured and not yet judged: their numbers stay on the device until the step is over, and come in one copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from msprobe_engine.accuracy.free_benchmark.judge import Judgement, Measured, decide, norm_of
from msprobe_engine.accuracy.free_benchmark.preheat import Preheat
from msprobe_integrations.common.op_tools.free_benchmark.choice import Choice

_MOST = 4096
_UNCHANGED = "no input value is large enough"


class Waiting(NamedTuple):
    """A measured result.

    Attributes:
        base, name: API, and its call.
        dtype, kind: type of the result, as torch and as the engine name it.
        place: which of several results.
        numbers: parts of `Measured`.
        moved: parts of `norm_of`, twice: change of the input, and its size; empty when the input was not moved.
        agrees: did the CPU agree? None: it was not asked.
    """

    base: str
    name: str
    dtype: str
    kind: str
    shape: str
    place: str
    numbers: Sequence[torch.Tensor]
    moved: Sequence[torch.Tensor]
    agrees: bool | None = None


class Pending:
    """Waits with the verdicts of a step.

    Args:
        preheat: knows the thresholds; None: they are those of the types.
    """

    def __init__(self, choice: Choice, preheat: Preheat | None) -> None:
        self._choice, self._preheat = choice, preheat
        self._waiting: list[Waiting] = []

    def add(self, result: Waiting) -> None:
        self._waiting.append(result)
        if len(self._waiting) >= _MOST:
            self.resolve()

    def resolve(self) -> None:
        """Judge what waits. Waits for the device."""
        waiting, self._waiting = self._waiting, []
        numbers = _fetch_numbers([tensor for result in waiting for tensor in (*result.numbers, *result.moved)])
        for result in waiting:
            measured = Measured.of([next(numbers) for _ in result.numbers])
            moved = [next(numbers) for _ in result.moved]
            change, size = norm_of([row[:2] for row in moved]), norm_of([row[2:] for row in moved])
            if moved and not change:
                self._choice.table.get_counts(result.base).skip(_UNCHANGED)
                continue
            threshold = None
            if self._preheat is not None:
                threshold = self._preheat.threshold(result.base, result.kind)
                if result.agrees is not None:
                    self._preheat.learn(result.base, 1 + measured.ratio, result.agrees)
            relative = change / size if size else 0.0
            judgement = decide(measured, result.kind, self._choice.mode, threshold, relative)
            self.record_judgement(result, judgement, relative)

    def record_judgement(self, result: Waiting, judgement: Judgement, moved: float = 0.0) -> None:
        name = f"{result.name}.{self._choice.stage}"  # as the existing tool has it with torch
        self._choice.add_result(result.base, name, judgement, moved, result.dtype, result.shape, result.place)


def _fetch_numbers(tensors: Sequence[torch.Tensor]) -> Iterator[list[float]]:
    """The numbers of all tensors, in order; one copy for each device and type."""
    groups: dict[tuple[torch.device, torch.dtype, int], list[int]] = {}
    for start, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, tensor.dtype, tensor.numel()), []).append(start)
    rows: list[list[float]] = [[]] * len(tensors)
    for places in groups.values():
        for start, row in zip(places, torch.stack([tensors[start] for start in places]).tolist()):
            rows[start] = row
    return iter(rows)
