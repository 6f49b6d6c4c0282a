"""Every family of the parameter side equals a float64 reference of gathered tensors, whoever holds the parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import parameter_cases as pc
import pytest
import torch
from forkpool import run_ranks

pytestmark = pytest.mark.framework
STEPS = 3
Truth = dict[tuple[str, ...], np.ndarray[Any, Any]]


def local_gradients(model: torch.nn.Module, step: int) -> dict[str, np.ndarray[Any, Any]]:
    """What this rank's gradients are before any reduction: of an ordinary copy of the model as it is now."""
    copy = pc.net()
    with torch.no_grad():
        for p, (_, q) in zip(copy.parameters(), named(model)):
            p.copy_(torch.from_numpy(pc.whole(q)))
    copy(pc.data(step)).square().mean().backward()
    return {name: pc.whole(p.grad) for name, p in copy.named_parameters() if p.grad is not None}


def named(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name.removeprefix("module."), p) for name, p in model.named_parameters()]


def updates(state: dict[str, Any], group: dict[str, Any], truth: Truth, name: str) -> None:
    if "exp_avg" in state:
        one, two = group["betas"]
        step = float(state["step"])
        m, v = (pc.whole(state[k]) / (1 - b**step) for k, b in (("exp_avg", one), ("exp_avg_sq", two)))
        truth["update", name, ""] = m / (np.sqrt(v) + group["eps"])
        truth["ratio", name, ""] = np.divide(m, np.sqrt(v), out=np.zeros_like(m), where=v > 0)
    else:
        truth["update", name, ""] = pc.whole(state["momentum_buffer"])


def job(kind: str, algorithm: str) -> None:
    model = pc.wrapped(kind, pc.net())
    optimizer = pc.optimizer(algorithm, [p for p in model.parameters() if p.requires_grad])
    probe = pc.probe(**pc.EVERYTHING)
    truths: list[Truth] = []
    with pc.closing(probe) as frames:
        probe.attach(model, optimizer)
        for step in range(STEPS):
            truth: Truth = {}
            for name, gradient in local_gradients(model, step).items():
                truth["grad_unreduced", name, "accumulated"] = gradient
            probe.begin_step(step)
            model(pc.data(step)).square().mean().backward()
            watched = [(name, p) for name, p in named(model) if p.requires_grad]
            for name, p in watched:
                truth["param_origin", name, ""] = pc.whole(p)
                if p.grad is not None:
                    truth["grad_reduced", name, "reduced"] = gradient = pc.whole(p.grad)
                    state = optimizer.state.get(p, {})
                    moment = state.get("exp_avg", state.get("momentum_buffer"))
                    if moment is not None:
                        truth["other", name, "mg_direction"] = np.array(((1 + np.sign(gradient) * np.sign(pc.whole(moment))) / 2).mean())
            optimizer.step()
            for name, p in watched:
                truth["param_updated", name, ""] = pc.whole(p)
                for key, value in optimizer.state.get(p, {}).items():
                    if key in ("exp_avg", "exp_avg_sq"):
                        truth[key, name, ""] = pc.whole(value)
                    elif key == "momentum_buffer":
                        truth["opt_state", name, key] = pc.whole(value)
                if p.grad is not None:
                    updates(optimizer.state[p], optimizer.param_groups[0], truth, name)
            optimizer.zero_grad()
            probe.end_step()
            truths.append(truth)
    assert len(frames) == STEPS
    for frame, truth in zip(frames, truths):
        seen = pc.samples(frame)
        assert set(seen) == set(truth), set(seen) ^ set(truth)
        for key, sample in seen.items():
            pc.assert_same(sample, truth[key], (kind, algorithm, frame.step, key))
            assert sample.extra.get("scope", "whole") == "whole"
        for scalar, family in (("update_norm", "update"), ("param_norm", "param_updated"), ("grad_norm", "grad_reduced")):
            total = np.sqrt(sum((x**2).sum() for key, x in truth.items() if key[0] == family))
            assert frame.scalars[scalar] == pytest.approx(total, rel=1e-6), scalar
        assert frame.scalars["skipped"] == 0
        assert frame.scalars["learning_rate"] == optimizer.param_groups[0]["lr"]
        assert not frame.lost


@pytest.mark.parametrize("algorithm", ["adamw", "sgd"])
def test_plain(algorithm: str) -> None:
    """One process. The keys are equal too: what has no gradient, no moment yet, or wants none, has no row."""
    job("plain", algorithm)


@pytest.mark.parametrize("algorithm", ["adamw", "sgd"])
@pytest.mark.parametrize("kind", ["ddp", "ddp_views", "fsdp2", "fsdp2_columns"])
@pytest.mark.fast_cells("ddp-adamw", "fsdp2-sgd")
def test_two_ranks(kind: str, algorithm: str) -> None:
    """Two ranks: unreduced gradients are each rank's own, everything else is of whole parameters, uneven and empty shards included."""
    run_ranks(2, job, kind, algorithm)


@pytest.mark.slow
def test_hsdp() -> None:
    """Four ranks, two replicas of two shards: rows merge over the shards only, so nothing is counted twice."""
    run_ranks(4, job, "hsdp", "adamw")


def digests(kind: str) -> list[dict[tuple[str, ...], int | None]]:
    model = pc.wrapped(kind, pc.net())
    optimizer = pc.optimizer("sgd", [p for p in model.parameters() if p.requires_grad])
    probe = pc.probe(parameters=True, digest=True)
    with pc.closing(probe) as frames:
        probe.attach(model, optimizer)
        probe.begin_step(0)
        model(pc.data(0, rank=0)).square().mean().backward()
        optimizer.step()
        probe.end_step()
    return [{key: seen.statistics.digest for key, seen in pc.samples(frame).items()} for frame in frames]


@pytest.mark.slow
def test_digest_of_shards() -> None:
    """Shards of the first dimension have digests that add up to that of the whole parameter; of other dimensions there is none rather
    than a wrong one."""
    (alone,) = digests("plain")
    (rows,) = run_ranks(2, digests, "fsdp2")[0]
    (columns,) = run_ranks(2, digests, "fsdp2_columns")[0]
    before = {key for key in alone if key[0] == "param_origin"}
    assert before
    for key in before:
        assert alone[key] is not None
        assert rows[key] == alone[key]
        assert columns[key] == (None if key[1] == "a.weight" else alone[key])


def scope() -> set[tuple[Any, ...]]:
    model = pc.wrapped("fsdp2", pc.net())
    optimizer = pc.optimizer("sgd", [p for p in model.parameters() if p.requires_grad])
    probe = pc.probe(rank=(0,))
    with pc.closing(probe) as frames:
        probe.attach(model, optimizer)
        probe.begin_step(0)
        model(pc.data(0)).square().mean().backward()
        local = {name: tuple(p.grad.to_local().shape) for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        probe.end_step()
    for frame in frames:
        for (_, name, _), seen in pc.samples(frame).items():
            assert seen.shape == local[name]
    return {(seen.extra["scope"], tuple(seen.extra["shard"]), seen.extra["of"]) for frame in frames for seen in pc.samples(frame).values()}


@pytest.mark.slow
def test_scope_says_shard() -> None:
    """A rank that monitors alone cannot merge: its rows are those of its shard, with the shard's shape, and say which part they are."""
    found, nothing = run_ranks(2, scope)
    assert ("shard", (0, 56), 104) in found
    assert not nothing


class Quantised(torch.optim.SGD):
    """Momentum as codes and a scale, as 8-bit optimizers have it, and a second one as Transformer Engine scales float16."""

    def step(self, _closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    scale = p.grad.abs().amax() / 127
                    codes = (p.grad / scale).round().to(torch.int8)
                    self.state[p] = {"step": torch.tensor(1.0), "codes": codes, "scale": scale, "half": (p.grad / scale).half()}
                    p.data.sub_(p.grad, alpha=group["lr"])

    def get_unscaled_state(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        return self.state[parameter][name].float() * self.state[parameter]["scale"]


def test_codes_are_no_values_of_a_state(caplog: pytest.LogCaptureFixture) -> None:
    """Integers of a state are left out and said; what the optimizer itself scales back is shown as it computes with it."""
    model = pc.net()
    optimizer = Quantised(model.parameters(), lr=0.1)
    probe = pc.probe(**pc.EVERYTHING)
    with pc.closing(probe) as frames:
        probe.attach(model, optimizer)
        probe.begin_step(0)
        model(pc.data(0)).square().mean().backward()
        largest = {name: float(p.grad.abs().amax()) for name, p in model.named_parameters() if p.grad is not None}
        assert largest
        optimizer.step()
        probe.end_step()
    (frame,) = frames
    states = {key[1:]: seen.statistics for key, seen in pc.samples(frame).items() if key[0] == "opt_state"}
    assert states.keys() == {(name, "half") for name in largest}
    for (name, _), found in states.items():
        assert max(found.max, -found.min) == pytest.approx(largest[name], rel=1e-3)
    assert "holds int8: codes, not values" in caplog.text
