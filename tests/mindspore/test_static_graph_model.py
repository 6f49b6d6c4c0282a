"""Level L0 inside of compiled graphs where ``Model.train`` owns the loop: the callback, scope, recompute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn
from small_residual import Net

from msprobe.mindspore import MsprobeStep, PrecisionDebugger

OUT, DOWN, UP = "Cell.out.Dense", "Cell.block.down.Dense", "Cell.block.up.Dense"


def train(settings: dict[str, Any] | None = None, *, recompute: bool = False) -> list[bytes]:
    """Three steps of a residual network; losses and weights."""
    ms.set_seed(1234)
    ms.set_context(mode=ms.GRAPH_MODE)
    net: Any = Net()  # type: ignore[no-untyped-call]
    if recompute:
        net.block.recompute()
    random = np.random.RandomState(0)
    arrays = random.randn(6, 4).astype(np.float32), random.randn(6, 1).astype(np.float32)
    data = ms.dataset.NumpySlicesDataset(arrays, ["x", "y"], shuffle=False).batch(2)
    losses = _Losses()
    callbacks: list[Any] = [losses]
    if settings is not None:
        debugger: Any = PrecisionDebugger(settings)  # type: ignore[arg-type]
        debugger.start(net)
        callbacks.append(MsprobeStep(debugger))
    ms.Model(net, nn.MSELoss(), nn.SGD(net.trainable_params(), 0.1)).train(1, data, callbacks=callbacks, dataset_sink_mode=False)
    if settings is not None:
        debugger._run.files.wait()
    return [*losses.seen, *(p.asnumpy().tobytes() for p in net.get_parameters())]


class _Losses(ms.train.Callback):  # type: ignore[misc]
    """Notes them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bytes] = []

    def on_train_step_end(self, run_context: Any) -> None:
        """The loss of a step."""
        self.seen.append(run_context.original_args().net_outputs.asnumpy().tobytes())


@pytest.fixture(scope="module")
def plain() -> list[bytes]:
    """Without a probe."""
    return train()


def settings_of(path: Path, **section: Any) -> dict[str, Any]:
    """Level L0 in the steps 1 and 2."""
    return {"task": "statistics", "level": "L0", "dump_path": str(path), "step": [1, 2], "statistics": section}


def names_of(path: Path, step: int) -> list[str]:
    """Records of a step."""
    return list(json.loads(next(path.glob(f"step{step}/*/dump.json")).read_text())["data"])


@pytest.mark.usefixtures("own_debugger")
def test_each_step_of_a_model(tmp_path: Path, plain: list[bytes], capsys: pytest.CaptureFixture[str]) -> None:
    """The wanted steps have all records, forward and backward; the training has its bits here; that gradient probes may change last bits
    is said once."""
    assert train(settings_of(tmp_path)) == plain
    for step in (1, 2):
        names = names_of(tmp_path, step)
        assert names[:4] == [f"{UP}.forward.0", f"{DOWN}.forward.0", "Cell.block.Block.forward.0", f"{OUT}.forward.0"]
        assert {f"{cell}.{kind}.0" for cell in (OUT, DOWN, UP) for kind in ("backward", "parameters_grad")} < set(names)
    assert not (tmp_path / "step0").exists()
    assert capsys.readouterr().err.count("the last bits of the sum may differ") == 1


@pytest.mark.usefixtures("own_debugger")
@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        ([f"{UP}.forward.0", f"{DOWN}.forward.0"], [f"{UP}.forward.0", f"{DOWN}.forward.0"]),
        (
            [f"{OUT}.backward.0", f"{DOWN}.backward.0"],
            [f"{OUT}.parameters_grad.0", f"{OUT}.backward.0", f"{DOWN}.parameters_grad.0", f"{DOWN}.backward.0"],
        ),
    ],
)
def test_a_range(tmp_path: Path, scope: list[str], expected: list[str]) -> None:
    """With scope, records from the first to the last, and gradients of parameters between them only."""
    train(settings_of(tmp_path, scope=scope))
    assert names_of(tmp_path, 1) == expected


@pytest.mark.usefixtures("own_debugger")
def test_recompute(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Cells that are recomputed have one forward record and gradients of parameters, others all; it is said; the bits stay."""
    assert train(settings_of(tmp_path), recompute=True) == train(recompute=True)
    names = names_of(tmp_path, 1)
    assert names[:4] == [f"{UP}.forward.0", f"{DOWN}.forward.0", "Cell.block.Block.forward.0", f"{OUT}.forward.0"]
    assert {name for name in names if ".backward." in name} == {f"{OUT}.backward.0"}
    assert {f"{cell}.parameters_grad.0" for cell in (OUT, DOWN, UP)} < set(names)
    assert "are recomputed in a compiled graph" in capsys.readouterr().err
