"""Runs of many ranks: what several of them have is said once, with the ranks, and nothing grows with the square of their number."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import pytest

from msprobe_engine.find.difference.divergence import diverge
from msprobe_engine.find.nonfinite.load import load_step
from msprobe_engine.find.run import diagnose
from msprobe_engine.formats.dump.read_table import read_side
from msprobe_engine.formats.dump.reader import open_dump
from msprobe_engine.formats.dump.replicas.shared_columns import SharedColumns, own_columns
from msprobe_engine.report.diagnosis.page import write

RANKS, FEW = 340, 16
"""More than what once nested sentences too deep; and as many as the other rules need."""


def _run(rank_dump: Any, root: Path, bad: range, stages: int = 1, beta: int = 1, ranks: int = FEW) -> Path:
    """Each rank calls two functions and takes part in a sum; the second function is off on ranks of `bad`."""
    for rank in range(ranks):
        dump = rank_dump()
        numbers = [
            {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [4], "requires_grad": True} | _stats(x) for x in (1.0, 2.0, 3.0)
        ]
        if rank in bad:
            numbers[2] |= _stats(3.0 + 0.01 * (1 + rank % 3))
        dump.api("Functional.relu", [numbers[0]], [numbers[1]])
        dump.api("Functional.softplus", [numbers[1]], [numbers[2]], kwargs={"beta": beta})
        summed = copy.deepcopy(numbers[0])
        dump.comm("all_reduce", [summed], [summed], group=list(range(ranks)))
        directory = root / "step0" / f"rank{rank}"
        dump.write(directory)
        file = directory / "dump.json"
        place = {"rank": {"pp": rank * stages // ranks}, "size": {"pp": stages}}
        file.write_text(json.dumps({"parallel": place, **json.loads(file.read_text())}, indent=1))
    return root


def _stats(value: float) -> dict[str, float]:
    return {"Max": value, "Min": -value, "Mean": value / 2, "Norm": value * 1.5}


@pytest.fixture(scope="module")
def run(rank_dump: Any) -> Any:
    return functools.partial(_run, rank_dump)


@pytest.fixture(scope="module")
def golden(run: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("golden"), range(0))


def test_a_fault_of_all_ranks_is_one_suspect(run: Any, tmp_path: Path) -> None:
    """It is said once, on all ranks; the size on each of them may be another one. No line grows with the ranks."""
    golden = run(tmp_path / "golden", range(0), ranks=RANKS)
    found = diagnose(run(tmp_path / "run", range(RANKS), ranks=RANKS), golden)
    assert [suspect.record for suspect in found.suspects] == ["Functional.softplus.0.forward"]
    assert found.suspects[0].on_ranks == [f"0-{RANKS - 1}"]
    assert f"all {RANKS} ranks" in found.headline()
    assert max(map(len, found.text().splitlines())) < 250
    write(found, tmp_path / "out")
    assert (tmp_path / "out" / "diagnosis.json").stat().st_size < 20_000
    assert [len(found.begins_in(0, rank)) for rank in (0, 57, RANKS - 1)] == [1, 1, 1], "each rank's table has its own"


def test_stages_of_a_pipeline_have_suspects_of_their_own(run: Any, tmp_path: Path) -> None:
    """Layers are counted from the first one of each stage: equal names there are no equal places."""
    found = diagnose(run(tmp_path / "run", range(FEW), stages=2), run(tmp_path / "golden", range(0), stages=2))
    half = FEW // 2
    assert [suspect.on_ranks for suspect in found.suspects] == [[f"0-{half - 1}"], [f"{half}-{FEW - 1}"]]


def test_one_bad_rank_is_said_to_be_the_only_one(run: Any, golden: Path, tmp_path: Path) -> None:
    found = diagnose(run(tmp_path / "run", range(5, 6)), golden)
    assert [(suspect.rank, suspect.on_ranks) for suspect in found.suspects] == [(5, [])]
    assert "A difference begins on rank 5 alone." in found.evidence


def test_facts_that_all_ranks_share_are_one_suspect(run: Any, golden: Path, tmp_path: Path) -> None:
    """Another argument that shows in no number, on all ranks."""
    found = diagnose(run(tmp_path / "run", range(0), beta=2), golden)
    shown: list[Any] = [(suspect.kind, suspect.on_ranks) for suspect in found.suspects]
    assert shown == [("argument", [f"0-{FEW - 1}"])]


def test_ranks_of_one_program_hold_its_columns_once(run: Any, tmp_path: Path) -> None:
    """What does not differ between ranks, or between the runs, is one object; numbers are where they are the same. Equal numbers of another
    type are others."""
    shared = SharedColumns()
    root = run(tmp_path / "run", range(3, 4), ranks=8)
    tables = [shared.share(read_side(root / "step0" / f"rank{rank}" / "dump.json")) for rank in range(8)]
    first, second, odd = tables[0], tables[1], tables[3]
    for column in ("ops", "name", "dtype", "shape", "offsets", "role", "values"):
        assert getattr(first, column) is getattr(odd, column)
    assert first.numbers is second.numbers
    assert first.numbers is not odd.numbers
    assert first.collectives[2]["input_kwargs"]["group"]["group_ranks"] is odd.collectives[2]["input_kwargs"]["group"]["group_ranks"]
    own_columns(second)
    second.shape[0], second.numbers[0] = None, 7.0
    assert first.shape[0] == [4]
    assert first.numbers[0] == 1.0
    one, other = run(tmp_path / "one", range(0), ranks=1, beta=1), run(tmp_path / "other", range(0), ranks=1, beta=1.0)
    one, other = (shared.share(read_side(path / "step0" / "rank0" / "dump.json")) for path in (one, other))
    assert [list(map(type, table.values.values())) for table in (one, other)] == [[int, str], [float, str]]


def test_memory_follows_the_ranks_that_differ(run: Any, tmp_path: Path) -> None:
    """Walks of many ranks hold pairs, trees and what encloses what once."""
    target, golden = run(tmp_path / "run", range(8), ranks=8), run(tmp_path / "golden", range(0), ranks=8)
    shared = SharedColumns()
    sides = [
        {rank: shared.share(read_side(root / "step0" / f"rank{rank}" / "dump.json")) for rank in range(8)} for root in (target, golden)
    ]
    walkers = diverge(*sides).walkers
    for walker in walkers.values():
        assert walker.rows is walkers[0].rows
        assert walker.structure.pairs is walkers[0].structure.pairs
        assert walker.target.kinds is walkers[0].target.kinds
        assert walker.side.construct is walkers[0].side.construct
        assert walker.carried._seen is None


def test_call_stacks_of_all_ranks_are_not_kept(run: Any, tmp_path: Path) -> None:
    """They are larger than all else that is read; a finding reads those of its rank again."""
    dump = open_dump(run(tmp_path / "run", range(0), ranks=4))
    traces, problems = load_step(dump, 0)
    assert not problems
    assert not any("stacks" in one.dump.__dict__ for one in traces.values())
    assert traces[0].dump.construct is traces[3].dump.construct
