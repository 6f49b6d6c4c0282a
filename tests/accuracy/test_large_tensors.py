"""Large tensors are looked at in blocks: what comes of it is what the whole tensor gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from msprobe_engine.accuracy import condition, metrics, standards
from msprobe_engine.accuracy.judge import judge
from msprobe_engine.accuracy.precheck import memory
from msprobe_engine.accuracy.precheck.calls import Call
from msprobe_integrations.torch.accuracy import types

MEANS = ("cosine", "rmse", "mean_rel", "mean_ulp")
APIS = {"add": standards.ABSOLUTE, "matmul": standards.ULP, "abs": standards.BINARY, "conv1d": standards.THOUSANDTH}


def _sides(kind: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    bench = rng.standard_normal((50, 101)) * 10.0 ** rng.integers(-8, 3, (50, 101))
    device = (bench * (1 + rng.standard_normal((50, 101)) * 1e-6)).astype(np.float16 if kind == "float16" else np.float32)
    bench[3, 4], device[3, 4], bench[7, 7], device[9, 9] = np.inf, np.inf, np.nan, np.inf
    return bench, device


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("api", APIS)
def test_metrics_of_blocks_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch, api: str, kind: str) -> None:
    """Counts, shares and extremes are the same numbers; means differ by round-off; so does our verdict not."""
    bench, device = _sides(kind)
    for b, d in (
        (bench, device),
        (np.nan_to_num(bench, posinf=1.0), np.nan_to_num(device, posinf=1.0)),
        (np.zeros((50, 101)), np.zeros_like(device)),
    ):
        monkeypatch.setattr(metrics, "BLOCK", 1 << 20)
        monkeypatch.setattr(condition, "AT_ONCE", 1 << 17)
        whole = judge(api, f"Torch.{api}.0.forward.output.0", b, d, "torch.float64", f"torch.{kind}", changed=[b * (1 + 1e-7)])
        monkeypatch.setattr(metrics, "BLOCK", 700)
        monkeypatch.setattr(condition, "AT_ONCE", 2000)
        parts = judge(api, f"Torch.{api}.0.forward.output.0", b, d, "torch.float64", f"torch.{kind}", changed=[b * (1 + 1e-7)])
        assert whole.metrics.keys() == parts.metrics.keys()
        for key, value in whole.metrics.items():
            if key in MEANS and value is not None:
                assert parts.metrics[key] == pytest.approx(value, rel=1e-5, nan_ok=True), key
            else:
                np.testing.assert_equal(parts.metrics[key], value, err_msg=key)
        assert (whole.status, whole.old_status) == (parts.status, parts.old_status)
        if whole.units is not None and whole.status == "pass":
            assert parts.units == pytest.approx(whole.units, rel=0.5)


def test_changes_of_blocks_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs are moved in the same direction whatever the size of a block."""

    def moved() -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        values = torch.linspace(-1, 2, 999).reshape(27, 37)
        return types.nudged(values, torch.bfloat16, lambda shape: torch.randint(0, 2, shape, generator=generator, dtype=torch.int8) * 2 - 1)

    whole = moved()
    monkeypatch.setattr(types, "BLOCK", 100)
    assert torch.equal(moved(), whole)


def _call(name: str, *shape: int) -> Call:
    tensor = {"type": "torch.Tensor", "dtype": "torch.bfloat16", "shape": list(shape)}
    return Call(name, {"input_args": [tensor], "input_kwargs": {}, "output": [tensor]}, {"input": [tensor], "output": [tensor]})


def test_calls_share_the_memory_there_is() -> None:
    """Small calls are checked by all processes, large ones by as many as fit, one that cannot fit has a reason."""
    small, large, huge = _call("Torch.exp.0", 10), _call("Torch.exp.1", 1 << 26), _call("Torch.exp.2", 1 << 40)
    assert memory.bytes_of(large) == 4 * 8 << 26
    plan = memory.plan([small, large, huge], 8, 20 << 30)
    assert (plan.together, plan.large, plan.processes) == ([small], [large], 2)
    assert [call.name for call, _ in plan.refused] == ["Torch.exp.2"]
    assert "too large for this machine" in plan.refused[0][1]
    assert memory.plan([small, large, huge], 8, None).together == [small, large, huge]
    assert memory.plan([small], 8, 1 << 20).together == [small]
    if Path("/proc/meminfo").exists():
        assert (memory.free_memory() or 0) > 0
