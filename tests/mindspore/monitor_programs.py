"""Small trainings that the tests of the monitor share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import nn, ops

from msprobe_engine.core.settings.schema import MonitorSettings, ProbeSettings, SinkSettings
from msprobe_integrations.mindspore.monitor.probe import MindSporeProbe


class Net(nn.Cell):  # type: ignore[misc]
    """Two layers, the output of the first is used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Dense(6, 8)
        self.norm = nn.LayerNorm((8,))
        self.second = nn.Dense(8, 3)

    def construct(self, x: Any) -> Any:
        hidden = ops.tanh(self.first(x))
        return self.second(self.norm(hidden) + hidden * ops.relu(hidden))


def data(steps: int) -> list[Any]:
    """Inputs, [5, 6] float32 each."""
    numbers = np.random.RandomState(7)
    return [ms.Tensor(numbers.randn(5, 6).astype(np.float32)) for _ in range(steps)]


def settings(sinks: SinkSettings | None = None, **monitor: Any) -> ProbeSettings:
    """Frames in memory, faults are raised."""
    return ProbeSettings(
        strict=True, output_dir="out", monitor=MonitorSettings(**monitor), sinks=sinks if sinks is not None else SinkSettings(memory=True)
    )


def build(optimizer: Callable[[Any], Any]) -> tuple[Net, Any]:
    """The net with the weights of seed 11 and its optimizer."""
    ms.set_seed(11)
    net = Net()
    net.set_train()
    return net, optimizer(net.trainable_params())


def train(net: Net, optimizer: Any, probe: MindSporeProbe | None, steps: int = 3, seen: list[Any] | None = None) -> list[bytes]:
    """Train; the bytes of all weights and losses at the end.

    Args:
        seen: gets (gradients, weights before, weights after) of each step, as arrays.
    """
    weights = tuple(optimizer.parameters)
    step_function = ms.value_and_grad(lambda x: (net(x) ** 2).mean(), None, weights)
    out = []
    for step, batch in enumerate(data(steps)):
        if probe is not None:
            probe.begin_step(step)
        loss, gradients = step_function(batch)
        before = [w.asnumpy().copy() for w in weights]
        optimizer(gradients)
        if seen is not None:
            seen.append(([g.asnumpy().copy() for g in gradients], before, [w.asnumpy().copy() for w in weights]))
        if probe is not None:
            probe.end_step({"loss": loss})
        out.append(loss.asnumpy().tobytes())
    return out + [w.asnumpy().tobytes() for w in weights]


def model_train(callbacks: list[Any]) -> list[bytes]:
    """Four steps of `Model.train`; the bytes of the weights."""
    net, optimizer = build(lambda p: nn.Adam(p, 1e-2))
    numbers = np.random.RandomState(0).randn(8, 6).astype(np.float32)
    dataset = ds.NumpySlicesDataset((numbers, np.zeros((8, 3), np.float32)), ["a", "b"], shuffle=False).batch(2)
    ms.train.Model(net, nn.MSELoss(), optimizer).train(1, dataset, callbacks=callbacks, dataset_sink_mode=False)
    return [w.asnumpy().tobytes() for w in optimizer.parameters]
