"""What else both tools do with MindSpore on the CPU: gradient probe, monitor of moments, packs of the config check.

    python ms_watching.py OUT PART...

Parts: ``L0``, ``L1``, ``L2`` (gradient probe with `nn.SGD`), ``moments`` (`TrainerMon` with `mint.optim.Adam`, the one combination of the
existing tool's monitor that runs here) and ``pack`` (`ConfigChecker`). Each runs in a process forked from this one and leaves its files in
``OUT/{part}``, with its exit code in ``OUT/{part}/code``. Only names that both tools have are used.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops

STEPS = 3


class Net(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.relu, self.fc2 = nn.Dense(4, 6), nn.ReLU(), nn.Dense(6, 3)

    def construct(self, x: Tensor) -> Tensor:
        return self.fc2(self.relu(self.fc1(x)))


def build() -> nn.Cell:
    """The net with weights that no generator decides."""
    net = Net()
    for i, parameter in enumerate(net.trainable_params()):
        parameter.set_data(Tensor(np.random.RandomState(i).randn(*parameter.shape).astype(np.float32)))
    return net


def train(net: nn.Cell, optimizer: Any) -> None:
    """Three steps on data that no generator decides."""

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return ops.square(net(x) - y).mean()

    weights = list(net.trainable_params())
    differentiated = ms.value_and_grad(loss, None, weights)
    for step in range(STEPS):
        random = np.random.RandomState(100 + step)
        x, y = (Tensor(random.randn(5, width).astype(np.float32)) for width in (4, 3))
        _, gradients = differentiated(x, y)
        optimizer(gradients)


def grad_probe(level: str) -> None:
    from msprobe.mindspore import PrecisionDebugger

    probe = {"grad_level": level, "param_list": [], "bounds": [-1, 0, 1]}
    Path("config.json").write_text(json.dumps({"task": "grad_probe", "dump_path": "./dump", "rank": [], "step": [], "grad_probe": probe}))
    net = build()
    optimizer = nn.SGD(net.trainable_params(), learning_rate=0.1)
    debugger = PrecisionDebugger("config.json")
    debugger.monitor(optimizer)
    train(net, optimizer)
    debugger.stop()


def moments() -> None:
    os.environ["MONITOR_OUTPUT_DIR"] = "monitor"
    Path("monitor_config.json").write_text(
        json.dumps({"targets": {}, "mv_distribution": True, "ops": ["norm", "min", "max", "mean"], "ndigits": 12, "format": "csv"})
    )
    from msprobe.mindspore import TrainerMon

    net = build()
    optimizer = mint.optim.Adam(net.trainable_params(), lr=0.01)
    monitor = TrainerMon("monitor_config.json", params_have_main_grad=False)
    monitor.set_monitor(net, optimizer=optimizer, grad_acc_steps=1)
    train(net, optimizer)


def pack() -> None:
    from msprobe.core.config_check import ConfigChecker

    ConfigChecker.apply_patches(fmk="mindspore")
    Path("run.sh").write_text("#!/bin/bash\npython train.py --lr 3e-4 --seed 1234 --hidden-size 6\n")
    ms.set_seed(1234)
    net = build()
    ConfigChecker(model=net, shell_path=["run.sh"], output_zip_path="pack.zip", fmk="mindspore")
    train(net, nn.SGD(net.trainable_params(), learning_rate=0.1))


def norm_for_cpu() -> None:
    """A mint.norm of primitives that the CPU has."""
    square, total, root = ops.Square(), ops.ReduceSum(), ops.Sqrt()
    mint.norm = lambda x, *_, **__: root(total(square(x), ()))


def child(part: str, out: Path) -> None:
    """One part, in a process of its own, which ends as programs do."""
    log = os.open(out / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o640)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(out)
    try:
        parts = {"moments": moments, "pack": pack}
        parts[part]() if part in parts else grad_probe(part)
        (out / "code").write_text("0")
    except BaseException:
        traceback.print_exc()
        (out / "code").write_text("1")
    sys.exit()


if __name__ == "__main__":
    if os.environ.get("MSPROBE_COMPAT_NORM") == "1":
        norm_for_cpu()
    for one in sys.argv[2:]:
        place = Path(sys.argv[1]).absolute() / one
        place.mkdir(parents=True, exist_ok=True)
        pid = os.fork()
        if not pid:
            child(one, place)
        os.waitpid(pid, 0)
