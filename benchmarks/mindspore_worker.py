"""One side of the MindSpore benchmark: trains a small GPT in PyNative mode with one tool in one mode and reports step times on request.

Speaks lines: reads ``run N``, answers with a JSON object {"wall": N step times, "cpu": N CPU times of the process} in seconds; ends on
``quit``. Started by mindspore_steps.py in an environment that has MindSpore and either tool. The existing tool calls ``mint.norm``, which
has no CPU kernel; it gets one made of primitives here, without which it cannot write a statistic on a CPU.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, mint, nn, ops


@dataclass(frozen=True)
class Workload:
    """Size of a GPT and its batch; lengths are tokens."""

    layers: int
    width: int
    vocabulary: int
    batch: int
    length: int


WORKLOADS = {
    "host-bound": Workload(layers=4, width=64, vocabulary=256, batch=2, length=16),
    "compute-bound": Workload(layers=4, width=512, vocabulary=4096, batch=4, length=128),
}


class Attention(nn.Cell):
    def __init__(self, w: Workload) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Dense(w.width, w.width) for _ in range(4))
        self.softmax = nn.Softmax(axis=-1)
        self.scale = w.width**-0.5

    def construct(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = mint.matmul(self.q(x), self.k(x).swapaxes(-1, -2)) * self.scale
        return self.out(mint.matmul(self.softmax(scores + mask), self.v(x)))


class Block(nn.Cell):
    def __init__(self, w: Workload) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm((w.width,)), nn.LayerNorm((w.width,))
        self.attention = Attention(w)
        self.up, self.act, self.down = nn.Dense(w.width, 4 * w.width), nn.GELU(), nn.Dense(4 * w.width, w.width)

    def construct(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), mask)
        return x + self.down(self.act(self.up(self.norm2(x))))


class Gpt(nn.Cell):
    def __init__(self, w: Workload) -> None:
        super().__init__()
        self.tokens = nn.Embedding(w.vocabulary, w.width)
        self.blocks = nn.CellList([Block(w) for _ in range(w.layers)])
        self.norm = nn.LayerNorm((w.width,))
        self.head = nn.Dense(w.width, w.vocabulary, has_bias=False)
        self.mask = Tensor(np.triu(np.full((w.length, w.length), -1e9, np.float32), 1))

    def construct(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, self.mask)
        return self.head(self.norm(x))


class Job:
    """One training job; `step` does forward, backward and the update once."""

    def __init__(self, w: Workload) -> None:
        mindspore.set_seed(0)
        self.net = Gpt(w)
        self.optimizer = nn.Adam(self.net.trainable_params(), learning_rate=1e-3)
        ids = np.random.RandomState(0).randint(0, w.vocabulary, (w.batch, w.length + 1)).astype(np.int32)
        self.ids, self.labels = Tensor(ids[:, :-1].copy()), Tensor(ids[:, 1:].copy())
        self.differentiated = mindspore.value_and_grad(self.loss, None, self.net.trainable_params())

    def loss(self) -> Tensor:
        logits = self.net(self.ids)
        return ops.cross_entropy(logits.reshape(-1, logits.shape[-1]), self.labels.reshape(-1))

    def step(self) -> None:
        """PyNative runs behind; reading the loss and a weight waits for it."""
        loss, gradients = self.differentiated()
        self.optimizer(gradients)
        loss.asnumpy()
        self.net.head.weight.asnumpy()


def dump_step(job: Job, mode: str, out: Path) -> Callable[[], None]:
    """A training step inside start / stop / step, as users write it. Same names in both tools."""
    task, _, level = mode.rpartition("-")
    level, steps = ("mix", [999_999]) if mode == "idle" else (level, [])
    task = task or "statistics"
    config = {"task": task, "dump_path": str(out), "rank": [], "step": steps, "level": level, task: {"summary_mode": "statistics"}}
    path = out / "config.json"
    path.write_text(json.dumps(config))
    from msprobe.mindspore import PrecisionDebugger

    debugger = PrecisionDebugger(config_path=str(path))

    def step() -> None:
        debugger.start(job.net)
        loss, gradients = job.differentiated()
        debugger.stop()
        job.optimizer(gradients)
        debugger.step()
        loss.asnumpy()
        job.net.head.weight.asnumpy()

    return step


FOUR = ["norm", "min", "max", "mean"]
MONITOR_MODES: dict[str, dict[str, Any]] = {
    "gradients": {"wg_distribution": True, "ops": FOUR},
    "moments": {"mv_distribution": True, "ops": FOUR},
    "activations": {"xy_distribution": True, "all_xy": True, "ops": FOUR},
    "everything": {
        "wg_distribution": True,
        "param_distribution": True,
        "mv_distribution": True,
        "xy_distribution": True,
        "all_xy": True,
        "ops": FOUR,
    },
}
"""``monitor_config.json`` of the monitor modes."""


def monitor_step(job: Job, mode: str, out: Path) -> Callable[[], None]:
    """A training step under `TrainerMon`, which both tools have under this name."""
    os.environ["MONITOR_OUTPUT_DIR"] = str(out)
    path = out / "monitor_config.json"
    path.write_text(json.dumps({"targets": {}, "ndigits": 12, "step_count_per_record": 100, **MONITOR_MODES[mode]}))
    from msprobe.mindspore import TrainerMon

    monitor = TrainerMon(str(path), params_have_main_grad=False)
    monitor.set_monitor(job.net, job.optimizer)
    return job.step


def norm_for_cpu() -> None:
    """A mint.norm of primitives that the CPU has."""
    square, total, root = ops.Square(), ops.ReduceSum(), ops.Sqrt()
    mint.norm = lambda x, *_, **__: root(total(square(x), ()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tool", choices=["none", "ours", "existing"], required=True)
    parser.add_argument("--mode", required=True)
    parser.add_argument("--workload", choices=list(WORKLOADS), required=True)
    parser.add_argument("--out", type=Path, required=True)
    a = parser.parse_args()
    logging.disable(logging.WARNING)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a tool prints must not look like a reply
    a.out.mkdir(parents=True, exist_ok=True)
    os.chdir(a.out)  # MindSpore litters
    if a.tool == "existing":
        norm_for_cpu()
    job = Job(WORKLOADS[a.workload])
    step: Callable[[], None] = job.step
    if a.tool != "none":
        step = (monitor_step if a.mode in MONITOR_MODES else dump_step)(job, a.mode, a.out)
    for line in sys.stdin:
        if line.startswith("quit"):
            break
        wall, cpu = [], []
        for _ in range(int(line.split()[1])):
            begin, used = time.perf_counter(), time.process_time()
            step()
            wall.append(time.perf_counter() - begin)
            cpu.append(time.process_time() - used)
        replies.write(json.dumps({"wall": wall, "cpu": cpu}) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
