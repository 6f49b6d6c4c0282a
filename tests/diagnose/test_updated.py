"""Suspects in the update of the optimizer name the parameter that it updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msprobe_engine.find.run import diagnose

CALL = "Tensor.lerp_.0.forward"


def tensor(seed: float) -> dict[str, Any]:
    """A tensor with numbers of its own."""
    numbers = {"Max": 1 + seed, "Min": -1 - seed, "Mean": seed, "Norm": 3 * seed}
    return {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2, 4], **numbers, "requires_grad": True}


def _written(rank_dump: Any, root: Path, gradient: float, value: float = 0.1) -> Path:
    """One layer, and the update of its weight with a gradient that is known by its number."""
    made = rank_dump()
    x, weight, moment, own, out = (tensor(seed) for seed in (0.11, 0.22, 0.33, 0.44, 0.55))
    made.module("layers.1.up.Linear", [x], [out], params={"weight": weight})
    made.module("layers.1.up.Linear", [tensor(0.66)], [tensor(0.77)], direction="backward")
    made.data["Module.layers.1.up.Linear.parameters_grad"] = {"weight": [own]}
    made.construct["Module.layers.1.up.Linear.parameters_grad"] = None
    made.api("Tensor.lerp_", [moment, tensor(gradient), value], [tensor(gradient / 10 + value)])
    made.api("Tensor.addcdiv_", [weight, tensor(gradient / 10 + value)], [tensor(gradient / 20 + value)])
    made.write(root / "step0" / "rank0")
    return root


def test_a_gradient_that_was_not_reduced(tmp_path: Path, rank_dump: Any) -> None:
    """The optimizer takes in a rank's own gradient: the parameter is found through the equal numbers of its gradient."""
    found = diagnose(_written(rank_dump, tmp_path / "bad", 0.44), _written(rank_dump, tmp_path / "good", 0.9))
    first = found.first_suspect
    assert first is not None
    assert first.record == CALL
    assert first.why.startswith("in the update of parameter layers.1.up.weight by the optimizer: input.1 differs by")


def test_another_argument_of_the_update(tmp_path: Path, rank_dump: Any) -> None:
    """A call of the update with another number names the parameter too."""
    found = diagnose(_written(rank_dump, tmp_path / "bad", 0.44, 0.2), _written(rank_dump, tmp_path / "good", 0.44))
    first = found.first_suspect
    assert first is not None
    assert first.record == CALL
    assert first.why.startswith("in the update of parameter layers.1.up.weight by the optimizer: lerp_ weight = 0.2, golden 0.1")
