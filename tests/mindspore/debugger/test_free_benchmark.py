"""Task free_benchmark on MindSpore: what it finds, what it leaves alone, and that the training stays bit for bit what it was."""

from __future__ import annotations

import csv
import json
import logging
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops

from msprobe_engine.core.errors import SettingsError
from msprobe_integrations.mindspore.dump.debugger import PrecisionDebugger
from msprobe_integrations.mindspore.hooks.wrappers import WRAPPERS
from msprobe_integrations.mindspore.op_tools.free_benchmark import checker

PAGE = Path(__file__).parents[3] / "docs" / "guide" / "free-benchmark.md"
MODES = ("improve_precision", "add_noise", "bit_noise", "change_value", "no_change")


@pytest.fixture(autouse=True)
def _one_debugger(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Each test has its own."""
    monkeypatch.setattr(PrecisionDebugger, "_instance", None)
    yield
    if PrecisionDebugger._instance is not None and PrecisionDebugger._instance._run is not None:
        PrecisionDebugger._instance._run.extras.close()


def debugger(tmp_path: Path, step: tuple[int, ...] = (), **section: Any) -> PrecisionDebugger:
    """With task free_benchmark, writing into ``tmp_path / "out"``."""
    settings = {"task": "free_benchmark", "dump_path": str(tmp_path / "out"), "step": list(step), "level": "L1", "free_benchmark": section}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    return PrecisionDebugger(tmp_path / "config.json")


def rows(tmp_path: Path) -> list[dict[str, str]]:
    """Of free_benchmark.csv; none without it."""
    path = tmp_path / "out" / "free_benchmark.csv"
    return list(csv.DictReader(path.open(newline=""))) if path.exists() else []


def operators(found: PrecisionDebugger, tmp_path: Path) -> dict[str, dict[str, str]]:
    """Of the summary, which closing writes."""
    found.run.extras.close()
    return {row["api"]: row for row in csv.DictReader((tmp_path / "out" / "free_benchmark_summary.csv").open(newline=""))}


def one_step(found: PrecisionDebugger, call: Callable[[], Any]) -> Any:
    """A training step around a call."""
    found.start()
    result = call()
    found.stop()
    found.step()
    return result


class Small(nn.Cell):  # type: ignore[misc]
    """Random, in place, several outputs, integers, a function kept as a member."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Dense(8, 8)
        self.norm = nn.LayerNorm((8,))
        self.act = ops.gelu
        self.count = mindspore.Parameter(Tensor(np.zeros(1, np.float32)), requires_grad=False)

    def construct(self, x: Any) -> Any:
        x = self.norm(mint.matmul(x, x.swapaxes(-1, -2)) + self.act(self.fc(x)))
        ops.assign_add(self.count, Tensor([1.0], mindspore.float32))
        top, _ = ops.topk(x, 4)
        low = ops.softmax(ops.dropout(x, p=0.3).astype(mindspore.float16), -1)
        return top.sum() + (low * low).sum().astype(mindspore.float32) + ops.cumsum(x, 0).mean()


def bits_of_training(around: PrecisionDebugger | None) -> list[bytes]:
    """Losses, gradients, weights and random numbers of two steps."""
    mindspore.set_seed(5)
    net = Small()
    optimizer = nn.Adam(net.trainable_params(), 1e-2)
    step = mindspore.value_and_grad(net, None, net.trainable_params())
    x = Tensor(np.random.RandomState(3).randn(8, 8).astype(np.float32))
    found = []
    for _ in range(2):
        if around is not None:
            around.start(net)
        loss, gradients = step(x)
        if around is not None:
            around.stop()
        optimizer(gradients)
        if around is not None:
            around.step()
        found += [tensor.asnumpy().tobytes() for tensor in (loss, *gradients, *net.get_parameters(), ops.rand(3))]
    return found


@pytest.fixture(scope="module")
def plain() -> list[bytes]:
    """Without a debugger."""
    return bits_of_training(None)


CELLS = [(mode, stage) for mode in MODES for stage in ("forward", "backward")]
FAST = [cell for at, cell in enumerate(CELLS) if at == 0 or (at + at // 2) % 2]
"""Each mode in one of the stages in turn, the first in both."""


@pytest.mark.parametrize(("mode", "stage"), [cell if cell in FAST else pytest.param(*cell, marks=pytest.mark.slow) for cell in CELLS])
@pytest.mark.fast_cells("improve_precision-backward")
def test_the_training_has_the_same_bits(mode: str, stage: str, plain: list[bytes], tmp_path: Path) -> None:
    """In every mode and stage, over random functions and such that change their input; no_change finds nothing."""
    around = debugger(tmp_path, pert_mode=mode, fuzz_stage=stage)
    assert bits_of_training(around) == plain
    assert not around.faults.disabled
    found = operators(around, tmp_path)
    assert sum(int(row["checked"]) for row in found.values()) > (5 if mode == "improve_precision" else 20)
    assert "random" in found["Functional.dropout"]["skipped"]
    assert "changes its input" in found["Functional.assign_add"]["skipped"]
    assert mode != "no_change" or not rows(tmp_path)
    assert WRAPPERS._taker is None
    assert not hasattr(ops.softmax, "__wrapped__")


def test_an_overflow_and_lost_digits_are_found(tmp_path: Path) -> None:
    """float16 against float32: exp above 11.1 is Inf; a subtraction of nearly equal numbers loses nothing by itself."""
    x = Tensor(np.array([[1.0, 12.0]]), mindspore.float16)
    one_step(debugger(tmp_path), lambda: (ops.exp(x), mint.sub(x, x + 0.001)))
    assert [(row["api_name"], row["max_rel"], row["dtype"], row["shape"]) for row in rows(tmp_path)] == [
        ("Functional.exp.0", "inf", "Float16", "(1, 2)")
    ]


def test_noise_finds_the_ill_conditioned_operator(tmp_path: Path) -> None:
    """Cancellation multiplies one bit of its input; a sum of positive numbers does not. The summary has the factor."""
    x = Tensor(np.full((4, 4), 1.5, np.float32))
    around = debugger(tmp_path, pert_mode="bit_noise")
    one_step(around, lambda: (mint.sub(x, Tensor(np.full((4, 4), 1.4995, np.float32))), mint.add(x, x)))
    assert [row["api_name"] for row in rows(tmp_path)] == ["Mint.sub.0"]
    found = operators(around, tmp_path)
    assert float(found["Mint.sub"]["amplification"]) > 1000 > 2 > float(found["Mint.add"]["amplification"])


def test_subnormal_results_are_no_alarm(tmp_path: Path) -> None:
    """Softmax of float16 with probabilities that only subnormal numbers hold, computed in float32: rounding is all there is."""
    x = Tensor(np.linspace(0, 11, 64).reshape(1, 64), mindspore.float16)
    low = ops.softmax(x.astype(mindspore.float32), -1).astype(mindspore.float16)
    assert 0 < float(low.asnumpy().min()) < 6e-5
    one_step(debugger(tmp_path), lambda: low.astype(mindspore.float32) * 1)
    one_step(PrecisionDebugger(), lambda: ops.mul(low, low))
    assert rows(tmp_path) == []


def test_gradients_are_compared_with_those_of_ones(tmp_path: Path) -> None:
    """The gradient of a high power depends on its input; that of a product with a constant does not."""
    x = Tensor(np.full((2, 2), 1.5, np.float32))
    around = debugger(tmp_path, pert_mode="bit_noise", fuzz_stage="backward")
    one_step(around, lambda: mindspore.grad(lambda a: ops.pow(a, 30.0).sum() + ops.mul(a, 2.0).sum())(x))
    found = operators(around, tmp_path)
    assert found["Functional.pow"]["checked"] == found["Functional.mul"]["checked"] == "1"
    assert float(found["Functional.pow"]["max_rel"]) > 0.0 == float(found["Functional.mul"]["max_rel"])


def test_fix_puts_the_precise_result_in_place(tmp_path: Path) -> None:
    """The overflowing float16 exponential becomes finite in what follows, and the gradient comes through it."""
    x = Tensor(np.array([12.0, 11.5, 1.0]), mindspore.float16)

    def loss(a: Any) -> Any:
        return mint.sub(ops.mean(ops.mul(a, a)), 1.0).astype(mindspore.float32)

    big = Tensor(np.array([300.0, 200.0]), mindspore.float16)  # the mean of squares fits, their sum does not
    around = debugger(tmp_path, handler_type="fix", list=["mindspore.ops.mean"])
    value, gradient = one_step(around, lambda: mindspore.value_and_grad(loss)(x))
    assert float(value) == pytest.approx(91.1, rel=0.01)
    np.testing.assert_allclose(gradient.asnumpy(), 2 * x.asnumpy() / 3, rtol=2e-2)
    fixed = one_step(PrecisionDebugger(), lambda: ops.mean(big))
    assert (str(fixed.dtype), float(fixed)) == ("Float16", 250.0)
    assert rows(tmp_path) == []
    assert operators(around, tmp_path)["Functional.mean"]["checked"] == "2"


def test_selections(tmp_path: Path) -> None:
    """Steps, and names in full or in part; numbers count all calls of a step."""
    x = Tensor(np.array([1.0, 12.0]), mindspore.float16)
    around = debugger(tmp_path, step=(1,), list=["mindspore.ops.exp", "Mint.exp.1"])
    for _ in range(3):
        one_step(around, lambda: (ops.exp(x), ops.exp2(x * 2), mint.exp(x), mint.exp(x)))
    assert [(row["step"], row["api_name"]) for row in rows(tmp_path)] == [("1", "Functional.exp.0"), ("1", "Mint.exp.1")]


def test_nothing_looked_at_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A step that never comes, or a name that nothing has."""
    around = debugger(tmp_path, step=(7,))
    monitor = logging.getLogger("msprobe")
    monitor.addHandler(caplog.handler)
    try:
        one_step(around, lambda: mint.add(1, Tensor([1.0])))
        around.run.extras.close()
    finally:
        monitor.removeHandler(caplog.handler)
    assert "no call of an API was looked at" in caplog.text
    assert [path.name for path in tmp_path.glob("out/*") if path.name != ".owners"] == []


def test_failures_of_the_second_run_are_counted(tmp_path: Path) -> None:
    """What has no kernel for the other inputs is skipped; the error of the training's own call stays its own."""
    around = debugger(tmp_path, pert_mode="bit_noise")
    x = Tensor(np.ones((2, 3), np.float32))
    with pytest.raises(Exception, match="must be equal"):
        one_step(around, lambda: mint.matmul(x, x))
    around.stop()
    around.step()
    one_step(around, lambda: mint.add(x, x))
    assert not around.faults.disabled
    assert int(operators(around, tmp_path)["Mint.add"]["checked"]) >= 1


@pytest.mark.parametrize("handler", ["check", "fix"])
def test_a_second_run_without_a_kernel_does_not_come_back(handler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MindSpore reports a failure again in later calls; those of the training do not see it. (bfloat16 stands for a missing kernel.)"""
    monkeypatch.setattr(checker, "_improve_precision", lambda tensor: tensor.astype(mindspore.bfloat16))
    monkeypatch.setattr(mindspore, "float32", mindspore.bfloat16)
    around = debugger(tmp_path, handler_type=handler, list=["Functional.softmax", "Functional.erfinv"])
    x = Tensor(np.linspace(0, 0.5, 16).reshape(4, 4), mindspore.float16)
    for _ in range(4):
        result = one_step(around, lambda: (ops.softmax(x, -1), ops.erfinv(x), mint.add(x, x).asnumpy(), ops.exp(x).asnumpy()))
        assert result[0].asnumpy().dtype == np.float16
    assert not around.faults.disabled
    assert "no second run (TypeError): 4" in operators(around, tmp_path)["Functional.erfinv"]["skipped"]


@pytest.mark.parametrize("section", [{"pert_mode": "to_cpu", "fuzz_device": "cpu"}, {"if_preheat": True}])
def test_what_only_pytorch_has_is_refused(section: dict[str, Any], tmp_path: Path) -> None:
    """When the debugger is made, with the key."""
    with pytest.raises(SettingsError, match=f"{next(iter(section))}.*PyTorch only"):
        debugger(tmp_path, **section)


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of docs/guide/free-benchmark.md finds what the page says it does."""
    text = PAGE.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    (settings,) = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    (program,) = re.findall(r"```python\n(import mindspore.*?)```", text, re.DOTALL)
    (tmp_path / "config.json").write_text(settings)
    (tmp_path / "program.py").write_text(program)
    runpy.run_path(str(tmp_path / "program.py"))
    found = [row["api_name"] for row in rows(tmp_path)]
    assert found[0] == "Functional.exp.0"
    assert "Functional.softmax.0" not in found
