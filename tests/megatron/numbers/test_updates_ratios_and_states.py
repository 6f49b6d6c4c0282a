"""Updates, ratios, momentum agreement, states and histograms under Megatron: float64 from the optimizer's own states where they are
whole, and the same numbers where they are sharded."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from forkpool import run_ranks
from megatron_harness import probe_settings, run_gpt, train_gpt

from msprobe_engine.core.settings.schema import MonitorSettings
from msprobe_engine.core.statistics import histograms
from msprobe_engine.core.statistics.rows import Statistics
from msprobe_integrations.megatron.layout import unwrap_model
from msprobe_integrations.megatron.optimizers import leaves
from msprobe_integrations.torch.monitor.probe import TorchProbe
from msprobe_integrations.torch.parameters.find import find_source

MONITOR = MonitorSettings(
    gradients=True,
    gradient_phases=("clipped",),
    optimizer_states=True,
    updates=True,
    momentum_agreement=True,
    histograms=("update", "grad_reduced"),
)
Truth = dict[str, dict[str, np.ndarray]]
Key = tuple[str, int, str]


def states_of(chunks: list[Any], optimizer: Any) -> Truth:
    """Moments, number of updates and gradient of every parameter in float64; only where the optimizer holds whole parameters."""
    found: Truth = {}
    for stage, chunk in enumerate(chunks):
        for name, parameter in unwrap_model(chunk).named_parameters():
            main = getattr(parameter, "main_param", None)
            main = parameter if main is None else main
            for leaf in leaves(optimizer):
                state = leaf.optimizer.state.get(main, {})
                if "exp_avg" in state:
                    wide = {key: state[key].double().view(-1).numpy().copy() for key in ("exp_avg", "exp_avg_sq", "step")}
                    gradient = main.grad.double().view(-1).numpy().copy() if main.grad is not None else np.zeros(0)
                    found[f"{stage} {name}"] = {**wide, "gradient": gradient}
    return found


def spy(state: dict[str, Any], chunks: list[Any], optimizer: Any) -> None:
    """Keep the states around every update."""
    state["before"], state["after"] = [], []
    step = optimizer.step

    @functools.wraps(step)
    def looked() -> Any:
        state["before"].append(states_of(chunks, optimizer))
        result = step()
        state["after"].append(states_of(chunks, optimizer))
        return result

    optimizer.step = looked


def job(argv: str) -> dict[str, Any]:
    state, frames = run_gpt(argv, probe_settings(MONITOR), spy if "--distopt" not in argv else None)
    samples: list[dict[Key, tuple[Statistics, dict[str, Any]]]] = []
    bins: list[dict[Key, list[int]]] = []
    for frame in frames:
        samples.append({(r.source.family, r.source.vpp_stage, r.name): (r.statistics, dict(r.source.extra)) for r in frame.records()})
        drawn = [(s, s.extra["histogram"]) for s in frame.samples if "histogram" in s.extra]
        bins.append({(s.family, s.vpp_stage, s.name): histograms.counts(frame.rows, h["row"], h["kind"]).tolist() for s, h in drawn})
    return {"before": state.get("before"), "after": state.get("after"), "samples": samples, "bins": bins}


@functools.cache
def ran(argv: str) -> list[dict[str, Any]]:
    return run_ranks(2, job, f"--steps 2 --layers 2 --hidden 40 {argv}", timeout=240)


@pytest.mark.framework
@pytest.mark.parametrize(
    "argv", ["", "--bf16", pytest.param("--fp16", marks=pytest.mark.slow), "--ep 2 --experts 4", "--pp 2 --vpp 2 --layers 4 --untie"]
)
@pytest.mark.fast_cells("")
def test_updates_are_those_of_the_states(argv: str) -> None:
    """Update, ratio and agreement equal what float64 makes of the optimizer's own moments; agreement is with the moment before."""
    for rank in ran(argv):
        assert len(rank["samples"]) == 2
        for samples, before, after in zip(rank["samples"], rank["before"], rank["after"]):
            assert len(after) == len([key for key in samples if key[0] == "update"]) > 10
            for key, truth in after.items():
                stage, _, name = key.partition(" ")
                step = float(truth["step"][0])
                m, v = truth["exp_avg"] / (1 - 0.9**step), truth["exp_avg_sq"] / (1 - 0.999**step)
                update = samples["update", int(stage), name][0]
                assert update.norm == pytest.approx(np.linalg.norm(m / (np.sqrt(v) + 1e-8)), rel=1e-4, abs=1e-12)
                with np.errstate(invalid="ignore", divide="ignore"):
                    ratio = np.where(v > 0, m / np.sqrt(v), 0)
                assert samples["ratio", int(stage), name][0].norm == pytest.approx(np.linalg.norm(ratio), rel=1e-4, abs=1e-12)
                found = samples.get(("other", int(stage), name))
                assert (found is None) == (key not in before)
                if found is not None:
                    expected = (np.sign(truth["gradient"]) * np.sign(before[key]["exp_avg"])).mean() / 2 + 0.5
                    assert found[0].mean == pytest.approx(expected, abs=1e-6)


PAIRS = [
    ("", "--distopt"),
    pytest.param("", "--distopt --overlap --overlap-param", marks=pytest.mark.slow),
    pytest.param("--fp16", "--fp16 --distopt", marks=pytest.mark.slow),
    ("--ep 2 --experts 4", "--ep 2 --experts 4 --distopt"),
]


@pytest.mark.framework
@pytest.mark.parametrize(("plain", "sharded"), PAIRS)
@pytest.mark.fast_cells("---distopt")
def test_shards_add_up(plain: str, sharded: str) -> None:
    """Every derived family and histogram of the distributed optimizer is that of the plain one, for whole parameters, on every rank."""
    for one, other in zip(ran(plain), ran(sharded)):
        first, second = one["samples"][0], other["samples"][0]
        assert set(first) == set(second)
        for key, (statistics, _) in first.items():
            found, facts = second[key]
            assert facts.get("scope", "whole") == "whole"
            assert found.count == statistics.count
            if key[0] in ("exp_avg", "exp_avg_sq", "grad_reduced"):
                assert found.norm == pytest.approx(statistics.norm, rel=1e-3, abs=1e-6)
            else:  # an element whose gradient is noise has any sign
                assert found.mean == pytest.approx(statistics.mean, abs=0.05)
        for key, counts in one["bins"][0].items():
            assert sum(other["bins"][0][key]) == pytest.approx(sum(counts), rel=0.02, abs=2)


def replicas(argv: str) -> dict[str, list[tuple[str, int]]]:
    found: dict[str, list[tuple[str, int]]] = {}
    _, chunks, optimizer = train_gpt.build(train_gpt.arguments(["--quiet", *argv.split()]))
    probe = TorchProbe(probe_settings(MONITOR))
    source = find_source(probe, chunks, optimizer)
    assert source is not None
    for piece in source.pieces:
        groups = source.find_replicas(piece)
        found[f"{piece.vpp_stage} {piece.name}"] = [(r.label, torch.distributed.get_world_size(r.group)) for r in groups]
    probe.close()
    return found


LAYER, EMBEDDING = "0 decoder.layers.0", "0 embedding.word_embeddings.weight"


@pytest.mark.framework
@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("", {f"{LAYER}.mlp.linear_fc1.weight": [("dp", 2)], EMBEDDING: [("dp", 2)]}),
        ("--distopt", {f"{LAYER}.mlp.linear_fc1.weight": [("dp", 2)]}),
        (
            "--tp 2",
            {
                f"{LAYER}.mlp.linear_fc1.weight": [],
                f"{LAYER}.mlp.linear_fc2.bias": [("tp", 2)],
                f"{LAYER}.input_layernorm.weight": [("tp", 2)],
            },
        ),
        ("--pp 2", {f"{LAYER}.mlp.linear_fc1.weight": []}),
        ("--ep 2 --experts 4", {f"{LAYER}.mlp.router.weight": [("dp", 2)], f"{LAYER}.input_layernorm.weight": [("dp", 2)]}),
    ],
)
def test_which_ranks_hold_the_same(argv: str, expected: dict[str, list[tuple[str, int]]]) -> None:
    """Data parallelism copies everything but experts of expert parallelism, tensor parallelism what is not cut; tied embeddings are on
    the first and the last stage."""
    runs = run_ranks(2, replicas, argv)
    for name, groups in expected.items():
        assert runs[0][name] == groups, (argv, name)
    if argv == "--pp 2":
        assert runs[0][EMBEDDING] == runs[1]["0 output_layer.weight"] == [("embedding", 2)]
    if "--ep" in argv:
        experts = [groups for name, groups in runs[0].items() if "experts" in name]
        assert experts
        assert all(groups == [] for groups in experts)
