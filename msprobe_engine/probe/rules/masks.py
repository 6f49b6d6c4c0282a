"""Which -Inf of activations are those of masks, as against a -Inf that was born in the forward pass (the logarithm of zero).

An additive mask is -Inf on purpose, and so are the scores that it is added to until softmax takes it away. It does no harm: nothing that is
computed after it is NaN or infinite for its sake. So a -Inf is a mask's unless something else of its step is wrong; and then it still is
one where that can be seen:

* all other elements are zero;
* an operation made it that fills memory with what the caller names, or handed on what it was given;
* a module was given it, and what the module gives is finite;
* the same tensor held -Inf in an earlier step, in which nothing was wrong.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.operator_traits import FILLS, normal_op
from msprobe_engine.core.records import Entry, Frame
from msprobe_engine.core.statistics.rows import COUNT, NANS, NEG_INF, POS_INF, ZEROS
from msprobe_engine.probe.rules.layout import Layout
from msprobe_engine.probe.rules.uninitialised import API_CALL

Integers = npt.NDArray[np.int64]
_KEPT = 100_000
"""Tensors that are remembered; names that change at every step must not fill the memory."""
_OUTPUT = re.compile(r"(.*)\.output(?:[._].*)?", re.DOTALL)
_GIVEN = re.compile(r"(.*)\.(?:input|kwargs)(?:[._].*)?", re.DOTALL)


class Masks:
    """Tells -Inf of masks from others, frame by frame.

    Attributes:
        passed_over: what was taken for masks so far: number of tensors, name and step of the first; empty: nothing.
    """

    def __init__(self) -> None:
        self.passed_over: dict[str, Any] = {}
        self._harmless: set[str] = set()

    def without_harm(self, frame: Frame, layout: Layout, found: list[int]) -> None:
        """Nothing else of the frame is wrong: these tensors with -Inf are masks, here and in later frames."""
        new = [key for i in found if (key := layout.keys[i]) not in self._harmless]
        if not new:
            return
        if not self.passed_over:
            self.passed_over.update(tensors=0, first=layout.names[found[0]], step=frame.step)
        self.passed_over["tensors"] += len(new)
        if len(self._harmless) < _KEPT:
            self._harmless.update(new)

    def is_born(self, frame: Frame, layout: Layout, ints: Integers, i: int) -> bool:
        """Is the -Inf of tensor `i` no mask's, where something after it in the frame is wrong?

        Args:
            ints: integer words of the rows in the order of the layout, [n, 16].
        """
        zeros, count = int(ints[i, ZEROS]), int(ints[i, COUNT])
        if (zeros and zeros + int(ints[i, NEG_INF]) == count) or layout.keys[i] in self._harmless:
            return False
        name = layout.names[i]
        if (made := API_CALL.fullmatch(name)) is not None and made[2].startswith("output") and normal_op(made[1]) in FILLS:
            return False
        if (match := _OUTPUT.fullmatch(name)) is not None:
            return not any(ints[j, NEG_INF] for j in _of_call(frame, layout, i, match[1], _GIVEN))
        if (match := _GIVEN.fullmatch(name)) is not None:
            return bool(any(ints[j, [NANS, POS_INF, NEG_INF]].any() for j in _of_call(frame, layout, i, match[1], _OUTPUT)))
        return True


def _of_call(frame: Frame, layout: Layout, i: int, call: str, wanted: re.Pattern[str]) -> list[int]:
    """Inputs or outputs of the call that tensor `i` is of."""
    source = layout.source(frame, i)
    near = np.flatnonzero(layout.order == layout.order[i]) if isinstance(source, Entry) else np.arange(len(layout.names))
    found = []
    for j in near.tolist():
        match = wanted.fullmatch(layout.names[j]) if layout.names[j].startswith(call) else None
        if match is not None and match[1] == call:
            other = layout.source(frame, j)
            if isinstance(other, Entry) or isinstance(source, Entry):
                if other is source:
                    found.append(j)
            elif (other.family, other.micro_step, other.vpp_stage) == (source.family, source.micro_step, source.vpp_stage):
                found.append(j)
    return found
