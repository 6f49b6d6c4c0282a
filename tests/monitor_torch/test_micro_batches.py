"""Gradients of micro batches, and of all of them together, before the reduction over ranks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import parameter_cases as pc
import pytest
import torch
import torch.distributed as dist
from forkpool import run_ranks
from torch import nn

pytestmark = pytest.mark.framework
MICRO = 3
Gradients = dict[str, np.ndarray[Any, Any]]


def own(model: nn.Module, step: int) -> list[Gradients]:
    """Each micro batch's gradients of this rank, of a copy of the model as it is now."""
    found = []
    for micro in range(MICRO):
        copy = pc.net()
        with torch.no_grad():
            for p, q in zip(copy.parameters(), model.parameters()):
                p.copy_(torch.from_numpy(pc.whole(q)))
        copy(pc.data(step, micro)).square().mean().backward()
        found.append({name: pc.whole(p.grad) for name, p in copy.named_parameters() if p.grad is not None})
    return found


def run(kind: str, sync: str, **monitor: Any) -> tuple[list[Any], list[list[Gradients]]]:
    """Two steps. `sync`: ``last`` (other micro batches without a reduction), ``every``, ``by_hand`` (never, the test reduces)."""
    model = pc.wrapped(kind, pc.net())
    optimizer = pc.optimizer("sgd", [p for p in model.parameters() if p.requires_grad])
    probe = pc.probe(**monitor)
    truths = []
    with pc.closing(probe) as frames:
        probe.attach(model, optimizer)
        for step in range(2):
            truths.append(own(model, step))
            probe.begin_step(step)
            for micro in range(MICRO):
                quiet = sync == "by_hand" or (sync == "last" and micro < MICRO - 1)
                if kind.startswith("fsdp2"):
                    model.set_requires_gradient_sync(not quiet)
                with model.no_sync() if quiet and kind.startswith("ddp") else nullcontext():
                    model(pc.data(step, micro)).square().mean().backward()
            if sync == "by_hand":
                for p in model.parameters():
                    if p.grad is not None:
                        dist.all_reduce(p.grad)
            optimizer.step()
            optimizer.zero_grad()
            probe.end_step()
    return frames, truths


def unreduced(frame: Any) -> dict[tuple[str, ...], pc.Seen]:
    return {key[1:]: seen for key, seen in pc.samples(frame).items() if key[0] == "grad_unreduced"}


def accumulated(kind: str, sync: str, first: int = 0) -> None:
    frames, truths = run(kind, sync, unreduced_gradients=True)
    for frame, micros in list(zip(frames, truths))[first:]:
        seen = unreduced(frame)
        assert set(seen) == {(name, "accumulated") for name in micros[0]}
        for (name, _), sample in seen.items():
            pc.assert_same(sample, sum(micro[name] for micro in micros), (kind, frame.step, name))
        assert not frame.lost


@pytest.mark.fast_cells("ddp")
@pytest.mark.parametrize("kind", ["ddp", "ddp_views", "fsdp2"])
def test_sum_over_micro_batches(kind: str) -> None:
    """Once a step, the sum over micro batches, each rank's own."""
    run_ranks(2, accumulated, kind, "last")


def test_without_a_reduction() -> None:
    """One process reduces nothing: the sum is there with one read."""
    accumulated("plain", "every")


def by_hand() -> None:
    accumulated("ddp", "by_hand", first=1)
    (first, second), _ = run("ddp", "by_hand", unreduced_gradients=True)
    assert first.lost == {"unreduced gradients under no_sync": 6}
    assert not second.lost


def test_reduction_by_hand() -> None:
    """A training under DDP that never lets it reduce: the first step says what it lost, then every micro batch counts."""
    run_ranks(2, by_hand)


def every_micro_batch(kind: str, sync: str, phase: str) -> None:
    frames, truths = run(kind, sync, micro_batch_gradients=True)
    for frame, micros in zip(frames, truths):
        seen = unreduced(frame)
        assert {(key[0], int(key[2])) for key in seen} == {(name, i) for i in range(MICRO) for name in micros[0]}
        for (name, label, number), sample in seen.items():
            i = int(number)
            assert label == (phase if i else "local")
            truth = micros[i][name] if label == "local" else sum(micro[name] for micro in micros[: i + 1])
            pc.assert_same(sample, truth, (kind, frame.step, name, number))


@pytest.mark.parametrize("kind", ["ddp", "ddp_views"])
def test_own_gradient_of_every_micro_batch(kind: str) -> None:
    """`local`: before it is added to the others, whether or not it is reduced at once."""
    run_ranks(2, every_micro_batch, kind, "last", "local")


@pytest.mark.fast_cells("every-local")
@pytest.mark.parametrize(("sync", "phase"), [("every", "local"), ("last", "accumulated")])
def test_micro_batches_under_fsdp2(sync: str, phase: str) -> None:
    """Reduced at once, a micro batch's gradient is its own; kept, autograd has added it to the others, and the phase says so."""
    run_ranks(2, every_micro_batch, "fsdp2", sync, phase)


def last_own() -> None:
    frames, truths = run("fsdp2", "every", unreduced_gradients=True)
    for frame, micros in zip(frames, truths):
        for (name, phase, number), sample in unreduced(frame).items():
            assert (phase, number) == ("local", str(MICRO - 1))
            pc.assert_same(sample, micros[-1][name], name)


@pytest.mark.slow
def test_no_sum_exists_when_every_micro_batch_is_reduced() -> None:
    """FSDP2 that reduces every micro batch has no sum of this rank: what is shown is the last micro batch's own, and is called so."""
    run_ranks(2, last_own)


def each_once() -> None:
    frames, truths = run("fsdp2", "every", unreduced_gradients=True, micro_batch_gradients=True)
    for frame, micros in zip(frames, truths):
        assert set(unreduced(frame)) == {(name, "local", str(i)) for i in range(MICRO) for name in micros[0]}


@pytest.mark.slow
def test_one_row_where_both_are_wanted() -> None:
    """The last micro batch's own gradient is there as a micro batch already: no key comes twice."""
    run_ranks(2, each_once)


def test_parameters_used_in_some_micro_batches() -> None:
    """The number of a micro batch is the training's, also for a parameter that came late; one that is set by hand wins."""

    class Switch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.late = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)

        def forward(self, x: torch.Tensor, late: bool) -> torch.Tensor:
            return self.late(self.always(x)) if late else self.always(x)

    for by_hand in (False, True):
        model = Switch()
        probe = pc.probe(micro_batch_gradients=True)
        with pc.closing(probe) as frames:
            probe.attach(model, pc.optimizer("sgd", model.parameters()))
            probe.begin_step(0)
            for micro in range(MICRO):
                if by_hand:
                    probe.micro_step = micro + 5
                model(torch.ones(1, 2), late=micro > 0).sum().backward()
            probe.end_step()
        shift = 5 if by_hand else 0
        numbers = sorted((key[0], int(key[2]) - shift) for key in unreduced(frames[0]))
        assert [n for n in numbers if n[0].startswith("always")] == [("always.weight", i) for i in range(MICRO)]
        assert [n for n in numbers if n[0].startswith("late")] == [("late.weight", 1), ("late.weight", 2)]
