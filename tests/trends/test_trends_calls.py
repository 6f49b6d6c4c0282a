"""What the calls of a dump are called on a trends page, so that the same row is the same call in every step and run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from msprobe_engine.cli.main import main
from msprobe_engine.formats.dump.read_table import read_side
from msprobe_engine.report.trends.collect import apart, collect
from msprobe_engine.report.trends.sources.dumps import calls_of
from msprobe_engine.report.trends.sources.open_source import open_source
from msprobe_engine.report.trends.sources.source import Wanted


def record(norm: float, recomputed: bool) -> dict[str, object]:
    """A record with one result."""
    tensor = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2], "Max": norm, "Min": 0.0, "Mean": 0.5, "Norm": norm}
    return {"input_args": [], "output": [tensor], **({"is_recompute": True} if recomputed else {})}


def written(root: Path, construct: Mapping[str, str | None], values: Mapping[str, float], recomputed: tuple[str, ...] = ()) -> Path:
    """A dump of level mix with one rank."""
    place = root / "step0" / "rank0"
    place.mkdir(parents=True)
    data = {name: record(values.get(name, 1.0), name in recomputed) for name in construct}
    (place / "dump.json").write_text(json.dumps({"task": "statistics", "level": "mix", "data": data}))
    (place / "construct.json").write_text(json.dumps(construct))
    return root


def layers(count: int, extra: int = -1, micro: int = 1) -> dict[str, str | None]:
    """construct.json of a model whose layers are at the top, one call of a product in each; layer `extra` makes one call more before it."""
    construct: dict[str, str | None] = {}
    number = 0
    for step in range(micro):
        for layer in range(count):
            module = f"Module.layers.{layer}.Block.forward.{step}"
            for _ in range(2 if layer == extra else 1):
                construct[f"Tensor.mul.{number}.forward"] = module
                number += 1
            construct[module] = None
    return construct


def test_a_call_more_in_one_module_shifts_no_row_of_another(tmp_path: Path) -> None:
    """Two runs part where their numbers do, not at all calls behind one that only one run makes."""
    good = written(tmp_path / "good", layers(4), {f"Tensor.mul.{i}.forward": 10.0 + i for i in range(4)})
    numbers = {0: 10.0, 1: 11.0, 2: 11.0, 3: 12.5, 4: 13.0}
    bad = written(tmp_path / "bad", layers(4, extra=1), {f"Tensor.mul.{i}.forward": norm for i, norm in numbers.items()})
    trends = collect([open_source(bad), open_source(good)])
    found, *_ = apart(trends)
    assert [trends.metrics[one.metric].targets[one.target].shown for one in found] == ["layers.2: Tensor.mul.output.0"]


def test_layers_at_the_top_are_rows_of_their_own(tmp_path: Path) -> None:
    """A model that is itself no record has its layers at the top: calls of the same function in different layers are different rows."""
    trends = collect([open_source(written(tmp_path, layers(3), {}))])
    assert [target.shown for target in trends.metrics["forward"].targets] == [
        name for layer in range(3) for name in (f"layers.{layer}: Tensor.mul.output.0", f"Module.layers.{layer}.Block.output.0")
    ]


def test_micro_batches_of_such_a_model_are_one_row_or_several(tmp_path: Path) -> None:
    """Every call of a module at the top begins a micro step of what is inside of it."""
    root = written(tmp_path, layers(2, micro=2), {"Tensor.mul.0.forward": 1.0, "Tensor.mul.2.forward": 3.0})
    grid = collect([open_source(root)]).runs[0].grids["forward", "norm"].cube
    assert (grid.low[0, 0, 0], grid.high[0, 0, 0]) == (1.0, 3.0)
    apart_ones = collect([open_source(root, Wanted(micro_steps=True))]).metrics["forward"].targets
    assert [target.shown for target in apart_ones][:2] == [
        "layers.0: Tensor.mul.output.0 [micro 0]",
        "Module.layers.0.Block.output.0 [micro 0]",
    ]
    assert len(apart_ones) == 8


def test_recomputed_calls_are_numbered_by_themselves(tmp_path: Path) -> None:
    """Activation checkpointing calls each module twice; both calls are of the same micro step, under their own metrics."""
    construct = {**layers(1), "Tensor.mul.1.forward": "Module.layers.0.Block.forward.1", "Module.layers.0.Block.forward.1": None}
    construct |= {"Tensor.mul.1.backward": "Module.layers.0.Block.backward.1", "Module.layers.0.Block.backward.1": None}
    root = written(tmp_path, construct, {}, ("Tensor.mul.1.forward", "Module.layers.0.Block.forward.1"))
    calls = calls_of(read_side(root / "step0/rank0/dump.json"))
    assert calls["Tensor.mul.1.forward"] == ("recompute", "layers.0: Tensor.mul", 0, 0)
    assert calls["Tensor.mul.1.backward"] == ("backward", "layers.0: Tensor.mul", 0, 0)


def test_backward_rows_part_where_the_backward_pass_comes_first(tmp_path: Path) -> None:
    """Rows of the backward pass are in the order of the model, and what runs first in it, the last layer, comes first in the list."""
    construct = layers(3)
    for layer in (2, 1, 0):
        construct[f"Tensor.mul.{layer}.backward"] = f"Module.layers.{layer}.Block.backward.0"
        construct[f"Module.layers.{layer}.Block.backward.0"] = None
    good = written(tmp_path / "good", construct, {})
    bad = written(tmp_path / "bad", construct, {f"Tensor.mul.{i}.backward": 1.5 for i in (1, 0)})
    trends = collect([open_source(bad), open_source(good)])
    assert [target.shown for target in trends.metrics["backward"].targets][-2:] == [
        "Module.layers.2.Block.output.0",
        "layers.2: Tensor.mul.output.0",
    ]
    assert [trends.metrics[one.metric].targets[one.target].shown for one in apart(trends)[0]] == [
        "layers.1: Tensor.mul.output.0",
        "layers.0: Tensor.mul.output.0",
    ]


def test_calls_of_the_optimizer_come_behind_the_backward_pass(tmp_path: Path) -> None:
    """What runs outside of all modules behind the last backward call is the update, so a NaN of it is listed behind the gradient that it
    came from. A loss before the backward pass is of the forward pass, and so is a call behind one of several backward passes."""
    construct = {
        "Tensor.mul.0.forward": "Module.layers.0.Block.forward.0",
        "Module.layers.0.Block.forward.0": None,
        "Tensor.sum.0.forward": None,
        "Tensor.sum.0.backward": None,
        "Tensor.sum.1.forward": None,
        "Tensor.mul.0.backward": "Module.layers.0.Block.backward.0",
        "Module.layers.0.Block.backward.0": None,
        "Tensor.mul_.0.forward": None,
        "Tensor.add_.0.forward": None,
    }
    root = written(tmp_path / "both", construct, {"Tensor.mul.0.backward": math.nan, "Tensor.mul_.0.forward": math.nan})
    calls = calls_of(read_side(root / "step0/rank0/dump.json"))
    assert {name for name, call in calls.items() if call.metric == "optimizer"} == {"Tensor.mul_.0.forward", "Tensor.add_.0.forward"}
    trends = collect([open_source(root)])
    assert list(trends.metrics) == ["forward", "backward", "optimizer"]
    found = trends.runs[0].nonfinite
    assert [one.metric for one in found] == ["backward", "optimizer"]
    alone = {name: parent for name, parent in construct.items() if ".backward" not in name}
    forward = calls_of(read_side(written(tmp_path / "forward", alone, {}) / "step0/rank0/dump.json"))
    assert {call.metric for call in forward.values()} == {"forward"}


def test_construct_that_goes_round_in_circles_is_endured(tmp_path: Path) -> None:
    """A damaged file ends no page."""
    construct = {"Tensor.mul.0.forward": "Module.a.A.forward.0", "Module.a.A.forward.0": "Module.a.A.forward.0"}
    calls = calls_of(read_side(written(tmp_path, construct, {}) / "step0/rank0/dump.json"))
    assert calls["Tensor.mul.0.forward"].name == "a: Tensor.mul"


def test_the_first_nan_is_the_first_that_was_made(tmp_path: Path) -> None:
    """Two models take turns, as a generator and its critic do: an update between their passes is none of the forward pass to come, and a
    NaN that came to it from the backward pass before is listed behind that one. Operands of a call come before its results."""
    construct = {
        "Tensor.mul.0.forward": "Module.critic.Block.forward.0",
        "Module.critic.Block.forward.0": None,
        "Tensor.mul.0.backward": "Module.critic.Block.backward.0",
        "Module.critic.Block.backward.0": None,
        "Tensor.lerp_.0.forward": None,
        "Tensor.mul.1.forward": "Module.generator.Block.forward.0",
        "Module.generator.Block.forward.0": None,
        "Tensor.mul.1.backward": "Module.generator.Block.backward.0",
        "Module.generator.Block.backward.0": None,
        "Tensor.lerp_.1.forward": None,
    }
    bad = ["Module.critic.Block.backward.0", "Tensor.lerp_.0.forward", "Module.generator.Block.forward.0", "Tensor.lerp_.1.forward"]
    trends = collect([open_source(written(tmp_path, construct, dict.fromkeys(bad, math.nan)))])
    found = [trends.metrics[one.metric].targets[one.target].shown for one in trends.runs[0].nonfinite]
    assert found == [
        "Module.critic.Block.output.0",
        "Tensor.lerp_.output.0",
        "Module.generator.Block.output.0",
        "Tensor.lerp_.output.0",
    ]
    assert [one.metric for one in trends.runs[0].nonfinite] == ["backward", "forward", "forward", "optimizer"]


def _row(low: float, high: float = 1.0) -> dict[str, Any]:
    return {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2, 2], "Max": high, "Min": low, "Mean": 0.5, "Norm": 2.0}


@pytest.mark.parametrize("fault", [False, True])
def test_infinities_of_masks_are_no_fault(fault: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What goes into a softmax as a mask is not counted, in a step that has a fault as well; the fault is."""
    calls = {
        "Tensor.masked_fill.0.forward": (_row(-1.0), _row(-math.inf)),
        "Functional.softmax.0.forward": (_row(-math.inf), _row(0.0)),
        "Torch.log.0.forward": (_row(0.0), _row(-math.inf if fault else -1.0)),
        "Tensor.mean.0.forward": (_row(-math.inf if fault else -1.0), _row(-math.inf if fault else -1.0, -math.inf if fault else -1.0)),
    }
    place = tmp_path / "run" / "step0" / "rank0"
    place.mkdir(parents=True)
    data = {name: {"input_args": [given], "input_kwargs": {}, "output": [made]} for name, (given, made) in calls.items()}
    (place / "dump.json").write_text(json.dumps({"task": "statistics", "level": "L1", "data": data}))
    (place / "construct.json").write_text(json.dumps(dict.fromkeys(data)))
    (place / "stack.json").write_text("{}")
    assert main(["trends", str(tmp_path / "run"), "-o", str(tmp_path)]) == int(fault)
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith("First Inf: step 0, rank 0, Torch.log.output.0" if fault else "No alert, no NaN or Inf")
    assert not any("Inf: " in line and ("masked_fill" in line or "softmax" in line) for line in others)
