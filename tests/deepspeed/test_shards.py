"""The tables of DeepSpeed's optimizers, as the probe reads them, against DeepSpeed's own gathers."""

from __future__ import annotations

import contextlib
from typing import Any

import deepspeed_harness as harness
import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state
from forkpool import run_ranks

from msprobe_integrations.deepspeed.shards import Shards, kind_of

OFFLOAD = {"zero": {"offload_optimizer": {"device": "cpu"}}, "zero_force_ds_cpu_optimizer": False}
FP32_SUM = {"data_types": {"grad_accum_dtype": "fp32"}}
# With those of `test_families` every stage has every dtype in the fast tier.
CASES: list[Any] = [
    (0, "fp32", 2, {}, "Shards"),
    (0, "bf16", 2, {}, "UnfusedShards"),
    pytest.param(0, "fp16", 1, {}, "UnfusedShards", marks=pytest.mark.slow),
    (1, "fp32", 1, {}, "ZeroShards"),
    pytest.param(1, "bf16", 2, {}, "ZeroShards", marks=pytest.mark.slow),
    (1, "bf16", 2, FP32_SUM, "Bf16Shards"),
    pytest.param(1, "fp16", 2, {}, "ZeroShards", marks=pytest.mark.slow),
    pytest.param(2, "fp32", 2, {}, "ZeroShards", marks=pytest.mark.slow),
    (2, "bf16", 2, {"zero": {"overlap_comm": True}}, "ZeroShards"),
    pytest.param(2, "bf16", 2, FP32_SUM, "ZeroShards", marks=pytest.mark.slow),
    (2, "bf16", 2, OFFLOAD, "ZeroShards"),
    (2, "fp16", 1, {}, "ZeroShards"),
    pytest.param(3, "fp32", 1, {}, "Zero3Shards", marks=pytest.mark.slow),
    pytest.param(3, "bf16", 2, {}, "Zero3Shards", marks=pytest.mark.slow),
    (3, "bf16", 2, OFFLOAD, "Zero3Shards"),
    (3, "fp16", 2, {"zero": {"sub_group_size": 40}}, "Zero3Shards"),
]


def put_together(shards: Shards, parameter: torch.Tensor, part: torch.Tensor | None) -> torch.Tensor:
    """The whole from the parts of all ranks: every element comes from exactly one of them, or the sum shows it."""
    if part is None:
        return torch.zeros(0)  # on all ranks or on none
    if shards.members(parameter) is None:
        return part.float().view(-1)
    fragment = shards.fragments[parameter]
    whole = torch.zeros(shards.numel(parameter))
    whole[fragment.lo : fragment.hi] = part.float().view(-1)
    dist.all_reduce(whole)
    return whole


def differences(stage: int, dtype: str, accumulation: int, more: dict[str, Any]) -> tuple[str, list[Any], int]:
    engine = harness.engine_of(harness.config(stage, dtype, accumulation, 0.05, **more))
    shards = kind_of(engine.optimizer)(engine.optimizer)
    wrong: list[Any] = []
    compared = 0

    def compare(what: str, name: str, parameter: torch.Tensor, mine: torch.Tensor | None, theirs: torch.Tensor | None) -> None:
        nonlocal compared
        whole = put_together(shards, parameter, mine)
        if theirs is None:
            return
        compared += 1
        if mine is None:  # this rank's optimizer saw no gradient
            whole = torch.zeros(theirs.numel())
        if not torch.equal(whole, theirs.detach().float().view(-1)):
            wrong.append((what, name, shards.fragments[parameter]))

    for x in harness.batches(dtype, 3 * accumulation):
        engine.backward(engine(x))
        boundary = engine.is_gradient_accumulation_boundary()
        named = list(engine.module.named_parameters())
        for name, parameter in named if boundary else ():
            compare("gradient", name, parameter, shards.read_reduced(parameter), safe_get_full_grad(parameter))
        engine.step()
        for name, parameter in named if boundary else ():
            compare("master", name, parameter, shards.main(parameter), safe_get_full_fp32_param(parameter))
            for key in ("exp_avg", "exp_avg_sq"):
                theirs = safe_get_full_optimizer_state(parameter, key)
                compare(key, name, parameter, shards.states(parameter).get(key), theirs)
            with deepspeed_whole(parameter) as whole:
                compare("value", name, parameter, shards.value(parameter), (parameter if whole is None else whole).detach().clone())
    return type(shards).__name__, wrong, compared


def deepspeed_whole(parameter: torch.Tensor) -> Any:
    """A context with the whole parameter."""
    if hasattr(parameter, "ds_id"):
        return harness.deepspeed.zero.GatheredParameters(parameter)
    return contextlib.nullcontext(parameter.detach())


@pytest.mark.fast_cells("0-fp32-2-more0-Shards", "0-bf16-2-more1-UnfusedShards")
@pytest.mark.framework
@pytest.mark.parametrize(("stage", "dtype", "accumulation", "more", "kind"), CASES)
def test_parts_are_those_of_the_whole(stage: int, dtype: str, accumulation: int, more: dict[str, Any], kind: str) -> None:
    """Reduced gradients, master copies, moments and parameters, put together from the ranks' parts at the ranges the probe reads, are
    bit for bit what DeepSpeed gathers itself."""
    for found, wrong, compared in run_ranks(2, differences, stage, dtype, accumulation, more):
        assert found == kind
        assert wrong == []
        assert compared >= (12 if stage == 0 else 60)


def round_robin(stage: int, on: bool) -> dict[str, torch.Tensor]:
    engine = harness.engine_of(harness.config(stage, "bf16", 2, zero={"round_robin_gradients": on}))
    shards = kind_of(engine.optimizer)(engine.optimizer)
    found: dict[str, torch.Tensor] = {}
    for number, x in enumerate(harness.batches("bf16", 2)):
        engine.backward(engine(x))
        for name, parameter in engine.module.named_parameters() if number else ():
            found[name] = put_together(shards, parameter, shards.read_reduced(parameter))
        engine.step()
    for name, parameter in engine.module.named_parameters():
        found[f"{name} master"] = put_together(shards, parameter, shards.main(parameter))
        found[f"{name} exp_avg"] = put_together(shards, parameter, shards.states(parameter)["exp_avg"])
    return {name: tensor.numpy() for name, tensor in found.items()}


@pytest.mark.framework
@pytest.mark.parametrize("stage", [1, 2])
def test_round_robin_order(stage: int) -> None:
    """With gradients dealt out round-robin (where DeepSpeed's own gathers do not know the order) all numbers are those of the run
    without."""
    plain, dealt = (run_ranks(2, round_robin, stage, on)[1] for on in (False, True))
    assert set(plain) == set(dealt)
    for name, whole in plain.items():
        assert (whole == dealt[name]).all(), name


def one_each(stage: int) -> list[tuple[int, bool]]:
    """Elements of each parameter's gradient on this rank, of a model with as many parameters as ranks; whether they are DeepSpeed's."""
    if not dist.is_initialized():
        harness.deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(7, 8, bias=False), torch.nn.Linear(8, 7, bias=False))
    engine, *_ = harness.deepspeed.initialize(model=net, model_parameters=net.parameters(), config=harness.config(stage, "fp32"))
    shards = kind_of(engine.optimizer)(engine.optimizer)
    engine.backward(engine(harness.batches("fp32", 1)[0]).pow(2).mean())
    found = []
    for parameter in engine.module.parameters():
        part, theirs = shards.read_reduced(parameter), safe_get_full_grad(parameter)
        assert part is not None
        found.append((part.numel(), torch.equal(put_together(shards, parameter, part), theirs.view(-1))))
    return found


@pytest.mark.framework
def test_a_rank_that_has_one_parameter_alone() -> None:
    """Of the others it gives empty tensors."""
    first, second = run_ranks(2, one_each, 1)
    assert first == [(56, True), (0, True)]
    assert second == [(0, True), (56, True)]
