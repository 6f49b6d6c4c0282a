"""`ConfigChecker` where a model runs inside of compiled functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore import nn, ops

from msprobe_engine.config_check.pack import read_pack
from msprobe_integrations.mindspore.config_checker import MindSporeConfigChecker


def outputs(pack: Path | None) -> tuple[Any, list[Any]]:
    """The checker, made where `pack` is given, and the bits of the loss and the gradients of a compiled step."""
    mindspore.set_seed(7)
    net = nn.SequentialCell(nn.Dense(3, 4), nn.ReLU(), nn.Dense(4, 1))
    net.set_train()
    checker = MindSporeConfigChecker(net, {}, pack) if pack is not None else None
    x = mindspore.Tensor(np.linspace(-1, 1, 6).reshape(2, 3).astype(np.float32))

    def forward(given: Any) -> Any:
        return ops.square(net(given)).mean()

    gradient = mindspore.value_and_grad(forward, None, net.trainable_params())
    loss, grads = mindspore.jit(gradient)(x)
    return checker, [loss.asnumpy().tobytes(), *(g.asnumpy().tobytes() for g in grads)]


def test_a_compiled_step_is_left_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A model that only compiled code calls computes the same bits, and the end of the checker says why there is nothing of it."""
    _, plain = outputs(None)
    checker, checked = outputs(tmp_path / "pack.zip")
    assert checked == plain
    checker.close()
    said = capfd.readouterr()
    assert "no forward pass in training outside of compiled functions" in said.out + said.err
    assert not read_pack(tmp_path / "pack.zip").by_step("weights")
