"""Suspects in the update of the optimizer name the parameter that it updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from msprobe_engine.align.calls.call_tree import Tree
from msprobe_engine.find.difference.harmless.bridges import scaled_by
from msprobe_engine.find.run import diagnose
from msprobe_engine.formats.dump.read_table import read_side

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


def _two_groups(rank_dump: Any, root: Path, order: str, decayed: str, off: float = 0.001) -> Path:
    """The first update of four layers in this order, each with numbers of its own: a decay of some, which moves them by `off`, and of all
    the moments, which are 0 before."""
    made = rank_dump()
    seeds = {layer: 0.1 * place for place, layer in enumerate("abcd", 1)}
    shape = {layer: {"shape": [4] if layer in "ac" else [2, 4]} for layer in seeds}
    for layer, seed in seeds.items():
        made.module(f"{layer}.Linear", [tensor(seed)], [tensor(seed + 1)], params={"weight": tensor(seed + 2) | shape[layer]})
    for layer, seed in reversed(seeds.items()):
        made.module(f"{layer}.Linear", [tensor(seed + 3)], [tensor(seed + 4)], direction="backward")
        made.data[f"Module.{layer}.Linear.parameters_grad"] = {"weight": [tensor(seed + 5) | shape[layer]]}
        made.construct[f"Module.{layer}.Linear.parameters_grad"] = None
    for layer in order:
        weight, gradient, first, second = (tensor(seeds[layer] + part) | shape[layer] for part in (2, 5, 6, 7))
        zero = weight | {"Max": 0.0, "Min": 0.0, "Mean": 0.0, "Norm": 0.0}
        if layer in decayed:
            weight_before, weight = weight, tensor(seeds[layer] + 2 + off) | shape[layer]
            made.api("Tensor.mul_", [weight_before, 0.999], [weight])
        made.api("Tensor.lerp_", [zero, gradient, 0.1], [first])
        made.api("Tensor.mul_", [zero, 0.98], [zero])
        made.api("Tensor.addcmul_", [zero, gradient, gradient], [second])
        made.api("Tensor.addcdiv_", [weight, first, second], [tensor(weight["Mean"] + 8) | shape[layer]])
    made.write(root / "step0" / "rank0")
    return root


def test_a_decay_that_one_group_of_parameters_does_not_have(tmp_path: Path, rank_dump: Any) -> None:
    """Groups that are updated in another order, one of them without decay: the call that is missing is named. Both of an update's products
    are calls of one kind, and the moments of all parameters are 0: neither numbers nor how many came before tell them apart."""
    target = _two_groups(rank_dump, tmp_path / "target", "bdac", "bd")
    golden = _two_groups(rank_dump, tmp_path / "golden", "abcd", "abcd")
    found = diagnose(target, golden)
    assert found.unmatched == {"target": [], "golden": ["Tensor.mul_.0.forward", "Tensor.mul_.4.forward"]}
    first = found.first_suspect
    assert first is not None
    assert (first.record, first.parameter) == ("Tensor.mul_.0.forward", "a.weight")
    assert first.why.startswith("in the update of parameter a.weight by the optimizer: only the golden run makes this call")


def test_a_decay_that_rounding_swallows(tmp_path: Path, rank_dump: Any) -> None:
    """Norms in bf16 are 1 behind a decay, too: all numbers are the same, and the runs are not."""
    target = _two_groups(rank_dump, tmp_path / "target", "abcd", "abcd", off=0.0)
    golden = _two_groups(rank_dump, tmp_path / "golden", "abcd", "bd", off=0.0)
    for runs, who in (((target, golden), "this run"), ((golden, target), "the golden run")):
        found = diagnose(*runs)
        first = found.first_suspect
        assert first is not None
        assert (found.finding, first.record) == ("structure", "Tensor.mul_.0.forward")
        assert first.why == f"only the update of {who} multiplies parameter a.weight by 0.999 (a decay); rounding swallows it in this step"


@pytest.mark.parametrize(
    ("call", "number", "factor"),
    [
        ("Tensor.__truediv__", 2, 0.5),
        ("Tensor.div_", 0.125, 8.0),
        ("Tensor.__mul__", 0.25, 0.25),
        ("Tensor.mul_", 3.0, 3.0),
        ("Tensor.mul_", 0.9999975, 1.0),
        ("Tensor.__mul__", 0.98, 1.0),
        ("Tensor.__truediv__", 0, 1.0),
        ("Tensor.__mul__", -1.0, 1.0),
        ("Tensor.__add__", 2, 1.0),
    ],
)
def test_the_factor_of_a_call_that_one_side_alone_makes(call: str, number: float, factor: float, tmp_path: Path, rank_dump: Any) -> None:
    """A whole number, or one over it, is what ranks and micro batches are counted by, and no round-off; another one may be a decay."""
    made = rank_dump()
    made.api(call, [tensor(1.0), number], [tensor(0.5)])
    made.api("Tensor.add_", [tensor(3.0), tensor(0.5)], [tensor(3.5)])
    made.write(tmp_path / "step0" / "rank0")
    tree = Tree(read_side(tmp_path / "step0" / "rank0" / "dump.json"))
    scaled = next(row for row in tree.tensors_in(1) if tree.producers.get(row) == 0)
    assert scaled_by(tree, scaled, {0}) == pytest.approx(factor)
    assert scaled_by(tree, scaled, set()) == 1.0
