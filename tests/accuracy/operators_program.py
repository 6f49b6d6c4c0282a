"""A program with calls of many operators, dumped at level L1 (arguments: task, directory of the dump; as many pairs as wanted)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import ending
import torch
import torch.nn.functional as F

from msprobe.pytorch import PrecisionDebugger

UNARY = "exp sin cos tanh sigmoid abs neg floor round sign erf relu"
POSITIVE = "log sqrt rsqrt reciprocal log1p"


def main(task: str, out: Path) -> None:
    """Dump one step."""
    settings = out.with_suffix(".json")
    settings.write_text(json.dumps({"task": task, "dump_path": str(out), "level": "L1", task: {"data_mode": ["all"]}}))
    torch.manual_seed(0)
    torch.set_num_threads(1)
    x, w = torch.randn(4, 6, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    y = torch.rand(4, 6, 8, requires_grad=True) + 0.1
    low, half = torch.randn(6, 8).bfloat16().requires_grad_(), torch.randn(6, 8).half()
    image, kernel = torch.randn(2, 3, 8, 8, requires_grad=True), torch.randn(4, 3, 3, 3, requires_grad=True)
    ids, odd = torch.tensor([[1, 3], [0, 2]]), torch.tensor([float("nan"), float("inf"), -1.0, 0.0], requires_grad=True)
    mask = torch.zeros(8, 8).masked_fill(torch.ones(8, 8).triu(1).bool(), float("-inf"))
    spread = torch.randn(33, 24) * 10 ** (torch.rand(33, 24) * 6)  # sums of it in another order are other numbers
    debugger = PrecisionDebugger(config_path=str(settings))
    debugger.start()
    made = [getattr(torch, name)(x) for name in UNARY.split()] + [getattr(torch, name)(y) for name in POSITIVE.split()]
    made += [torch.matmul(x, w.t()), torch.add(x, y, alpha=2), torch.mul(x, y), torch.div(x, y, rounding_mode="floor"), torch.pow(y, 2.5)]
    made += [torch.where(x > 0, x, y), torch.cat([x, y], dim=1), torch.stack((x, y)), torch.sum(x, dim=(0, 2), keepdim=True)]
    made += [torch.mean(x), torch.var(x, dim=-1, unbiased=False), torch.cumsum(x, 0), torch.logsumexp(x, -1), torch.topk(x, 3)[0]]
    made += [torch.sort(x, descending=True)[0], torch.max(x, dim=1)[0], torch.gather(x, 2, torch.zeros(4, 6, 2, dtype=torch.int64))]
    made += [torch.index_select(x, 1, torch.tensor([0, 2])), torch.einsum("abc,dc->abd", x, w), torch.bmm(x, y.transpose(1, 2))]
    made += [torch.clamp(x, -1.0, float("inf")), torch.flip(x, [0]), torch.roll(x, 1, 2), torch.masked_select(x, x > 0), torch.tril(x)]
    made += [F.linear(x, w, None), F.conv2d(image, kernel, padding=1, stride=2), F.max_pool2d(image, 2), F.avg_pool2d(image, 2)]
    made += [F.pad(image, (1, 1, 1, 1), value=-3.0), F.softmax(low, -1, dtype=torch.float32), F.log_softmax(low, dim=-1)]
    made += [
        F.layer_norm(low, (8,)),
        F.gelu(x),
        F.silu(low),
        F.leaky_relu(x, 0.1),
        F.mse_loss(x, y),
        F.embedding(ids, w),
        F.one_hot(ids, 7),
    ]
    made += [F.group_norm(image, 3), F.batch_norm(image, None, None, training=True), F.normalize(x, dim=1)]
    made += [F.scaled_dot_product_attention(image * 0.3, image, image, attn_mask=mask), torch.fft.rfft(x).abs(), torch.isnan(odd)]
    made += [torch.linalg.inv(torch.eye(3) * 2 + torch.rand(3, 3)), torch.exp(odd), torch.nan_to_num(odd), torch.argmax(x, -1)]
    made += [torch.arange(0, 10, 2), F.dropout(x, 0.5), torch.bernoulli(y.clamp(0, 1).detach()), torch.zeros(0, 3).sum(0)]
    z = x * 1
    z[:, 1] = 0
    z.mul_(2)
    z.clamp_(min=-3)
    made += [z, z[None, :, [0, 2], -1], z[..., ::2], z[z > 0], x.type_as(half), low @ low.t(), half + 1, 1 / y, x**2]
    made += [spread.t().mean(1), x.masked_fill(x > 0, -1e9), x.unbind(0)[1], x.chunk(2, 1)[0], x.permute(2, 0, 1).contiguous()]
    with torch.autocast("cpu", torch.bfloat16):
        made += [torch.mm(w, w.t() * 2)]
    torch.stack([out.abs().nan_to_num(0, 0, 0).float().sum() for out in made if out.requires_grad]).sum().backward()
    debugger.stop()
    debugger.step()


if __name__ == "__main__":
    for task, place in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        if ending.fork(lambda: main(task, Path(place))):  # noqa: B023  # torch is imported once for all of them; done when it returns
            sys.exit(1)
