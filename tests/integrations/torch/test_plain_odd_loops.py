"""Loops of plain torch that do more than train one model: save it whole, begin anew, let a model grow."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from typing import Any

import plain_cases as cases
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from msprobe_engine.core.statistics.rows import read_row
from msprobe_integrations.torch.training.plain import loop as plain_loop


def train(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> dict[str, float]:
    """One step. Returns the norm of every gradient, in float64."""
    model(cases.batch(number)).square().mean().backward()
    norms = {name: p.grad.double().norm().item() for name, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    optimizer.zero_grad()
    return norms


def reduced(frame: Any) -> dict[str, float]:
    """The norms of the gradients in a frame; each parameter once."""
    found = [(s.name, read_row(frame.rows[s.ref.row]).norm) for s in frame.samples if s.family == "grad_reduced"]
    assert len(found) == len(dict(found))
    return dict(found)


def same(frames: list[Any], truth: list[dict[str, float]]) -> bool:
    """Do the frames hold these gradients, step by step?"""
    seen = [reduced(frame) for frame in frames]
    return [*map(dict.keys, seen)] == [*map(dict.keys, truth)] and all(
        abs(got[name] - norm) <= 1e-5 * norm for got, norms in zip(seen, truth) for name, norm in norms.items()
    )


def test_a_model_is_saved_whole_and_copied_in_a_step_that_is_dumped() -> None:
    """``torch.save(model)`` works while a dump has its hooks on the model, and what a copy computes is no call of the model."""
    with cases.launched(dump={"task": "statistics", "level": "L0"}) as launch:
        model = cases.two()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(2):
            train(model, optimizer, number)
            kept = io.BytesIO()
            torch.save(model, kept)
            with torch.no_grad():
                copy.deepcopy(model).encoder(cases.batch(number))
    kept.seek(0)
    assert torch.equal(torch.load(kept, weights_only=False)(cases.batch(0)), model(cases.batch(0)))
    for frame in launch.frames:
        assert [e.name for e in frame.entries if ".encoder." in e.name and ".forward." in e.name] == ["Module.encoder.Linear.forward.0"]


@pytest.mark.slow
def test_one_training_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that trains several models has a step per update of each, with the numbers of that model. When the next training has
    begun, nothing of ours holds the model and the optimizer of the one before."""
    monkeypatch.setattr(plain_loop, "_PAUSE", 0)
    truth, gone = [], []
    everything = dict.fromkeys(("activations", "activation_gradients", "unreduced_gradients", "optimizer_states"), True)
    with cases.launched(everything, dump={"task": "statistics", "level": "mix"}, grad_probe={}) as launch:
        for seed in range(3):
            model = cases.two(seed)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            scheduler = StepLR(optimizer, 1)  # and the optimizer hold each other
            for number in range(3):
                truth.append(train(model, optimizer, number))
                scheduler.step()
            gc.collect()
            assert all(ref() is None for ref in gone)
            gone += [weakref.ref(model), weakref.ref(optimizer), weakref.ref(model.encoder.weight)]
    assert [frame.step for frame in launch.frames] == list(range(9))
    assert same(launch.frames, truth)


def test_parameters_that_are_added() -> None:
    """What ``add_param_group`` adds has rows from its first step on."""
    truth = []
    with cases.launched() as launch:
        model = cases.two()
        model.decoder.requires_grad_(False)
        optimizer = torch.optim.SGD(model.encoder.parameters(), lr=0.1)
        for number in range(4):
            if number == 2:
                model.decoder.requires_grad_(True)
                optimizer.add_param_group({"params": model.decoder.parameters()})
            truth.append(train(model, optimizer, number))
    assert [len(norms) for norms in truth] == [2, 2, 4, 4]
    assert same(launch.frames, truth)


def test_a_scripted_model() -> None:
    """A TorchScript module is followed like any other."""
    truth = []
    with cases.launched() as launch:
        model = torch.jit.script(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(3):
            truth.append(train(model, optimizer, number))
    assert len(truth[0]) == 4
    assert same(launch.frames, truth)


class NoTruth(cases.Two):
    """A model that says neither whether it is true nor how long it is."""

    def __bool__(self) -> bool:
        raise TypeError("it is neither true nor false")

    def __len__(self) -> int:
        raise TypeError("it has no length")


class Empty(cases.Two):
    """A model that counts as false."""

    def __len__(self) -> int:
        return 0


@pytest.mark.parametrize("kind", [NoTruth, Empty])
def test_a_model_is_never_asked_whether_it_is_true(kind: type[nn.Module]) -> None:
    """It trains as without the probe, and every step is seen."""
    with cases.launched() as launch:
        model = kind()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(3):
            model(cases.batch(number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(launch.frames) == 3
