"""Gradients of the inputs of compiled functions, some of which have none."""

from __future__ import annotations

import mindspore as ms
import pytest
from mindspore import mint, ops
from ms_capturing import capture, entries, stat, tensor


@ms.jit
def weighted(a, b, c, d):  # type: ignore[no-untyped-def]
    """Every input has a gradient of its own size."""
    return a.sum() + 2 * b.sum() + 3 * c.sum() + 4 * d.sum()


def test_gradients_of_compiled_functions_belong_to_their_inputs() -> None:
    """MindSpore gives a compiled function's node only the gradients that somebody wants: each is that of its input, the others are none,
    and the capture of gradients goes on."""
    x = tensor()
    run = ms.grad(lambda x: weighted(tensor(), x * 1, tensor(), x * 2) + ops.square(mint.sin(x)).sum())
    frames, _ = capture(None, lambda: run(x), "L1")
    found = entries(frames[0])
    a, b, c, d = found["Jit.weighted.0.backward"].sections["output"]
    assert (a, c) == (None, None)
    assert [stat(frames[0], ref).mean for ref in (b, d)] == pytest.approx([2, 4])
    assert {"Mint.sin.0.backward", "Functional.square.0.backward"} <= found.keys()


def test_a_parameter_that_is_not_differentiated() -> None:
    """A Parameter that nobody differentiates (the scale of a loss) takes a place among the inputs and has no gradient: no other one's is
    taken for it, and the capture of gradients goes on."""
    x, scale = tensor(), ms.Parameter(ms.Tensor(2.0, ms.float32), name="scale")
    run = ms.grad(lambda x: weighted(scale, x * 1, scale, x * 2) + ops.square(mint.sin(x)).sum())
    frames, _ = capture(None, lambda: run(x), "L1")
    found = entries(frames[0])
    assert not any(found["Jit.weighted.0.backward"].sections["output"])
    assert {"Mint.sin.0.backward", "Functional.square.0.backward"} <= found.keys()
