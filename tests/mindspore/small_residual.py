"""A network with a residual."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from __future__ import annotations

import mindspore as ms
from mindspore import nn, ops


class Block(nn.Cell):
    """With a part in bfloat16."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Dense(4, 8), nn.Dense(8, 4)

    def construct(self, x):
        return x + self.down(ops.relu(self.up(x)).astype(ms.bfloat16).astype(ms.float32))


class Net(nn.Cell):
    """Two layers."""

    def __init__(self):
        super().__init__()
        self.block, self.out = Block(), nn.Dense(4, 1)

    def construct(self, x):
        return self.out(self.block(x))
