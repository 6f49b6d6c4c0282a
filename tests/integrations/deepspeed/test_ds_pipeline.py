"""The pipeline engine: two stages, their layers, micro batches that alternate, and what they send each other."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import deepspeed_harness as harness
import ds_jobs as jobs
import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from forkpool import run_ranks
from restored import snapshot
from torch import nn

from msprobe_engine.settings.schema import MonitorSettings

pytestmark = pytest.mark.framework
LAYOUT = "PP 2, 2 ranks"
SIZES = (7, 13, 13, 5)
MICRO = 4
WATCHED = MonitorSettings(activations=True, activation_gradients=True, parameters=True, optimizer_states=True, collectives=True)


def layers() -> list[Any]:
    specs: list[Any] = []
    for one, other in pairwise(SIZES):
        specs += [LayerSpec(nn.Linear, one, other), LayerSpec(nn.Tanh)]
    return specs[:-1]


def pipeline(dtype: str = "fp32", **more: Any) -> Any:
    """An engine of two stages: Linear, Tanh, Linear | Tanh, Linear."""
    if not harness.deepspeed.comm.is_initialized():
        harness.deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(0)
    net = PipelineModule(layers(), num_stages=2, loss_fn=nn.MSELoss(), partition_method="uniform", seed_layers=True)
    conf = harness.config(0, dtype, MICRO, 0.05, **more)
    engine, *_ = harness.deepspeed.initialize(model=net, model_parameters=list(net.parameters()), config=conf)
    return engine


def data(seed: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(4, SIZES[0], generator=generator), torch.randn(4, SIZES[-1], generator=generator)


def run(sections: dict[str, Any] | None) -> Any:
    with tempfile.TemporaryDirectory() as directory:
        engine = pipeline()
        callback = jobs.follow(engine, None if sections is None else jobs.settings(directory, **sections))
        batches = data()
        losses = [float(engine.train_batch(data_iter=batches)), float(engine.eval_batch(data_iter=data(9)))]
        losses.append(float(engine.train_batch(data_iter=batches)))
        frames: list[Any] = []
        if callback is not None:
            assert callback.observer.probe is not None
            probe = callback.observer.probe
            callback.close()
            frames = probe.frames
        weights = {n: p.detach().clone().numpy().tobytes() for n, p in engine.module.named_parameters()}
        return losses, weights, frames, jobs.dumps_in(directory), engine.stage_id


def both(sections: dict[str, Any]) -> Any:
    plain, seen = run(None), run(sections)
    assert seen[:2] == plain[:2]
    frames = []
    for frame in seen[2]:
        sent = sorted({(s.name, s.micro_step) for s in frame.samples if s.family in ("other", "p2p")})
        frame.samples[:] = [s for s in frame.samples if (s.name, s.micro_step) not in sent]
        frames.append((frame.step, frame.scalars, {} if frame.entries else harness.samples_of(frame), sent))
    return seen[0], frames, seen[3], seen[4]


def truth() -> dict[str, Any]:
    """One process without DeepSpeed, in double precision: gradients of the mean loss, outputs per micro batch, the loss."""
    torch.manual_seed(0)
    found: dict[str, Any] = {"gradients": {}, "outputs": {}}
    modules: list[nn.Module] = []
    for number, spec in enumerate(layers()):
        torch.manual_seed(1234 + number)  # as PipelineModule seeds its layers
        modules.append(spec.build())
    net = nn.Sequential(*modules).double()
    batches = data()
    losses = []
    for micro in range(MICRO):
        x, y = next(batches)
        out = x.double()
        for number, module in enumerate(net):
            out = module(out)
            found["outputs"][number, micro] = float(out.detach().norm())
        loss = nn.functional.mse_loss(out, y.double())
        (loss / MICRO).backward()
        losses.append(float(loss.detach()))
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None
        found["gradients"][name] = float(parameter.grad.norm())
    return {**found, "loss": sum(losses) / MICRO}


def test_monitor() -> None:
    """Same bits; each stage has its own layers under DeepSpeed's names, every micro batch under its own number, and the values of one
    process in float64; the evaluation between two steps is not seen."""
    expected = truth()
    for losses, frames, _, stage in run_ranks(2, both, {"monitor": WATCHED}):
        assert [frame[0] for frame in frames] == [0, 1]
        for loss, (_, scalars, *_) in zip((losses[0], losses[2]), frames):
            assert scalars["loss"] == pytest.approx(loss, rel=1e-6)
            assert scalars["learning_rate"] == 0.01
        assert losses[0] == pytest.approx(expected["loss"], rel=1e-5)
        samples = frames[0][2]
        mine = (0, 2) if stage == 0 else (4,)
        gradients = {k[2]: v[0].norm for k, v in samples.items() if k[0] == "grad_reduced"}
        assert gradients == {
            name: pytest.approx(value, rel=1e-5) for name, value in expected["gradients"].items() if int(name.partition(".")[0]) in mine
        }
        outputs = {}
        for (family, _, name, micro), (statistics, _) in samples.items():
            layer, _, end = name.rpartition(".")
            if family == "actv" and end.startswith("output") and layer.isdigit():
                outputs[int(layer), micro] = statistics.norm
        layers_here = range(3) if stage == 0 else range(3, 5)
        assert set(outputs) == {(layer, micro) for layer in layers_here for micro in range(MICRO)}
        for key, norm in outputs.items():
            assert norm == pytest.approx(expected["outputs"][key], rel=1e-5), key
        arriving = {(k[2], k[3]) for k in samples if k[0] == "actv_grad"}
        assert {micro for _, micro in arriving} == set(range(MICRO))
        assert {"recv"} <= {name for name, _ in frames[0][3]}, frames[0][3]


@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
def test_dump(level: str) -> None:
    """Same bits; every layer has one record per micro batch, and sends and receives are there at the levels that have calls."""
    for rank, (_, _, dumps, stage) in enumerate(run_ranks(2, both, {"dump": jobs.dump_of(level)})):
        names = set(dumps[f"step0/rank{rank}"])
        if level != "L1":
            layer = 2 if stage == 0 else 4
            for way in ("forward", "backward"):
                assert {n for n in names if n.startswith(f"Module.{layer}.Linear.{way}.")} == {
                    f"Module.{layer}.Linear.{way}.{i}" for i in range(MICRO)
                }
        if level != "L0":
            calls = {n.split(".")[1] for n in names if n.startswith("Distributed.")}
            assert {"send", "recv"} <= calls, calls


def left_behind() -> list[str]:
    engine = pipeline()
    batches = data()
    engine.train_batch(data_iter=batches)
    before = snapshot(engine, engine.module, engine.optimizer, engine.monitor)
    callback = jobs.follow(engine, jobs.settings(monitor=WATCHED))
    engine.train_batch(data_iter=batches)
    assert callback is not None
    callback.close()
    return before.changed(lambda place: place.startswith("process.random"))  # the layers seed them as they run


def test_nothing_is_left_behind() -> None:
    """Engine and class use the class's table of instructions again."""
    assert run_ranks(2, left_behind) == [[], []]
