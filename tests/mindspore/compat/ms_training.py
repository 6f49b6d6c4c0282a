"""The MindSpore training that both tools dump: a tiny transformer or a chain of layers, on the CPU, from one config.json per job.

    python ms_training.py JOBS.json

JOBS.json is a list of jobs ``{"out": directory, "config": content of config.json, "net": "chain" or "transformer", "does": [...]}``. Each
job runs in a process forked from this one, so that mindspore and the tool are imported once; ``out`` gets ``config.json``, ``dump/``,
``losses.json`` and ``log0``. The tool is the one whose ``msprobe`` is importable: only names that both have are used.

``chain`` has cells of one tensor input only, because 8.1.1 fails on others with this MindSpore. ``transformer`` has cells with two inputs,
integer inputs, masks, mint and ops functions, Tensor methods, Primitives, and cells with nested and dict outputs and keyword arguments.
Two steps, the second with two micro batches, and a plain update of the weights after each. On request (``does``): ``fit`` trains by
`Model.train` and `MsprobeStep`, ``listed`` gives ``start`` a list of two models, ``bfloat16`` has that dtype in the second block instead of
float16.

The existing tool calls ``mint.norm``, which has no CPU kernel; MSPROBE_COMPAT_NORM=1 puts one in its place before the tool is imported.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops

WIDTH, VOCABULARY, BATCH, LENGTH, STEPS = 8, 11, 2, 4, 2


class Chain(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm((WIDTH,))
        self.layers = nn.CellList([nn.SequentialCell(nn.Dense(WIDTH, WIDTH), nn.ReLU()) for _ in range(2)])
        self.head = mint.nn.Linear(WIDTH, VOCABULARY)

    def construct(self, ids: Tensor) -> Tensor:
        x = self.norm(self.tokens(ids))
        for layer in self.layers:
            x = mint.add(x, layer(x), alpha=0.5)
        return self.head(x)


class Attention(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.q = mint.nn.Linear(WIDTH, WIDTH)
        self.k = mint.nn.Linear(WIDTH, WIDTH)
        self.v = mint.nn.Linear(WIDTH, WIDTH)
        self.out = nn.Dense(WIDTH, WIDTH)
        self.softmax = ops.Softmax(axis=-1)

    def construct(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        scores = mint.matmul(self.q(x), self.k(x).swapaxes(-1, -2)) / (WIDTH**0.5)
        weights = self.softmax(scores + mask)
        return self.out(mint.matmul(weights, self.v(x))), weights


class Mlp(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Dense(WIDTH, 2 * WIDTH)
        self.act = nn.GELU()
        self.down = nn.Dense(2 * WIDTH, WIDTH)

    def construct(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Block(nn.Cell):
    def __init__(self, low: Any) -> None:
        super().__init__()
        self.low = low
        self.norm1 = nn.LayerNorm((WIDTH,))
        self.attention = Attention()
        self.norm2 = nn.LayerNorm((WIDTH,))
        self.mlp = Mlp()

    def construct(self, x: Tensor, mask: Tensor, scale: float = 1.0) -> Tensor:
        y, _ = self.attention(self.norm1(x), mask)
        if self.low is not None:
            y = ops.cast(ops.cast(y, self.low) * scale, ms.float32)
        x = x + y
        return x + self.mlp(self.norm2(x))


class Head(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Dense(WIDTH, WIDTH, activation="relu")
        self.last = nn.Dense(WIDTH, VOCABULARY, has_bias=False)

    def construct(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x)
        return self.last(hidden), hidden


class Transformer(nn.Cell):
    def __init__(self, low: Any) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.CellList([Block(low=None), Block(low=low)])
        self.head = Head()
        self.mask = Tensor(np.triu(np.full((LENGTH, LENGTH), -1e9, np.float32), 1))

    def construct(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        x = self.blocks[0](x, self.mask)
        x = self.blocks[1](x, mask=self.mask, scale=0.5)
        return self.head(x)[0]


class Loss(nn.Cell):
    def construct(self, logits: Tensor, labels: Tensor) -> Tensor:
        return ops.cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1))


def other_values(logits: Tensor) -> None:
    """Calls with the dtypes and structures that a transformer does not have by itself."""
    mint.add(Tensor(np.array([1, 2**30], np.int64)), Tensor(np.array([2, 3], np.int64)))
    ops.cast(logits, ms.float16).abs()
    ops.isnan(logits)
    mint.mul(Tensor(np.array([1.0, np.inf, np.nan], np.float32)), 2.0)
    ops.abs(Tensor(np.array([3 + 4j, 1j], np.complex64)))
    mint.mul(Tensor(np.ones(2, np.float64)), 1e3)
    ops.concat((logits, logits), axis=0)
    ops.split(logits, 1, axis=0)
    mint.sum(logits, dim=-1, keepdim=True)
    mint.abs(Tensor(-3.0, ms.float32))
    logits.argmax(axis=-1)


def batch(number: int) -> Tensor:
    return Tensor(np.random.RandomState(number).randint(0, VOCABULARY, (BATCH, LENGTH)).astype(np.int32))


def train(job: dict[str, Any]) -> list[float]:
    """Two steps under the tool; the losses."""
    from msprobe.mindspore import PrecisionDebugger, seed_all

    seed_all(seed=1234, mode=True, rm_dropout=False)
    debugger = PrecisionDebugger(config_path=str(Path(job["out"]) / "config.json"))
    net: nn.Cell = Chain() if job["net"] == "chain" else Transformer(ms.bfloat16 if "bfloat16" in job["does"] else ms.float16)
    criterion = Loss()
    if "fit" in job["does"]:
        return fit(debugger, net, criterion)
    level, losses, number = job["config"]["level"], [], 0

    def forward(ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = net(ids)
        loss = criterion(logits, ids)
        if level == "debug":
            save(debugger, logits, loss)
        return loss, logits

    weights = net.trainable_params()
    step_of = ms.value_and_grad(forward, None, weights, has_aux=True)
    for step in range(STEPS):
        debugger.start([net, criterion] if "listed" in job["does"] else net)
        total = [np.zeros(w.shape, np.float32) for w in weights]
        for _ in range(1 + step):
            (loss, logits), gradients = step_of(batch(number))
            number += 1
            losses.append(float(loss.asnumpy()))
            total = [a + b.asnumpy() for a, b in zip(total, gradients)]
        if level in ("L1", "mix"):
            other_values(logits)
        debugger.stop()
        debugger.step()
        for weight, gradient in zip(weights, total):
            weight.set_data(Tensor(weight.asnumpy() - np.float32(0.1) * gradient))
    return losses


def fit(debugger: Any, net: nn.Cell, criterion: nn.Cell) -> list[float]:
    """`Model.train` with the tool's callback."""
    from msprobe.mindspore import MsprobeStep

    losses: list[float] = []

    class Keep(ms.train.Callback):
        def on_train_step_end(self, run_context: Any) -> None:
            losses.append(float(run_context.original_args().net_outputs.asnumpy()))

    data = ms.dataset.GeneratorDataset([(batch(i).asnumpy()[0],) * 2 for i in range(STEPS)], ["ids", "labels"], shuffle=False).batch(1)
    model = ms.train.Model(net, loss_fn=criterion, optimizer=nn.SGD(net.trainable_params(), learning_rate=0.1))
    debugger.start(net)
    model.train(1, data, callbacks=[MsprobeStep(debugger), Keep()], dataset_sink_mode=False)
    return losses


def save(debugger: Any, logits: Tensor, loss: Tensor) -> None:
    """Variables of the kinds that ``save`` takes."""
    debugger.save(logits, "logits")
    debugger.save(loss, "loss")
    debugger.save({"pair": [1, "s", 0.5], "nan": Tensor(np.array([np.nan, np.inf], np.float32))}, "extra", save_backward=False)
    debugger.save([logits, {"k": (loss, 3)}], "nested")


def norm_for_cpu() -> None:
    """A mint.norm of primitives that the CPU has."""
    square, total, root = ops.Square(), ops.ReduceSum(), ops.Sqrt()
    mint.norm = lambda x, *_, **__: root(total(square(x), ()))


def child(job: dict[str, Any]) -> None:
    """One job, in a process of its own."""
    code = 1
    out = Path(job["out"])
    log = os.open(out / "log0", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o640)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        os.chdir(out)
        losses = train(job)
        (out / "losses.json").write_text(json.dumps([loss.hex() for loss in losses]))
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    atexit._run_exitfuncs()  # as at the end of a program; what the tool still holds is written there
    os._exit(code)


def run(job: dict[str, Any], limit: float = 600.0) -> None:
    """Run one job; its end is written to ``out/codes.json``: exit code, None when it did not come to an end."""
    out = Path(job["out"])
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(job["config"]))
    pid, code, end = os.fork(), None, time.monotonic() + limit
    if not pid:
        child(job)
    while code is None:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
        elif time.monotonic() > end:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            break
        time.sleep(0.005)
    (out / "codes.json").write_text(json.dumps([code]))


if __name__ == "__main__":
    if os.environ.get("MSPROBE_COMPAT_NORM") == "1":
        norm_for_cpu()
    import msprobe.mindspore  # noqa: F401 - once here instead of in every forked process

    for one in json.loads(Path(sys.argv[1]).read_text()):
        run(one)
