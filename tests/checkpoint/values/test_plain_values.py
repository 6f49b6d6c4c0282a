"""Plain values of checkpoints: steps, schedulers, settings, random states; what matters and what is expected to differ."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from msprobe_engine.find.checkpoint.diff import diff
from msprobe_engine.find.checkpoint.values import compare_values
from msprobe_engine.find.config_and_checkpoint import diagnose_checkpoints
from msprobe_engine.formats.checkpoint.model import Checkpoint
from msprobe_engine.formats.checkpoint.open import open_checkpoint


def _checkpoint(path: str, **values: Any) -> Checkpoint:
    return Checkpoint(Path(path), "test", values={key.replace("__", "."): value for key, value in values.items()})


def _of(found: Any) -> dict[str, bool]:
    return {d.name: d.matters for d in found.different}


def test_a_training_saved_twice_differs_only_as_expected(tmp_path: Path) -> None:
    """torch.save of one training: equal; after a step the step, the scheduler and the random state matter."""
    import torch

    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def save(name: str, step: int) -> Checkpoint:
        tree = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "lr_scheduler": scheduler.state_dict(),
            "global_step": step,
            "save_path": f"/somewhere/{name}",
            "timestamp": name,
        }
        torch.save(tree, tmp_path / f"{name}.pt")
        return open_checkpoint(tmp_path / f"{name}.pt")

    first, again = save("first", 3), save("again", 3)
    assert not any(_of(compare_values(first, again)).values())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    scheduler.step()
    found = compare_values(first, save("later", 4))
    matters = {name for name, matter in _of(found).items() if matter}
    assert {"global_step", "optimizer.param_groups.0.lr", "lr_scheduler.last_epoch"} <= matters
    assert {"save_path", "timestamp"} <= _of(found).keys() - matters


def test_steps_of_two_frameworks_are_compared_with_each_other() -> None:
    """Megatron's iteration is DeepSpeed's global_steps and transformers' global_step."""
    found = compare_values(_checkpoint("a", iteration=5), _checkpoint("b", trainer_state__global_step=5))
    assert (found.equal, found.different) == (1, [])
    (other,) = compare_values(_checkpoint("a", iteration=5), _checkpoint("b", global_steps=6)).different
    assert (other.name, other.a, other.b, other.matters) == ("step (iteration; global_steps)", 5, 6, True)


@pytest.mark.parametrize(
    ("name", "a", "b", "matters"),
    [
        ("args.lr", 1e-4, 2e-4, True),
        ("args.tensor_model_parallel_size", 1, 2, False),
        ("args.save", "/a/x", "/b/y", False),
        ("args.log_interval", 1, 10, False),
        ("args.some_new_option", 1, 2, False),
        ("args.num_layers", 2, 4, True),
        ("ds_config.gradient_clipping", 0.0, 1.0, True),
        ("optimizer.param_groups.0.weight_decay", 0.0, 0.1, True),
        ("optimizer.param_groups.0.params", 10, 12, False),
        ("rng_state.rank0.python", "digest a", "digest b", True),
        ("opt_param_scheduler.num_steps", 10, 20, True),
        ("scaler.scale", 1024.0, 512.0, True),
        ("num_floating_point_operations_so_far", 1, 2, False),
        ("checkpoint_version", 3.0, 2.0, False),
    ],
)
def test_each_difference_matters_or_not_and_says_why(name: str, a: Any, b: Any, matters: bool) -> None:
    """Settings as config check judges them; states always, but for times, places, counts and layouts."""
    (found,) = compare_values(_checkpoint("a", **{name: a}), _checkpoint("b", **{name: b})).different
    assert found.matters is matters
    assert found.why


def test_settings_of_the_model_are_compared_by_their_meaning() -> None:
    """Megatron's rotary_base is transformers' rope_theta: weights do not show it. It is said and does not make equal weights differ."""
    a = _checkpoint("a", args__rotary_base=10000, args__num_attention_heads=4, args__layernorm_epsilon=1e-5)
    b = _checkpoint("b", config__rope_parameters__rope_theta=500000.0, config__num_attention_heads=4, config__rms_norm_eps=1e-5)
    for first, second in ((a, b), (b, a)):
        found = compare_values(first, second)
        assert [d.name.split(" ")[0] for d in found.different] == ["rope_base"]
        assert not found.different[0].matters
        assert found.equal == 2
        assert "even equal weights compute something else" in found.notes[0]


def test_random_states_of_other_ranks_are_not_compared() -> None:
    """Each rank has its own random numbers: with another layout there is nothing to compare, and that is said."""
    a = {"rng_state.tp0.pp0.0.python": "x"}
    found = compare_values(
        _checkpoint("a", **a), _checkpoint("b", **{"rng_state.tp0.pp0.0.python": "y", "rng_state.tp1.pp0.0.python": "z"})
    )
    assert not found.different
    assert any("random states" in note for note in found.notes)


def test_equal_numbers_of_other_types_and_nan_are_equal_and_long_values_are_cut() -> None:
    """1 is 1.0, NaN is NaN, a tuple is a list; what is shown of a long value is bounded."""
    a = _checkpoint("a", x=1, y=float("nan"), z=(1, 2), w="a" * 5000)
    b = _checkpoint("b", x=1.0, y=float("nan"), z=[1, 2], w="b" * 5000)
    found = compare_values(a, b)
    assert found.equal == 3
    assert len(found.different[0].a) < 250


def test_values_of_one_side_are_counted() -> None:
    """An option that one side has is named among its settings; whole sections of one side are counted."""
    a = _checkpoint("a", args__lr=0.1, args__old=1, trainer_state__x=1, trainer_state__y=2)
    found = compare_values(a, _checkpoint("b", args__lr=0.1, args__new=2))
    assert {(d.name, d.a, d.b, d.matters) for d in found.different} == {("args.old", 1, None, False), ("args.new", None, 2, False)}
    assert found.notes == ["values that only the run has were not compared: trainer_state (2)"]


def test_what_an_optimizer_holds_is_compared_whether_tensor_or_number(tmp_path: Path) -> None:
    """Steps as tensors (newer torch) against numbers; states that one file lost; a step that one file lacks; and how it is said."""
    import torch

    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(3)).sum().backward()
        optimizer.step()

    def saved(name: str, change: Callable[[dict[str, Any]], object] = lambda _: None) -> Path:
        tree = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 2})
        change(tree)
        torch.save(tree, tmp_path / name)
        return tmp_path / name

    def steps(value: Any) -> Callable[[dict[str, Any]], object]:
        return lambda tree: [state.update(step=value) for state in tree["optimizer"]["state"].values()]

    a = saved("a.pt")
    for sides in ((a, saved("three.pt", steps(3))), (tmp_path / "three.pt", a)):
        found = diff(*sides)
        assert (found.code, [value.name for value in found.values_that_matter]) == (
            1,
            ["optimizer.state.weight.step", "optimizer.state.bias.step"],
        )
    same = diff(a, saved("two.pt", steps(2)))
    assert (same.code, same.not_compared) == (0, [])

    found = diff(a, saved("four.pt", steps(torch.tensor(4.0))))
    assert [t.hint for t in found.different] == ["optimizer steps 2 and 4"] * 2

    lost = diff(a, saved("lost.pt", lambda tree: tree["optimizer"]["state"].clear()))
    assert (lost.code, len(lost.only_in_a), lost.not_compared) == (1, 6, [])
    weights = diff(a, saved("weights.pt", lambda tree: tree.pop("optimizer")))
    assert (weights.code, weights.only_in_a) == (0, [])

    late = diff(a, saved("late.pt", lambda tree: tree.pop("step")))
    assert [(v.name, v.a, v.b, v.matters) for v in late.values] == [("step", 2, None, False)]
    assert any("only the run has were not compared: step" in note for note in late.notes)


def test_diagnose_leads_with_the_values_that_matter(tmp_path: Path) -> None:
    """Learning rate and step come before what the tensors look like, and no sentence is empty."""
    import torch

    for name, lr in (("golden", 0.1), ("target", 0.2)):
        weights = {"w": torch.arange(6.0) * lr + torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0, lr])}
        groups = [{"lr": lr, "params": [0]}]
        torch.save({"model": weights, "optimizer": {"state": {}, "param_groups": groups}}, tmp_path / f"{name}.pt")
    found = diagnose_checkpoints(tmp_path / "target.pt", tmp_path / "golden.pt")
    assert found.headline() == "The checkpoints differ: optimizer.param_groups.0.lr"
    assert found.suspects[0].why.startswith("0.2, golden 0.1")
    assert found.suspects[1].why.startswith("5 of 6 elements differ, by ")
    assert "its elements differ" not in found.text()
