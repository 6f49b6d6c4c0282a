"""Runs that are the same to the last bit but for one parameter, or one rank, that an update has left where it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from msprobe_engine.find.run import diagnose

LAYERS = "abcde"


def tensor(number: float) -> dict[str, Any]:
    numbers = {"Max": 1 + number, "Min": -1 - number, "Mean": number, "Norm": 8 + number}
    return {"type": "torch.Tensor", "dtype": "torch.bfloat16", "shape": [8, 8], **numbers, "requires_grad": True}


def run(rank_dump: Any, root: Path, moves: dict[int, dict[str, float]], names: str = LAYERS, words: str = "layers.") -> Path:
    """Two steps of modules alone; `moves`: rank -> layer -> how far the update between them moves it, 0.02 else."""
    for step in (0, 1):
        for rank, own in moves.items():
            made = rank_dump()
            for place, name in enumerate(names):
                weight = tensor(0.1 * (place + 1) + step * own.get(name, 0.02))
                made.module(f"{words}{name}.Linear", [tensor(0.3)], [tensor(0.4)], params={"weight": weight})
            made.write(root / f"step{step}" / f"rank{rank}")
    return root


@pytest.mark.parametrize(("moved", "named"), [({"c": 0.01}, "layers.c"), ({"c": 0.0199}, None), (dict.fromkeys("abcd", 0.0199), None)])
def test_one_parameter_that_an_update_has_moved_otherwise(
    moved: dict[str, float], named: str | None, tmp_path: Path, rank_dump: Any
) -> None:
    """Where most parameters came out the same it is no other kernel; a hair's breadth may be one, and so may it where most are off."""
    found = diagnose(run(rank_dump, tmp_path / "bad", {0: moved}), run(rank_dump, tmp_path / "good", {0: {}}))
    first = found.first_suspect
    assert (first and first.module) == named
    assert any("came out of its update the same" in line for line in found.evidence) == (named is not None)
    assert bool(found.problems) == (named is None)


@pytest.mark.parametrize(
    ("moved", "words", "named"),
    [
        ({"c": 0.0}, "layers.", ["c"]),
        (dict.fromkeys("bc", 0.0), "layers.", ["b", "c"]),
        (dict.fromkeys(LAYERS, 0.5), "layers.", []),
        (dict.fromkeys("bc", 0.0), "experts.", []),
    ],
    ids=["one", "two", "all: nothing says that they are copies", "experts of each rank"],
)
def test_one_rank_that_an_update_has_not_moved(
    moved: dict[str, float], words: str, named: list[str], tmp_path: Path, rank_dump: Any
) -> None:
    """Ranks that began with the same numbers of all parameters, and some of which an update has moved alike, hold copies."""
    root = run(rank_dump, tmp_path / "run", {0: {}, 1: moved}, words=words)
    found = diagnose(root)
    assert [place.record.split(".")[2] for place in found.suspects] == named
    if named:
        assert all("has not moved it on rank 1, and has on ranks 0" in place.why for place in found.suspects)
    else:
        assert any("differ from step 1 on" in problem for problem in found.problems) or words == "experts."
