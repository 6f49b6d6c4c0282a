"""Healthy pairs of trainings that `msprobe diagnose` must not accuse, and the smallest faults that it names: curves of detection.

    python benchmarks/roundoff.py [--keep DIR] [--modes fp32,bf16,amp,fp16] [--levels mix,L0] [--seeds 6] [--fault-seeds 1]

A small GPT (hidden size 256, 4 blocks, 256 tokens, trained for 120 steps first) is dumped for two steps, statistics only.

Healthy: all products summed in two halves (as two tensor-parallel ranks do), a fused attention, one weight off by one rounding unit, and at
L0 a norm whose weight is applied after rounding and a loss over two halves of the vocabulary.

Faults: a factor on the output of a branch, on a bias, on the gradient of a weight, on a weight; each in the same program, and against
products summed in two halves. A fault is named when the first suspect is the module it is in.

Exit code 1 when a healthy pair is accused.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent / "fault_set"))

from fault_dumps import scratch_directory

HIDDEN, BLOCKS, HEADS, VOCAB, LENGTH, BATCH = 256, 4, 4, 1024, 64, 4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "amp": torch.bfloat16, "fp16": torch.float16}
UNITS = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
HEALTHY = {"mix": ("halves", "fused", "unit"), "L0": ("halves", "fused", "unit", "late", "vocabulary")}
SITES = {
    "mlp": "layers.2.mlp",
    "attention": "layers.1.attention",
    "bias": "layers.1.mlp",
    "gradient": "layers.1.mlp.up",
    "weight": "layers.2.attention.out",
}
FACTORS = {"fp32": (1.000003, 1.00003, 1.0003, 1.003, 1.03, 1.5), "": (1.001, 1.003, 1.01, 1.03, 1.1, 1.5)}
HALVES = False
"""All products are summed in two halves."""


@torch.library.custom_op("msprobe_bench::linear", mutates_args=())
def linear(x: Tensor, weight: Tensor, kind: str) -> Tensor:
    """A product with float32 sums, rounded to the dtype of x; in one piece for the recorder."""
    a, b, half = x.float(), weight.float(), x.shape[-1] // 2
    if HALVES and kind == "row":
        return (a[..., :half] @ b[:, :half].T).to(x.dtype) + (a[..., half:] @ b[:, half:].T).to(x.dtype)
    if HALVES:
        cut = weight.shape[0] // 2
        return torch.cat([a @ b[:cut].T, a @ b[cut:].T], -1).to(x.dtype)
    return (a @ b.T).to(x.dtype)


@torch.library.custom_op("msprobe_bench::linear_backward", mutates_args=())
def linear_backward(x: Tensor, weight: Tensor, gradient: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Its gradients."""
    g, w, cut = gradient.float(), weight.float(), weight.shape[0] // 2
    rows, inputs = g.flatten(0, -2), x.float().flatten(0, -2)
    if not HALVES:
        return (g @ w).to(x.dtype), (rows.T @ inputs).to(weight.dtype)
    middle = len(rows) // 2
    of_weight = rows[:middle].T @ inputs[:middle] + rows[middle:].T @ inputs[middle:]
    of_input = (g[..., :cut] @ w[:cut]).to(x.dtype) + (g[..., cut:] @ w[cut:]).to(x.dtype) if kind == "column" else (g @ w).to(x.dtype)
    return of_input, of_weight.to(weight.dtype)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG001 - the names are torch's
    ctx.save_for_backward(inputs[0], inputs[1])
    ctx.kind = inputs[2]


linear.register_autograd(lambda ctx, g: (*linear_backward(*ctx.saved_tensors, g, ctx.kind), None), setup_context=_setup)


class Linear(nn.Module):
    def __init__(self, inner: int, outer: int, kind: str, bias: bool = True) -> None:
        super().__init__()
        self.weight, self.kind, self.factor, self.amp = nn.Parameter(torch.zeros(outer, inner)), kind, 1.0, False
        self.bias = nn.Parameter(torch.zeros(outer)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        x, weight = (x.bfloat16(), self.weight.bfloat16()) if self.amp else (x, self.weight)
        y: Tensor = torch.ops.msprobe_bench.linear(x, weight, self.kind)
        if self.bias is None:
            return y
        bias = self.bias.to(y.dtype)
        return y + (bias if self.factor == 1 else bias * self.factor)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias, self.late = nn.Parameter(torch.ones(HIDDEN)), nn.Parameter(torch.zeros(HIDDEN)), False

    def forward(self, x: Tensor) -> Tensor:
        if self.late and x.dtype != torch.float32:
            return F.layer_norm(x.float(), (HIDDEN,)).to(x.dtype) * self.weight + self.bias
        return F.layer_norm(x.float(), (HIDDEN,), self.weight.float(), self.bias.float()).to(x.dtype)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = Linear(HIDDEN, 3 * HIDDEN, "column"), Linear(HIDDEN, HIDDEN, "row")
        self.fused, self.factor = False, 1.0

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(BATCH, LENGTH, 3, HEADS, HIDDEN // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = torch.matmul(q, k.transpose(-1, -2)) * (HIDDEN // HEADS) ** -0.5
            scores = scores.masked_fill(~torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(), -10000.0)
            mixed = torch.matmul(F.softmax(scores.float(), -1).to(q.dtype), v)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(BATCH, LENGTH, HIDDEN))
        return out if self.factor == 1 else out * self.factor


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.factor = Linear(HIDDEN, 4 * HIDDEN, "column"), Linear(4 * HIDDEN, HIDDEN, "row"), 1.0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out if self.factor == 1 else (out.float() * self.factor).to(out.dtype)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = Norm(), Attention(), Norm(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places, self.norm = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(LENGTH, HIDDEN), Norm()
        self.layers, self.head, self.halves = nn.ModuleList(Block() for _ in range(BLOCKS)), Linear(HIDDEN, VOCAB, "column", False), False

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(LENGTH))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)).float()
        if not self.halves:
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        top = logits.amax(-1, True).detach()
        one, two = logits.chunk(2, -1)
        total = torch.log((one - top).exp().sum(-1) + (two - top).exp().sum(-1)) + top[..., 0]
        return (total - logits.gather(-1, labels[..., None])[..., 0]).mean()


def batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Tokens of which most follow from the one before, and what follows them."""
    generator = torch.Generator().manual_seed(seed * 1000 + step)
    tokens = torch.randint(0, 128, (BATCH, LENGTH + 1), generator=generator)
    for at in range(1, LENGTH + 1):
        tokens[:, at] = torch.where(torch.rand(BATCH, generator=generator) < 0.7, (tokens[:, at - 1] * 7 + 3) % 128, tokens[:, at])
    return tokens[:, :-1], tokens[:, 1:]


def trained(path: Path) -> dict[str, Tensor]:
    """Weights after 120 steps, kept in a file."""
    if not path.exists():
        model, generator = Gpt(), torch.Generator().manual_seed(1)
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            with torch.no_grad():
                weight.copy_(1 + 0.05 * noise if "norm" in name and name.endswith("weight") else 0.02 * noise)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        for step in range(120):
            optimizer.zero_grad()
            model(*batch(99, step)).backward()
            optimizer.step()
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), path)
    found: dict[str, Tensor] = torch.load(path)
    return found


def plant(model: Any, variant: str) -> None:
    """Change a model: words joined by +, a fault with its factor behind a colon."""
    global HALVES
    for word in variant.split("+"):
        name, _, text = word.partition(":")
        factor = float(text or 1)
        if name == "halves":
            HALVES = True
        elif name == "fused":
            for layer in model.layers:
                layer.attention.fused = True
        elif name == "late":
            for module in model.modules():
                module.late = isinstance(module, Norm)
        elif name == "vocabulary":
            model.halves = HALVES = True
        elif name == "unit":
            with torch.no_grad():
                weight = model.layers[0].mlp.up.weight
                weight[3, 5] = weight[3, 5].float() * (1 + UNITS[weight.dtype])
        elif name == "mlp":
            model.layers[2].mlp.factor = factor
        elif name == "attention":
            model.layers[1].attention.factor = factor
        elif name == "bias":
            model.layers[1].mlp.up.factor = factor
        elif name == "gradient":
            model.layers[1].mlp.up.weight.register_hook(lambda gradient, by=factor: gradient * by)
        elif name == "weight":
            with torch.no_grad():
                model.layers[2].attention.out.weight.mul_(factor)


def train(out: Path, weights: dict[str, Tensor], mode: str, level: str, seed: int, variant: str) -> None:
    """Two steps, dumped."""
    from msprobe.pytorch import PrecisionDebugger

    model, generator = Gpt(), torch.Generator().manual_seed(seed + 7)
    model.load_state_dict(weights)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + 0.02 * torch.randn(weight.shape, generator=generator))
    if mode == "amp":
        for module in model.modules():
            module.amp = True
    else:
        model.to(DTYPES[mode])
    plant(model, variant)
    own = list(model.parameters())
    masters = own if mode in ("fp32", "amp") else [weight.detach().float().clone() for weight in own]
    optimizer, scale = torch.optim.AdamW(masters, 1e-3, weight_decay=0.1, foreach=False), 4096.0 if mode == "fp16" else 1.0
    settings = {"task": "statistics", "dump_path": str(out), "level": level, "step": [0, 1], "rank": []}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(settings, file)
        file.flush()
        debugger = PrecisionDebugger(config_path=file.name)
    for step in range(2):
        data = batch(seed, step)
        debugger.start(model=model)
        model.zero_grad(set_to_none=True)
        (model(*data) * scale).backward()
        for master, weight in zip(masters, own) if masters is not own else ():
            master.grad = weight.grad.float() / scale
        nn.utils.clip_grad_norm_(masters, 0.5, foreach=False)
        optimizer.step()
        with torch.no_grad():
            for master, weight in zip(masters, own) if masters is not own else ():
                weight.copy_(master)
        debugger.stop()
        debugger.step()


def dumped(directory: Path, weights: dict[str, Tensor], mode: str, level: str, seed: int, variant: str) -> Path:
    """The dump of a training in a process of its own; one that is there is not made again.

    Raises:
        RuntimeError: the training failed.
    """
    out = directory / f"{mode}-{level}" / f"seed{seed}" / variant
    if (out / "done").exists():
        return out
    shutil.rmtree(out, ignore_errors=True)
    process = os.fork()
    if not process:
        code = 1
        try:
            train(out, weights, mode, level, seed, variant)
            import atexit

            atexit._run_exitfuncs()  # a forked child ends without them, and they finish the files
            code = 0
        finally:
            os._exit(code)
    if os.waitpid(process, 0)[1]:
        raise RuntimeError(f"{out}: the training failed")
    (out / "done").touch()
    return out


def faults(mode: str) -> Iterator[tuple[str, float, str]]:
    """(site, factor, what the other run does otherwise, too)."""
    for site in SITES:
        for factor in FACTORS.get(mode, FACTORS[""]):
            yield site, factor, ""
            yield site, factor, "halves+"


def main() -> int:
    """See the module."""
    from msprobe_engine.find.run import diagnose

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, help="where dumps are kept; default: nowhere")
    parser.add_argument("--modes", default="fp32,bf16,amp,fp16")
    parser.add_argument("--levels", default="mix,L0")
    parser.add_argument("--seeds", type=int, default=6, help="healthy pairs of each kind")
    parser.add_argument("--fault-seeds", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    wrong = 0
    with scratch_directory() as scratch:
        root = args.keep or scratch
        weights = trained(root / "weights.pt")
        for mode in args.modes.split(","):
            for level in args.levels.split(","):
                made = lambda seed, variant, mode=mode, level=level: dumped(root, weights, mode, level, seed, variant)  # noqa: E731
                accused = pairs = records = 0
                for seed in range(args.seeds):
                    for variant in HEALTHY[level]:
                        found = diagnose(made(seed, variant), made(seed, "plain"))
                        pairs, records = pairs + 1, records + int(found.looked_at["records"])
                        if found.first_suspect is not None:
                            accused += 1
                            print(f"accused: {mode} {level} seed {seed} {variant}: {found.headline()}")
                print(f"\n{mode}, {level}: {accused} of {pairs} healthy pairs accused, {records:,} records compared")
                wrong += accused
                named: dict[tuple[str, str], list[str]] = {}
                for seed in range(100, 100 + args.fault_seeds):
                    for site, factor, also in faults(mode):
                        first = diagnose(made(seed, f"{also}{site}:{factor:g}"), made(seed, "plain")).first_suspect
                        right = first is not None and (SITES[site] in first.module or SITES[site] in first.record)
                        named.setdefault((site, also), []).append(
                            f"{factor:g} {'named' if right else '-' if first is None else 'elsewhere'}"
                        )
                for (site, also), answers in named.items():
                    print(f"  {site:10s}{'other order of sums' if also else 'same program':20s} {', '.join(answers)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
