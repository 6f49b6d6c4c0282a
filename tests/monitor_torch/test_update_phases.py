"""Between the backward pass and the update: loss scaling, clipping, closures, skipped updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import parameter_cases as pc
import pytest
import torch
from torch.nn.utils import clip_grad_norm_  # early: the name is bound before any probe exists

from msprobe_engine.core.records import Frame
from msprobe_integrations.common.parameters.parameter_sampler import ParameterSampler
from msprobe_integrations.torch.testing import ProbeDevice

pytestmark = pytest.mark.framework
ALL = ("reduced", "unscaled", "clipped")


def total(frame: Frame, phase: str) -> float:
    """Norm over all gradients of a phase."""
    return float(np.sqrt(sum(s.statistics.norm**2 for k, s in pc.samples(frame).items() if k[0] == "grad_reduced" and k[2] == phase)))


def phases(frame: Frame) -> set[str]:
    return {s.phase for s in frame.samples if s.family == "grad_reduced"}


def scaled(
    monitor: dict[str, Any], *, unscale: bool = False, clip: float = 0.0, fused: bool = False, seen_skip: bool = True
) -> list[Frame]:
    """Three steps with a loss scale of 8; the second overflows."""
    model = pc.net()
    optimizer = pc.optimizer("adamw", [p for p in model.parameters() if p.requires_grad], fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    probe = pc.probe(**monitor)
    seen: list[bool] = []
    with pc.closing(probe) as frames:
        probe.attach(model, optimizer, on_update=seen.append)
        for step in range(3):
            probe.begin_step(step)
            loss = model(pc.data(step)).square().mean() * (float("inf") if step == 1 else 1.0)
            scaler.scale(loss).backward()
            if unscale:
                scaler.unscale_(optimizer)
            if clip:
                clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            probe.end_step()
    assert seen == [False, seen_skip, False]
    assert [frame.scalars["skipped"] for frame in frames] == [0, 1, 0]
    assert [frame.scalars["loss_scale"] for frame in frames] == [8, 8, 4]
    return frames


def test_numbers_of_every_step() -> None:
    """Skipped updates, the learning rate and the loss scale are known in steps that are not monitored, too."""
    frames = scaled({"interval": 3})
    assert [bool(frame.samples) for frame in frames] == [True, False, False]
    assert all({"skipped", "loss_scale"} <= set(frame.scalars) for frame in frames)
    assert ["learning_rate" in frame.scalars for frame in frames] == [True, False, True]  # where nothing is updated none is used


@pytest.mark.parametrize("unscale", [False, True])
def test_skipped_updates_are_steps(unscale: bool) -> None:
    """A skipped update has its frame, says so, has its gradients in both phases and its unchanged parameters, and no update."""
    monitor = {"gradient_phases": ALL, "parameters": True, "updates": True, "optimizer_states": True}
    frames = scaled(monitor, unscale=unscale)
    for frame in frames:
        assert phases(frame) == {"reduced", "unscaled"}
        bad = frame.step == 1
        for key, seen in pc.samples(frame).items():
            if key[0] == "grad_reduced":
                assert bool(seen.statistics.nonfinite) == bad, key
        families = {s.family for s in frame.samples}
        assert ("update" in families) != bad
        before, after = ({k[1]: s.statistics for k, s in pc.samples(frame).items() if k[0] == f} for f in ("param_origin", "param_updated"))
        assert (before == after) == bad
    for frame, scale in ((frames[0], 8), (frames[2], 4)):
        assert total(frame, "reduced") == pytest.approx(scale * total(frame, "unscaled"), rel=1e-6)
        assert frame.scalars["grad_norm"] == pytest.approx(total(frame, "unscaled"), rel=1e-6)


def test_norm_without_the_scale() -> None:
    """Where only scaled gradients are taken, the gradient norm is theirs divided by the loss scale."""
    first, _, last = scaled({})
    for frame, scale in ((first, 8), (last, 4)):
        assert frame.scalars["grad_norm"] == pytest.approx(total(frame, "reduced") / scale, rel=1e-6)


def test_update_that_skips_on_the_device() -> None:
    """A fused optimizer unscales inside of its kernel: its gradients stay `reduced`, and what it says about overflow is the scalar."""
    frames = scaled({"gradient_phases": ALL}, fused=True)
    assert [phases(frame) for frame in frames] == [{"reduced"}] * 3


@pytest.mark.parametrize("on_device", [False, True])
def test_update_that_was_skipped_has_no_numbers(monkeypatch: pytest.MonkeyPatch, on_device: bool) -> None:
    """States are those of the last update in a step that a fused optimizer skips: nothing is shown as its update or ratio. Where the
    overflow is known on a device only there are rows, of no elements."""
    after_step = ParameterSampler.after_step

    def on_the_device(self: ParameterSampler, skipped: Any = False) -> None:
        after_step(self, ProbeDevice.wrap(skipped) if isinstance(skipped, torch.Tensor) else skipped)

    if on_device:
        monkeypatch.setattr(ParameterSampler, "after_step", on_the_device)
    frames = scaled({"updates": True}, fused=True, seen_skip=not on_device)
    for frame in frames:
        counts = {key[0]: seen.statistics.count for key, seen in pc.samples(frame).items() if key[0] in ("update", "ratio")}
        if frame.scalars["skipped"]:
            assert counts == ({"update": 0, "ratio": 0} if on_device else {})
        else:
            assert set(counts) == {"update", "ratio"}
            assert min(counts.values()) > 0


def test_clipped_after_unscaling() -> None:
    """All three phases of one step, each with its own values; the norm is the one clipping worked out."""
    first, _, last = scaled({"gradient_phases": ALL}, unscale=True, clip=0.01)
    for frame, scale in ((first, 8), (last, 4)):
        assert phases(frame) == set(ALL)
        assert total(frame, "clipped") == pytest.approx(0.01, rel=1e-3)
        assert total(frame, "reduced") == pytest.approx(scale * total(frame, "unscaled"), rel=1e-6)
        assert frame.scalars["grad_norm"] == pytest.approx(total(frame, "unscaled"), rel=1e-6)


@pytest.mark.parametrize("when", ["before", "after"])
def test_states_of_a_skipped_update(when: str) -> None:
    """A skipped update leaves the states as they are: they are shown, and are those of its neighbour."""
    frames = scaled({"optimizer_states": True, "states_when": when})
    means = [{k: seen.statistics.mean for k, seen in pc.samples(frame).items() if k[0] == "exp_avg"} for frame in frames]
    assert means[1]
    assert means[1] == means[2 if when == "before" else 0]


def train(probe: Any, between: Callable[[torch.nn.Module], Any], steps: int = 2, **attach: Any) -> torch.nn.Module:
    model = pc.net()
    optimizer = pc.optimizer("adamw", [p for p in model.parameters() if p.requires_grad])
    probe.attach(model, optimizer, **attach)
    for watch in probe.parameters.watches:
        watch.entry_only = bool(getattr(probe, "entry_only", False))
    for step in range(steps):
        probe.begin_step(step)
        model(pc.data(step)).square().mean().backward()
        between(model)
        optimizer.step()
        optimizer.zero_grad()
        probe.end_step()
    return model


def with_norm(model: torch.nn.Module) -> None:
    parameters = [p for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
    torch.nn.utils.clip_grads_with_norm_(iter(parameters), 0.01, norm)


@pytest.mark.parametrize(
    "between",
    [
        lambda model: clip_grad_norm_(model.parameters(), 0.01),
        lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01, foreach=False),
        with_norm,
        lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3),
    ],
    ids=["early_import", "foreach", "with_norm", "value"],
)
def test_clipping(between: Callable[[torch.nn.Module], Any]) -> None:
    """Whichever way gradients are clipped, `reduced` is before and `clipped` after it, and the norm is that of before."""
    probe = pc.probe(gradient_phases=ALL)
    with pc.closing(probe) as frames:
        train(probe, between)
    for frame in frames:
        assert phases(frame) == {"reduced", "clipped"}
        assert total(frame, "clipped") < 0.02 < total(frame, "reduced")
        assert frame.scalars["grad_norm"] == pytest.approx(total(frame, "reduced"), rel=1e-6)


def test_default_is_before_clipping() -> None:
    """With the default `gradient_phases` only `reduced` is taken, before clipping."""
    probe = pc.probe()
    with pc.closing(probe) as frames:
        train(probe, lambda model: clip_grad_norm_(model.parameters(), 0.01))
    assert [phases(frame) for frame in frames] == [{"reduced"}] * 2
    assert all(total(frame, "reduced") > 0.02 for frame in frames)


def test_entry_only() -> None:
    """A watch that looks at the entry of the update only gives one row per gradient, under the phase it has reached."""
    probe = pc.probe()
    probe.entry_only = True  # type: ignore[attr-defined]
    with pc.closing(probe) as frames:
        train(probe, lambda model: clip_grad_norm_(model.parameters(), 0.01))
    assert [phases(frame) for frame in frames] == [{"clipped"}] * 2
    assert all(total(frame, "clipped") < 0.02 for frame in frames)


def test_other_parameters_do_not_matter() -> None:
    """Clipping and scaling of what belongs to somebody else changes nothing here."""
    other = torch.nn.Linear(2, 2)

    def elsewhere(_: torch.nn.Module) -> None:
        other(torch.ones(1, 2)).sum().backward()
        clip_grad_norm_(other.parameters(), 0.01)

    probe = pc.probe(gradient_phases=ALL)
    with pc.closing(probe) as frames:
        train(probe, elsewhere)
    assert [phases(frame) for frame in frames] == [{"reduced"}] * 2


def test_closure() -> None:
    """An optimizer that is given a closure has its gradients from it: they are taken after the closure, not before."""
    model = pc.net()
    optimizer = pc.optimizer("sgd", [p for p in model.parameters() if p.requires_grad])
    probe = pc.probe(momentum_agreement=True)
    norms: list[float] = []
    with pc.closing(probe) as frames:
        probe.attach(model, optimizer)
        for step in range(2):
            probe.begin_step(step)

            def closure(step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(pc.data(step)).square().mean()
                loss.backward()
                norms.append(
                    float(torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None])))
                )
                return loss

            optimizer.step(closure) if step else optimizer.step(closure=closure)
            probe.end_step()
    assert [total(frame, "reduced") for frame in frames] == pytest.approx(norms, rel=1e-6)


def hooks(model: torch.nn.Module) -> int:
    return sum(len(getattr(p, name) or ()) for p in model.parameters() for name in ("_backward_hooks", "_post_accumulate_grad_hooks"))


def test_nothing_is_left() -> None:
    """Hooks on parameters are there only in monitored steps; after `close` every function is what it was."""
    from torch.nn.utils import clip_grad

    def functions() -> list[Any]:
        scaler = vars(torch.amp.GradScaler)
        return [
            scaler["step"], scaler["unscale_"], clip_grad._clip_grads_with_norm_, clip_grad.clip_grad_value_,
            torch.nn.utils.clip_grad_value_, torch.nn.utils.clip_grads_with_norm_,
        ]  # fmt: skip

    before = functions()
    probe = pc.probe(unreduced_gradients=True, micro_batch_gradients=True, start_step=1, interval=2)
    counts: list[int] = []
    with pc.closing(probe):
        model = train(probe, lambda model: counts.append(hooks(model)), steps=4)
        assert functions() != before
    assert counts == [0, counts[1], 0, counts[1]]
    assert counts[1] > 0
    assert hooks(model) == 0
    assert functions() == before


class NotOfTorch(torch.optim.SGD):
    """As one that keeps what rounding takes away."""


@pytest.mark.parametrize(
    ("dtype", "rate", "of", "lost"),
    [
        (torch.bfloat16, 1e-6, torch.optim.SGD, True),
        (torch.bfloat16, 0.5, torch.optim.SGD, False),
        (torch.float32, 1e-12, torch.optim.SGD, None),
        (torch.bfloat16, 1e-6, NotOfTorch, None),
        ("copies", 1e-6, torch.optim.SGD, None),
    ],
)
def test_updates_that_rounding_takes_away(dtype: Any, rate: float, of: Any, lost: bool | None) -> None:
    """The part of the elements in 16 bits with a gradient that the update leaves as they were; nothing of an optimizer that updates float32
    or is not known to round to the nearest number."""
    model = pc.net(torch.bfloat16 if dtype == "copies" else dtype)
    trained = [p for p in model.parameters() if p.requires_grad]
    copies = [p.detach().float().requires_grad_() for p in trained] if dtype == "copies" else trained
    optimizer = of(copies, lr=rate)
    probe = pc.probe(rules=("lost_updates", "growing_weights"), gradients=True)
    with pc.closing(probe) as frames:
        probe.attach(model, optimizer)
        probe.begin_step(0)
        model(pc.data(0, dtype=torch.bfloat16 if dtype == "copies" else dtype)).square().mean().backward()
        for copy, parameter in zip(copies, trained):
            if copy is not parameter and parameter.grad is not None:
                copy.grad = parameter.grad.float()
        optimizer.step()
        probe.end_step()
    share = frames[0].facts.get("updates_lost")
    assert (None if share is None else share > 0.5) == lost


@pytest.mark.parametrize("rate", [1.0, 1e-3])
def test_how_much_weights_have_grown(rate: float) -> None:
    """In the median over the matrices, against the first step, in the first hundred steps; in no file."""
    model = pc.net()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=rate)
    matrices = [model.a.weight, model.b.weight, model.c.weight]
    probe = pc.probe(rules=("lost_updates", "growing_weights"), gradients=True)
    sizes = []
    with pc.closing(probe) as frames:
        probe.attach(model, optimizer)
        for step in (0, 1, 2, 101):
            probe.begin_step(step)
            model(pc.data(step)).square().mean().backward()
            sizes.append(np.array([float(w.detach().double().square().mean().sqrt()) for w in [*matrices, model.unused.weight]]))
            optimizer.step()
            optimizer.zero_grad()
            probe.end_step()
    grown = [frame.facts.get("weights_grown") for frame in frames]
    assert grown[0] is grown[3] is None
    assert grown[1:3] == pytest.approx([sorted(now / sizes[0])[1] for now in sizes[1:3]], rel=1e-5)  # torch takes the lower of two
    assert (grown[2] > 1.5) == (rate == 1.0)
    assert all("weights_grown" not in frame.scalars for frame in frames)
