"""Optimizers, parameters and settings out of the ordinary; and a training that does not notice any of it."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import parameter_cases as pc
import pytest
import torch
import torch.distributed as dist
from forkpool import run_ranks
from torch import nn

from msprobe_engine.core.records import Frame
from msprobe_engine.core.statistics import histograms

pytestmark = pytest.mark.framework


def step(model: nn.Module, *optimizers: torch.optim.Optimizer, number: int = 0) -> None:
    """One update, gradients left where they are."""
    dtype = next(model.parameters()).dtype
    for optimizer in optimizers:
        optimizer.zero_grad()
    model(pc.data(number, dtype=dtype)).float().square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()


def one_step(model: nn.Module, *optimizers: torch.optim.Optimizer, **monitor: Any) -> Frame:
    """The second step of a training."""
    probe = pc.probe(**monitor)
    with pc.closing(probe) as frames:
        probe.attach(model, list(optimizers) if len(optimizers) > 1 else optimizers[0])
        for number in range(2):
            probe.begin_step(number)
            step(model, *optimizers, number=number)
            probe.end_step()
    return frames[1]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        self.second = nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def test_tied_weights() -> None:
    """A parameter with two names is one parameter: one row, its gradient the sum over both uses."""
    model = Tied()
    frame = one_step(model, pc.optimizer("sgd", model.parameters()), unreduced_gradients=True, micro_batch_gradients=True)
    truth = pc.whole(model.first.weight.grad)
    seen = pc.samples(frame)
    assert set(seen) == {
        ("grad_unreduced", "first.weight", "local", "0"),
        ("grad_unreduced", "first.weight", "accumulated"),
        ("grad_reduced", "first.weight", "reduced"),
    }
    for key, sample in seen.items():
        pc.assert_same(sample, truth, key)


def test_two_optimizers() -> None:
    """Each optimizer has its own parameters, once, with its own states; a parameter that nobody updates still has its gradient."""
    model = pc.net()
    adam = pc.optimizer("adamw", model.a.parameters())
    sgd = pc.optimizer("sgd", model.b.parameters())
    seen = pc.samples(one_step(model, adam, sgd, parameters=True, optimizer_states=True, updates=True))
    names = {
        family: {k[1] for k in seen if k[0] == family} for family in ("grad_reduced", "param_updated", "exp_avg", "opt_state", "update")
    }
    a, b, c = ({f"{m}.weight", f"{m}.bias"} for m in "abc")
    assert names["grad_reduced"] == a | b | c
    assert names["param_updated"] == a | b | c | {"unused.weight", "unused.bias"}
    assert names["exp_avg"] == a
    assert names["opt_state"] == b
    assert names["update"] == a | b


def test_own_group_of_every_parameter() -> None:
    """Betas and eps are those of the parameter's own group, also after a checkpoint has put new groups in place."""
    model = pc.net()
    groups = [
        {"params": model.a.parameters(), "betas": (0.5, 0.6), "eps": 1e-2},
        {"params": [*model.b.parameters(), *model.c.parameters()]},
    ]
    optimizer = pc.optimizer("adamw", groups)
    step(model, optimizer)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    seen = pc.samples(one_step(model, optimizer, updates=True))
    for group in optimizer.param_groups:
        for name, p in model.named_parameters():
            if any(p is q for q in group["params"]):
                state, (one, two) = optimizer.state[p], group["betas"]
                count = float(state["step"])
                m, v = pc.whole(state["exp_avg"]) / (1 - one**count), pc.whole(state["exp_avg_sq"]) / (1 - two**count)
                pc.assert_same(seen["update", name, ""], m / (np.sqrt(v) + group["eps"]), name)


def test_bf16() -> None:
    """Statistics of bfloat16 parameters, gradients, states and updates are of their exact values."""
    model = pc.net(torch.bfloat16)
    optimizer = pc.optimizer("adamw", [p for p in model.parameters() if p.requires_grad])
    seen = pc.samples(one_step(model, optimizer, **pc.EVERYTHING))
    for name, p in model.named_parameters():
        if p.grad is not None:
            state = optimizer.state[p]
            pc.assert_same(seen["grad_reduced", name, "reduced"], pc.whole(p.grad), name)
            pc.assert_same(seen["param_updated", name, ""], pc.whole(p), name)
            pc.assert_same(seen["exp_avg_sq", name, ""], pc.whole(state["exp_avg_sq"]), name)
            m, v = pc.whole(state["exp_avg"]) / (1 - 0.8**2), pc.whole(state["exp_avg_sq"]) / (1 - 0.97**2)
            pc.assert_same(seen["update", name, ""], m / (np.sqrt(v) + 1e-6), name, tolerance=1e-5)


def test_states_before() -> None:
    """`states_when: before` shows what the update begins with: nothing in the first step, the last step's in the second."""
    model = pc.net()
    optimizer = pc.optimizer("adamw", [p for p in model.parameters() if p.requires_grad])
    probe = pc.probe(optimizer_states=True, states_when="before")
    with pc.closing(probe) as frames:
        probe.attach(model, optimizer)
        for number in range(2):
            probe.begin_step(number)
            truth = {name: pc.whole(optimizer.state[p]["exp_avg"]) for name, p in model.named_parameters() if p in optimizer.state}
            step(model, optimizer, number=number)
            probe.end_step()
    first, second = (pc.samples(frame) for frame in frames)
    assert not [key for key in first if key[0] == "exp_avg"]
    assert {key[1] for key in second if key[0] == "exp_avg"} == set(truth)
    for name, value in truth.items():
        pc.assert_same(second["exp_avg", name, ""], value, name)


def test_states_of_any_optimizer() -> None:
    """States with other names are `opt_state` and say which they are; what an unknown optimizer does is said once and counted."""
    model = pc.net()
    frame = one_step(model, torch.optim.Adadelta(model.parameters()), optimizer_states=True, updates=True)
    states = {(key[1], key[2]) for key in pc.samples(frame) if key[0] == "opt_state"}
    assert states == {(f"{m}.{p}", state) for m in "abc" for p in ("weight", "bias") for state in ("square_avg", "acc_delta")}
    assert not [key for key in pc.samples(frame) if key[0] == "update"]
    assert frame.lost == {"update: optimizer Adadelta": 6}


def test_names_without_wrappers() -> None:
    """Compilation and activation checkpointing are no part of a parameter's name."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = pc.net()
    model.b = checkpoint_wrapper(model.b)  # type: ignore[assignment]
    compiled: Any = torch.compile(model, backend="eager")
    optimizer = pc.optimizer("sgd", [p for p in model.parameters() if p.requires_grad])
    names = {key[1] for key in pc.samples(one_step(compiled, optimizer))}
    assert names == {f"{m}.{p}" for m in "abc" for p in ("weight", "bias")}


def drawn(kind: str) -> dict[tuple[str, str], list[int]]:
    model = pc.wrapped(kind, pc.net())
    optimizer = pc.optimizer("adamw", [p for p in model.parameters() if p.requires_grad])
    probe = pc.probe(updates=True, histograms=("update", "ratio", "grad_reduced"))
    with pc.closing(probe) as frames:
        probe.attach(model, optimizer)
        probe.begin_step(0)
        model(pc.data(0, rank=0)).square().mean().backward()
        optimizer.step()
        probe.end_step()
    (frame,) = frames
    found = {}
    for sample in frame.samples:
        place = sample.extra["histogram"]
        counts = histograms.counts(frame.rows, place["row"], place["kind"])
        assert len(counts) == place["bins"]
        found[sample.family, sample.name] = [int(n) for n in counts]
    for name, p in model.named_parameters():
        if p.grad is not None:
            state = optimizer.state[p]
            m, v = (pc.whole(state[k]).astype(np.float32) for k in ("exp_avg", "exp_avg_sq"))
            m, v = m / np.float32(1 - 0.8), v / np.float32(1 - 0.97)
            truth = torch.histc(torch.from_numpy(m / (np.sqrt(v) + np.float32(1e-6))), 30, -1, 1)
            assert np.abs(truth.numpy() - found["update", name]).sum() <= 4, name  # +-1 lies on the outer edge
    return found


def test_histograms() -> None:
    """Asked families have counts per bin; those of shards merge to those of the whole."""
    alone = drawn("plain")
    assert {family for family, _ in alone} == {"update", "ratio", "grad_reduced"}
    merged = run_ranks(2, drawn, "fsdp2")[0]
    for key, counts in alone.items():
        assert sum(counts) == pytest.approx(sum(merged[key]), abs=4), key
        assert np.abs(np.subtract(counts, merged[key])).sum() <= 8, key


EVERY_KEY = {
    **pc.EVERYTHING,
    "micro_batch_gradients": True,
    "gradient_phases": ("reduced", "unscaled", "clipped"),
    "histograms": ("grad_reduced", "update"),
    "digest": True,
}


def trained(kind: str, monitor: dict[str, Any] | None) -> list[bytes]:
    model = pc.wrapped(kind, pc.net())
    optimizer = pc.optimizer("adamw", [p for p in model.parameters() if p.requires_grad])
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, enabled=not kind.startswith("fsdp"))
    probe = pc.probe(**monitor) if monitor is not None else None
    if probe is not None:
        probe.attach(model, optimizer)
    torch.manual_seed(3 + (dist.get_rank() if dist.is_initialized() else 0))
    for number in range(4):
        if probe is not None:
            probe.begin_step(number)
        for micro in range(2):
            loss = nn.functional.dropout(model(pc.data(number, micro)), 0.3).square().mean()
            scaler.scale(loss * (float("inf") if number == 2 and scaler.is_enabled() else 1.0)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if probe is not None:
            probe.end_step({"loss": loss})
    if probe is not None:
        probe.close()
    return [pc.whole(p).tobytes() for p in model.parameters()] + [torch.get_rng_state().numpy().tobytes()]


def both(kind: str) -> tuple[list[bytes], list[bytes]]:
    return trained(kind, None), trained(kind, EVERY_KEY)


@pytest.mark.parametrize("kind", ["plain", "ddp_views", "fsdp2"])
@pytest.mark.fast_cells("ddp_views", "plain")
def test_same_bits(kind: str) -> None:
    """Parameters and random state after some steps are bitwise the same with every family on and without a probe."""
    for without, watched in [both(kind)] if kind == "plain" else run_ranks(2, both, kind):
        assert watched == without
