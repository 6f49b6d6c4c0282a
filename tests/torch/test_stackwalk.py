"""The walk over call frames in C and in Python."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import pytest

from msprobe_integrations.common.stacks import walk_python

compiled = pytest.importorskip("msprobe_integrations.common._stackwalk", reason="built without a C compiler")


def deep(n: int, then: Callable[[FrameType], Any]) -> Any:
    """Call `then` with a frame `n` calls further in."""
    return then(sys._getframe()) if n == 0 else deep(n - 1, then)


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("hide", [(), ("deep",), ("<lambda>",)])
def test_both_walks_give_the_same_key(ends: bool, hide: tuple[str, ...]) -> None:
    """Same code objects and instructions, the same frames left out and judged once, the same end."""

    def both(frame: FrameType) -> list[Any]:
        outer: FrameType | None = frame
        for _ in range(3):
            assert outer is not None
            outer = outer.f_back
        results = []
        for walk in (walk_python, compiled.stack_key):
            hidden: dict[CodeType, bool] = {}
            judged: list[str] = []

            def judge(code: CodeType, judged: list[str] = judged) -> bool:
                judged.append(code.co_name)
                return code.co_name in hide

            key, known = walk(frame, outer if ends else None, hidden, judge, 7)
            results.append((key, known, hidden, judged))
        return results

    python, c = deep(6, both)
    assert python == c
    assert python[1] is ends
    assert (python[0][-1] == 7) is ends
    assert len(set(python[3])) == len(python[3]) or not ends


def test_no_frame_and_an_end_that_is_not_met() -> None:
    """Nothing to walk gives an empty key; a frame that is no caller of the first is never met."""
    assert compiled.stack_key(None, None, {}, bool, 1) == walk_python(None, None, {}, bool, 1) == ((), False)
    other = deep(3, lambda frame: frame)
    here = sys._getframe()
    assert compiled.stack_key(here, other, {}, lambda _: False, 1)[1] is False


def test_an_error_of_the_judge_comes_through_and_nothing_leaks() -> None:
    """The judge's exception is the caller's; references of frames, codes and keys are given back."""

    def fails(_: CodeType) -> bool:
        raise ValueError("no")

    here = sys._getframe()
    before = sys.getrefcount(here), sys.getrefcount(here.f_code)
    for _ in range(100):
        with pytest.raises(ValueError, match="no"):
            compiled.stack_key(here, None, {}, fails, 1)
        compiled.stack_key(here, None, {}, lambda _: False, 1)
        compiled.stack_key(here, here.f_back, {}, lambda _: False, 1)
    gc.collect()
    assert sys.getrefcount(here) <= before[0] + 1
    assert sys.getrefcount(here.f_code) <= before[1] + 1
    with pytest.raises(TypeError):
        compiled.stack_key(here)
