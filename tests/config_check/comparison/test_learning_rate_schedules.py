"""Learning rates as the frameworks compute them: ours are held against the functions in their installed sources."""

from __future__ import annotations

import ast
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from msprobe_engine.config.settings.pack_settings import PackSettings, Setting
from msprobe_engine.config.settings.schedules import Schedule, schedule
from msprobe_engine.find.config.compare_settings import compare_settings

STEPS, PEAK = 50, 3e-4


def _function(package: str, file: str, name: str) -> Callable[..., Any]:
    """One function of a framework's source; the framework is not imported, which would take seconds."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    tree = ast.parse((Path(spec.origin).parent / file).read_text(encoding="utf-8"))
    node = [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) and one.name == name][-1]  # a later one replaces an earlier
    node.decorator_list, node.returns = [], None
    for argument in [*node.args.args, *node.args.kwonlyargs]:
        argument.annotation = None
    names: dict[str, Any] = {"math": math}
    exec(compile(ast.Module([node], []), file, "exec"), names)
    return names[name]  # type: ignore[no-any-return]


def _schedule(framework: str, **settings: Any) -> Schedule:
    found = schedule(PackSettings([Setting(name.replace("__", "."), value, framework=framework) for name, value in settings.items()]))
    assert found is not None
    return found


@pytest.mark.parametrize("style", ["linear", "cosine", "constant", "inverse-square-root"])
@pytest.mark.parametrize("warmup", [0, 7])
def test_megatron(style: str, warmup: int) -> None:
    """Every update has the rate that Megatron's scheduler gives it."""
    theirs = _function("megatron.core", "optimizer_param_scheduler.py", "get_lr")
    ours = _schedule("megatron", lr=PEAK, min_lr=1e-5, lr_decay_style=style, lr_warmup_iters=warmup, train_iters=STEPS, lr_warmup_init=1e-6)
    for update in range(1, STEPS + 1):
        state = SimpleNamespace(
            max_lr=PEAK, min_lr=1e-5, init_lr=1e-6, lr_warmup_steps=warmup, num_steps=update - 1, lr_decay_steps=STEPS, lr_decay_style=style
        )
        assert ours.rate(update) == pytest.approx(theirs(state, {}), rel=1e-12)


@pytest.mark.parametrize(
    ("style", "name"), [("linear", "_get_linear_schedule_with_warmup_lr_lambda"), ("cosine", "_get_cosine_schedule_with_warmup_lr_lambda")]
)
@pytest.mark.parametrize("warmup", [0, 7])
def test_transformers(style: str, name: str, warmup: int) -> None:
    """Every update has the rate of the Trainer's schedule."""
    theirs = _function("transformers", "optimization.py", name)
    more = {"num_cycles": 0.5} if style == "cosine" else {}
    ours = _schedule("transformers", learning_rate=PEAK, lr_scheduler_type=style, warmup_steps=warmup, max_steps=STEPS)
    for update in range(1, STEPS + 1):
        factor = theirs(update - 1, num_warmup_steps=warmup, num_training_steps=STEPS, **more)
        assert ours.rate(update) == pytest.approx(PEAK * factor, rel=1e-12, abs=1e-18)


@pytest.mark.parametrize("style", ["linear", "cosine", "sqrt"])
@pytest.mark.parametrize("ratio", [None, 0.2])
def test_torchtitan(style: str, ratio: float | None) -> None:
    """Every update has the rate of torchtitan's warm-up, plateau and decay."""
    theirs = _function("torchtitan", "components/optimizer/lr_scheduler.py", "linear_warmup_stable_decay")
    more = {} if ratio is None else {"lr_scheduler__decay_ratio": ratio}
    ours = _schedule(
        "torchtitan", optimizer__lr=PEAK, lr_scheduler__warmup_steps=5, lr_scheduler__decay_type=style, training__steps=STEPS,
        lr_scheduler__min_lr_factor=0.1, **more,
    )  # fmt: skip
    falls = STEPS - 5 if ratio is None else round(STEPS * ratio)
    for update in range(1, STEPS + 1):
        factor = theirs(update - 1, 5, STEPS + 1 - 5 - falls, falls, style, 0.1)
        assert ours.rate(update) == pytest.approx(PEAK * factor, rel=1e-12)


def test_schedules_set_alike_and_computed_otherwise() -> None:
    """Linear warm-up over ten updates begins at zero in Transformers and at a tenth in torchtitan: that is told, with the rates."""
    a = PackSettings(
        [
            Setting(n, v, framework="transformers")
            for n, v in (
                ("learning_rate", PEAK),
                ("lr_scheduler_type", "linear"),
                ("max_steps", STEPS),
                ("warmup_steps", 10),
                ("weight_decay", 0.1),
                ("adam_beta2", 0.95),
            )
        ]
    )
    names = (("optimizer.lr", PEAK), ("lr_scheduler.decay_type", "linear"), ("training.steps", STEPS), ("lr_scheduler.warmup_steps", 10))
    b = PackSettings([Setting(n, v, framework="torchtitan") for n, v in names])
    found = compare_settings(a, b, "file")
    rates = [one for one in found.differences if one.name.startswith("rate of update")]
    assert [(one.name, one.bench, one.cmp) for one in rates] == [("rate of update 1", "0", "3e-05")]
    assert found.derived["learning_rate of update 10 (end of warm-up)"][2] is False


def test_the_same_rates_of_two_frameworks_are_no_difference() -> None:
    """Megatron's and the Trainer's cosine over the same updates give the same rates."""
    a = PackSettings(
        [
            Setting(n, v, framework="transformers")
            for n, v in (("learning_rate", PEAK), ("lr_scheduler_type", "cosine"), ("max_steps", STEPS), ("warmup_steps", 5))
        ]
    )
    names = (("lr", PEAK), ("min_lr", 0.0), ("lr_decay_style", "cosine"), ("train_iters", STEPS), ("lr_warmup_fraction", 0.1))
    found = compare_settings(a, PackSettings([Setting(n, v, framework="megatron") for n, v in names]), "file")
    assert len([name for name in found.derived if name.startswith("learning_rate of update")]) == 4
    assert all(equal for name, (_, _, equal) in found.derived.items() if name.startswith("learning_rate of update"))
