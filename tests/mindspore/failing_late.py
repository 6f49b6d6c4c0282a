"""An operator of the training that fails between ``stop()`` and ``step()``; prints who tells of it, and what reading its result gives.

usage: failing_late.py step|exit
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from mindspore import Tensor, int32, nn, ops

from msprobe.mindspore import PrecisionDebugger


class Net(nn.Cell):  # type: ignore[misc]
    """One Cell with a record."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Dense(3, 2)

    def construct(self, x: Any) -> Any:
        return self.layer(x)


def main(how: str) -> None:
    debugger = PrecisionDebugger(task="statistics", level="L0", dump_path="dump")
    net, x = Net(), Tensor(np.ones((4, 3), np.float32))
    debugger.start(net)
    net(x)
    debugger.stop()
    ops.gather(x, Tensor([99], int32), 0)
    if how == "step":
        try:
            debugger.step()
        except RuntimeError as error:
            print("told by step:", str(error).split(",")[0])


main(sys.argv[1])
