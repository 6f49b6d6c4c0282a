"""A program with calls of many operators of MindSpore, dumped at level L1 (arguments: task, directory of the dump)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mindspore
import numpy as np
from mindspore import mint, ops

from msprobe.mindspore import PrecisionDebugger


def loss(x: Any, w: Any) -> Any:
    """Of many operators that have kernels on the CPU."""
    y = ops.softmax(mint.add(mint.matmul(x, w), 1.0, alpha=2), -1)
    y = ops.gelu(y) * 2 + y[:, :1]
    top, _ = ops.topk(y, 2)
    entropy = ops.cross_entropy(x[0], mindspore.Tensor(np.arange(6), mindspore.int32))
    linear = mint.nn.functional.linear(x, ops.transpose(w, (1, 0)))
    return y.sum() + mint.sum(mint.exp(x), 2).mean() + mint.max(x, 1)[0].sum() + top.sum() + entropy + linear.mean() + ops.tanh(x).sum()


def main(task: str, out: Path) -> None:
    """Dump one step."""
    settings = out.with_suffix(".json")
    settings.write_text(json.dumps({"task": task, "dump_path": str(out), "level": "L1", task: {"data_mode": ["all"]}}))
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE, device_target="CPU")
    mindspore.set_seed(1)
    random = np.random.RandomState(0)
    x = mindspore.Tensor(random.randn(4, 6, 8).astype(np.float32))
    w = mindspore.Parameter(mindspore.Tensor(random.randn(8, 5).astype(np.float32)), name="w")
    half, low = mindspore.Tensor(random.randn(6, 8), mindspore.float16), mindspore.Tensor(random.randn(6, 8), mindspore.bfloat16)
    debugger = PrecisionDebugger(config_path=str(settings))
    debugger.start()
    mint.add(half, half)
    ops.cast(half, mindspore.float32)
    low + low
    mint.ones((2, 3))
    ops.rand(2, 3)
    ops.masked_fill(x, x > 0, float("-inf"))
    mindspore.value_and_grad(loss, (0, 1))(x, w)
    debugger.stop()
    debugger.step()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
