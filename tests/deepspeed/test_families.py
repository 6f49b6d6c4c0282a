"""Every family of the parameter side under every stage, against a slow float64 reference from gathered tensors."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import deepspeed_harness as harness
import numpy as np
import numpy.typing as npt
import pytest
import torch
from deepspeed.utils import safe_get_full_grad, safe_get_full_optimizer_state
from every_family import PARAMETER_FAMILIES
from forkpool import run_ranks

from msprobe_engine.core.statistics.rows import Statistics
from msprobe_engine.probe.sinks.memory import MemorySink

MONITOR = replace(PARAMETER_FAMILIES, micro_batch_gradients=True, updates=True, momentum_agreement=True, digest=True)
CLIP = 0.05
FP32_SUM = {"data_types": {"grad_accum_dtype": "fp32"}}
OFFLOAD = {"zero": {"offload_optimizer": {"device": "cpu"}}, "zero_force_ds_cpu_optimizer": False}
Case = tuple[int, str, int, float, str]
# With those of `test_shards` every stage has every dtype in the fast tier.
CASES: list[Any] = [
    (0, "fp32", 2, CLIP, ""),
    (0, "bf16", 1, CLIP, ""),
    (0, "fp16", 2, 0.0, ""),
    pytest.param((1, "fp32", 2, CLIP, ""), marks=pytest.mark.slow),
    pytest.param((1, "bf16", 2, 0.0, ""), marks=pytest.mark.slow),
    (1, "bf16", 2, CLIP, "fp32 sum"),
    (1, "fp16", 2, CLIP, ""),
    (2, "fp32", 1, 0.0, ""),
    pytest.param((2, "bf16", 2, CLIP, "fp32 sum"), marks=pytest.mark.slow),
    pytest.param((2, "fp16", 2, CLIP, ""), marks=pytest.mark.slow),
    (2, "bf16", 2, CLIP, "offload"),
    (3, "fp32", 2, CLIP, ""),
    (3, "bf16", 2, 0.0, ""),
    pytest.param((3, "fp16", 2, CLIP, ""), marks=pytest.mark.slow),
    pytest.param((3, "bf16", 2, CLIP, "offload"), marks=pytest.mark.slow),
]
Array = npt.NDArray[np.float64]


def wide(tensor: torch.Tensor) -> Array:
    return tensor.detach().double().view(-1).numpy()


def whole_parameter(parameter: torch.Tensor) -> Array:
    if not hasattr(parameter, "ds_id"):
        return wide(parameter)
    with harness.deepspeed.zero.GatheredParameters([parameter]):
        return wide(parameter.data).copy()


def state_of(engine: Any, parameter: torch.Tensor, key: str) -> Array | None:
    """A state of the whole parameter; None before the first update."""
    optimizer = engine.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    if not inner.state:
        return None
    if engine.zero_optimization_stage():
        return wide(safe_get_full_optimizer_state(parameter, key)).copy()
    if hasattr(optimizer, "fp32_groups"):
        copies = zip(optimizer.fp16_groups[0], optimizer.fp32_groups[0])
        parameter = next(master for of, master in copies if of is parameter)
    return wide(inner.state[parameter][key]).copy()


def steps_taken(engine: Any) -> float:
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    return float(next(iter(inner.state.values()))["step"])


def job(case: Case) -> dict[str, Any]:
    """Two updates; per update the samples, the scalars and the reference."""
    stage, dtype, accumulation, clip, extra = case
    more = {"": {}, "fp32 sum": FP32_SUM, "offload": OFFLOAD}[extra]
    engine = harness.engine_of(harness.config(stage, dtype, accumulation, clip, **more))
    sink = MemorySink()
    probe = harness.probe_of(MONITOR, sink)
    named = list(engine.module.named_parameters())
    local: dict[str, list[Array]] = {}
    for name, parameter in named:
        parameter.register_hook(lambda g, name=name: local.setdefault(name, []).append(wide(g.float()).copy()))
    probe.attach(engine, engine.optimizer)
    references: list[dict[str, dict[str, Any]]] = []
    reference: dict[str, dict[str, Any]] = {}
    for number, x in enumerate(harness.batches(dtype, 2 * accumulation)):
        if number % accumulation == 0:
            probe.begin_step(number // accumulation)
        engine.backward(engine(x))
        boundary = engine.is_gradient_accumulation_boundary()
        for name, parameter in named if boundary else ():
            gradient = safe_get_full_grad(parameter)
            reference[name] = {
                "reduced": wide(gradient) if gradient is not None else None,
                "before": whole_parameter(parameter),
                "m before": state_of(engine, parameter, "exp_avg"),
            }
        engine.step()
        for name, parameter in named if boundary else ():
            reference[name] |= {
                "after": whole_parameter(parameter),
                "exp_avg": state_of(engine, parameter, "exp_avg"),
                "exp_avg_sq": state_of(engine, parameter, "exp_avg_sq"),
                "local": local.pop(name, []),
                "step": steps_taken(engine),
            }
        if boundary:
            probe.end_step()
            references.append(reference)
            reference = {}
    probe.close()
    return {"samples": [harness.samples_of(f) for f in sink.frames], "scalars": [f.scalars for f in sink.frames], "reference": references}


@functools.cache
def ran(case: Case) -> list[dict[str, Any]]:
    return run_ranks(2, job, case)


def same(statistics: Statistics, expected: Array, relative: float = 1e-6) -> None:
    norm = float(np.sqrt((expected**2).sum()))
    assert statistics.count == expected.size
    assert statistics.norm == pytest.approx(norm, rel=relative, abs=1e-30)
    assert statistics.mean * expected.size == pytest.approx(expected.sum(), rel=relative, abs=relative * (norm + 1e-30) * 10)
    assert statistics.min == pytest.approx(expected.min(), rel=relative, abs=1e-30)
    assert statistics.max == pytest.approx(expected.max(), rel=relative, abs=1e-30)


def each(case: Case) -> Any:
    """Per rank and update: samples, scalars, reference of every parameter."""
    for rank in ran(case):
        assert len(rank["samples"]) == len(rank["reference"]) == 2
        for samples, scalars, reference in zip(rank["samples"], rank["scalars"], rank["reference"]):
            for name, truth in reference.items():
                yield samples, scalars, name, truth, reference


@pytest.mark.fast_cells("(0, 'fp32', 2, 0.05, '')", "(0, 'bf16', 1, 0.05, '')")
@pytest.mark.framework
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients(case: Case) -> None:
    """The reduced gradient is what DeepSpeed gathers itself; where it clips, the clipped one is that divided by the loss scale and by
    max(1, norm / limit), else the unscaled one that divided by the scale. Shards are merged: the statistics are of the whole."""
    for samples, scalars, name, truth, _ in each(case):
        if truth["reduced"] is None:
            continue
        key = ("grad_reduced", "reduced", name, -1)
        if not truth["reduced"].any() and key not in samples:
            continue  # the optimizer has seen no gradient of it
        same(samples[key][0], truth["reduced"])
        assert samples[key][1].get("scope") == ("whole" if case[0] else None)
        phase = "clipped" if case[3] else "unscaled"
        scale = scalars.get("loss_scale", 1.0)
        norm = scalars["grad_norm"]
        factor = scale * max(1.0, (norm + 1e-6) / case[3]) if case[3] else scale
        same(samples["grad_reduced", phase, name, -1][0], truth["reduced"] / factor, 1e-2 if case[0] == 0 and case[1] == "bf16" else 2e-5)
        other = {"clipped": "unscaled", "unscaled": "clipped"}[phase]
        assert ("grad_reduced", other, name, -1) not in samples


@pytest.mark.framework
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_before_the_reduction(case: Case) -> None:
    """Each micro batch's gradient is this rank's own; where DeepSpeed adds them up before it reduces, the sum is sampled as
    accumulated, elsewhere there is none."""
    sums = case[0] == 0 or case[0] == 1
    for samples, _, name, truth, _ in each(case):
        for number, expected in enumerate(truth["local"]):
            same(samples["grad_unreduced", "local", name, number][0], expected)
        assert len(truth["local"]) == (0 if name.startswith("unused") else case[2])
        found = samples.get(("grad_unreduced", "accumulated", name, -1))
        assert (found is not None) == (sums and bool(truth["local"]))
        if found is not None:
            same(found[0], np.sum(truth["local"], 0), 1e-6 if case[1] == "fp32" or case[4] else 2e-2)


@pytest.mark.framework
@pytest.mark.parametrize("case", CASES, ids=str)
def test_parameters_and_states(case: Case) -> None:
    """Parameters before and after the update and the moments after it are those of the whole."""
    for samples, _, name, truth, _ in each(case):
        same(samples["param_origin", "", name, -1][0], truth["before"])
        same(samples["param_updated", "", name, -1][0], truth["after"])
        for key in ("exp_avg", "exp_avg_sq"):
            same(samples[key, "", name, -1][0], truth[key])


@pytest.mark.framework
@pytest.mark.parametrize("case", CASES, ids=str)
def test_updates_and_agreement(case: Case) -> None:
    """Update, ratio of the moments and sign agreement are those computed in float64 from the whole states; agreement is with the moment
    before the update, and there is none in the first one (an optimizer that DeepSpeed has stepped on zeros has half)."""
    for samples, _, name, truth, _ in each(case):
        m, v = truth["exp_avg"] / (1 - 0.9 ** truth["step"]), truth["exp_avg_sq"] / (1 - 0.999 ** truth["step"])
        if truth["reduced"] is None or not truth["reduced"].any():
            continue
        same(samples["update", "", name, -1][0], m / (np.sqrt(v) + 1e-8), 1e-4)
        same(samples["ratio", "", name, -1][0], m / np.sqrt(v), 1e-4)
        found = samples.get(("other", "", name, -1))
        assert (found is None) == (truth["m before"] is None)
        if found is not None:
            expected = (np.sign(truth["reduced"]) * np.sign(truth["m before"])).mean() / 2 + 0.5
            assert found[0].mean == pytest.approx(expected, abs=1e-6)
            assert found[0].count == 1
            assert found[1]["tag"] == "mg_direction"
