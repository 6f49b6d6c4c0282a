"""Small trainings with real DeepSpeed on gloo ranks that leave a checkpoint, and what the engine itself holds at that moment."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import deepspeed
import numpy as np
import torch
import torch._dynamo
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn

with contextlib.suppress(ImportError):  # initialize imports it late; older versions do not have it
    importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # the first use would compile C++ for more than a minute
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
Truth = dict[str, Any]
"""Key of a tensor -> its values as the engine holds them."""


class Net(nn.Module):
    """A tied embedding, a frozen layer, a buffer, a parameter of one element; sizes that fit no partition."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.up = nn.Linear(width, 13)
        self.frozen = nn.Linear(13, 13)
        self.down = nn.Linear(13, width, bias=False)
        self.norm = nn.LayerNorm(width)
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.arange(5))
        for parameter in self.frozen.parameters():
            parameter.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = self.norm(x + self.down(self.frozen(torch.tanh(self.up(x)))) * self.scale)
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), tokens.flatten())


def config(stage: int, dtype: str, **more: Any) -> dict[str, Any]:
    """A DeepSpeed configuration with Adam and a schedule; `zero` in `more` goes into ``zero_optimization``."""
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.01, "torch_adam": True}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 5e-3, "warmup_max_lr": 1e-2, "warmup_num_steps": 5, "warmup_type": "linear"},
        },
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": False,
            "stage3_param_persistence_threshold": 0,
            **more.pop("zero", {}),
        },
    }
    if dtype != "fp32":
        found[dtype] = {"enabled": True, **({"initial_scale_power": 6} if dtype == "fp16" else {})}
    return {**found, **more}


def groups_of(net: nn.Module) -> list[dict[str, Any]]:
    """Two parameter groups: matrices with weight decay, the rest without."""
    trained = [p for p in net.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]


def bits(tensor: torch.Tensor) -> Any:
    """A tensor as numpy words of its bits, in its shape."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16).copy()
    return tensor.numpy().copy()


def truth_of(engine: Any) -> Truth:
    """What the engine holds: weights, float32 masters and Adam's moments by the keys of a checkpoint that is read."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):  # DeepSpeed links only what the first step had made
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    zero = engine.zero_optimization_stage() > 0 or hasattr(optimizer, "bf16_groups")
    found: Truth = {}
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        with deepspeed.zero.GatheredParameters([parameter], enabled=engine.zero_optimization_stage() == 3):
            found[name] = bits(parameter)
    flat = hasattr(optimizer, "fp32_groups_flat") and not zero
    if flat:
        found |= _flat_truth(engine)
    for name, parameter in engine.module.named_parameters():  # a tied parameter has its states under its first name
        if parameter.requires_grad and zero:
            found[f"optimizer.master.{name}"] = bits(safe_get_full_fp32_param(parameter))
            for state in ("exp_avg", "exp_avg_sq"):
                found[f"optimizer.{state}.{name}"] = bits(safe_get_full_optimizer_state(parameter, state))
        elif parameter.requires_grad and not flat:
            copy = _copy_of(parameter, optimizer)
            if copy is not parameter:
                found[f"optimizer.master.{name}"] = bits(copy)
            for state in ("exp_avg", "exp_avg_sq"):
                found[f"optimizer.{state}.{name}"] = bits(getattr(optimizer, "optimizer", optimizer).state[copy][state])
    for name, buffer in engine.module.named_buffers():
        found[name] = bits(buffer)
    return found


@contextlib.contextmanager
def fused() -> Iterator[None]:
    """Lets DeepSpeed take torch's Adam for its own fused one, which needs a GPU: it wraps it in its optimizer with flat groups."""
    import deepspeed.runtime.engine as module

    before, module.FusedAdam = module.FusedAdam, torch.optim.Adam
    yield
    module.FusedAdam = before


def _flat_truth(engine: Any) -> Truth:
    """Masters and moments of an optimizer with one flat vector per group."""
    found: Truth = {}
    optimizer = engine.optimizer
    for group, vector in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat):
        states = {"master": vector, **{state: optimizer.optimizer.state[vector][state] for state in ("exp_avg", "exp_avg_sq")}}
        for state, held in states.items():
            pieces = held.detach().split([parameter.numel() for parameter in group])
            for parameter, piece in zip(group, pieces):
                found[f"optimizer.{state}.{engine.param_names[parameter]}"] = bits(piece.reshape(parameter.shape))
    return found


def _copy_of(parameter: torch.Tensor, optimizer: Any) -> torch.Tensor:
    """The float32 copy of a parameter in an optimizer without ZeRO; itself where there is none."""
    for group, copies in zip(getattr(optimizer, "fp16_groups", ()), getattr(optimizer, "fp32_groups", ())):
        for held, copy in zip(group, copies):
            if held is parameter:
                return copy  # type: ignore[no-any-return]
    return parameter


def train(directory: str, stage: int, dtype: str, steps: tuple[int, ...] = (2,), groups: bool = False, **more: Any) -> Truth:
    """Trains `Net` under ZeRO on the ranks of this process group and saves a checkpoint after each of `steps`; call it on every rank."""
    torch.manual_seed(0)
    net = Net()
    parameters: Any = groups_of(net) if groups else [p for p in net.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=net, model_parameters=parameters, config=config(stage, dtype, **more))
    generator = torch.Generator().manual_seed(100 + deepspeed.comm.get_rank())
    for step in range(max(steps)):
        engine.backward(engine(torch.randint(0, 11, (2, 3), generator=generator)))
        engine.step()
        if step + 1 in steps:
            arguments = argparse.Namespace(num_attention_heads=4, hidden_size=16)  # as Megatron-DeepSpeed saves its own
            state = {"epoch": 3, "note": "kept", "torch_rng_state": torch.get_rng_state(), "args": arguments}
            engine.save_checkpoint(directory, client_state=state)
    return truth_of(engine)


class Experts(nn.Module):
    """A mixture of four experts over two ranks between two layers that all ranks share."""

    def __init__(self) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.first = nn.Linear(6, 6)
        self.moe = MoE(6, nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 6)), num_experts=4, ep_size=2, k=1)
        self.last = nn.Linear(6, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, loss, _ = self.moe(self.first(x))
        return (self.last(y) - x).float().pow(2).mean() + 0.01 * loss


def train_experts(directory: str, stage: int, dtype: str, steps: int = 2) -> Truth:
    """Trains `Experts` and saves; every rank returns what it holds, its experts with whole-model numbers."""
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

    torch.manual_seed(0)
    net = Experts()
    groups = split([{"params": list(net.parameters()), "name": "all", "lr": 1e-2}])
    engine, *_ = deepspeed.initialize(model=net, model_parameters=groups, config=config(stage, dtype))
    torch.manual_seed(100 + deepspeed.comm.get_rank())
    for _ in range(steps):
        engine.backward(engine(torch.randn(8, 6).to(DTYPES[dtype])))
        engine.step()
    engine.save_checkpoint(directory)
    found = {}
    mark = ".deepspeed_experts."
    for key, value in truth_of(engine).items():
        if mark in key:
            before, _, rest = key.partition(mark)
            local, _, tail = rest.partition(".")
            key = f"{before}{mark}{2 * deepspeed.comm.get_rank() + int(local)}.{tail}"
        found[key] = value
    return found


def train_pipeline(directory: str, stage: int, dtype: str, stages: int, steps: int = 2) -> Truth:
    """Trains a pipeline with a tied embedding, its stages over the ranks, and saves; every rank returns what its stage holds."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    torch.manual_seed(0)
    layers = [
        TiedLayerSpec("embed", nn.Embedding, 11, 7),
        LayerSpec(nn.Linear, 7, 13),
        LayerSpec(nn.Tanh),
        LayerSpec(nn.Linear, 13, 7),
        LayerSpec(nn.LayerNorm, 7),
        TiedLayerSpec("embed", nn.Embedding, 11, 7, forward_fn=lambda layer, x: x @ layer.weight.T),
    ]
    net = PipelineModule(
        layers,
        num_stages=stages,
        partition_method="uniform",
        loss_fn=lambda out, y: nn.functional.cross_entropy(out.float().flatten(0, 1), y.flatten()),
    )
    engine, *_ = deepspeed.initialize(model=net, model_parameters=list(net.parameters()), config=config(stage, dtype))
    generator = torch.Generator().manual_seed(100 + engine.grid.get_data_parallel_id())

    def batches() -> Any:
        while True:
            tokens = torch.randint(0, 11, (2, 3), generator=generator)
            yield tokens, tokens

    data = batches()
    for _ in range(steps):
        engine.train_batch(data_iter=data)
    engine.save_checkpoint(directory)
    return truth_of(engine)


def shard(directory: str, dtype: str) -> tuple[Truth, Truth]:
    """Cuts a small Bloom over two tensor parallel ranks (AutoTP), one projection in three parts, and saves it before and after a step.

    Returns the weights before they were cut and before the step, and what this rank holds in the end.
    """
    from transformers import BloomConfig, BloomForCausalLM

    torch.manual_seed(0)
    model = BloomForCausalLM(BloomConfig(vocab_size=32, hidden_size=16, n_layer=2, n_head=4)).to(DTYPES[dtype])
    whole = {name: bits(value) for name, value in model.state_dict().items()}
    layers = [
        {
            "patterns": [r".*query_key_value\.weight$", r".*query_key_value\.bias$"],
            "partition_type": "column",
            "shape": [3, -1],
            "partition_dim": 0,
        },
        {"patterns": [r".*dense\.weight$", r".*dense_4h_to_h\.weight$"], "partition_type": "row"},
        {"patterns": [r".*dense_h_to_4h\.weight$"], "partition_type": "column"},
    ]
    parallel = {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": layers}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config(1, dtype, tensor_parallel=parallel))
    engine.save_checkpoint(directory, tag="before")
    tokens = torch.arange(10).reshape(2, 5)
    engine.backward(engine(tokens, labels=tokens).loss)
    engine.step()
    engine.save_checkpoint(directory, tag="after")
    return whole, truth_of(engine)


def expert_layers(directory: str, stage: int) -> Truth:
    """Lets DeepSpeed spread the experts of a small Mixtral over two ranks (AutoEP) and saves it before and after a step, and before that by
    transformers. Returns what this rank held before: two of four experts."""
    from transformers import MixtralConfig, MixtralForCausalLM
    from transformers.utils import output_capturing

    registry = output_capturing._CAN_RECORD_REGISTRY
    if not hasattr(registry, "adapted"):  # transformers 5.23 has no default there, and DeepSpeed 0.19.8 gives one
        kind, before = type(registry), type(registry).get
        kind.get = lambda self, model, default=None: before(self, model) or default or {}
        kind.adapted = True
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads)).to(torch.bfloat16)
    model.save_pretrained(f"{directory}/transformers")
    parallel = {"enabled": True, "autoep_size": 2}
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config(stage, "bf16", expert_parallel=parallel)
    )
    engine.save_checkpoint(directory, tag="before")
    found: Truth = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=stage == 3):
            value = bits(parameter)
        found[name] = value
    tokens = torch.arange(10).reshape(2, 5)
    engine.backward(engine(tokens, labels=tokens).loss)
    engine.step()
    engine.save_checkpoint(directory, tag="after")
    return found


RUNS: dict[str, tuple[Any, ...]] = {
    "zero 0 fp32": (0, "fp32"),
    "zero 0 bf16": (0, "bf16"),
    "zero 1 bf16": (1, "bf16", (2, 3)),
    "zero 2 fp16": (2, "fp16"),
    "zero 2 fp32 groups": (2, "fp32", (2,), True),
    "zero 3 fp32": (3, "fp32"),
    "zero 3 bf16 groups": (3, "bf16", (2,), True),
}


def all_runs(directory: str) -> dict[str, Truth]:
    """All small trainings, each in a directory of its own; call it on two ranks."""
    deepspeed.init_distributed("gloo", verbose=False)
    found = {name: train(f"{directory}/{name}", *arguments) for name, arguments in RUNS.items()}
    found["zero 3 parts"] = train(f"{directory}/zero 3 parts", 3, "bf16", zero={"sub_group_size": 50})
    found["zero 1 round robin"] = train(f"{directory}/zero 1 round robin", 1, "bf16", (2,), True, zero={"round_robin_gradients": True})
    with fused():
        found["zero 0 fused"] = train(f"{directory}/zero 0 fused", 0, "bf16", (2,), True)
    found["bf16 optimizer"] = train(f"{directory}/bf16 optimizer", 1, "bf16", data_types={"grad_accum_dtype": "fp32"})
    found["elastic"] = train(f"{directory}/elastic", 1, "bf16", zero={"elastic_checkpoint": True})
    found["experts"] = train_experts(f"{directory}/experts", 1, "bf16")
    found["experts without zero"] = train_experts(f"{directory}/experts without zero", 0, "fp32")
    found["expert layers 1"] = expert_layers(f"{directory}/expert layers 1", 1)
    found["expert layers 3"] = expert_layers(f"{directory}/expert layers 3", 3)
    found["pipeline"] = train_pipeline(f"{directory}/pipeline", 1, "bf16", stages=2)
    found["pipeline bf16 optimizer"] = train_pipeline(f"{directory}/pipeline bf16 optimizer", 0, "bf16", stages=2)
    found["whole"], found["tensor parallel"] = shard(f"{directory}/tensor parallel", "bf16")
    return found
