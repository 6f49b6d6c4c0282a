"""Preheat: thresholds that are learnt for each API, from calls that are also made on the CPU (existing tool, 8.1.1).

The first step only counts calls. In the following ones some calls of each API, others in each step, are also compared with the CPU. While
the CPU agrees with the result of the training, what the perturbed run differs by is nothing to report, and the threshold stays
above it; it comes nearer to 1 as more calls agree. A call that does not agree lowers it below what that call differed by, for good.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from msprobe_engine.accuracy.free_benchmark.judge import OTHERWISE, THRESHOLD

START = 2.05


@dataclass
class _Api:
    calls: int = 0
    """Of the first step."""
    seen: int = 0
    """Of this step."""
    threshold: float = START
    frozen: bool = False
    agreed: list[float] = field(default_factory=list)
    differed: list[float] = field(default_factory=list)


class Preheat:
    """The thresholds of all APIs.

    Args:
        steps: `preheat_step`; learning ends before the step of this number, counted from the first that is looked at.
        most: `max_sample`, of calls of an API and step that are also made on the CPU.
    """

    def __init__(self, steps: int, most: int) -> None:
        self._steps, self._most = steps, most
        self._step = 0
        self._apis: dict[str, _Api] = {}

    @property
    def counting(self) -> bool:
        """In the first step nothing is compared."""
        return self._step == 0

    def call(self, base: str) -> bool:
        """A call of an API. Is it to be made on the CPU too?"""
        api = self._apis.setdefault(base, _Api())
        number, api.seen = api.seen, api.seen + 1
        if not 0 < self._step < self._steps:
            return False
        calls = max(api.calls, 1)
        wanted = min(math.ceil(calls / self._steps), self._most)
        return (number - (self._step - 1) * wanted) % calls < wanted

    def learn(self, base: str, ratio: float, agrees: bool) -> None:
        """The CPU agreed with a call or did not; `ratio`: what the perturbed run of it differed by, at least 1."""
        api = self._apis.setdefault(base, _Api())
        (api.agreed if agrees else api.differed).append(ratio)

    def threshold(self, base: str, dtype: str) -> float:
        """Largest ratio that is consistent now; never below that of the type."""
        least = THRESHOLD.get(dtype, OTHERWISE)
        known = self._apis.get(base)
        return max(least, START if known is None else known.threshold)

    def end_step(self) -> None:
        """Take over what the step has shown."""
        for api in self._apis.values():
            if self._step == 0:
                api.calls = api.seen
            api.seen = 0
            if api.differed:
                api.threshold, api.frozen = min(api.threshold, *api.differed), True
            elif api.agreed and not api.frozen:
                excess = api.threshold - 1
                api.threshold = 1 + (excess * 2 if max(api.agreed) > api.threshold else excess / 2)
            api.agreed.clear()
            api.differed.clear()
        self._step += 1
