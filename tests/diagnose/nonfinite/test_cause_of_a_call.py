"""Why a call made a NaN or an Inf: said where the numbers of a real dump show it, and nothing where they do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import warm

from msprobe_engine.find.nonfinite.made_by import why_not_finite
from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.formats.dump.read_table import read_side

HERE = Path(__file__).parent
SAID = {
    "Torch.log.0.forward": "logarithm of a negative number: input.0 goes down to -2",
    "Torch.log.1.forward": "logarithm of 0: the smallest element of input.0 is 0",
    "Torch.sqrt.0.forward": "square root of a negative number: input.0 goes down to -2",
    "Torch.rsqrt.0.forward": "1 / sqrt(0): an element of input.0 is 0",
    "Tensor.__truediv__.0.forward": "0 / 0: an element of the divisor input.1 is 0, and what is divided is 0 there",
    "Torch.div.0.forward": "division by 0: an element of the divisor input.1 is 0",
    "Torch.exp.0.forward": "overflow of the exponential: input.0 goes up to 100, and beyond 88.7 its result does not fit into float32",
    "Torch.pow.0.forward": "a negative number to a power that is no integer: input.0 goes down to -2",
    "Torch.pow.1.forward": "0 to a negative power: an element of input.0 is 0",
    "Functional.cross_entropy.0.forward": "0 / 0: all labels are -100, which are ignored, so the mean is that of nothing",
    "Functional.cross_entropy.1.forward": "0 / 0: all labels are 1, which are ignored, so the mean is that of nothing",
    "Tensor.__truediv__.1.forward": ("0 / 0: all labels are -100, which are ignored, and the loss is divided by their number, input.1"),
    "Torch.softmax.0.forward": "a row that is masked completely: softmax of nothing but -Inf, by input.0",
    "Torch.mean.0.forward": "0 / 0: the mean of an empty tensor, input.0 has shape [0]",
    "Torch.std.0.forward": "0 / 0: the spread of a single element, input.0",
    "Torch.layer_norm.0.forward": "eps is 0: a row without spread is divided by 0",
    "Torch.layer_norm.1.forward": ("the squares for the spread are beyond float32, which ends at 3.40282e+38: input.0 is up to 2e+30"),
    "Torch.matmul.0.forward": "the result is beyond float16, which ends at 65504; what goes in is up to 300",
    "Tensor.to.0.forward": "cast to float16, which ends at 65504: what goes in is up to 1e+06",
    "Torch.sub.0.forward": "Inf minus Inf: input.0 holds infinities",
    "Torch.sqrt.1.backward": "the gradient of the square root is infinite at 0, and an element of input.0 is 0",
    "Torch.acos.0.forward": "acos is defined from -1 to 1, and the elements of input.0 lie between -2 and 3",
    "Torch.acos.1.backward": "the gradient of acos is infinite at -1 and 1, and an element of input.0 is 1",
    "Torch.std.1.forward": "0 / 0: the spread of a single element along dimension 0, input.0 has shape [1, 8]",
    "Torch.sub.1.forward": "the call was given an infinite number, input.1",
    "Torch.mul.0.forward": "the result is beyond float16, which ends at 65504; what goes in is up to 400",
    "Functional.cross_entropy.3.forward": "the score of a label is -Inf, its probability 0: input.0 holds -Inf",
    "Functional.mse_loss.0.forward": "the result is beyond float32, which ends at 3.40282e+38; what goes in is up to 1e+30",
}
"""Record of `nonfinite_calls.py` -> what is said of it."""


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> DumpTable:
    root = tmp_path_factory.mktemp("calls") / "dump"
    done = warm.run((HERE / "nonfinite_calls.py").read_text(), root, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    (path,) = root.glob("step0/*/dump.json")
    return read_side(path)


@pytest.mark.parametrize("record", SAID)
def test_what_the_numbers_show(dumped: DumpTable, record: str) -> None:
    """One sentence with the numbers that show it."""
    assert why_not_finite(dumped, dumped.ops.index(record)) == SAID[record]


def test_nothing_is_said_of_finite_results(dumped: DumpTable) -> None:
    """Calls whose result is in order make nothing, whatever they take in."""
    others = [op for op, name in enumerate(dumped.ops) if name not in SAID]
    assert not [dumped.ops[op] for op in others if why_not_finite(dumped, op)]
