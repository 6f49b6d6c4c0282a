"""Every layout of Megatron in docs/evidence/integrations.md with every feature. One is in the fast tier; others have tests in
test_every_layout.py."""

from __future__ import annotations

import functools
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
from forkpool import run_ranks
from fsdp_layout import FLAG
from layout_cells_job import LEVELS, STEPS, alone, drifting, faulty, watched
from layout_checks import check_gradients, check_parameters, check_sums

from msprobe_engine.find.nonfinite.nan_analyze import nan_analyze

pytestmark = pytest.mark.framework
LAYOUTS = {
    "1 rank": (1, ""),
    "DP 2": (2, ""),
    "DP 2, distributed optimizer": (2, "--distopt"),
    "DP 2, distributed optimizer, bf16": (2, "--distopt --bf16"),
    "DP 2, distributed optimizer, overlapped": (2, "--distopt --overlap --overlap-param --bf16"),
    "DP 2, recompute full": (2, "--recompute"),
    "DP 2, recompute selective": (2, "--recompute-core"),
    "TP 2": (2, "--tp 2"),
    "TP 2, fp16 with loss scale": (2, "--tp 2 --fp16"),
    "TP 2, sequence parallel": (2, "--tp 2 --sp"),
    "PP 2": (2, "--pp 2 --untie"),
    "PP 2, tied embeddings": (2, "--pp 2"),
    "PP 2, interleaved": (2, "--pp 2 --vpp 2 --layers 4 --untie"),
    "EP 2": (2, "--ep 2 --experts 4"),
    "EP 2, all-gather": (2, "--ep 2 --experts 4 --allgather --distopt"),
    "TP 2, expert TP 2": (2, "--tp 2 --sp --etp 2 --experts 4 --allgather"),
    "DP 2, distributed optimizer, fused gradient accumulation": (2, "--fused --distopt --overlap"),
    "TP 2, sequence parallel, fused gradient accumulation": (2, "--fused --tp 2 --sp"),
    "Megatron-FSDP": (2, f"--distopt {FLAG}"),
    "TP 2 x PP 2": (4, "--tp 2 --pp 2"),
    "DP 2 x TP 2, sequence parallel, distributed optimizer": (4, "--tp 2 --sp --distopt --overlap"),
    "EP 2 x TP 2, sequence parallel, distributed optimizer": (4, "--tp 2 --sp --ep 2 --experts 4 --distopt"),
}
FAST = "DP 2, distributed optimizer, bf16"
ALONE = ("1 rank", "PP 2", "PP 2, interleaved", "Megatron-FSDP")
"""No two ranks hold the same."""


@functools.cache
def ran(layout: str) -> list[dict[str, Any]]:
    ranks, argv = LAYOUTS[layout]
    with tempfile.TemporaryDirectory() as place:
        return run_ranks(ranks, watched, argv, place, timeout=300)


@pytest.mark.fast_cells("DP 2, distributed optimizer, bf16-L1")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dump(layout: str, level: str) -> None:
    """Outputs of all layer norms, as modules and as operators, and gradients of these outputs are those that hooks of the test's own have
    seen, in every step and micro batch; a level has what belongs to it and nothing else."""
    wanted = {"L0": {"module"}, "L1": {"operator"}, "mix": {"module", "operator"}}[level]
    for rank in ran(layout):
        run = rank[level]
        assert len(run["seen"]) == STEPS
        for step, seen in enumerate(run["seen"]):
            assert {kind for kind, _ in seen["dump"]} == wanted
            for kind in wanted:
                assert run["norms"][step]
                assert seen["dump"][kind, "forward"] == pytest.approx(run["norms"][step], rel=1e-6)
                assert run["gradients"][step]
                assert sorted(seen["dump"][kind, "backward"]) == pytest.approx(sorted(run["gradients"][step]), rel=1e-6)


def factor(scalars: dict[str, float]) -> float:
    """What the optimizer multiplies reduced gradients with: the loss scale is taken out, and they are clipped to a norm of 1."""
    return min(1.0, 1.0 / (scalars["grad_norm"] + 1e-6)) / scalars.get("loss_scale", 1.0)


@pytest.mark.fast_cells(FAST)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_monitor(layout: str) -> None:
    """Activations, reduced gradients and updated parameters are those of whole tensors in float64; after the first update, moments are
    what Adam makes of these gradients; sums over groups are the sums of what their members gave."""
    run = [rank["mix"] for rank in ran(layout)]
    for rank in run:
        for step, seen in enumerate(rank["seen"]):
            samples = seen["samples"]
            check_gradients(rank["reference"][step], samples, bf16=False)
            if "--overlap-param" not in LAYOUTS[layout][1]:  # else the forward pass gathers them
                check_parameters(rank["parameters"][step], samples)
            assert seen["scalars"]["skipped"] == 0
            check_activations(rank["norms"][step], samples, "recompute" in layout)
        check_moments(rank["reference"][0], rank["seen"][0])
    if LAYOUTS[layout][0] > 1:
        for step in range(STEPS):
            sums = [rank["seen"][step]["sums"] for rank in run]
            assert all(sums)
            check_sums(sums, [{"rank": at} for at in range(len(run))])


def check_activations(expected: list[float], samples: dict[Any, Any], twice: bool) -> None:
    """Every layer norm of every micro batch has a sample; a pass that is recomputed has one."""
    found = [v[0].norm for k, v in samples.items() if k[0] == "actv" and "layernorm.output" in k[2] and "k_lay" not in k[2]]
    matching = [value for value in found if any(value == pytest.approx(one, rel=1e-6) for one in expected)]
    assert len(matching) >= (len(expected) // 2 if twice else len(expected)) > 0


def check_moments(reference: dict[str, tuple[float, ...]], seen: dict[str, Any]) -> None:
    moments = {(key[0], key[2]): value[0] for key, value in seen["samples"].items() if key[0] in ("exp_avg", "exp_avg_sq")}
    by = factor(seen["scalars"])
    for name, (whole, _, low, high, _) in reference.items():
        largest = max(abs(low), abs(high)) * by
        assert moments["exp_avg", name].norm == pytest.approx(0.1 * whole * by, rel=1e-4, abs=1e-12)
        assert moments["exp_avg_sq", name].max == pytest.approx(0.001 * largest**2, rel=1e-3, abs=1e-20)


@pytest.mark.fast_cells(FAST)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_grad_probe(layout: str) -> None:
    """Norms of the gradients that the optimizer uses are those of gathered gradients in float64, without loss scale and clipped; ranges
    that the ranks of a group update make up the whole."""
    run = ran(layout)
    for rank in run:
        for step, reference in enumerate(rank["mix"]["reference"]):
            by = factor(rank["mix"]["seen"][step]["scalars"])
            rows = rank["mix"]["probed"][step]
            assert rows
            for name, (whole, *_) in reference.items():
                members = rank["members"]["experts" in name]
                parts = [run[other]["mix"]["probed"][step].get(name) for other in members]
                pieces = sorted({part[1:]: part for part in parts if part is not None and part[1] < part[2]}.values(), key=lambda p: p[1])
                borders = [0, *(hi for _, _, hi, _ in pieces)]
                assert [lo for _, lo, _, _ in pieces] == borders[:-1], name
                assert borders[-1] == pieces[0][3], name
                assert math.hypot(*(part[0] for part in pieces)) == pytest.approx(whole * by, rel=1e-4, abs=1e-12), name
            assert set(rows) <= set(reference)


@pytest.mark.fast_cells(FAST)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_same_bits(layout: str) -> None:
    """With everything watched, the gradient probe and each level of the dump, losses, weights and the random state are those without."""
    for rank in ran(layout):
        for level in LEVELS:
            assert rank[level]["bits"] == rank["plain"], level


@pytest.mark.fast_cells(FAST)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_detach(layout: str) -> None:
    """After a probe with everything on has left a training, every name of Megatron and torch is the same object as before, and so are
    methods and hooks of its chunks and its optimizer."""
    assert [rank["left"] for rank in ran(layout)] == [[]] * LAYOUTS[layout][0]


@pytest.mark.fast_cells(FAST)
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout not in ALONE])
@pytest.mark.slow
def test_replicas(layout: str) -> None:
    """Silent until a parameter changes on one rank alone; in that step it is named, with a group that has the rank in it."""
    ranks, argv = LAYOUTS[layout]
    name = "output_layer.weight" if layout == "PP 2, tied embeddings" else "input_layernorm.weight"
    said = [alert for rank in run_ranks(ranks, drifting, argv, ranks - 1, name, timeout=240) for alert in rank]
    assert said
    assert min(step for step, _, _ in said) == 2
    names = ("embedding.word_embeddings.weight", name)  # tied weights have the name of the first stage
    assert any(step == 2 and one.endswith(names) and ranks - 1 in group for step, one, group in said), said


@pytest.mark.slow
@pytest.mark.parametrize("layout", ALONE[1:])
def test_no_replicas(layout: str) -> None:
    """Where no two ranks hold the same, the replica check says once that there is nothing to compare."""
    first, *others = run_ranks(2, alone, LAYOUTS[layout][1])
    assert [line for line in first if "nothing is compared" in line] == first
    assert len(first) == 1
    assert others == [[]]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "Megatron-FSDP"])
def test_incident(layout: str, tmp_path: Path) -> None:
    """Step, rank and module that `nan_analyze` gives for the incident are those of a planted fault."""
    ranks, argv = LAYOUTS[layout]
    answers = run_ranks(ranks, faulty, argv, 3, str(tmp_path), timeout=240)
    (truth,) = [answer for answer in answers if answer]
    (incident, *_) = sorted((tmp_path / "incidents").glob("step*"))
    first = nan_analyze(incident).findings[0]
    assert (first["step"], first["rank"]) == (truth["step"], truth["rank"])
    assert first["module"].removeprefix("0.") == truth["module"]  # of several chunks the first is meant
