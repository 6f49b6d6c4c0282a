"""`ProbeCallback`: the probe where ``mindspore.train.Model`` owns the loop.

model = Model(net, loss_fn, optimizer)
model.train(epochs, dataset, callbacks=[ProbeCallback("probe.yaml")], dataset_sink_mode=False)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mindspore
from mindspore.train import Callback

from msprobe_integrations.mindspore import environment
from msprobe_integrations.mindspore.monitor.probe import MindSporeProbe
from msprobe_integrations.mindspore.tensors.memory import numel_of
from msprobe_integrations.requirements import make_missing_error


class ProbeCallback(Callback):  # type: ignore[misc]  # mindspore has no types
    """Steps of the probe are those of ``Model.train``; they go on counting where a resumed run was left. Evaluation is not watched.

    Args:
        config: ``probe.yaml``, or a probe that was made already.

    Raises:
        SettingsError: the file cannot be read or is wrong.
    """

    def __init__(self, config: str | Path | MindSporeProbe) -> None:
        super().__init__()
        self.probe = config if isinstance(config, MindSporeProbe) else MindSporeProbe.from_config(config)
        self._open = False

    def on_train_begin(self, run_context: Any) -> None:
        """Network and optimizer are known."""
        given = run_context.original_args()
        environment.warn_of_sink_mode("ProbeCallback", given)
        network = given.get("network") or given.get("train_network")
        if network is None:
            make_missing_error("original_args().network or .train_network", "the monitor under Model.train")
        else:
            self.probe.attach(network, given.get("optimizer"))

    def on_train_step_begin(self, run_context: Any) -> None:
        """A step begins; the number that it will have at its end is not counted yet."""
        given = run_context.original_args()
        self._open = True
        self.probe.begin_step(max(int(given.cur_step_num) - 1, 0))

    def on_train_step_end(self, run_context: Any) -> None:
        """The step is over: its loss and, where the network scales it, overflow and loss scale."""
        given = run_context.original_args()
        if self._open:
            self._open = False
            self.probe.end_step(_numbers(given.net_outputs))

    def on_eval_begin(self, run_context: Any) -> None:  # noqa: ARG002
        """Nothing is seen until the evaluation is over."""
        self.probe.pause()

    def on_eval_end(self, run_context: Any) -> None:  # noqa: ARG002
        """The training goes on."""
        self.probe.resume()

    def on_train_end(self, run_context: Any) -> None:  # noqa: ARG002
        """Everything is written."""
        self.probe.close()


def _numbers(outputs: Any) -> Mapping[str, Any]:
    """What a training step gives: the loss, or (loss, overflow, loss scale)."""
    values = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
    numbers: dict[str, Any] = {}
    for name, value in zip(("loss", "skipped", "loss_scale"), values):
        if isinstance(value, mindspore.Tensor) and numel_of(value) == 1:
            numbers[name] = value.astype(mindspore.float32) if value.dtype == mindspore.bool_ else value
        elif isinstance(value, (int, float)):
            numbers[name] = float(value)
    return numbers
