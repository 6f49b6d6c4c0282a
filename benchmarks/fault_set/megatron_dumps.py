"""Trains a small GPT of megatron-core on the CPU in any layout and dumps two steps: ``{directory}/step{N}/rank{R}``.

Rows that fill the vocabulary up to ``--vocab`` are zero, and not used: what they give is taken out before the softmax.

Weights follow from the name of a parameter and its place in the whole model, the global batch from the step, and there is no dropout: every
layout trains the same model on the same tokens.
"""

from __future__ import annotations

import atexit
import math
import os
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fault_dumps import on_ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "megatron"
VOCAB = 56
"""Rows of the vocabulary that are used; ``--vocab`` says how many the table has."""

Plant = Callable[[Any], None]
"""Changes the model chunks before the first step."""


def nothing(chunks: Any) -> None:
    """No defect."""


def dump_megatron(path: Path, argv: str, plant: Plant = nothing, level: str = "mix") -> None:
    """Train in processes of its own and leave the dump at `path`; an existing one is kept.

    Args:
        path: root of the dump.
        argv: arguments of examples/megatron/train_gpt.py, as ``--tp 2 --sp --dp 2``; ``--dp`` is this function's own, and so is
            ``--batch``, the global one: the size of a micro batch follows from it.
        plant: makes a defect.
        level: of the dump.

    Raises:
        RuntimeError: a rank failed.
    """
    if (path / "done").exists():
        return
    shutil.rmtree(path, ignore_errors=True)
    words = argv.split()
    sizes = {name: int(words[words.index(f"--{name}") + 1]) if f"--{name}" in words else 1 for name in ("tp", "pp", "cp", "dp")}
    on_ranks(path.name, math.prod(sizes.values()), _rank, path, words, plant, level)
    (path / "done").touch()


def _rank(rank: int, ranks: int, scratch: str, path: Path, words: list[str], plant: Plant, level: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{scratch}/init", rank=rank, world_size=ranks)
    sys.path.insert(0, str(EXAMPLE))
    import train_gpt

    from msprobe.pytorch import PrecisionDebugger

    a = train_gpt.arguments(["--quiet", *_own(words)])
    known, more = train_gpt.known, _more(words)
    train_gpt.known = lambda cls, **keys: known(
        cls, **{key: 0.0 if key.endswith("_dropout") else value for key, value in {**keys, **more.get(cls.__name__, {})}.items()}
    )
    if "--token-loss" in words or "--per-token" in words:
        train_gpt.forward_step = _token_loss
    _, chunks, optimizer = train_gpt.build(a)
    a.mbs = _number(words, "batch", 4) // a.nmb // train_gpt.state.get_data_parallel_world_size()
    train_gpt.batches = lambda a: _batches(a, train_gpt.state, "--per-token" in words)
    for chunk in chunks:
        _fill(chunk, train_gpt.state)
        if a.vocab > VOCAB:
            _leave_out(chunk, train_gpt.state)
    optimizer.reload_model_params()
    plant(chunks)
    debugger = PrecisionDebugger(dump_path=str(path), task="statistics", level=level, step=list(range(a.steps)))

    def on_step(step: int) -> None:
        if step:
            debugger.stop()
            debugger.step()
        debugger.start(model=list(chunks) if len(chunks) > 1 else chunks[0])

    train_gpt.train(a, chunks, optimizer, on_step)
    debugger.stop()
    debugger.step()
    dist.barrier()
    atexit._run_exitfuncs()  # a forked child ends without them, and they finish the files
    dist.destroy_process_group()


def _own(words: list[str]) -> list[str]:
    """Arguments of the script alone, with two steps of one micro batch unless told otherwise."""
    kept = [word for word in words if word not in ("--token-loss", "--per-token")]
    for name in ("dp", "batch", "groups"):
        if f"--{name}" in kept:
            at = kept.index(f"--{name}")
            del kept[at : at + 2]
    return ["--steps", "2", "--nmb", "1", "--vocab", str(VOCAB), "--heads", "4", *kept]


def _more(words: list[str]) -> dict[str, dict[str, Any]]:
    """What a training has that the example has no argument for: grouped queries with a gated MLP and RMS norms, a loss per token."""
    groups = _number(words, "groups", 0)
    llama = {"num_query_groups": groups, "gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "add_bias_linear": False}
    model = {**(llama if groups else {}), **({"normalization": "RMSNorm"} if groups else {})}
    return {"TransformerConfig": {**model, "calculate_per_token_loss": "--per-token" in words}}


def _token_loss(data: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
    """A micro batch with the loss of Megatron's own programs: a sum over the tokens that count, and their number."""
    batch = next(data)
    output = model(batch["tokens"], batch["positions"], batch["mask"], labels=batch["labels"])

    def loss(out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        counted = batch["counted"].view(-1).float()
        total = torch.sum(out.view(-1).float() * counted)
        tokens = counted.sum().clone().detach().to(torch.int)
        report = torch.cat([total.clone().detach().view(1), tokens.view(1)])
        return total, tokens, {"lm loss": report[0] / report[1], "report": report}

    return output, loss


def _number(words: list[str], name: str, default: int) -> int:
    return int(words[words.index(f"--{name}") + 1]) if f"--{name}" in words else default


def _batches(a: Any, state: Any, some: bool = False) -> Iterator[dict[str, torch.Tensor]]:
    """This rank's part of the global batches, micro batch after micro batch. `some`: not every token counts."""
    generator = torch.Generator().manual_seed(a.seed)
    size, rank = state.get_data_parallel_world_size(), state.get_data_parallel_rank()
    mask = torch.tril(torch.ones(1, 1, a.seq, a.seq)) < 0.5
    positions = torch.arange(a.seq)[None].expand(a.mbs, -1).contiguous()
    while True:
        whole = torch.randint(0, VOCAB, (a.nmb * size * a.mbs, a.seq + 1), generator=generator)
        for micro in range(a.nmb):
            tokens = whole[(micro * size + rank) * a.mbs :][: a.mbs]
            made = {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous(), "mask": mask, "positions": positions}
            yield {**made, "counted": (made["labels"] % 5 > 0 if some else made["labels"] >= 0).float()}


@torch.no_grad()
def _fill(chunk: Any, state: Any) -> None:
    """Weights of the whole model, cut for this rank. Rows that fill up the vocabulary are zero."""
    model = chunk
    while hasattr(model, "module"):
        model = model.module
    for name, parameter in model.named_parameters():
        size, dim = 1, 0
        if getattr(parameter, "tensor_model_parallel", False):
            size, dim = state.get_tensor_model_parallel_world_size(), parameter.partition_dim
        shape = list(parameter.shape)
        shape[dim] *= size
        table = name.endswith(("word_embeddings.weight", "output_layer.weight"))
        generator = torch.Generator().manual_seed(zlib.crc32(_global_name(model, name, state).encode()))
        values = torch.randn([VOCAB, *shape[1:]] if table else shape, generator=generator) * 0.1
        if "linear_fc1" in name and getattr(model.config, "gated_linear_unit", False):  # each rank has its part of both halves
            values = torch.cat([part for parts in zip(*(half.chunk(size, dim) for half in values.chunk(2, dim))) for part in parts], dim)
        if "norm.weight" in name:
            values += 1
        whole = torch.zeros(shape)
        whole[: len(values)] = values
        parameter.copy_(whole.chunk(size, dim)[state.get_tensor_model_parallel_rank() if size > 1 else 0])


def _leave_out(chunk: Any, state: Any) -> None:
    """Logits of rows that only fill up the vocabulary are minus a lot."""
    model = chunk
    while hasattr(model, "module"):
        model = model.module

    def hook(_module: Any, _inputs: Any, output: Any) -> Any:
        logits, bias = output
        first = state.get_tensor_model_parallel_rank() * logits.shape[-1]
        unused = torch.arange(first, first + logits.shape[-1]) >= VOCAB
        return logits.masked_fill(unused, -1e4), bias

    model.output_layer.register_forward_hook(hook)


def _global_name(model: Any, name: str, state: Any) -> str:
    """The name that a parameter has in one process: layers and experts have their numbers of the whole."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part == "layers":
            parts[i + 1] = str(model.get_submodule(".".join(parts[: i + 2])).layer_number - 1)
        elif part == "local_experts":
            local = len(model.get_submodule(".".join(name.split(".")[: i + 1])))
            parts[i + 1] = str(int(parts[i + 1]) + local * state.get_expert_model_parallel_rank())
    return ".".join(parts)


def inner(chunks: Any) -> Any:
    """The model inside of the wrappers."""
    model = chunks[0]
    while hasattr(model, "module"):
        model = model.module
    return model


def wrong_eps(chunks: Any) -> None:
    """A norm of the second layer adds too much to the variance."""
    inner(chunks).decoder.layers[1].pre_mlp_layernorm.eps = 1e-2


def missing_sum(chunks: Any) -> None:
    """The row-parallel product of the second layer's MLP is not summed over tensor-parallel ranks."""
    from megatron.core.tensor_parallel import layers

    linear, reduce = inner(chunks).decoder.layers[1].mlp.linear_fc2, layers.reduce_from_tensor_model_parallel_region
    forward = linear.forward

    def without(*args: Any, **kwargs: Any) -> Any:
        layers.reduce_from_tensor_model_parallel_region = lambda x, **_: x
        try:
            return forward(*args, **kwargs)
        finally:
            layers.reduce_from_tensor_model_parallel_region = reduce

    linear.forward = without


LAYOUTS = {
    "one process": "",
    "TP 2": "--tp 2",
    "TP 4": "--tp 4",
    "SP 2": "--tp 2 --sp",
    "DP 2": "--dp 2",
    "DP 4": "--dp 4",
    "DP 2, distributed optimizer": "--dp 2 --distopt",
    "TP 2 x DP 2": "--tp 2 --dp 2",
    "SP 2 x DP 2, distributed optimizer": "--tp 2 --sp --dp 2 --distopt",
    "TP 2, padded vocabulary": "--tp 2 --vocab 64",
    "two micro batches": "--nmb 2",
    "recomputation": "--recompute",
    "recomputation of attention": "--recompute-core",
    "TP 2, recomputation": "--tp 2 --recompute",
}
"""What `dump_megatron` is given, by name."""

FAMILIES = {
    "mean loss": "",
    "Megatron's own loss": "--token-loss",
    "loss per token": "--per-token",
    "grouped queries": "--token-loss --groups 2",
    "grouped queries, bf16": "--token-loss --groups 4 --bf16 --hidden 64 --heads 8",
}
"""Trainings that every layout is made of, by name."""
