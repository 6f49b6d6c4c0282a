"""Loops of several ranks that make no call: what is reported of each parameter is that of one process in float64."""

from __future__ import annotations

import pytest
import rank_loops
from forkpool import run_ranks

pytestmark = pytest.mark.framework
LAYOUTS = {
    "ddp": "DDP, 2 ranks",
    "fsdp2": "FSDP2, 2 ranks",
    "tp": "TP 2, 2 ranks",
    "fsdp1": "FSDP1, 2 ranks",
    "fsdp1_flat": "FSDP1, 2 ranks",
    "fsdp1_whole": "FSDP1, 2 ranks",
}


@pytest.mark.parametrize("clip", [0.0, 0.1])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_numbers(kind: str, clip: float) -> None:
    """Gradients, parameters, moments and losses with accumulation over micro batches, and with clipping; the training itself is the
    same to the bit."""
    micros = 1 if kind.startswith("fsdp1") else 2
    for found in run_ranks(2, rank_loops.follow, kind, micros, clip):
        assert found["same"]
        assert {"grad_reduced", "grad_unreduced", "param_updated", "exp_avg", "exp_avg_sq", "update"} <= set(found["families"])
        if clip:
            assert all(got == pytest.approx(true, rel=1e-5) for got, true in found["norms"])


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B"])
def test_pipeline(schedule: str) -> None:
    """Stages of `torch.distributed.pipelining`: each rank reports its own layers, under names of their own, with the gradients and the
    loss of one process; nobody waits for a rank that waits for the pipeline."""
    assert all(found["same"] for found in run_ranks(2, rank_loops.follow_pipeline, schedule))


@pytest.mark.parametrize(("kind", "level"), [("ddp", "mix"), ("fsdp2", "L1"), ("fsdp1", "L0")])
def test_dump_and_gradient_probe(kind: str, level: str) -> None:
    """``dump`` and ``grad_probe`` of the settings file: the step that was asked for, on each rank, and gradients of that update under the
    model's own names; the training is the same."""
    sections = {"dump": {"level": level, "step": [1]}, "grad_probe": {"grad_level": "L1", "step": [1]}}
    squares: dict[str, list[float]] = {}
    for rank, found in enumerate(run_ranks(2, rank_loops.follow, kind, 1, 0.0, sections)):
        assert found["same"]
        files = found["files"]
        assert f"dump/step1/rank{rank}/dump.json" in files
        assert not any(name.startswith(("dump/step0", "dump/step2")) for name in files)
        assert f"grad_probe/rank{rank}/grad_summary_1.csv" in files
        assert not any("grad_summary_0" in name or "grad_summary_2" in name for name in files)
        forward = "Module." if level != "L1" else "Functional.linear"
        assert any(record.startswith(forward) for record in found["records"]), found["records"][:5]
        for name, _, _, norm, *_ in found["gradients"]:
            squares.setdefault(name, []).append(float(norm) ** 2)
    true = rank_loops.truth(2, 1)[1]["reduced"]
    assert set(squares) == set(true)
    for name, found_squares in squares.items():  # DDP: the whole on both ranks; else each rank's part
        square = found_squares[0] if kind == "ddp" else sum(found_squares)
        assert square == pytest.approx((true[name] ** 2).sum(), rel=1e-5), name


def test_replicas_that_differ_start_an_incident() -> None:
    """A rank of DDP whose parameters drift: the lowest rank of the group says so and leaves an incident. Others hear of it
    while they train."""
    files, _ = run_ranks(2, rank_loops.drift)
    assert any(name.startswith("incidents/") for name in files), files
