"""What is added to an exponent is a factor of the result: absolute noise becomes relative noise, also through a mask of -Inf."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msprobe_engine.find.run import diagnose
from msprobe_engine.measure import propagation
from msprobe_engine.measure.propagation import Noise, Operand, Result


def _row(values: np.ndarray, dtype: str = "torch.float32") -> dict[str, Any]:
    numbers = {"Max": values.max(), "Min": values.min(), "Mean": values.mean(), "Norm": np.linalg.norm(values)}
    said = {name: float(number) for name, number in numbers.items()}
    infinite = {"inf_count": int(np.isinf(values).sum())} if np.isinf(values).any() else {}
    return {"type": "torch.Tensor", "dtype": dtype, "shape": list(values.shape), **said, "requires_grad": False, **infinite}


def _run(root: Path, noise: float, factor: float) -> Path:
    """Decays in bfloat16 that are masked and put into an exponent in float32; `noise` of them, `factor` of the result."""
    draw = np.random.default_rng(0)
    sums = -np.abs(draw.normal(size=(32, 32))) * 8 - np.tri(32, k=-1)
    np.fill_diagonal(sums, 0.0)
    given, base = sums * (1 + noise * draw.normal(size=(32, 32))), np.abs(draw.normal(size=(32, 32))) + 1
    masked = np.where(np.tri(32, dtype=bool), given, -np.inf)
    mask = {"type": "torch.Tensor", "dtype": "torch.bool", "shape": [32, 32], "Max": True, "Min": False, "Mean": None, "Norm": None}
    mask |= {"requires_grad": False, "true_count": 496}
    calls = {
        "Tensor.__mul__.0.forward": ([_row(base, "torch.bfloat16")], _row(given, "torch.bfloat16")),
        "Tensor.float.0.forward": ([_row(given, "torch.bfloat16")], _row(given)),
        "Tensor.masked_fill.0.forward": ([_row(given), mask, {"type": "float", "value": -np.inf}], _row(masked)),
        "Tensor.exp.0.forward": ([_row(masked)], _row(np.exp(masked) * factor)),
    }
    folder = root / "dump" / "step0" / "rank0"
    folder.mkdir(parents=True)
    data = {name: {"input_args": taken, "input_kwargs": {}, "output": [given]} for name, (taken, given) in calls.items()}
    (folder / "dump.json").write_text(json.dumps({"task": "statistics", "level": "L1", "framework": "pytorch", "data": data}))
    return root


@pytest.mark.parametrize(("factor", "record"), [(1.0, None), (1.2, "Tensor.exp.0.forward")], ids=["noise", "a factor"])
def test_noise_goes_through_a_mask_of_infinity_into_an_exponent(factor: float, record: str | None, tmp_path: Path) -> None:
    """Of what is masked the statistics say nothing but that the largest is zero: they are the same whatever the other elements are."""
    found = diagnose(_run(tmp_path / "run", 1e-3, factor), _run(tmp_path / "golden", 0.0, 1.0))
    assert (found.first_suspect and found.first_suspect.record) == record, found.text()


def test_of_an_exponent_the_absolute_noise_counts() -> None:
    """Of elements of the size 50 a millionth is 5e-5 of the result."""
    operand = Operand(Noise(1e-6, 0.0, 5e-5), 50.0, 0.0, 0.03, 1024, 32, 6e-8)
    assert propagation.forward("exp", [operand], Result(1.0, 1024, 6e-8), False).element == pytest.approx(5e-5)
    assert propagation.forward("sigmoid", [operand], Result(1.0, 1024, 6e-8), False).element == pytest.approx(1.5e-6)
