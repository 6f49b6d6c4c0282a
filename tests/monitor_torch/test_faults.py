"""A fault in one family, second attempts, several probes, pauses: the rest goes on."""

from __future__ import annotations

import tempfile
from typing import Any

import parameter_cases as pc
import pytest
import torch

from msprobe_engine.core.settings.schema import IncidentSettings, MonitorSettings, ProbeSettings, SinkSettings
from msprobe_integrations.torch.monitor.probe import TorchProbe
from msprobe_integrations.torch.parameters.plain import PlainSource

pytestmark = pytest.mark.framework


def lenient(**monitor: Any) -> TorchProbe:
    return TorchProbe(
        ProbeSettings(
            output_dir=tempfile.mkdtemp(prefix="msprobe-test-"),
            monitor=MonitorSettings(**monitor),
            sinks=SinkSettings(memory=True),
            incident=IncidentSettings(enabled=False),
        )
    )


def train(probe: TorchProbe | None, steps: int = 3) -> list[torch.Tensor]:
    model = pc.net()
    optimizer = pc.optimizer("adamw", [p for p in model.parameters() if p.requires_grad])
    if probe is not None:
        probe.attach(model, optimizer)
    for step in range(steps):
        if probe is not None:
            probe.begin_step(step)
        optimizer.zero_grad()
        model(pc.data(step)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        if probe is not None:
            probe.end_step()
    return list(model.parameters())


@pytest.mark.fast_cells("gradient-lost0")
@pytest.mark.parametrize(
    ("method", "lost"),
    [
        ("gradient", {"grad_reduced", "update", "ratio", "other", "grad_unreduced"}),
        ("value", {"param_origin", "param_updated"}),
        ("states", {"exp_avg", "exp_avg_sq", "update", "ratio", "other"}),
        ("hyper", {"update", "ratio"}),
    ],
)
def test_a_fault_costs_its_families(method: str, lost: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What needs the broken part is switched off, every other family stays, and the training is bitwise what it was."""
    expected = train(None)
    probe = lenient(**pc.EVERYTHING)
    with pc.closing(probe) as whole:
        train(probe)
    everything = {sample.family for frame in whole for sample in frame.samples}
    assert lost < everything

    def broken(*_: Any) -> Any:
        raise RuntimeError("planted fault")

    monkeypatch.setattr(PlainSource, method, broken)
    probe = lenient(**pc.EVERYTHING)
    with pc.closing(probe) as frames:
        found = train(probe)
    assert {sample.family for frame in frames for sample in frame.samples} == everything - lost
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


def test_second_attempt() -> None:
    """A step that runs twice has the gradients of the run that counts, each once."""
    model = pc.net()
    optimizer = pc.optimizer("sgd", [p for p in model.parameters() if p.requires_grad])
    probe = TorchProbe(
        ProbeSettings(
            output_dir=tempfile.mkdtemp(prefix="msprobe-test-"),
            strict=True,
            monitor=MonitorSettings(unreduced_gradients=True, micro_batch_gradients=True, parameters=True),
            sinks=SinkSettings(memory=True),
            incident=IncidentSettings(capture_steps=1),
        )
    )
    runs = 0
    with pc.closing(probe) as frames:
        probe.attach(model, optimizer)
        for step in range(2):
            for _ in probe.attempts(step, optimizer.zero_grad):
                runs += 1
                model(pc.data(step)).square().mean().mul(float("nan") if step else 1.0).backward()
            optimizer.step()
            optimizer.zero_grad()
            probe.end_step()
    assert runs == 3
    keys = [set(pc.samples(frame)) for frame in frames]  # every key once
    assert keys[0] == keys[1]
    assert ("grad_unreduced", "a.weight", "accumulated") in keys[0]


def test_two_probes() -> None:
    """Two probes on one training see the same and leave nothing, in whichever order they go."""
    from torch.nn.utils import clip_grad

    before = clip_grad._clip_grads_with_norm_
    model = pc.net()
    optimizer = pc.optimizer("adamw", [p for p in model.parameters() if p.requires_grad])
    one, two = (pc.probe(**pc.EVERYTHING, gradient_phases=("reduced", "clipped")) for _ in range(2))
    with pc.closing(two) as second:
        with pc.closing(one) as first:
            for probe in (one, two):
                probe.attach(model, optimizer)
            for step in range(2):
                for probe in (one, two):
                    probe.begin_step(step)
                model(pc.data(step)).square().mean().backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
                for probe in (one, two):
                    probe.end_step()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    for a, b in zip(first, second):
        a_seen, b_seen = pc.samples(a), pc.samples(b)
        assert {k: v.statistics for k, v in a_seen.items()} == {k: v.statistics for k, v in b_seen.items()}
        assert ("grad_reduced", "a.weight", "clipped") in a_seen
    assert clip_grad._clip_grads_with_norm_ is before
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_paused() -> None:
    """What happens in a pause is not seen, and the numbers of the step are those from outside of it."""
    model = pc.net()
    optimizer = pc.optimizer("sgd", [p for p in model.parameters() if p.requires_grad])
    probe = pc.probe(unreduced_gradients=True)
    with pc.closing(probe) as frames:
        probe.attach(model, optimizer)
        probe.begin_step(0)
        model(pc.data(0)).square().mean().backward()
        truth = {name: pc.whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        kept = [p.grad for p in model.parameters()]
        probe.pause()
        model(pc.data(7)).square().mean().backward()
        probe.resume()
        for p, (name, _) in zip(model.parameters(), model.named_parameters()):
            if name in truth:
                p.grad = torch.from_numpy(truth[name]).float()
        del kept
        optimizer.step()
        probe.end_step()
    for key, seen in pc.samples(frames[0]).items():
        pc.assert_same(seen, truth[key[1]], key)


def test_attach_again() -> None:
    """The newest objects count: nothing of the first optimizer is followed any more."""
    probe = pc.probe(parameters=True)
    with pc.closing(probe) as frames:
        train(probe, steps=1)
        train(probe, steps=1)
    assert len(frames) == 2
    assert set(pc.samples(frames[0])) == set(pc.samples(frames[1]))
    assert not probe.parameters.watches
