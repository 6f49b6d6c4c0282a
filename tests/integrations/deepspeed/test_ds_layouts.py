"""ZeRO 0 to 3 followed by a callback: the same bits as without, the values of a run without DeepSpeed, and nothing left behind."""

from __future__ import annotations

from typing import Any

import deepspeed_harness as harness
import ds_jobs as jobs
import pytest
import torch
from forkpool import run_ranks
from restored import snapshot

from msprobe_engine.settings.schema import MonitorSettings, ReplicaCheckSettings

pytestmark = pytest.mark.framework
LAYOUTS: dict[int, tuple[str, dict[str, Any]]] = {
    0: ("fp32", {}),
    1: ("fp16", {}),
    2: ("bf16", {"zero": {"overlap_comm": True}}),
    3: ("bf16", {}),
}
FULL = MonitorSettings(
    activations=True,
    activation_gradients=True,
    gradients=True,
    parameters=True,
    optimizer_states=True,
    updates=True,
    collectives=True,
    replica_check=ReplicaCheckSettings(interval=1, gradients=True),
)
WAYS: dict[str, dict[str, Any]] = {
    "monitor": {"monitor": FULL},
    "L0": {"dump": jobs.dump_of("L0")},
    "L1": {"dump": jobs.dump_of("L1")},
    "mix": {"dump": jobs.dump_of("mix")},
}


def several(stage: int, ways: tuple[str, ...]) -> tuple[Any, dict[str, tuple[Any, int, int]]]:
    """Bits without a probe, and with each way: bits, frames, dumps."""
    dtype, more = LAYOUTS[stage]

    def once(sections: dict[str, Any] | None) -> jobs.Run:
        torch.manual_seed(3)
        return jobs.train(harness.config(stage, dtype, 2, 0.05, **more), dtype, 2, sections)

    found = {way: once(WAYS[way]) for way in ways}
    return once(None).bits, {way: (run.bits, len(run.frames), len(run.dumps)) for way, run in found.items()}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_same_bits(stage: int) -> None:
    """Losses, weights and the random state are the same bits with everything watched and with every level dumped as without a probe."""
    for plain, found in run_ranks(2, several, stage, tuple(WAYS), timeout=120):
        for way, (bits, frames, dumps) in found.items():
            assert bits == plain, way
            assert (frames, dumps) == (2, 1 if way != "monitor" else 0), way


def reference(steps: int = 1) -> dict[str, tuple[float, float, float]]:
    """Without DeepSpeed, in double precision, on the batches of both ranks: norms of gradient, parameter and first moment."""
    torch.manual_seed(0)
    net = harness.Net().double()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.01)
    generators = [torch.Generator().manual_seed(100 + rank) for rank in range(2)]
    found: dict[str, tuple[float, float, float]] = {}
    for _ in range(steps):
        optimizer.zero_grad()
        for generator in generators:
            (net(torch.randn(4, 7, generator=generator).double()) / 2).backward()
        before = {n: float(p.detach().norm()) for n, p in net.named_parameters()}
        optimizer.step()
        for name, p in net.named_parameters():
            if p.grad is not None:
                found[name] = (float(p.grad.norm()), before[name], float(optimizer.state[p]["exp_avg"].norm()))
    return found


def plain_loop(engine: Any, data: list[torch.Tensor]) -> list[float]:
    for x in data:
        engine.backward(engine(x))
        engine.step()
    return []


def watched(stage: int) -> dict[tuple[str, str], float]:
    run = jobs.train(harness.config(stage, "fp32"), "fp32", 1, {"monitor": jobs.MONITOR}, plain_loop)
    (frame,) = run.frames
    return {(key[0], key[2]): value[0].norm for key, value in harness.samples_of(frame).items() if key[0] != "actv"}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_values_are_those_of_the_whole_in_double_precision(stage: int) -> None:
    """Gradients, parameters and states, whatever pieces they are in, have the norms of a run without DeepSpeed in float64."""
    truth = reference()
    for found in run_ranks(2, watched, stage):
        for name, (gradient, parameter, moment) in truth.items():
            assert found["grad_reduced", name] == pytest.approx(gradient, rel=1e-5), name
            assert found["param_origin", name] == pytest.approx(parameter, rel=1e-6), name
            assert found["exp_avg exp_avg" if ("exp_avg exp_avg", name) in found else "exp_avg", name] == pytest.approx(moment, rel=1e-5), (
                name
            )


def dumped(stage: int, level: str) -> Any:
    run = jobs.train(harness.config(stage, "fp32"), "fp32", 1, {"dump": jobs.dump_of(level)}, plain_loop)
    return run.dumps[f"step0/rank{harness.deepspeed.comm.get_rank()}"]


def truth_of_rank(rank: int) -> dict[str, tuple[float, float, float]]:
    """Per module: norms of output, weight and of the gradient of its output, without DeepSpeed."""
    torch.manual_seed(0)
    net = harness.Net()
    outputs: dict[str, torch.Tensor] = {}
    for name, module in net.named_children():
        module.register_forward_hook(lambda _m, _i, out, name=name: (out.retain_grad(), outputs.__setitem__(name, out))[0])
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(100 + rank))
    net(x).backward()
    found = {}
    for name, out in outputs.items():
        assert out.grad is not None
        norms = [t.detach().norm() for t in (out, getattr(net, name).weight, out.grad)]
        found[name] = (float(norms[0]), float(norms[1]), float(norms[2]))
    return found


@pytest.mark.parametrize("level", ["L0", "mix"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_dump_has_the_modules_of_the_users_model(stage: int, level: str) -> None:
    """Outputs, weights and gradients of modules are those of the model without DeepSpeed; under ZeRO 3 weights are seen whole."""
    for rank, data in enumerate(run_ranks(2, dumped, stage, level)):
        for name, (output, weight, gradient) in truth_of_rank(rank).items():
            forward, backward = data[f"Module.{name}.Linear.forward.0"], data[f"Module.{name}.Linear.backward.0"]
            assert forward["output"][0]["Norm"] == pytest.approx(output, rel=1e-6)
            assert forward["parameters"]["weight"]["Norm"] == pytest.approx(weight, rel=1e-6)
            assert backward["input"][0]["Norm"] == pytest.approx(gradient, rel=1e-5)


def activations(stage: int) -> tuple[int, dict[str, float]]:
    run = jobs.train(harness.config(stage, "fp32"), "fp32", 1, {"monitor": MonitorSettings(activations=True)}, plain_loop)
    (frame,) = run.frames
    found = {k[2]: v[0].norm for k, v in harness.samples_of(frame).items() if k[0] == "actv" and "output" in k[2]}
    return harness.deepspeed.comm.get_rank(), found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_activations(stage: int) -> None:
    """Activations have the names of the user's modules and the values of the model without DeepSpeed."""
    for rank, found in run_ranks(2, activations, stage):
        for name, (output, _, _) in truth_of_rank(rank).items():
            (norm,) = [value for key, value in found.items() if key.startswith((f"{name}.", f"{name}:", f"0:{name}."))]
            assert norm == pytest.approx(output, rel=1e-6)


def apis(stage: int) -> list[str]:
    return list(dumped(stage, "L1"))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_api_dump(stage: int) -> None:
    """Level L1 has the calls of the model and of DeepSpeed's work on it; ZeRO 3 replaces linear by a function of its own."""
    names = run_ranks(2, apis, stage)[0]
    linear = "Autograd.LinearFunctionForZeroStage3" if stage == 3 else "Functional.linear"
    assert [n for n in names if n.startswith(linear) and n.endswith("forward")] == [f"{linear}.{i}.forward" for i in range(3)]
    assert {"Torch.tanh.0.forward", "Torch.tanh.1.forward", "Tensor.pow.0.forward", "Tensor.mean.0.forward"} <= set(names)
    assert not [n for n in names if n.startswith("Tensor.clone")]  # nothing of the observer's own


def left_behind(stage: int) -> list[str]:
    dtype, more = LAYOUTS[stage]
    engine = harness.engine_of(harness.config(stage, dtype, 1, 0.05, **more))
    data = harness.batches(dtype, 3)
    engine.backward(engine(data[0]))
    engine.step()
    before = snapshot(engine, engine.module, engine.optimizer, engine.monitor)
    callback = jobs.follow(engine, jobs.settings(monitor=FULL))
    engine.backward(engine(data[1]))
    engine.step()
    assert callback is not None
    callback.close()
    return before.changed()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_nothing_is_left_behind(stage: int) -> None:
    """Every name of DeepSpeed and torch, of the engine, its optimizer and its model is the same object again after `close`."""
    assert run_ranks(2, left_behind, stage) == [[], []]
