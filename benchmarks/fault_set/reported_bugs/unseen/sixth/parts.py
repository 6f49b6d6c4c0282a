"""Parts of the model of the sixth set: a mixer with a state and a short convolution, experts that are chosen in groups, linear layers whose
products take numbers of eight bits, and a loss that computes its gradients in the forward pass."""

from __future__ import annotations

from typing import Any

import torch
from reported_bugs.unseen.fifth.decoder import HEADS, SIZE, WIDTH, Norm
from torch import Tensor, nn
from torch.nn import functional as F

EXPERTS, SECTIONS, TOP, INNER, WINDOW = 8, 4, 2, 48, 3


class Recurrent(nn.Module):
    """Linear attention whose state decays; state and convolution begin anew with each document."""

    stepwise = False

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.conv, self.rate = nn.Parameter(torch.empty(WINDOW, WIDTH)), nn.Linear(WIDTH, HEADS)
        self.decay, self.norm = nn.Parameter(torch.linspace(-2.5, 0.5, HEADS)), Norm(SIZE)
        nn.init.normal_(self.conv, std=0.6)

    def same(self, documents: Tensor, back: int) -> Tensor:
        return documents == F.pad(documents, (back, 0), value=-1)[:, : documents.shape[1]]

    def convolved(self, x: Tensor, documents: Tensor) -> Tensor:
        out = x * self.conv[0]
        for back in range(1, WINDOW):
            earlier = F.pad(x, (0, 0, back, 0))[:, : x.shape[1]]
            out = out + earlier * self.conv[back] * self.same(documents, back)[..., None]
        return F.silu(out)

    def logs(self, x: Tensor) -> Tensor:
        """Of what a place leaves of the state."""
        return -self.decay.float().exp() * F.softplus(self.rate(x).float())

    def joined(self, documents: Tensor) -> Tensor:
        return documents[:, :, None] == documents[:, None]

    def left(self, logs: Tensor, documents: Tensor) -> Tensor:
        total = logs.cumsum(1)
        seen = torch.ones(logs.shape[1], logs.shape[1], dtype=torch.bool).tril() & self.joined(documents)
        return (total[:, :, None] - total[:, None]).permute(0, 3, 1, 2).masked_fill(~seen[:, None], -torch.inf).exp()

    def step_by_step(self, q: Tensor, k: Tensor, v: Tensor, logs: Tensor, documents: Tensor) -> Tensor:
        kept, state, found = logs.exp() * self.same(documents, 1)[..., None], torch.zeros(()), []
        for place in range(q.shape[2]):
            added = k[:, :, place, :, None].float() * v[:, :, place, None].float()
            state = added if place == 0 else state * kept[:, place, :, None, None] + added
            found.append((q[:, :, place, None].float() @ state)[:, :, 0] * SIZE**-0.5)
        return torch.stack(found, 2).to(v.dtype)

    def forward(self, x: Tensor, _positions: Tensor, documents: Tensor) -> Tensor:
        x = self.convolved(x, documents)
        q, k, v = (linear(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        logs = self.logs(x)
        if self.stepwise:
            out = self.step_by_step(q, k, v, logs, documents)
        else:
            out = ((q @ k.transpose(-1, -2)).float() * SIZE**-0.5 * self.left(logs, documents)).to(v.dtype) @ v
        return self.o(self.norm(out).transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """Two of four groups are chosen, then two experts in them; a bias that follows the load takes part in the choice alone."""

    bias: Tensor
    together = counts = False

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up, self.down = nn.Parameter(torch.empty(EXPERTS, WIDTH, 2 * INNER)), nn.Parameter(torch.empty(EXPERTS, INNER, WIDTH))
        self.register_buffer("bias", torch.zeros(EXPERTS))
        self.load = torch.zeros(EXPERTS)
        for matrix in (self.up, self.down):
            nn.init.normal_(matrix, std=0.12)

    def scores(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.router.weight.float()).sigmoid()

    def of_groups(self, wanted: Tensor) -> Tensor:
        return wanted.unflatten(-1, (SECTIONS, -1)).sum(-1)

    def chosen(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        wanted = scores + self.bias
        groups = self.of_groups(wanted).topk(2, -1)[1]
        allowed = torch.zeros(*wanted.shape[:-1], SECTIONS, dtype=torch.bool).scatter_(-1, groups, True)
        experts = wanted.masked_fill(~allowed.repeat_interleave(EXPERTS // SECTIONS, -1), -torch.inf).topk(TOP, -1)[1]
        weights = scores.gather(-1, experts)
        return weights / weights.sum(-1, keepdim=True) * 1.5, experts

    def matrices(self) -> tuple[Tensor, Tensor]:
        return self.up, self.down

    def entered(self, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Where ranks have parts of each expert, gradients are summed here."""
        return x, weights

    def summed(self, out: Tensor) -> Tensor:
        return out

    def one(self, x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        gate, value = (x @ up).chunk(2, -1)
        return (F.silu(gate) * value) @ down

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        weights, experts = self.chosen(self.scores(flat))
        if self.counts:
            self.load = self.load + torch.bincount(experts.flatten(), minlength=EXPERTS)
        flat, weights = self.entered(flat, weights.to(flat.dtype))
        up, down = self.matrices()
        if self.together:
            each = self.one(flat, up, down)
            out = (each[experts.T, torch.arange(len(flat))] * weights.T[..., None]).sum(0)
        else:
            out = torch.zeros_like(flat)
            for number in range(EXPERTS):
                rows, places = torch.where(experts == number)
                out = out.index_add(0, rows, self.one(flat[rows], up[number], down[number]) * weights[rows, places, None])
        return self.summed(out).view_as(x)


class InForward(torch.autograd.Function):
    """Cross entropy of each token; the gradient of logits is made together with it."""

    @staticmethod
    def of_token(grad: Tensor) -> Tensor:
        return grad

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        logits, kept = (x @ weight.T).float(), labels != -100
        chances = logits.softmax(-1)
        ahead = chances.scatter_add(-1, labels.clamp(min=0)[:, None], torch.full((len(x), 1), -1.0))
        ctx.save_for_backward(x, weight, ahead * kept[:, None])
        return F.cross_entropy(logits, labels, ignore_index=-100, reduction="none")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, weight, ahead = ctx.saved_tensors
        own = (ahead * InForward.of_token(grad)[:, None]).to(x.dtype)
        return own @ weight, own.T @ x, None


def eighth(x: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """As numbers of eight bits, and what they are to be multiplied by."""
    scale = x.abs().amax().float().clamp(min=1e-12) / torch.finfo(kind).max
    return (x.float() / scale).to(kind).float(), scale


class Eighths(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, wrong: bool) -> Tensor:  # type: ignore[override]
        (a, of_a), (b, of_b) = eighth(x.detach(), torch.float8_e4m3fn), eighth(weight.detach(), torch.float8_e4m3fn)
        ctx.save_for_backward(a, of_a, b, of_a if wrong else of_b)
        return ((a @ b.T) * (of_a * of_b)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        a, of_a, b, of_b = ctx.saved_tensors
        g, of_g = eighth(grad, torch.float8_e5m2)
        of_weight = g.flatten(0, -2).T @ a.flatten(0, -2)
        return ((g @ b) * (of_g * of_b)).to(grad.dtype), (of_weight * (of_g * of_a)).to(grad.dtype), None


class Eight(nn.Linear):
    wrong = False

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Eighths.apply(x, self.weight, self.wrong)
        return found
