"""`diagnose` on small trainings with faults that statistics do not show where they happen, and on variations that are none."""

from __future__ import annotations

import functools
import multiprocessing
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # every optimizer imports it: once here instead of in every forked process
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from msprobe_engine.find.findings import Diagnosis
from msprobe_engine.find.run import diagnose

Losses = Callable[[], Iterable[Tensor]]
"""Of the micro batches of a step."""
Make = Callable[[str, torch.Generator], tuple[nn.Module, Losses]]


class Recurrent(nn.Module):
    """Tokens through a cell, step after step."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cell, self.out = nn.Embedding(12, 8), nn.GRUCell(8, 8), nn.Linear(8, 12)

    def forward(self, tokens: Tensor, fault: str) -> Tensor:
        if fault == "order":
            tokens = tokens.flip(1)
        embedded = self.embedding(tokens)
        state, found = torch.zeros(tokens.shape[0], 8), []
        for at in range(tokens.shape[1]):
            state = self.cell(embedded[:, at], state)
            if fault == "cut" and at == 2:
                state = state.detach()
            found.append(state)
        out: Tensor = self.out(torch.stack(found, 1))
        if fault == "written":
            out.detach().view(-1)[5:9].mul_(3.0)
        return out


class Normed(nn.Module):
    """A bias in front of a normalisation: its gradient is nothing but round-off, which Adam makes a whole step of."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Conv2d(6, 4, 3)

    def forward(self, x: Tensor, fault: str) -> Tensor:
        del fault
        y: Tensor = self.last(F.silu(self.norm(self.first(x))))
        return y.mean((2, 3))


class Attending(nn.Module):
    """One projection for queries, keys and values (a part of its bias has no gradient), recomputed in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor, fault: str) -> Tensor:
        q, k, v = self.project(x).view(2, 6, 3, 4, 4).permute(2, 0, 3, 1, 4)
        if fault == "by hand":
            scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
            mixed = torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v)
        else:
            mixed = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layers, self.head = nn.Embedding(12, 16), nn.ModuleList([Attending() for _ in range(2)]), nn.Linear(16, 12)

    def forward(self, tokens: Tensor, fault: str) -> Tensor:
        x: Tensor = self.embedding(tokens)
        seen = tokens.flatten() if fault != "counted" else tokens.flatten().add(1).remainder(12)
        x = x * (1 + torch.zeros(12).scatter_add(0, seen, torch.ones_like(seen, dtype=torch.float32))[tokens][..., None])
        for layer in self.layers:
            x = checkpoint(layer, x, fault, use_reentrant=fault == "whole")
        y: Tensor = self.head(x)
        return y


class Kernel(torch.autograd.Function):
    """A norm with a backward pass of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        scale = x.square().mean(-1, keepdim=True).add(1e-6).rsqrt()
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        x, scale = ctx.saved_tensors
        y = x * scale
        out: Tensor = (grad - y * (grad * y).mean(-1, keepdim=True)) * scale
        return out


class EarlyGradient(torch.autograd.Function):
    """A sum of losses whose gradient is computed in the forward pass, and scaled in the backward pass; `forgets`: or not."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, right: Tensor, forgets: bool) -> Tensor:
        with torch.enable_grad():
            own = out.detach().requires_grad_()
            loss = F.cross_entropy(own.transpose(1, 2), right, reduction="sum")
            (grad,) = torch.autograd.grad(loss, own)
        ctx.save_for_backward(grad)
        ctx.forgets = forgets
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (own,) = ctx.saved_tensors
        return own * 1.0 if ctx.forgets else own * grad, None, None


class Grouped(nn.Module):
    """Attention with half as many heads of keys and values as of queries."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.q, self.kv, self.head = nn.Embedding(12, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 12)

    def forward(self, tokens: Tensor, fault: str) -> Tensor:
        x = self.embedding(tokens)
        normed = Kernel.apply(x) if fault.startswith("kernel") else x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt()
        q = self.q(normed).unflatten(-1, (4, 4)).transpose(1, 2)
        k, v = self.kv(normed).unflatten(-1, (2, 2, 4)).permute(2, 0, 3, 1, 4)
        if fault == "groups":
            mixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        elif fault == "in turn":
            mixed = F.scaled_dot_product_attention(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))
        else:
            mixed = F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))
        y: Tensor = self.head(x + mixed.transpose(1, 2).flatten(2))
        return y


def _grouped(fault: str, generator: torch.Generator) -> tuple[nn.Module, Losses]:
    model, tokens = Grouped(), torch.randint(0, 12, (4, 7), generator=generator)
    if fault == "kernel, and a gradient":
        model.kv.weight.register_hook(lambda grad: grad * 1.5)
    count = 1 if fault != "micro batches" else 2

    def losses() -> Iterator[Tensor]:
        for part in tokens.chunk(count):
            out, right = model(part[:, :-1], fault), part[:, 1:]
            if fault in ("early gradient", "forgets"):
                loss = EarlyGradient.apply(out, right, fault == "forgets")
            else:
                loss = F.cross_entropy(out.transpose(1, 2), right, reduction="sum")
            yield loss / right.numel() / count

    return model, losses


def _recurrent(fault: str, generator: torch.Generator) -> tuple[nn.Module, Losses]:
    model, tokens = Recurrent(), torch.randint(0, 12, (3, 5), generator=generator)
    loss = F.l1_loss if fault == "loss" else F.mse_loss
    return model, lambda: [loss(model(tokens, fault), F.one_hot(tokens, 12).float())]


def _normed(fault: str, generator: torch.Generator) -> tuple[nn.Module, Losses]:
    model, pictures = Normed(), torch.rand(4, 3, 8, 8, generator=generator)
    if fault == "layout":
        model, pictures = model.to(memory_format=torch.channels_last), pictures.contiguous(memory_format=torch.channels_last)
    return model, lambda: [F.cross_entropy(model(pictures, fault), torch.arange(4))]


def _recomputed(fault: str, generator: torch.Generator) -> tuple[nn.Module, Losses]:
    model, tokens = Recomputed(), torch.randint(0, 12, (2, 7), generator=generator)

    def losses() -> list[Tensor]:
        out, right, weight = model(tokens[:, :-1], fault), tokens[:, 1:], torch.linspace(0.5, 2, 12)
        if fault == "picked":
            chosen = weight[right]
            return [-(out.log_softmax(-1).gather(-1, right[..., None])[..., 0] * chosen).sum() / chosen.sum()]
        return [F.cross_entropy(out.transpose(1, 2), right[:], None if fault == "unweighted" else weight)]

    return model, losses


def _train(path: Path, make: Make, fault: str) -> None:
    import atexit

    from msprobe.pytorch import PrecisionDebugger

    torch.set_num_threads(1)
    torch.manual_seed(3)
    model, losses = make(fault, torch.Generator().manual_seed(4))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, eps=1e-6 if make is _recomputed else 1e-8)
    debugger = PrecisionDebugger(dump_path=str(path), task="statistics", level="mix", step=[0, 1])
    for _ in range(2):
        debugger.start(model=model)
        total = torch.zeros(())
        for loss in losses():
            loss.backward()
            total = total + loss.detach()
        if make is not _grouped:  # of this one the update is recorded, too
            debugger.stop()
        optimizer.step()
        debugger.stop()
        optimizer.zero_grad()
        debugger.step()
    atexit._run_exitfuncs()  # a forked child ends without them, and they finish the files


def _dumped(path: Path, make: Make, fault: str) -> Path:
    process = multiprocessing.get_context("fork").Process(target=_train, args=(path, make, fault))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    return path


@functools.cache
def _golden(make: Make) -> Path:
    """Without a fault; one for all tests."""
    return _dumped(Path(tempfile.mkdtemp()) / "golden", make, "")


def _found(directory: Path, make: Make, fault: str) -> Diagnosis:
    return diagnose(_dumped(directory / fault, make, fault), _golden(make))


@pytest.mark.fast_cells("order-Tensor\\\\.flip\\\\.0\\\\.forward", "cut-Tensor\\\\.detach\\\\.0\\\\.forward")
@pytest.mark.parametrize(
    ("fault", "record"),
    [
        ("order", r"Tensor\.flip\.0\.forward"),
        ("cut", r"Tensor\.detach\.0\.forward"),
        ("written", r"Tensor\.mul_\.0\.forward"),
        ("loss", r"Functional\.(l1|mse)_loss\.0\.forward"),
    ],
)
def test_call_to_blame(fault: str, record: str, tmp_path: Path) -> None:
    """Elements in another order, a tensor cut off from its gradient, a write through a view and a loss of another kind are blamed on the
    call that did it, and not on the one whose numbers part first."""
    first = _found(tmp_path, _recurrent, fault).first_suspect
    assert first is not None
    assert re.fullmatch(record, first.record), first
    assert (first.step, first.rank) == (0, 0)
    assert Path(__file__).name in first.source


def test_gradient_that_cancels(tmp_path: Path) -> None:
    """Another order of memory moves a gradient that is zero in mathematics by its whole size, and the parameter after it: no difference."""
    found = _found(tmp_path, _normed, "layout")
    assert found.finding == "none", found.text()


@pytest.mark.fast_cells("by hand")
@pytest.mark.parametrize("variation", ["by hand", "whole", "picked"])
def test_another_way_to_the_same_numbers(variation: str, tmp_path: Path) -> None:
    """Attention written out, a recomputation that does not end early, and a loss that picks its terms are no difference, though other
    calls are made and elements whose gradient is nothing but round-off are moved by a small part of Adam's step."""
    found = _found(tmp_path, _recomputed, variation)
    assert found.finding in ("none", "structure"), found.text()


@pytest.mark.parametrize("variation", ["groups", "kernel", "early gradient", "micro batches"])
def test_other_code_for_the_same_numbers(variation: str, tmp_path: Path) -> None:
    """Attention that repeats keys by itself, a kernel with a backward pass of its own, a loss that computes its gradient early and micro
    batches whose losses are added up for the log are no difference."""
    found = _found(tmp_path, _grouped, variation)
    assert found.finding == "none", found.text()
    assert not found.problems, found.text()


@pytest.mark.parametrize(
    ("fault", "record"),
    [
        ("in turn", r"Tensor\.repeat(_interleave)?\.0\.forward"),
        ("forgets", r"Functional\.cross_entropy\.0\.backward"),
        ("kernel, and a gradient", r"Module\.kv\.Linear\.parameters_grad\.0|Tensor\.__mul__\..*"),
    ],
)
def test_faults_beside_them(fault: str, record: str, tmp_path: Path) -> None:
    """Keys that are repeated in another order, a gradient that came early and is not scaled, and one that is off beside a kernel, in which
    nothing requires a gradient."""
    first = _found(tmp_path, _grouped, fault).first_suspect
    assert first is not None
    assert re.fullmatch(record, first.record), first


@pytest.mark.parametrize(
    ("fault", "record"), [("unweighted", r"Functional\.cross_entropy\.0\.forward"), ("counted", r"Tensor\.(add|remainder)\.0\.forward")]
)
def test_what_a_call_is_given(fault: str, record: str, tmp_path: Path) -> None:
    """A tensor that is not given any more is told at the call, not at what made it; a call that takes only a form from what it is given
    hides nothing."""
    first = _found(tmp_path, _recomputed, fault).first_suspect
    assert first is not None
    assert re.fullmatch(record, first.record), first
