"""Two trainings with the same numbers that go other ways to them (another optimizer kernel, a wrapper, recomputation, other buckets) are no
difference; the way is said."""

from __future__ import annotations

import atexit
import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fault_dumps import on_ranks
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from msprobe_engine.align.calls.call_tree import Tree
from msprobe_engine.align.calls.structure import Matcher
from msprobe_engine.align.parallel.micro_batches import cut_into_micro_batches
from msprobe_engine.find.coverage.other_ways import without_other_code
from msprobe_engine.find.difference.harmless.flat_buffers import without_pieces
from msprobe_engine.find.run import diagnose
from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.formats.dump.read_table import read_side


class GELUActivation(torch.nn.Module):
    """Named as in Transformers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x)


class NewGELUActivation(torch.nn.Module):
    """Named as in Transformers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * x * (1.0 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


class Block(torch.nn.Module):
    """A residual branch."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.act = torch.nn.functional.relu if "relu" in way else torch.nn.functional.gelu
        if "classed" in way:
            self.act = NewGELUActivation() if "newer" in way else GELUActivation()
        self.norm, self.up, self.down = torch.nn.LayerNorm(32), torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)
        self.signed = "signed" in way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.signed:
            sign = torch.full((32,), 2.0, dtype=x.dtype)
            sign[:] = 1.0
            return x * sign + self.down(self.act(self.up(self.norm(x))))
        return x + self.down(self.act(self.up(self.norm(x))))


class Normed(torch.nn.Module):
    """The normalisation of root mean squares, written out, or torch's own."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.weight, self.own = torch.nn.Parameter(torch.ones(32)), own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.own:
            return torch.nn.functional.rms_norm(x, (32,), self.weight, 1e-6)
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Gated(torch.nn.Module):
    """A gated branch; `way`: its products as one (joined) or in halves, a cast made twice, scaled (before the last product or behind)."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.weight, self.way = torch.nn.Parameter(torch.ones(32)), way
        self.gate, self.up, self.down = (torch.nn.Linear(*sizes, bias=False) for sizes in ((32, 64), (32, 64), (64, 32)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        linear, silu = torch.nn.functional.linear, torch.nn.functional.silu
        if "cast twice" in self.way:
            wide = x.float() / torch.sqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
        else:
            wide = x.float()
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        normed = self.weight * wide.to(x.dtype)
        if "joined" in self.way:
            gate, up = linear(normed, torch.cat([self.gate.weight, self.up.weight])).chunk(2, -1)
        else:
            gate, up = self.gate(normed), self.up(normed)
        inner = silu(gate) * up
        if "scaled" in self.way:
            return x + (self.down(inner * 0.3) if "before" in self.way else self.down(inner) * 0.3)
        if "halves" in self.way:
            parts = (linear(inner[..., some], self.down.weight[:, some]).float() for some in (slice(32), slice(32, None)))
            return x + sum(parts).to(x.dtype)  # type: ignore[union-attr]
        return x + self.down(inner)


class Looking(torch.nn.Module):
    """Attention of one head to what came before; `way`: how the mask hides the rest, a dropout of nothing, the form of GELU."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.qkv, self.way = torch.nn.Linear(32, 96), way
        self.drop = torch.nn.Dropout(0.0) if "dropout" in way else torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores, hidden = q @ k.mT / 32**0.5, torch.ones(16, 16, dtype=torch.bool).triu(1)
        if "added" in self.way:
            scores = scores + torch.zeros(16, 16, dtype=x.dtype).masked_fill(hidden, -1e9)
        elif "times" in self.way:
            scores = scores + hidden.to(x.dtype) * (-1e4 if "low" in self.way else -3e38)
        else:
            scores = scores.masked_fill(hidden, -1e4 if "low" in self.way else float("-inf"))
        seen = scores.float().softmax(-1).to(x.dtype) @ v
        gelu = torch.nn.functional.gelu
        return x + self.drop(gelu(seen) if "exact" in self.way else gelu(seen, approximate="tanh"))


class Convolved(torch.nn.Module):
    """A branch that looks at three tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv1d(32, 32, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.nn.functional.relu(self.conv(x.mT)).mT


class Masked(torch.nn.Module):
    """Attention of two heads that is given its mask, or none for that of what came before."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, 16)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        seen = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return x + self.out(seen.transpose(1, 2).flatten(2))


class Chosen(torch.nn.Module):
    """Three experts, of which each token takes one, and the order in which they are called."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.router = torch.nn.Linear(32, 3, bias=False)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(3))
        self.order = (2, 1, 0) if "last first" in way else (0, 1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 1)
        weight, index = self.router(flat).float().softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for number in self.order:
            (rows,) = torch.where(index == number)
            out.index_add_(0, rows, self.experts[number](flat[rows]) * weight[rows, None].to(x.dtype))
        return x + out.view_as(x)


def allowed(tokens: torch.Tensor, way: str) -> torch.Tensor | None:
    """`way`: none at all, a mask that lets more through, one for each row, one that keeps the tokens of documents apart."""
    if "left out" in way:
        return None
    mask = torch.ones(16, 16, dtype=torch.bool).tril(3 if "wide" in way else 0)[None, None]
    if "repeated" in way:
        return mask.expand(len(tokens), -1, -1, -1)
    if "filled" in way:
        return torch.zeros(1, 1, 16, 16, dtype=torch.bfloat16).masked_fill(~mask, -1e4 if "low" in way else -3e38)
    document = torch.arange(16) // 5
    return mask & (document[:, None] == document[None, :]).expand(len(tokens), 1, -1, -1) if "apart" in way else mask


def labels(targets: torch.Tensor, way: str) -> torch.Tensor:
    """`way`: each part of the batch has another number of them."""
    targets = torch.roll(targets, -2 if "moved on" in way else -1, 1).masked_fill(torch.arange(16) > 13, -100)
    return targets.masked_fill(targets < 15, -100) if "uneven" in way else targets


def loss(logits: torch.Tensor, targets: torch.Tensor, way: str) -> torch.Tensor:
    """Over all tokens but the last ones; `way`: a sum divided by their number, of labels that are moved by one, of chosen tokens alone."""
    targets = labels(targets, way)
    if "by index" in way:
        return -logits[:, :13].float().log_softmax(-1).gather(-1, targets[:, :13, None].to(torch.int64)).mean()
    if "by rows" in way:
        return torch.nn.functional.cross_entropy(logits[:, :13].float().flatten(0, 1), targets[:, :13].to(torch.int64).flatten())
    if "chosen" in way:
        logits, targets = logits[targets != -100], targets[targets != -100]
        return torch.nn.functional.cross_entropy(logits.float(), targets)
    logits, targets = logits.float().flatten(0, 1), targets.flatten()
    if "summed" in way:
        return torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / (targets != -100).sum()
    return torch.nn.functional.cross_entropy(logits, targets)


def loss_in_chunks(head: torch.nn.Module, hidden: torch.Tensor, targets: torch.Tensor, way: str) -> torch.Tensor:
    """Of a few tokens after the others, so that there never are logits of all."""
    many, targets = 4 if "four" in way else 2, labels(targets, way)
    total = torch.zeros(())
    for part, some in zip(hidden.chunk(many, 1), targets.chunk(many, 1)):
        total = total + torch.nn.functional.cross_entropy(head(part).float().flatten(0, 1), some.flatten(), reduction="sum")
    return total / (targets != -100).sum()


class Outer(torch.nn.Module):
    """A wrapper that nobody knows."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.inner(tokens)


class Model(torch.nn.Module):
    """Two blocks; `again`: their forward passes are made again in the backward pass."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.table, self.head = torch.nn.Embedding(50, 32), torch.nn.Linear(32, 50)
        kind = Gated if "gated" in way else Looking if "looking" in way else Chosen if "experts" in way else Block
        self.layers = torch.nn.ModuleList(
            Masked() if "masked" in way else Convolved() if "convolved" in way else kind(way) for _ in range(2)
        )
        self.way = way
        if "rounded table" in way:
            self.table.bfloat16()
        if "tied" in way:
            self.head.weight = self.table.weight
        self.again, self.reentrant = "recomputed" in way, "reentrant" in way

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        if "masked" in self.way:
            mask = allowed(tokens, self.way)
            for layer in self.layers:
                x = layer(x, mask)
            return self.head(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant) if self.again else layer(x)
        return x if "chunks" in self.way else self.head(x)


def train(rank: int, ranks: int, scratch: str, path: Path, way: str) -> None:
    """Two steps of this rank's part of the batch."""
    from msprobe.pytorch import PrecisionDebugger

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{scratch}/init", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    torch.backends.mkldnn.enabled = "other kernel" not in way
    model: torch.nn.Module = Model(way)
    if "buckets" in way or "wrapped" in way:
        model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01 if "small buckets" in way else 25)
    if "fully sharded" in way:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (ranks,))
        for part in (*model.layers, model):  # type: ignore[misc]
            fully_shard(part, mesh=mesh)
    if "normed" in way:
        model.layers[0].norm = Normed("by torch" in way)  # type: ignore[index, union-attr]
    if "inside" in way:
        model = Outer(model)
    if "bf16" in way:
        model = model.bfloat16()
    if "compiled" in way:
        model = torch.compile(model, backend="aot_eager")  # type: ignore[assignment]
    parameters = list(model.parameters())[:: -1 if "backwards" in way else 1]
    rate = torch.tensor(1e-3) if "rate" in way else 1e-3
    optimizer = torch.optim.AdamW(parameters, rate, foreach="foreach" in way, fused="fused" in way)
    averages = [parameter.detach().clone() for parameter in parameters]
    of_torch = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99 if "slowly" in way else 0.9)) if "averaged" in way else None
    scale = 4096.0 if "large loss scale" in way else 256.0 if "loss scale" in way else 1.0
    debugger = PrecisionDebugger(dump_path=str(path), task="statistics", level="L0" if "L0" in way else "mix", step=[0, 1])
    for step in range(2):
        debugger.start(model=model)
        if "read back" in way:
            model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()})
        torch.manual_seed(100 + 10 * step + rank)
        for last in (False, True) if "accumulated" in way else (True,):
            tokens, targets = torch.randint(0, 50, (2, 4, 16))
            apart = contextlib.nullcontext() if last or "every time" in way else model.no_sync()  # type: ignore[operator]
            kind = torch.float16 if "halves of floats" in way else torch.bfloat16
            with apart, torch.autocast("cpu", kind, enabled="autocast" in way or "halves of floats" in way):
                if "pieces" in way:
                    counted = [(labels(part, way) != -100).sum() for part in targets.split(2)]
                    for some, part, count in zip(tokens.split(2), targets.split(2), counted):
                        (loss(model(some), part, way) * (count / sum(counted))).backward()
                else:
                    if "passed twice" in way:
                        with torch.no_grad():
                            model(tokens)
                    given = model(tokens)
                    found = loss_in_chunks(model.head, given, targets, way) if "chunks" in way else loss(given, targets, way)  # type: ignore[arg-type]
                    (found if scale == 1.0 else found * scale).backward()
        if "logged" in way:
            float(sum(parameter.detach().float().norm() ** 2 for parameter in model.parameters()))
        if scale != 1.0:
            for parameter in model.parameters():
                parameter.grad.mul_(1.0 / scale)  # type: ignore[union-attr]
        if "clipped by hand" in way:
            gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            total = torch.stack([gradient.float().pow(2).sum() for gradient in gradients]).sum().sqrt()
            factor = torch.clamp(0.1 / (total + 1e-6), max=1.0)
            for gradient in gradients:
                gradient.mul_((factor if "once" in way else torch.clamp(0.1 / (total + 1e-6), max=1.0)).to(gradient.dtype))
        elif "clipped" in way:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if "averaged early" not in way:
            optimizer.step()
        if "averaged" in way:
            weights = [parameter.detach() for parameter in parameters]
            with torch.no_grad():
                if of_torch is not None and "by torch" in way:
                    of_torch.update_parameters(model)
                elif "from a copy" in way:
                    for average, weight in zip(averages, weights):
                        average.lerp_(weight, 0.1 if step else 1.0)
                elif "at once" in way:
                    torch._foreach_lerp_(averages, weights, 0.1)
                else:
                    for average, weight in zip(averages, weights):
                        average.mul_(0.9).add_(weight, alpha=0.1)
        if "averaged early" in way:
            optimizer.step()
        optimizer.zero_grad(set_to_none="zeros" not in way)
        debugger.stop()
        debugger.step()
    dist.barrier()
    atexit._run_exitfuncs()  # a forked child ends without them, and they finish the files
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ways")


def made(dumps: Path, way: str, ranks: int = 1) -> Path:
    path = dumps / f"{way}-{ranks}"
    if not path.exists():
        on_ranks(way, ranks, train, path, way)
    return path


@pytest.mark.fast_cells(
    "plain-foreach-1-several by one call",
    "plain-recomputed-1-makes again to save memory",
    "wrapped-plain-1-bear other names",
    "bf16 masked L0-bf16 masked left out L0-1-",
    "clipped by hand once-clipped-1-",
)
@pytest.mark.parametrize(
    ("target", "golden", "ranks", "note"),
    [
        ("plain", "foreach", 1, "several by one call"),
        pytest.param("fused", "plain", 1, "several parameters by one call", marks=pytest.mark.slow),
        ("plain", "recomputed", 1, "makes again to save memory"),
        ("wrapped", "plain", 1, "bear other names"),
        ("fully sharded", "plain", 1, ""),
        pytest.param("buckets", "small buckets", 2, "", marks=pytest.mark.slow),
        pytest.param("plain", "zeros", 1, "", marks=pytest.mark.slow),
        pytest.param("logged", "plain", 1, "", marks=pytest.mark.slow),
        pytest.param("inside", "plain", 1, "bear other names", marks=pytest.mark.slow),
        pytest.param("normed", "normed by torch", 1, "", marks=pytest.mark.slow),
        ("bf16 fused", "bf16 plain", 1, ""),
        ("bf16 fused", "bf16 foreach", 1, "by calls of fused"),
        ("bf16 gated joined", "bf16 gated", 1, ""),
        pytest.param("bf16 gated halves", "bf16 gated", 1, "", marks=pytest.mark.slow),
        ("bf16 gated cast twice backwards", "bf16 gated", 1, "in another order"),
        ("autocast gated scaled before", "autocast gated scaled", 1, ""),
        ("bf16 looking chosen", "bf16 looking", 1, ""),
        ("autocast signed", "autocast", 1, ""),
        ("rate of one element", "plain", 1, ""),
        ("bf16 masked L0", "bf16 masked left out L0", 1, ""),
        ("bf16 masked repeated", "bf16 masked", 1, ""),
        ("bf16 experts last first", "bf16 experts", 1, "in another order"),
        ("clipped by hand", "clipped", 1, ""),
        ("clipped by hand once", "clipped", 1, ""),
        ("plain read back", "plain", 1, ""),
        ("compiled L0", "plain L0", 1, ""),
        ("averaged many at once", "averaged one by one", 1, ""),
        ("averaged by torch", "averaged from a copy", 1, ""),
        ("autocast convolved other kernel", "autocast convolved", 1, ""),
        ("bf16 by rows", "bf16 by index", 1, ""),
        ("halves of floats, large loss scale", "halves of floats, loss scale", 1, "The loss scale is 16 times"),
        ("bf16 looking added dropout", "bf16 looking", 1, ""),
        ("bf16 looking low", "bf16 looking", 1, "A mask hides scores by -10000 in this run and by -inf"),
        ("bf16 looking times low", "bf16 looking times", 1, "A mask hides scores by -10000 in this run and by -3e+38"),
        ("bf16 masked filled low L0", "bf16 masked filled L0", 1, "A mask hides scores by -9984 in this run"),
        ("bf16 four chunks", "bf16 two chunks", 1, ""),
        ("bf16 four chunks", "bf16 summed", 1, ""),
        ("bf16 four chunks L0", "bf16 two chunks L0", 1, "Only modules were recorded"),
        pytest.param("bf16 looking summed", "bf16 looking", 1, "", marks=pytest.mark.slow),
        pytest.param("bf16 recomputed reentrant", "bf16 recomputed", 1, "", marks=pytest.mark.slow),
        pytest.param("buckets accumulated every time", "buckets accumulated", 2, "", marks=pytest.mark.slow),
        ("buckets accumulated every time L0", "buckets accumulated L0", 2, ""),
        ("bf16 relu uneven pieces", "bf16 relu uneven", 1, "of different layouts"),
        ("autocast looking added tied uneven pieces", "autocast looking added tied uneven", 1, "of different layouts"),
        pytest.param("autocast relu recomputed reentrant", "autocast relu", 1, "makes again", marks=pytest.mark.slow),
    ],
)
def test_another_way_is_no_difference(target: str, golden: str, ranks: int, note: str, dumps: Path) -> None:
    """Exit code 0, with a note where there is something to say."""
    found = diagnose(made(dumps, target, ranks), made(dumps, golden, ranks))
    assert (found.finding, found.problems) == ("none", []), found.headline()
    assert any(note in line for line in found.evidence)
    assert any("are the same" in line or "largest difference is" in line or "begin to differ" in line for line in found.evidence)


@pytest.mark.parametrize(
    ("target", "record", "why"),
    [
        ("bf16 looking exact", "Functional.gelu.0.forward", "only the golden run gives gelu approximate = 'tanh'"),
        ("bf16 looking summed moved on", "Torch.roll.0.forward", "roll shifts = -2, golden -1"),
    ],
)
def test_arguments_beside_another_way(target: str, record: str, why: str, dumps: Path) -> None:
    """One that the other side leaves to its default, and one that orders elements otherwise, are named though sizes hardly show them."""
    first = diagnose(made(dumps, target), made(dumps, "bf16 looking")).first_suspect
    assert first is not None
    assert (first.step, first.record) == (0, record)
    assert first.why.startswith(why)


@pytest.mark.parametrize(
    ("target", "golden", "words"),
    [
        ("bf16 masked wide L0", "bf16 masked left out L0", "layers.0, Module.layers.0.Masked.forward.0"),
        ("bf16 masked", "bf16 masked apart", "only the golden run calls __eq__"),
    ],
)
def test_another_mask(target: str, golden: str, words: str, dumps: Path) -> None:
    """The place that one side gives no mask in, or the call that makes another one, though nothing is known of truth values but their
    extremes."""
    assert words in diagnose(made(dumps, target), made(dumps, golden)).headline()


@pytest.mark.parametrize(
    ("target", "golden", "words"),
    [
        ("foreach averaged early", "foreach averaged", "is taken in before Torch._foreach_addcdiv_.0.forward is called"),
        ("autocast rounded table", "autocast", "input.1 is bfloat16, golden float32 (step 0, rank 0, module table"),
    ],
)
def test_the_first_line_says_why(target: str, golden: str, words: str, dumps: Path) -> None:
    """An average of the weights that is made before their update, while the calls of the update are the same; another data type, which
    comes before the numbers that it makes."""
    found = diagnose(made(dumps, target), made(dumps, golden))
    assert words in found.headline()
    assert found.first_suspect is not None
    assert "same statistics" not in found.first_suspect.why


@pytest.mark.parametrize("level", ["", pytest.param(" L0", marks=pytest.mark.slow)])
def test_another_gelu_is_named_where_few_bits_do_not_show_it(level: str, dumps: Path) -> None:
    """The classes of the modules say it."""
    found = diagnose(made(dumps, f"bf16 classed newer{level}"), made(dumps, f"bf16 classed{level}"))
    assert "a NewGELUActivation (GELU by tanh), in the golden run a GELUActivation" in found.headline()
    assert found.first_suspect is not None
    assert found.first_suspect.module == "layers.0.act"


@pytest.mark.parametrize(("target", "golden", "finding"), [("plain", "zeros", "structure"), ("plain", "plain", "none")])
def test_every_bit_and_call_counts_where_it_is_asked_for(target: str, golden: str, finding: str, dumps: Path) -> None:
    """--exact: calls of one run alone are a difference; a run is the same as itself."""
    assert diagnose(made(dumps, target), made(dumps, golden), exact=True).finding == finding


@pytest.mark.parametrize("golden", ["averaged from a copy", "plain"])
def test_an_average_with_another_decay_is_no_other_way(golden: str, dumps: Path) -> None:
    """Nothing that both runs have is made of an average; its own numbers tell. Neither is an average that one run alone makes."""
    found = diagnose(made(dumps, "averaged by torch slowly"), made(dumps, golden))
    assert found.finding == "structure", found.headline()
    assert not found.suspects  # no parameter was updated by one run alone
    assert any("_foreach_lerp_" in problem for problem in found.problems)


def test_a_pass_more_through_the_model_is_no_other_way(dumps: Path) -> None:
    """Where most modules are called more often, what is made of their results was not recorded; what is made again to save memory is."""
    found = diagnose(made(dumps, "passed twice L0"), made(dumps, "plain L0"))
    assert found.finding == "structure", found.headline()
    assert any("2 times, in the golden run 1 times" in line for line in found.evidence)


def test_an_update_that_nobody_has_seen_is_not_called_the_same(dumps: Path) -> None:
    """At level L0 no call of an optimizer is recorded: another kernel of it and another setting cannot be told apart (exit code 3)."""
    found = diagnose(made(dumps, "bf16 fused L0"), made(dumps, "bf16 plain L0"))
    assert found.finding == "none", found.headline()
    assert any("another kernel" in problem for problem in found.problems)


def test_where_runs_begin_to_differ_is_said(dumps: Path) -> None:
    """Round-off is a note with its place, and with --exact it is the finding."""
    target, golden = made(dumps, "bf16 fused"), made(dumps, "bf16 plain")
    (note,) = [line for line in diagnose(target, golden).evidence if "begin to differ" in line]
    first = diagnose(target, golden, exact=True).first_suspect
    assert first is not None
    assert first.record in note
    assert first.step == 1


def test_a_parameter_that_is_left_out_is_still_said(dumps: Path) -> None:
    """A defect beside another way is found: the numbers tell."""
    on_ranks("broken", 1, _train_with_a_frozen_head, dumps / "broken")
    assert diagnose(dumps / "broken", made(dumps, "plain")).finding != "none"


def _train_with_a_frozen_head(rank: int, ranks: int, scratch: str, path: Path) -> None:
    made = torch.optim.AdamW.__init__

    def without_head(self: torch.optim.AdamW, parameters: object, *args: object, **kwargs: object) -> None:
        made(self, list(parameters)[:-2], *args, **{**kwargs, "foreach": True})  # type: ignore[call-overload, arg-type]

    torch.optim.AdamW.__init__ = without_head  # type: ignore[method-assign]
    train(rank, ranks, scratch, path, "foreach")


def tensor(first: float, size: int = 8) -> dict[str, Any]:
    """A vector of which the largest element is `first`."""
    kind = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [size], "requires_grad": True}
    return {**kind, "Max": first, "Min": -1.0, "Mean": 0.5, "Norm": 2.0 * (size / 8) ** 0.5}


def written(dump: Any, path: Path) -> DumpTable:
    dump.write(path)
    return read_side(path / "dump.json")


def passes(dump: Any, micro: int, first: float) -> None:
    """The passes of a micro batch through a layer, and its loss for the log behind them; `first`: tells its numbers from others."""
    layer = f"Module.layer.Linear.forward.{micro}"
    dump.api("Functional.linear", [tensor(first)], [tensor(first + 1)], parent=layer)
    dump.module("layer.Linear", [tensor(first)], [tensor(first + 1)], n=micro)
    dump.api("Tensor.__mul__", [tensor(first + 1)], [tensor(first + 2)])
    dump.module("layer.Linear", [tensor(first + 3)], [tensor(first + 4)], n=micro, direction="backward")
    dump.api("Tensor.__truediv__", [tensor(first + 2)], [tensor(first + 5)])


def test_a_loss_that_is_logged_belongs_to_its_micro_batch(rank_dump: Any, tmp_path: Path) -> None:
    """What follows a backward pass and takes in what its micro batch has made is no part of another one."""
    two, one = rank_dump(), rank_dump()
    passes(one, 0, 1.0)
    for micro in range(2):
        passes(two, micro, 1.0 + 10.0 * micro)
    first, second = cut_into_micro_batches({0: written(two, tmp_path / "two")}, {0: written(one, tmp_path / "one")})
    for piece in (first, second):
        assert [name for name in piece.side.ops if "truediv" in name] == [f"Tensor.__truediv__.{piece.micro}.forward"]
        assert [name.split(".")[0] for name in piece.side.ops] == ["Functional", "Module", "Tensor", "Module", "Tensor"]


def test_a_model_without_modules_is_cut_by_what_it_is_given(rank_dump: Any, tmp_path: Path) -> None:
    """A reference behind the passes of the model: each of its passes belongs to the batch that it is given, with what is made on the way;
    what both come to is made once for all of them, and its gradient."""
    sides = []
    for name, micros in (("two", 2), ("one", 1)):
        dump = rank_dump()
        for micro in range(micros):
            dump.api("Functional.linear", [tensor(10.0 * micro)], [tensor(10.0 * micro + 1)], parent=f"Module.layer.Linear.forward.{micro}")
            dump.module("layer.Linear", [tensor(10.0 * micro)], [tensor(10.0 * micro + 1)], n=micro)
        for micro in range(micros):
            dump.api("Tensor.exp", [tensor(10.0 * micro)], [tensor(10.0 * micro + 5)])
            dump.api("Torch.arange", [], [tensor(50.0)])
            dump.api("Tensor.sum", [tensor(10.0 * micro + 5)], [tensor(10.0 * micro + 6)])
        dump.api("Torch.cat", [tensor(10.0 * micro + 6) for micro in range(micros)], [tensor(70.0)])
        dump.api("Tensor.neg", [tensor(70.0)], [tensor(71.0)])
        dump.api("Tensor.neg", [tensor(72.0)], [tensor(73.0)], direction="backward")
        for micro in reversed(range(micros)):
            dump.module("layer.Linear", [tensor(10.0 * micro + 7)], [tensor(10.0 * micro + 8)], n=micro, direction="backward")
        sides.append({0: written(dump, tmp_path / name)})
    pieces = cut_into_micro_batches(*sides)
    for piece in pieces:
        calls = [name for name in piece.side.ops if not name.startswith(("Module", "Functional"))]
        own = [f"{api}.{piece.micro}.forward" for api in ("Tensor.exp", "Torch.arange", "Tensor.sum")]
        of_all = ["Torch.cat.0.forward", "Tensor.neg.0.forward", "Tensor.neg.0.backward"]
        assert calls == [*own, *(of_all if piece.micro == 0 else [])]


def test_micro_batches_of_functions_alone_are_told_apart_by_their_passes(rank_dump: Any, tmp_path: Path) -> None:
    """A call that both micro batches make before the first pass moves nothing into the second one; the logged loss belongs to its own."""
    sides = []
    for name, micros in (("two", 2), ("one", 1)):
        dump = rank_dump()
        for _ in range(micros):
            dump.api("Tensor.__ne__", [tensor(1.0)], [tensor(2.0)])
        for micro in range(micros):
            first = 10.0 * micro
            dump.api("Functional.linear", [tensor(first + 1)], [tensor(first + 2)])
            dump.api("Torch.stack", [tensor(first + 2)], [tensor(first + 3)])
            dump.api("Tensor.sum", [tensor(first + 3)], [tensor(first + 4)])
            dump.api("Functional.linear", [tensor(first + 5)], [tensor(first + 6)], direction="backward")
            dump.api("Tensor.detach", [tensor(first + 3)], [tensor(first + 7)])
        dump.api("Torch.stack", [tensor(98.0)], [tensor(99.0)])  # of the update, once
        sides.append({0: written(dump, tmp_path / name)})
    first, second = cut_into_micro_batches(*sides)
    assert [name for name in second.side.ops if "__ne__" in name] == []
    for piece in (first, second):
        calls = [name.rsplit(".", 1)[0] for name in piece.side.ops if "__ne__" not in name]
        own = [f"{api}.{piece.micro}" for api in ("Functional.linear", "Torch.stack", "Tensor.sum", "Functional.linear", "Tensor.detach")]
        assert calls == [*own, *(["Torch.stack.2"] if piece is first else [])]


@pytest.mark.parametrize(
    ("place", "pairs"),
    [
        ("site-packages/torch/optim/adam.py, line 7, in step", 1),
        ("site-packages/deepspeed/utils.py, line 1, in mask", 0),
        ("train.py, line 1, in f", 1),
    ],
    ids=["another line", "another library", "no library"],
)
def test_calls_that_two_libraries_make(place: str, pairs: int, rank_dump: Any, tmp_path: Path) -> None:
    """Behind the forward pass they are no pairs: each uses the function for something else."""
    trees = []
    for name, code in (("run", place), ("golden", "site-packages/torch/optim/adam.py, line 1, in step")):
        dump = rank_dump()
        dump.module("layer.Linear")
        dump.module("layer.Linear", direction="backward")
        dump.stack[dump.api("Tensor.mul_")] = [f"File /env/{code}, x.mul_(y)"]
        trees.append(Tree(written(dump, tmp_path / name)))
    structure = without_other_code(Matcher(*trees).run(), *trees)
    assert len(structure.pairs) == 2 + pairs
    assert (len(structure.only_target), len(structure.only_golden)) == (1 - pairs, 1 - pairs)


@pytest.mark.parametrize(
    ("golden_sizes", "largest", "pairs"),
    [((8,), 2.0, 2), ((8,), 1.5, 4), ((2, 6), 2.0, 2), ((2, 6), 1.5, 5), ((4, 4), 2.0, 6)],
    ids=["the same gradients", "other gradients", "as many buckets", "as many, other gradients", "the same buckets"],
)
def test_buckets_of_another_size(golden_sizes: tuple[int, ...], largest: float, pairs: int, rank_dump: Any, tmp_path: Path) -> None:
    """Buffers that hold the same gradients in other pieces are no pairs, and neither are the calls that fill them."""
    trees = []
    for name, sizes in (("run", (4, 4)), ("golden", golden_sizes)):
        dump = rank_dump()
        dump.module("layer.Linear", ["ok"], ["ok"])
        dump.module("layer.Linear", ["ok"], ["ok"], direction="backward")
        for size in sizes:
            gradient = tensor(largest if name == "run" else 2.0, size)
            dump.api("Tensor.narrow", [gradient], [gradient])
            dump.api("Tensor.div_", [gradient, 2.0], [gradient])
        trees.append(Tree(written(dump, tmp_path / name)))
    assert len(without_pieces(Matcher(*trees).run(), *trees).pairs) == pairs
