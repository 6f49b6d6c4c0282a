"""Operators that are wrong in ways that kernels are, and right ones that are computed in another way than torch does it.

Every function gives the call and what a device made of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Made(NamedTuple):
    """A call and its results.

    Attributes:
        api: type and name, ``"Torch.matmul"``.
        args, kwargs: of the call.
        outputs: of the device.
        gradients: of the device, for tensors that need one; empty: there is no backward.
        incoming: gradients that come into the backward.
    """

    api: str
    args: tuple[Any, ...]
    outputs: Any
    kwargs: dict[str, Any] = {}
    gradients: tuple[torch.Tensor, ...] = ()
    incoming: tuple[torch.Tensor, ...] = ()


def randn(*shape: int, dtype: torch.dtype = FP32, seed: int = 0, scale: float = 1.0, mean: float = 0.0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale + mean).to(dtype)


def chopped(x: torch.Tensor, bits: int) -> torch.Tensor:
    """float32 with so many bits of the fraction."""
    mask = -(1 << (23 - bits))
    return (x.view(torch.int32) & mask).view(FP32)


def step_by_step(terms: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Sum over the last axis, one term after the other, rounded each time."""
    total = torch.zeros(terms.shape[:-1], dtype=dtype)
    for n in range(terms.shape[-1]):
        total = total + terms[..., n].to(dtype)
    return total


def composite_softmax(x: torch.Tensor) -> torch.Tensor:
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def with_gradient(
    api: str, function: Callable[..., torch.Tensor], wrong: Callable[[torch.Tensor], torch.Tensor], *inputs: Any, **kwargs: Any
) -> Made:
    """The forward is right, the gradient of the first input that has one goes through `wrong`."""
    args = tuple(x.clone().requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs)
    out = function(*args, **kwargs)
    incoming = randn(*out.shape, dtype=out.dtype, seed=99)
    first, *others = torch.autograd.grad(out, [x for x in args if isinstance(x, torch.Tensor) and x.requires_grad], incoming)
    return Made(api, args, out.detach(), kwargs, (wrong(first), *others), (incoming,))


A, B = randn(48, 256, seed=1), randn(256, 40, seed=2)
X, Y = randn(64, 100, seed=3), randn(64, 100, seed=4)
IDS = torch.arange(60).remainder(17).view(6, 10)
TABLE = randn(20, 8, seed=5)
Q, K, V = (randn(2, 4, 24, 16, seed=n) for n in (6, 7, 8))
IMAGE, KERNEL = randn(2, 3, 12, 12, seed=9), randn(5, 3, 3, 3, seed=10)
NAN = X.clone()
NAN[3, 5] = math.nan
MASKED = X.masked_fill(X > 1, -math.inf)
WIDE = randn(8, 64, seed=11, scale=8.0)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.softmax((q @ k.mT * scale).masked_fill(mask, -math.inf), -1) @ v


def _changed(x: torch.Tensor, at: Any, value: Any) -> torch.Tensor:
    x = x.clone()
    x[at] = value
    return x


def _newton_rsqrt(x: torch.Tensor) -> torch.Tensor:
    """The first estimate of a known trick and one step."""
    guess = (0x5F3759DF - (x.view(torch.int32) >> 1)).view(FP32)
    return guess * (1.5 - 0.5 * x * guess * guess)


CAUSAL = torch.ones(24, 24).triu(1).bool()

WRONG: dict[str, Callable[[], Made]] = {
    "matmul with reduced mantissa": lambda: Made("Torch.matmul", (A, B), chopped(A, 10) @ chopped(B, 10)),
    "matmul in bfloat16": lambda: Made("Torch.matmul", (A, B), (A.bfloat16() @ B.bfloat16()).float()),
    "matmul accumulates in bfloat16": lambda: Made(
        "Torch.matmul", (A.bfloat16(), B.bfloat16()), step_by_step(A.bfloat16()[:, None] * B.bfloat16().T[None], BF16)
    ),
    "matmul accumulates in float16": lambda: Made(
        "Torch.mm", (A.half(), B.half()), step_by_step(A.half()[:, None] * B.half().T[None], FP16)
    ),
    "matmul loses the last of the inner axis": lambda: Made("Torch.matmul", (A, B), A[:, :-1] @ B[:-1]),
    "matmul counts a part twice": lambda: Made("Tensor.matmul", (A, B), A @ B + A[:, :4] @ B[:4]),
    "matmul transposed": lambda: Made("Torch.matmul", (X[:, :64], Y[:, :64]), (X[:, :64] @ Y[:, :64]).T.contiguous()),
    "matmul leaves the last row": lambda: Made("Torch.matmul", (A, B), _changed(A @ B, -1, 0.0)),
    "matmul with wrong tile": lambda: Made("Torch.matmul", (A, B), _changed(A @ B, (slice(16, 32), slice(0, 8)), (A @ B)[:16, :8])),
    "linear without bias": lambda: Made(
        "Functional.linear", (X, randn(30, 100, seed=20), randn(30, seed=21)), F.linear(X, randn(30, 100, seed=20))
    ),
    "linear in bfloat16 accumulates there": lambda: Made(
        "Functional.linear", (A.bfloat16(), B.T.contiguous().bfloat16()), step_by_step(A.bfloat16()[:, None] * B.T.bfloat16()[None], BF16)
    ),
    "bmm of the wrong batch": lambda: Made("Torch.bmm", (Q[0], K[0].mT.contiguous()), Q[0] @ K[0].roll(1, 0).mT),
    "sum without the last element": lambda: Made("Torch.sum", (X, -1), X[:, :-1].sum(-1)),
    "sum over the wrong axis": lambda: Made("Torch.sum", (X[:, :64], -1), X[:, :64].sum(0)),
    "sum accumulates in bfloat16": lambda: Made("Torch.sum", (X.bfloat16(), -1), step_by_step(X.bfloat16(), BF16)),
    "sum of many in bfloat16 stands still": lambda: Made(
        "Torch.sum", (torch.ones(1, 2000, dtype=BF16), -1), step_by_step(torch.ones(1, 2000), BF16)
    ),
    "sum in float16 overflows on the way": lambda: Made(
        "Torch.sum", (torch.tensor([[6e4, 6e4, -6e4, -5e4]], dtype=FP16), -1), torch.tensor([math.inf], dtype=FP16)
    ),
    "mean over one less": lambda: Made("Torch.mean", (X, -1), X.sum(-1) / 99),
    "mean accumulates in float16": lambda: Made("Torch.mean", (X.half(), -1), step_by_step(X.half(), FP16) / 100),
    "naive cumsum": lambda: Made(
        "Torch.cumsum", (x := randn(1, 65536, seed=30).abs(), -1), torch.from_numpy(np.cumsum(x.numpy(), -1, dtype=np.float32))
    ),
    "cumsum without the element itself": lambda: Made("Torch.cumsum", (X, -1), X.cumsum(-1) - X),
    "variance as a difference of squares": lambda: Made(
        "Torch.var", (x := randn(64, 200, seed=31, mean=30.0), -1), ((x * x).mean(-1) - x.mean(-1) ** 2) * 200 / 199
    ),
    "variance without correction": lambda: Made("Torch.var", (X, -1), X.var(-1, correction=0)),
    "norm in float16 overflows": lambda: Made("Torch.norm", (x := X.half() * 100,), (x * x).sum().sqrt()),
    "composite softmax in bfloat16": lambda: Made("Torch.softmax", (WIDE.bfloat16(), -1), composite_softmax(WIDE.bfloat16())),
    "composite softmax in float16": lambda: Made("Functional.softmax", (WIDE.half(), -1), composite_softmax(WIDE.half())),
    "softmax without the maximum": lambda: Made("Torch.softmax", (x := WIDE * 20, -1), torch.exp(x) / torch.exp(x).sum(-1, keepdim=True)),
    "softmax over the wrong axis": lambda: Made("Torch.softmax", (X, -1), X.softmax(0)),
    "softmax of a mask that is finite": lambda: Made("Torch.softmax", (MASKED / 4, -1), torch.softmax(X.masked_fill(X > 1, -30.0) / 4, -1)),
    "log_softmax by log of softmax": lambda: Made("Torch.log_softmax", (x := WIDE * 8, -1), x.softmax(-1).log()),
    "logsumexp without the maximum": lambda: Made("Torch.logsumexp", (x := WIDE * 20, -1), x.exp().sum(-1).log()),
    "layer_norm with another eps": lambda: Made("Functional.layer_norm", (X * 0.1, (100,)), F.layer_norm(X * 0.1, (100,), eps=1e-3)),
    "layer_norm with corrected variance": lambda: Made(
        "Functional.layer_norm", (X, (100,)), (X - X.mean(-1, keepdim=True)) / (X.var(-1, keepdim=True) + 1e-5).sqrt()
    ),
    "layer_norm by squares": lambda: Made(
        "Functional.layer_norm",
        (x := randn(32, 100, seed=33, mean=50.0), (100,)),
        (x - x.mean(-1, keepdim=True)) / ((x * x).mean(-1, keepdim=True) - x.mean(-1, keepdim=True) ** 2 + 1e-5).sqrt(),
    ),
    "layer_norm computed in bfloat16": lambda: Made(
        "Functional.layer_norm",
        (x := X.bfloat16(), (100,)),
        (x - x.mean(-1, keepdim=True)) * (x.var(-1, keepdim=True, correction=0) + 1e-5).rsqrt(),
    ),
    "rms_norm computed in bfloat16": lambda: Made(
        "Functional.rms_norm",
        (x := X.bfloat16(), (100,)),
        x * (x.pow(2).mean(-1, keepdim=True) + torch.finfo(BF16).eps).rsqrt(),
        {"eps": 2**-7},
    ),
    "batch_norm with corrected variance": lambda: Made(
        "Functional.batch_norm", (X, None, None, None, None, True), (X - X.mean(0)) / (X.var(0) + 1e-5).sqrt()
    ),
    "gelu by tanh": lambda: Made("Functional.gelu", (X,), F.gelu(X, approximate="tanh")),
    "gelu computed in bfloat16": lambda: Made("Functional.gelu", (x := X.bfloat16(),), 0.5 * x * (1 + torch.erf(x * 0.7071))),
    "silu computed in bfloat16": lambda: Made("Functional.silu", (x := X.bfloat16(),), x * torch.sigmoid(x)),
    "silu without the sigmoid's sign": lambda: Made("Functional.silu", (X,), X * torch.sigmoid(-X)),
    "exp with half the digits": lambda: Made("Torch.exp", (X,), X.half().exp().float()),
    "exp without small values": lambda: Made("Torch.exp", (x := WIDE * 2,), torch.where(x < -6, 0.0, x.exp())),
    "exp of the next element": lambda: Made("Torch.exp", (X,), X.exp().roll(1, -1)),
    "log1p by log": lambda: Made("Torch.log1p", (x := X.abs() * 1e-4,), torch.log(1 + x)),
    "expm1 by exp": lambda: Made("Torch.expm1", (x := X * 1e-4,), x.exp() - 1),
    "rsqrt from an estimate": lambda: Made("Torch.rsqrt", (x := X.abs() + 0.1,), _newton_rsqrt(x)),
    "division by a coarse reciprocal": lambda: Made("Torch.div", (X, y := Y.abs() + 1), X * chopped(1 / y, 12)),
    "tanh that saturates early": lambda: Made("Torch.tanh", (x := X * 3,), torch.where(x.abs() > 4, x.sign(), x.tanh())),
    "scaled by 1.01 in float32": lambda: Made("Torch.sin", (X,), X.sin() * 1.01),
    "scaled by 1.01 in bfloat16": lambda: Made(
        "Torch.mul", (X.bfloat16(), Y.bfloat16()), (X.bfloat16().float() * Y.bfloat16().float() * 1.01).bfloat16()
    ),
    "scaled by 1.02 in bfloat16, an operator of several kernels": lambda: Made(
        "Functional.normalize", (x := X.bfloat16(),), (F.normalize(x.float()) * 1.02).bfloat16()
    ),
    "scaled by 1.0001": lambda: Made("Torch.sigmoid", (X,), X.sigmoid() * 1.0001),
    "ten times too large, and small": lambda: Made("Functional.gelu", (x := X * 1e-5,), F.gelu(x) * 10),
    "ten times too large, and small, in float16": lambda: Made("Torch.mul", (x := (X * 1e-3).half(), Y.half()), x * Y.half() * 10),
    "one wrong element": lambda: Made("Torch.cos", (X,), _changed(X.cos(), (7, 7), X.cos()[7, 7] * 1.001)),
    "one NaN": lambda: Made("Torch.cos", (X,), _changed(X.cos(), (7, 7), math.nan)),
    "one Inf": lambda: Made("Torch.cos", (X.bfloat16(),), _changed(X.bfloat16().cos(), (7, 7), math.inf)),
    "stale result": lambda: Made("Torch.cos", (X,), Y.cos()),
    "result never written": lambda: Made("Torch.cos", (X,), torch.zeros_like(X)),
    "rounded down in bfloat16": lambda: Made(
        "Torch.cos", (x := X.bfloat16(),), (x.float().cos().view(torch.int32) & -65536).view(FP32).bfloat16()
    ),
    "maximum that swallows NaN": lambda: Made("Torch.maximum", (NAN, Y), torch.where(NAN != NAN, Y, torch.maximum(NAN, Y))),
    "relu that swallows NaN": lambda: Made("Functional.relu", (NAN,), torch.nan_to_num(NAN, 0.0).relu()),
    "sum that swallows NaN": lambda: Made("Torch.sum", (NAN, -1), NAN.nansum(-1)),
    "max that takes the second": lambda: Made("Torch.amax", (X, -1), X.sort(-1).values[:, -2]),
    "argmax off by one": lambda: Made("Torch.argmax", (X, -1), X.argmax(-1).add(1).clamp(max=99)),
    "topk in the wrong order": lambda: Made("Torch.topk", (X, 3), (X.topk(3).values.flip(-1), X.topk(3).indices.flip(-1))),
    "sort in the wrong direction": lambda: Made("Torch.sort", (X, -1, True), tuple(X.sort(-1))),
    "gather off by one": lambda: Made("Torch.gather", (X, 1, i := IDS.repeat(7, 1)[:42]), X[:42].gather(1, i + 1)),
    "embedding off by one": lambda: Made("Functional.embedding", (IDS, TABLE), F.embedding(IDS + 1, TABLE)),
    "index_select of the wrong axis": lambda: Made(
        "Torch.index_select", (X[:, :64], 0, i := torch.tensor([3, 1])), X[:, :64].T.index_select(0, i)
    ),
    "index_add that loses repeats": lambda: Made(
        "Torch.index_add", (z := torch.zeros(20, 10), 0, i := IDS.view(-1), s := X[:60, :10]), z.index_copy(0, i, s)
    ),
    "scatter_add that loses repeats": lambda: Made(
        "Torch.scatter_add", (z := torch.zeros(6, 20), 1, IDS, s := X[:6, :10]), z.scatter(1, IDS.roll(1, 1), s)
    ),
    "where with the sides exchanged": lambda: Made("Torch.where", (X > 0, X, Y), torch.where(X > 0, Y, X)),
    "masked_fill with a finite value": lambda: Made("Torch.masked_fill", (X, X > 1, -math.inf), X.masked_fill(X > 1, -10000.0)),
    "transpose that is none": lambda: Made("Torch.transpose", (X[:, :64], 0, 1), X[:, :64].clone()),
    "pad on the wrong side": lambda: Made("Functional.pad", (X, (1, 0)), F.pad(X, (0, 1))),
    "round half up": lambda: Made("Torch.round", (x := torch.arange(-20, 21) / 2,), torch.floor(x + 0.5)),
    "trunc by floor": lambda: Made("Torch.trunc", (X * 3,), (X * 3).floor()),
    "remainder with the sign of the other": lambda: Made("Torch.remainder", (X * 3, 2.0), torch.fmod(X * 3, 2.0)),
    "comparison with <=": lambda: Made("Torch.lt", (x := torch.arange(9.0), 4.0), x <= 4.0),
    "integers of 32 bits": lambda: Made("Torch.sum", (x := torch.full((2, 4), 2**30),), x.sum().to(torch.int32).long()),
    "attention without mask": lambda: Made(
        "Functional.scaled_dot_product_attention", (Q, K, V), F.scaled_dot_product_attention(Q, K, V), {"is_causal": True}
    ),
    "attention that sees one ahead": lambda: Made(
        "Functional.scaled_dot_product_attention",
        (Q, K, V),
        attention(Q, K, V, torch.ones(24, 24).triu(2).bool(), 0.25),
        {"is_causal": True},
    ),
    "attention without scale": lambda: Made("Functional.scaled_dot_product_attention", (Q, K, V), attention(Q, K, V, CAUSAL & False, 1.0)),
    "attention with the values of another head": lambda: Made(
        "Functional.scaled_dot_product_attention",
        (Q.bfloat16(), K.bfloat16(), V.bfloat16()),
        F.scaled_dot_product_attention(Q, K, V.roll(1, 1)).bfloat16(),
    ),
    "conv2d without padding's corners": lambda: Made(
        "Functional.conv2d", (IMAGE, KERNEL, None, 1, 1), F.pad(F.conv2d(IMAGE, KERNEL), (1, 1, 1, 1))
    ),
    "conv2d with the kernel turned": lambda: Made("Functional.conv2d", (IMAGE, KERNEL), F.conv2d(IMAGE, KERNEL.flip(-1, -2))),
    "conv2d with reduced mantissa": lambda: Made("Functional.conv2d", (IMAGE, KERNEL), F.conv2d(chopped(IMAGE, 10), chopped(KERNEL, 10))),
    "max_pool2d with a smaller window": lambda: Made(
        "Functional.max_pool2d", (IMAGE, 3), F.max_pool2d(F.pad(IMAGE[..., :-1], (0, 1), value=-9.0), 3)
    ),
    "avg_pool2d that counts the padding": lambda: Made(
        "Functional.avg_pool2d", (IMAGE, 3, 3, 1), F.avg_pool2d(IMAGE, 3, 3, 1), {"count_include_pad": False}
    ),
    "cross_entropy without ignore_index": lambda: Made(
        "Functional.cross_entropy", (X, t := torch.arange(64)), F.cross_entropy(X, t), {"ignore_index": 3}
    ),
    "mse_loss as a sum": lambda: Made("Functional.mse_loss", (X, Y), F.mse_loss(X, Y, reduction="sum")),
    "gradient halved": lambda: with_gradient("Functional.gelu", F.gelu, lambda g: g / 2, X),
    "gradient never written": lambda: with_gradient("Torch.exp", torch.exp, torch.zeros_like, X),
    "gradient of small values ten times too large": lambda: with_gradient("Torch.tanh", torch.tanh, lambda g: g * 10, X * 1e-6),
    "gradient of softmax without the sum": lambda: with_gradient("Torch.softmax", torch.softmax, lambda g: g + 1e-3 * X.softmax(-1), X, -1),
    "gradient of matmul transposed": lambda: with_gradient(
        "Torch.matmul", torch.matmul, lambda g: g.T.contiguous(), X[:, :64], Y[:, :64][:64]
    ),
    "gradient of layer_norm without the mean": lambda: with_gradient("Functional.layer_norm", F.layer_norm, lambda g: g + 1e-4, X, (100,)),
    "gradient with one NaN": lambda: with_gradient("Torch.sigmoid", torch.sigmoid, lambda g: _changed(g, (1, 1), math.nan), X),
    "gradient of embedding that loses repeats": lambda: with_gradient(
        "Functional.embedding", F.embedding, lambda g: _changed(g, 3, g[3] * 0.5), IDS, TABLE
    ),
    "gradient of a matmul in bfloat16": lambda: with_gradient(
        "Torch.matmul", torch.matmul, lambda _: step_by_step(randn(48, 40, seed=99)[:, None] * B[None], BF16).float(), A, B
    ),
}


def _blocked(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    parts = [a[:, n : n + 16] @ b[n : n + 16] for n in range(0, a.shape[1], 16)]
    out = parts[0]
    for part in parts[1:]:
        out = out + part
    return out


RIGHT: dict[str, Callable[[], Made]] = {
    "matmul of another library": lambda: Made("Torch.matmul", (A, B), torch.from_numpy(A.numpy() @ B.numpy())),
    "matmul in blocks": lambda: Made("Torch.matmul", (A, B), _blocked(A, B)),
    "matmul one term after the other": lambda: Made("Torch.matmul", (A, B), step_by_step(A[:, None] * B.T[None], FP32)),
    "matmul of a long axis, one term after the other": lambda: Made(
        "Torch.matmul", (a := randn(2, 8192, seed=40), b := randn(8192, 2, seed=41)), step_by_step(a[:, None] * b.T[None], FP32)
    ),
    "matmul of positive numbers": lambda: Made("Torch.matmul", (a := A.abs(), b := B.abs()), step_by_step(a[:, None] * b.T[None], FP32)),
    "matmul of bfloat16 in float32": lambda: Made(
        "Torch.matmul", (A.bfloat16(), B.bfloat16()), _blocked(A.bfloat16().float(), B.bfloat16().float()).bfloat16()
    ),
    "matmul of float16 in float32": lambda: Made("Torch.matmul", (A.half(), B.half()), _blocked(A.half().float(), B.half().float()).half()),
    "sum one after the other": lambda: Made("Torch.sum", (X, -1), step_by_step(X, FP32)),
    "sum of many": lambda: Made("Torch.sum", (x := randn(4, 20000, seed=42), -1), torch.from_numpy(np.add.reduce(x.numpy(), -1))),
    "softmax in another order": lambda: Made("Torch.softmax", (WIDE, -1), composite_softmax(WIDE)),
    "softmax of bfloat16 in float32": lambda: Made(
        "Torch.softmax", (WIDE.bfloat16(), -1), composite_softmax(WIDE.bfloat16().float()).bfloat16()
    ),
    "softmax with a mask": lambda: Made("Torch.softmax", (MASKED, -1), composite_softmax(MASKED)),
    "masked_fill with -inf": lambda: Made("Torch.masked_fill", (X, X > 1, -math.inf), X.masked_fill(X > 1, -math.inf)),
    "NaN stays": lambda: Made("Torch.maximum", (NAN, Y), torch.maximum(NAN, Y)),
    "overflow of float16": lambda: Made("Torch.mul", (x := (WIDE * 1000).half(), WIDE.half()), x * WIDE.half()),
    "layer_norm by hand": lambda: Made(
        "Functional.layer_norm",
        (x := randn(32, 100, seed=33, mean=3.0), (100,)),
        (x - x.mean(-1, keepdim=True)) * (x.var(-1, keepdim=True, correction=0) + 1e-5).rsqrt(),
    ),
    "variance of shifted values": lambda: Made(
        "Torch.var", (x := randn(64, 200, seed=31, mean=30.0), -1), ((x - 30) - (x - 30).mean(-1, True)).square().sum(-1) / 199
    ),
    "gelu by erf": lambda: Made("Functional.gelu", (X,), 0.5 * X * (1 + torch.erf(X * 2**-0.5))),
    "gelu of bfloat16 in float32": lambda: Made("Functional.gelu", (x := X.bfloat16(),), F.gelu(x.float()).bfloat16()),
    "exp by exp2": lambda: Made("Torch.exp", (X,), torch.exp2(X * 1.4426950408889634)),
    "exp of another library": lambda: Made("Torch.exp", (WIDE,), torch.from_numpy(np.exp(WIDE.numpy()))),
    "division by a reciprocal": lambda: Made("Torch.div", (X, y := Y.abs() + 1), X * (1 / y)),
    "attention by hand": lambda: Made(
        "Functional.scaled_dot_product_attention", (Q, K, V), attention(Q, K, V, CAUSAL, 0.25), {"is_causal": True}
    ),
    "attention of bfloat16 in float32": lambda: Made(
        "Functional.scaled_dot_product_attention",
        (q := Q.bfloat16(), k := K.bfloat16(), v := V.bfloat16()),
        attention(q.float(), k.float(), v.float(), CAUSAL, 0.25).bfloat16(),
        {"is_causal": True},
    ),
    "conv2d by a matmul": lambda: Made("Functional.conv2d", (IMAGE, KERNEL), (KERNEL.view(5, -1) @ F.unfold(IMAGE, 3)).view(2, 5, 10, 10)),
    "small numbers flushed to zero": lambda: Made("Torch.mul", (x := X * 1e-39, Y), torch.where((x * Y).abs() < 2**-126, 0.0, x * Y)),
    "normalize in bfloat16": lambda: Made("Functional.normalize", (x := X.bfloat16(),), x / x.norm(dim=1, keepdim=True)),
    "gradient of softmax by hand": lambda: with_gradient(
        "Torch.softmax",
        torch.softmax,
        lambda _: (p := X.softmax(-1)) * ((g := randn(64, 100, seed=99)) - (g * p).sum(-1, keepdim=True)),
        X,
        -1,
    ),
    "gradient of tanh by hand": lambda: with_gradient(
        "Torch.tanh", torch.tanh, lambda _: randn(64, 100, seed=99) * (1 - (X * 3).tanh() ** 2), X * 3
    ),
}
