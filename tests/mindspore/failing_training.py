"""One training step in which an operator fails; prints the error that ends it, and whether the capture's own guard was told.

MindSpore may crash in the step after a failed one, so each failure has a process of its own.

usage: failing_training.py unused|outside none|L0|L1|mix
"""

from __future__ import annotations

import sys

import mindspore
from mindspore import Tensor, nn, ops
from ms_capturing import capture, gradients, tensor


def unused(x):
    """Fails while it runs; nobody looks at the result."""
    ops.cholesky(-ops.eye(4, 4, mindspore.float32))
    return x


def outside(x):
    """Another type of error."""
    return ops.tensor_scatter_update(x, Tensor([[99, 0]], mindspore.int32), Tensor([1.0]))


class Failing(nn.Cell):
    def construct(self, x):
        return FAILING[sys.argv[1]](x)


class Net(nn.Cell):
    """A Cell that fails between two that do not."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Dense(4, 4), Failing(), nn.Dense(4, 4)

    def construct(self, x):
        return self.last(self.middle(self.first(x)))


FAILING = {"unused": unused, "outside": outside}


def main(level: str) -> None:
    net = Net()
    sessions: list = []

    def work():
        loss, _ = gradients(net)(tensor())
        return loss.asnumpy()

    try:
        if level == "none":
            work()
        else:
            capture(net, work, level, opened=sessions.append)
    except Exception as error:
        print(type(error).__name__, str(error).strip().splitlines()[0])
    for session in sessions:
        pipeline = session.recorder.pipeline
        print(pipeline.faults.counts, [entry.name for entry in pipeline.entries])


main(sys.argv[2])
