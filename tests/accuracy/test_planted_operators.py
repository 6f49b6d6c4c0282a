"""Wrong operators are found, right ones that compute in another way are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from call_records import Memory
from planted import RIGHT, WRONG, Made

from msprobe_engine.accuracy.results import ERROR, WARNING, CallResult
from msprobe_integrations.torch.accuracy.checker import Checker

ROUNDED_INSIDE = frozenset(
    name for name in WRONG if ("computed in bfloat16" in name or "composite" in name or "rounded down" in name or "small values" in name)
)
"""Results that hang on nothing but the type of intermediate values, or are wrong where they are small: warnings."""


def judged(made: Made) -> CallResult:
    """The verdict of the pre-check."""
    memory = Memory()
    record = memory.record(made.args, made.kwargs, made.outputs)
    backward = memory.backward(*made.incoming, output=made.gradients) if made.gradients else None
    outputs = made.outputs if isinstance(made.outputs, tuple) else (made.outputs,)
    return Checker(memory).check(f"{made.api}.0", record, backward, list(outputs), list(made.gradients) or None).result


@pytest.mark.parametrize("name", WRONG)
def test_wrong_operators_are_found(name: str) -> None:
    """Each fault of the list is an error, or a warning where it is the type of intermediate results."""
    result = judged(WRONG[name]())
    allowed = {ERROR, WARNING} if name in ROUNDED_INSIDE else {ERROR}
    assert {result.forward, result.backward} & allowed, result
    assert not result.passed


@pytest.mark.parametrize("name", RIGHT)
def test_right_operators_pass(name: str) -> None:
    """Another order of sums, another library, float32 inside of 16 bit kernels: no finding."""
    made: Callable[[], Made] = RIGHT[name]
    result = judged(made())
    assert result.passed, result
    assert not result.skipped, result
