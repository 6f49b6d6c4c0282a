"""Gradient statistics under every way Megatron reduces and shards gradients, against a gathered float64 reference."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
from every_family import PARAMETER_FAMILIES
from forkpool import run_ranks
from layout_checks import gathered
from megatron_harness import probe_settings, run_gpt

from msprobe_engine.core.statistics.rows import Statistics
from msprobe_integrations.megatron.layout import unwrap_model

MONITOR = replace(PARAMETER_FAMILIES, micro_batch_gradients=True, digest=True)
Key = tuple[str, str, str, int, int]


def spy(state: dict[str, Any], chunks: list[Any], optimizer: Any) -> None:
    """Keep the reference of every step, taken just before the optimizer looks at the gradients."""
    state["reference"] = []
    state["naive"] = []
    step = optimizer.step

    @functools.wraps(step)
    def looked() -> Any:
        state["reference"].append(gathered(chunks))
        state["naive"].append({n: float(p.main_grad.double().norm()) for c in chunks for n, p in unwrap_model(c).named_parameters()})
        return step()

    optimizer.step = looked


def job(argv: str) -> dict[str, Any]:
    state, frames = run_gpt(argv, probe_settings(MONITOR), spy)
    samples: list[dict[Key, tuple[Statistics, dict[str, Any]]]] = []
    for frame in frames:
        samples.append(
            {
                (s.source.family, s.source.phase, s.name, s.source.vpp_stage, s.source.micro_step): (s.statistics, dict(s.source.extra))
                for s in frame.records()
            }
        )
    return {"reference": state["reference"], "naive": state["naive"], "samples": samples, "scalars": [f.scalars for f in frames]}


@functools.cache
def ran(argv: str, ranks: int = 2) -> list[dict[str, Any]]:
    return run_ranks(ranks, job, f"--steps 2 --layers 3 --hidden 40 {argv}", timeout=240)


LAYOUTS: tuple[str, ...] = (
    "",
    "--distopt",
    "--overlap",
    "--distopt --overlap",
    "--distopt --overlap --overlap-param",
    "--bf16",
    "--bf16 --distopt --overlap",
)
OTHER: tuple[str, ...] = (
    "--fp16 --tp 2",
    "--fp16 --distopt",
    "--tp 2 --distopt",
    "--pp 2 --layers 4 --distopt --untie",
    "--pp 2 --vpp 2 --layers 4 --untie",
    "--ep 2 --experts 4 --distopt",
)


def pick(samples: dict[Key, Any], family: str, phase: str = "", micro: int = -1) -> dict[str, tuple[Statistics, dict[str, Any]]]:
    return {f"{k[3]} {k[2]}": v for k, v in samples.items() if k[0] == family and k[1] == phase and k[4] == micro}


@pytest.mark.fast_cells("--tp 2 --distopt")
@pytest.mark.framework
@pytest.mark.parametrize("argv", LAYOUTS + OTHER)
def test_reduced_gradients_are_those_of_the_whole_tensor(argv: str) -> None:
    """Norm, mean, bounds, count and digest of every parameter's reduced gradient equal the gathered float64 reference to 1e-6 on
    every rank, in every step, whatever the layout."""
    for rank in ran(argv):
        assert len(rank["samples"]) == len(rank["reference"]) == 2
        for samples, reference in zip(rank["samples"], rank["reference"]):
            reduced = pick(samples, "grad_reduced", "reduced")
            assert set(reduced) == set(reference)
            for name, (norm, total, low, high, digest) in reference.items():
                statistics, extra = reduced[name]
                assert extra.get("scope") in (None, "whole")
                assert statistics.norm == pytest.approx(norm, rel=1e-6, abs=1e-30)
                assert statistics.mean * statistics.count == pytest.approx(total, rel=1e-6, abs=1e-6 * norm)
                assert (statistics.min, statistics.max) == (low, high)
                assert statistics.digest == digest


@pytest.mark.fast_cells("--bf16 --distopt --overlap")
@pytest.mark.framework
@pytest.mark.parametrize("argv", LAYOUTS[1:])
def test_layouts_agree(argv: str) -> None:
    """Plain, distributed-optimizer and overlapped runs of the same model report the same reduced gradients (bf16: to its rounding)."""
    tolerance = 0.05 if "bf16" in argv else 1e-6
    plain = pick(ran("")[0]["samples"][0], "grad_reduced", "reduced")
    other = pick(ran(argv)[0]["samples"][0], "grad_reduced", "reduced")
    assert set(plain) == set(other)
    whole = sum(s.norm**2 for s, _ in plain.values()) ** 0.5
    for name, (statistics, _) in plain.items():
        assert other[name][0].norm == pytest.approx(statistics.norm, rel=tolerance, abs=whole * tolerance * 0.1)


@pytest.mark.slow
@pytest.mark.framework
def test_reading_the_whole_buffer_would_be_wrong() -> None:
    """The test has teeth: under the distributed optimizer the norm of `main_grad` is far from the truth."""
    run = ran("--distopt")[0]
    worst = max(
        abs(run["naive"][0][name.partition(" ")[2]] - reference[0]) / (reference[0] + 1e-12)
        for name, reference in run["reference"][0].items()
    )
    assert worst > 0.2


@pytest.mark.framework
@pytest.mark.slow
def test_phases_follow_from_each_other() -> None:
    """unscaled = reduced / loss scale, clipped = unscaled * min(1, clip / norm), and the clipped norm of all parameters is at most
    the limit."""
    for argv, scale in (("--fp16 --distopt", 1024.0), ("--distopt", 1.0), ("", 1.0)):
        run = ran(argv)[0]
        samples, scalars = run["samples"][0], run["scalars"][0]
        reduced, unscaled, clipped = (pick(samples, "grad_reduced", phase) for phase in ("reduced", "unscaled", "clipped"))
        if scale != 1.0:
            assert scalars["loss_scale"] == scale
        factor = min(1.0, 1.0 / (scalars["grad_norm"] + 1e-6))
        assert set(unscaled) == set(clipped) == set(reduced)
        for name, (statistics, _) in reduced.items():
            assert unscaled[name][0].norm == pytest.approx(statistics.norm / scale, rel=1e-6, abs=1e-12)
            assert clipped[name][0].norm == pytest.approx(statistics.norm / scale * factor, rel=1e-5, abs=1e-12)


@pytest.mark.framework
def test_local_gradients_add_up() -> None:
    """Micro-batch gradients add up to the accumulated one, and the mean over ranks of the accumulated ones is the reduced one."""
    runs = ran("--distopt")
    for rank in runs:
        samples = rank["samples"][0]
        accumulated = pick(samples, "grad_unreduced", "accumulated")
        parts = [pick(samples, "grad_unreduced", "local", k) for k in (0, 1)]
        for name, (statistics, _) in accumulated.items():
            total = sum(part[name][0].mean for part in parts)
            assert statistics.mean == pytest.approx(total, rel=1e-4, abs=1e-8)
    reduced = pick(runs[0]["samples"][0], "grad_reduced", "reduced")
    for name, (statistics, _) in reduced.items():
        means = [pick(rank["samples"][0], "grad_unreduced", "accumulated")[name][0].mean for rank in runs]
        assert statistics.mean == pytest.approx(sum(means) / 2, rel=1e-4, abs=1e-8)


@pytest.mark.framework
@pytest.mark.parametrize("family", ["exp_avg", "exp_avg_sq", "param_origin", "param_updated"])
@pytest.mark.parametrize("argv", ["--distopt", "--distopt --overlap --overlap-param"])
def test_states_and_parameters_are_whole(family: str, argv: str) -> None:
    """Moments and parameters of a sharded optimizer are reported as the plain optimizer has them."""
    plain, sharded = (pick(ran(x)[1]["samples"][1], family) for x in ("", argv))
    assert set(plain) == set(sharded)
    for name, (statistics, _) in plain.items():
        assert sharded[name][0].count == statistics.count
        assert sharded[name][0].norm == pytest.approx(statistics.norm, rel=1e-5, abs=1e-9)


@pytest.mark.framework
def test_tensor_parallel_parameters_say_so() -> None:
    """A parameter that is cut over tensor-parallel ranks is marked as a shard of it, a replicated one is not."""
    reduced = pick(ran("--tp 2 --distopt")[0]["samples"][0], "grad_reduced", "reduced")
    marks = {name: extra.get("tensor_parallel") for name, (_, extra) in reduced.items()}
    assert marks["0 decoder.layers.0.mlp.linear_fc1.weight"] == "shard"
    assert marks["0 decoder.final_layernorm.weight"] is None
    assert reduced["0 decoder.layers.2.mlp.linear_fc1.weight"][1]["layer"] == 2


@pytest.mark.framework
def test_scalars_of_a_step() -> None:
    """Loss, gradient norm and learning rate of the step are in the frame."""
    scalars = ran("--distopt")[0]["scalars"][0]
    assert scalars["loss"] == scalars["lm_loss"] == pytest.approx(4.2, abs=0.5)
    assert scalars["grad_norm"] > 0
    assert scalars["learning_rate"] == 1e-2
    assert scalars["skipped"] == 0
