"""Stages of torch.distributed.pipelining beside one process that runs the same micro batches in a row."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from fault_pipelining import dump
from torch import nn

from msprobe_engine.find.collectives.replicas import of_moved_copies, ranks_alike
from msprobe_engine.find.run import diagnose


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.slow
def test_schedule_is_no_difference(schedule: str, tmp_path: Path) -> None:
    """All numbers are the same, and the passes that look for shapes are left out and said."""
    found = diagnose(dump(tmp_path / schedule, schedule), dump(tmp_path / "one"))
    assert found.finding == "none", found.headline()
    assert not found.problems
    assert any("look for shapes" in line for line in found.evidence)
    assert "All numbers are the same." in found.evidence


@pytest.mark.slow
def test_defect_of_the_second_stage(tmp_path: Path) -> None:
    """It bears the rank of its stage, the name it has there, and its module's path in the whole model."""

    def wrong_eps(model: nn.Module) -> None:
        for layer in model.layers.values():
            layer.norm.eps = 0.1 if layer.number == 2 else 1e-5

    found = diagnose(dump(tmp_path / "bad", "1f1b", wrong_eps), dump(tmp_path / "one"))
    first = found.first_suspect
    assert first is not None
    assert (first.rank, first.step, first.module) == (1, 0, "layers.2.norm")
    assert first.record == "Functional.layer_norm.2.forward"
    assert "in the order of the whole model" in found.suspects[1].why


def test_stages_without_messages(tmp_path: Path) -> None:
    """At level L0 the modules say which ranks are stages of one model, and what goes in which passes are no training."""
    found = diagnose(dump(tmp_path / "1f1b", "1f1b", level="L0"), dump(tmp_path / "one", level="L0"))
    assert (found.finding, found.problems) == ("none", []), found.text()
    assert any("look for shapes" in line for line in found.evidence)


def test_nan_in_a_pass_that_looks_for_shapes(tmp_path: Path) -> None:
    """Such a pass goes over memory that nobody has written: what it holds is no finding. In a pass that trains it is."""
    root = dump(tmp_path / "1f1b", "1f1b")
    file = root / "step0" / "rank1" / "dump.json"
    document = json.loads(file.read_text())
    names = [name for name in document["data"] if name.startswith("Functional.layer_norm.") and name.endswith("forward")]
    for name, finding in ((names[0], "none"), (names[-1], "nonfinite")):
        changed = copy.deepcopy(document)
        changed["data"][name]["output"][0].update(Max=float("nan"), Min=float("nan"), Mean=float("nan"), Norm=float("nan"))
        file.write_text(json.dumps(changed))
        found = diagnose(root)
        assert found.finding == finding, found.text()


def test_stages_are_no_replicas() -> None:
    """Both number their layers from zero; in the other run both ranks hold all of the model."""
    first, second = ("[8]", 2.0, -1.0, 0.1, 3.0, None, None), ("[8]", 4.0, -1.0, 0.1, 3.0, None, None)
    began = {name: dict.fromkeys((0, 1), first) for name in ("table", "layers.0.w", "layers.1.w")}
    moved = {name: dict.fromkeys((0, 1), second) for name in began}
    stages = {"table": {0: second}, "layers.0.w": {0: second, 1: first}}
    assert not of_moved_copies(stages, began, moved)
    copies = {**moved, "layers.0.w": {0: second, 1: first}}
    assert set(of_moved_copies(copies, began, moved)) == set(began)
    assert ranks_alike({"w": {0: first, 1: second, 2: first, 3: second}, "v": {0: first, 2: first}}) == [(0, 2), (1, 3)]
