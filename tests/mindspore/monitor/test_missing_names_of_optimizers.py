"""Optimizers of MindSpore that lack one attribute: a number of their update is the one that it is with all of them, or it is left out and
said."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import mint, nn
from mindspore.train import Callback
from monitor_programs import model_train, settings

from msprobe_integrations import requirements
from msprobe_integrations.mindspore.monitor.model_callback import ProbeCallback
from msprobe_integrations.mindspore.monitor.probe import MindSporeProbe
from msprobe_integrations.mindspore.parameters.optimizers import OptimizerView

_OF_GRADIENTS = ("exec_weight_decay", "need_scale", "is_group", "global_step")
CASES: dict[str, tuple[Callable[[Any], Any], tuple[str, ...]]] = {
    "nn.Adam": (lambda p: nn.Adam(p, 1e-2), ("use_nesterov", "use_amsgrad", "global_step")),
    "nn.SGD": (lambda p: nn.SGD(p, 1e-2), ("nesterov", *_OF_GRADIENTS)),
    "nn.Momentum": (lambda p: nn.Momentum(p, 1e-2, 0.9), ("use_nesterov", "momentum")),
    "nn.Adagrad": (lambda p: nn.Adagrad([{"params": p}]), ("grad_centralization_flags", *_OF_GRADIENTS)),
    "experimental.AdamW": (lambda p: ms.experimental.optim.AdamW(p, 1e-2), ("state_step",)),
    "mint.Adam": (lambda p: mint.optim.Adam(p, 1e-2), ("state_step",)),
}
"""Optimizer, and attributes that it has."""


@pytest.mark.parametrize(("case", "name"), [(case, name) for case, (_, names) in CASES.items() for name in names])
def test_no_number_of_an_update_is_another_one(
    case: str, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the name the formula of the update is not known: no update is worked out with a setting that is not its own."""
    monkeypatch.setattr(requirements, "MISSING", {})
    parameter = ms.Parameter(ms.Tensor(np.ones(3, np.float32)), name="weight")
    optimizer = CASES[case][0]([parameter])
    right = OptimizerView(optimizer).hyper(parameter)
    assert right["algorithm"]
    assert requirements.MISSING == {}
    delattr(optimizer, name)
    with caplog.at_level(logging.WARNING, "msprobe"):
        found = OptimizerView(optimizer).hyper(parameter)
    assert found["algorithm"] == ""
    assert {key: value for key, value in found.items() if key != "algorithm" and str(right[key]) != str(value)} == {}
    assert list(requirements.MISSING.values()) == ["the families update and ratio"]
    assert name in caplog.text


class Around(Callback):  # type: ignore[misc]  # mindspore has no types
    """Another version of MindSpore, which does not tell a callback of something. The framework itself has it again."""

    def __init__(self, callback: Callback, *names: str) -> None:
        super().__init__()
        self.callback = callback
        self.names = names

    def on_train_begin(self, run_context: Any) -> None:
        parameters = run_context.original_args()
        taken = {name: parameters.pop(name) for name in self.names}
        self.callback.on_train_begin(run_context)
        parameters.update(taken)

    def on_train_step_begin(self, run_context: Any) -> None:
        self.callback.on_train_step_begin(run_context)

    def on_train_step_end(self, run_context: Any) -> None:
        self.callback.on_train_step_end(run_context)

    def on_train_end(self, run_context: Any) -> None:
        self.callback.on_train_end(run_context)


@pytest.mark.fast_cells("('dataset_sink_mode',)-4")
@pytest.mark.parametrize(
    ("names", "steps"),
    [
        (("dataset_sink_mode",), 4),
        (("batch_num",), 4),
        (("network",), 4),
        (("network", "train_network"), 0),
    ],
    ids=lambda value: str(value),
)
def test_a_training_goes_on_whatever_callbacks_are_not_told(
    names: tuple[str, ...], steps: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What lacks in the parameters of callbacks is a KeyError there: it does not reach the training, and what is off is said."""
    monkeypatch.setattr(requirements, "MISSING", {})
    plain = model_train([])
    probe = MindSporeProbe(settings(parameters=True))
    with caplog.at_level(logging.WARNING, "msprobe"):
        assert model_train([Around(ProbeCallback(probe), *names)]) == plain
    assert len([frame for frame in probe.frames if frame.samples]) == steps
    assert (names == ("network",)) or names[0] in caplog.text


def test_a_learning_rate_that_has_gone_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scalar is left out, and said."""
    monkeypatch.setattr(requirements, "MISSING", {})
    optimizer = nn.SGD([ms.Parameter(ms.Tensor(np.ones(3, np.float32)), name="weight")], 0.5)
    assert float(OptimizerView(optimizer).learning_rate().asnumpy()) == 0.5
    delattr(optimizer, "learning_rate")
    assert OptimizerView(optimizer).learning_rate() is None
    assert requirements.MISSING == {"SGD.learning_rate": "scalar learning_rate"}
