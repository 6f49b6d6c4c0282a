"""A training whose operator fails. MindSpore may crash in the step after a failed one, so each failure has a process of its own.

usage: failing_program.py unused|outside none|L0|L1|mix: one step; prints the error that ends it, and what the capture's own guard was told
       failing_program.py step|exit: it fails between ``stop()`` and ``step()``; prints who tells of it
"""

from __future__ import annotations

import sys

import mindspore
import numpy as np
from mindspore import Tensor, nn, ops
from ms_capturing import capture, gradients, tensor

from msprobe.mindspore import PrecisionDebugger


def unused(x):
    """Fails while it runs; nobody looks at the result."""
    ops.cholesky(-ops.eye(4, 4, mindspore.float32))
    return x


def outside(x):
    """Another type of error."""
    return ops.tensor_scatter_update(x, Tensor([[99, 0]], mindspore.int32), Tensor([1.0]))


class Failing(nn.Cell):
    def __init__(self, how):
        super().__init__()
        self.how = how

    def construct(self, x):
        return FAILING[self.how](x)


class Net(nn.Cell):
    """A Cell that fails between two that do not."""

    def __init__(self, how):
        super().__init__()
        self.first, self.middle, self.last = nn.Dense(4, 4), Failing(how), nn.Dense(4, 4)

    def construct(self, x):
        return self.last(self.middle(self.first(x)))


FAILING = {"unused": unused, "outside": outside}


def within(how: str, level: str) -> None:
    net = Net(how)
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


def late(how: str) -> None:
    debugger = PrecisionDebugger(task="statistics", level="L0", dump_path="dump")
    layer, x = nn.SequentialCell(nn.Dense(3, 2)), Tensor(np.ones((4, 3), np.float32))
    debugger.start(layer)
    layer(x)
    debugger.stop()
    ops.gather(x, Tensor([99], mindspore.int32), 0)
    if how == "step":
        try:
            debugger.step()
        except RuntimeError as error:
            print("told by step:", str(error).split(",")[0])


within(*sys.argv[1:]) if sys.argv[1] in FAILING else late(sys.argv[1])
