"""Writes checkpoints of small GPTs with megatron-core on the CPU: ``megatron_writer.py DIRECTORY [NAME ...]``, a directory for each case.

Weights and optimizer states follow from the name of a parameter and its place in the whole model: cases of one model hold the same
numbers, whatever the layout. Files are made as ``save_checkpoint`` of megatron/training/checkpointing.py makes them, by megatron-core's
own ``state_dict``, ``save_parameter_state`` and ``dist_checkpointing.save``. A process of its own, for the device shim.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Case:
    """A layout of a model, and how it is saved. `vpp`: chunks per stage; `first`: layers of the first stage where stages are uneven;
    `embedding_rate`: embeddings have a learning rate of their own; `singleton`: layers and experts are not stacked."""

    kind: str = "torch"
    tp: int = 1
    pp: int = 1
    vpp: int = 0
    ep: int = 1
    etp: int = 1
    dp: int = 1
    first: int = 0
    layers: int = 4
    experts: int = 0
    groups: int = 2
    vocab: int = 56
    table: int = 0
    gated: bool = True
    bias: bool = True
    rms: bool = False
    untie: bool = True
    mla: bool = False
    ahead: int = 0
    bf16: bool = True
    optimizer: str = "none"
    bucket: int = 0
    embedding_rate: float = 0.0
    singleton: bool = False
    names: str = "local"
    release: bool = False
    seed: int = 0

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def layout(self) -> tuple[int, ...]:
        """Cases of one layout are written by the same processes."""
        return self.tp, self.pp, self.vpp, self.ep, self.etp if self.experts else 0, self.dp


DENSE = Case()
PLAIN = Case(optimizer="plain")
SHARDED = Case(optimizer="distributed", dp=2)
MOE = Case(layers=2, experts=4, bias=False, rms=True)
MLA = Case(layers=2, mla=True, bias=False, rms=True)
QWEN = Case(layers=2, bias=False, rms=True)
DIST = {"kind": "torch_dist"}
CASES: dict[str, Case] = {
    "dense": PLAIN,
    "dense-tp2": replace(PLAIN, tp=2, table=64),
    "dense-pp2": replace(PLAIN, pp=2),
    "dense-tp2pp2": replace(PLAIN, tp=2, pp=2),
    "dense-pp2vpp2": replace(PLAIN, pp=2, vpp=2),
    "dense-uneven": replace(PLAIN, pp=2, first=1),
    "dense-tp4": replace(DENSE, tp=4, untie=False, groups=4, bias=False),
    "dense-tp1-of-tp4": replace(DENSE, untie=False, groups=4, bias=False),
    "dense-te": replace(DENSE, names="te"),
    "dense-te-tp2": replace(DENSE, names="te", tp=2),
    "dense-legacy": replace(DENSE, names="legacy"),
    "dense-release": replace(DENSE, release=True),
    "plain-mlp": replace(DENSE, gated=False),
    "plain-mlp-tp2": replace(DENSE, gated=False, tp=2),
    "tied": replace(PLAIN, untie=False),
    "tied-pp2": replace(PLAIN, untie=False, pp=2),
    "fp32": replace(PLAIN, bf16=False),
    "fp32-tp2": replace(PLAIN, bf16=False, tp=2),
    "decoupled": replace(PLAIN, embedding_rate=1e-3, pp=2),
    "sharded": SHARDED,
    "sharded-tp2": replace(SHARDED, tp=2, dp=1),
    "sharded-pp2vpp2": replace(SHARDED, pp=2, vpp=2, dp=1),
    "sharded-buckets": replace(SHARDED, bucket=1500),
    "sharded-tied-pp2": replace(SHARDED, untie=False, pp=2, dp=1),
    "tied-sharded": replace(SHARDED, untie=False, dp=1),
    "moe": replace(MOE, optimizer="plain"),
    "moe-ep2": replace(MOE, optimizer="plain", ep=2, dp=2),
    "moe-tp2ep2etp1": replace(MOE, optimizer="plain", tp=2, ep=2, untie=False),
    "moe-tied": replace(MOE, optimizer="plain", untie=False),
    "moe-tp2ep2etp2": replace(MOE, tp=2, ep=2, etp=2, dp=2),
    "moe-grouped": replace(MOE, names="grouped"),
    "moe-grouped-ep2": replace(MOE, names="grouped", ep=2, dp=2),
    "moe-sharded": replace(MOE, optimizer="distributed"),
    "moe-sharded-ep2": replace(MOE, optimizer="distributed", ep=2, dp=2),
    "moe-sharded-ep2pp2": replace(MOE, optimizer="distributed", ep=2, dp=2, pp=2),
    "ahead": replace(PLAIN, ahead=1),
    "ahead-tp2pp2": replace(PLAIN, ahead=1, tp=2, pp=2),
    "ahead-sharded-pp2": replace(SHARDED, ahead=1, pp=2, dp=1),
    "dist-ahead-dp-reshardable-tp2": replace(SHARDED, **DIST, ahead=1, tp=2, dp=1),
    "dist-ahead-dp-reshardable-pp2": replace(SHARDED, **DIST, ahead=1, pp=2, dp=1),
    "mla": MLA,
    "mla-tp2": replace(MLA, tp=2),
    "dist": replace(PLAIN, **DIST),
    "dist-tp2": replace(PLAIN, **DIST, tp=2),
    "dist-tp2pp2": replace(PLAIN, **DIST, tp=2, pp=2),
    "dist-pp2vpp2": replace(PLAIN, **DIST, pp=2, vpp=2),
    "dist-fp32": replace(PLAIN, **DIST, bf16=False),
    "dist-tied-pp2": replace(PLAIN, **DIST, untie=False, pp=2),
    "dist-dp-reshardable": replace(SHARDED, **DIST),
    "dist-dp-reshardable-tp2pp2": replace(SHARDED, **DIST, tp=2, pp=2, dp=1, first=1),
    "dist-dp-reshardable-pp2vpp2": replace(SHARDED, **DIST, pp=2, vpp=2, dp=1),
    "dist-dp-reshardable-buckets": replace(SHARDED, **DIST, bucket=1500),
    "dist-dp-reshardable-tied-pp2": replace(SHARDED, **DIST, untie=False, pp=2, dp=1),
    "dist-fully-reshardable": replace(SHARDED, **DIST, optimizer="fully"),
    "dist-fully-reshardable-tp2": replace(SHARDED, **DIST, optimizer="fully", tp=2, dp=1),
    "dist-moe": replace(MOE, **DIST, optimizer="plain"),
    "dist-moe-ep2": replace(MOE, **DIST, optimizer="plain", ep=2, dp=2),
    "dist-moe-dp-reshardable-ep2pp2": replace(MOE, **DIST, optimizer="distributed", ep=2, dp=2, pp=2),
    "dist-moe-fully-reshardable-ep2": replace(MOE, **DIST, optimizer="fully", ep=2, dp=2),
    "dist-moe-singleton-ep2": replace(MOE, **DIST, optimizer="fully", ep=2, dp=2, singleton=True),
    "dist-mla-tp2": replace(MLA, **DIST, tp=2),
    "qwen": QWEN,
    "qwen-tp2pp2": replace(QWEN, tp=2, pp=2, table=64),
    "qwen-dist-tp2": replace(QWEN, **DIST, tp=2, table=64),
}
FAST = (
    "dense", "dense-tp2", "dense-pp2", "dense-tp2pp2", "dense-uneven", "dense-release", "dense-te", "dense-legacy", "decoupled",
    "sharded", "sharded-tp2", "sharded-pp2vpp2", "sharded-buckets", "tied-sharded", "tied", "tied-pp2", "fp32", "plain-mlp",
    "plain-mlp-tp2", "dist", "dist-tp2", "dist-tp2pp2", "dist-dp-reshardable", "dist-dp-reshardable-tp2pp2", "dist-fp32",
    "dist-fully-reshardable", "moe", "moe-ep2", "moe-grouped", "moe-tied", "moe-tp2ep2etp1", "dist-moe-ep2", "mla", "mla-tp2",
)  # fmt: skip
"""Cases of the fast tier: each kind of file, cut and model."""
STATES = ("master", "exp_avg", "exp_avg_sq")


def main() -> None:
    warnings.filterwarnings("ignore")
    sys.path[:0] = [str(ROOT / "tests" / "frameworks"), str(ROOT / "examples" / "megatron")]
    import cpu_shim

    cpu_shim.install()
    from forkpool import run_ranks

    prepare()
    target = Path(sys.argv[1])
    wanted = [(target / name, CASES[name]) for name in sys.argv[2:] or CASES]
    for layout in dict.fromkeys(case.layout for _, case in wanted):
        alike = [(path, case) for path, case in wanted if case.layout == layout]
        run_ranks(alike[0][1].ranks, write_all, alike, timeout=240)


def prepare() -> None:
    """Imports once, for all ranks."""
    import megatron.core.dist_checkpointing
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer  # noqa: F401


def write_all(wanted: list[tuple[Path, Case]]) -> None:
    """One rank's part of several checkpoints, one after the other: processes and what they import are most of the time."""
    from megatron.core import parallel_state as mpu
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.transformer import multi_latent_attention

    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # the queue below is a process too
    filesystem_async._results_queue = multiprocessing.Manager().Queue()  # Megatron's own begins with a new interpreter: seconds
    multi_latent_attention.TELinear = ()  # it is asked for even where it is not installed
    first = wanted[0][1]
    mpu.initialize_model_parallel(
        first.tp,
        first.pp,
        virtual_pipeline_model_parallel_size=first.vpp or None,
        expert_model_parallel_size=first.ep,
        expert_tensor_parallel_size=first.etp if first.experts else None,
    )
    for path, case in wanted:
        config, chunks = build(case)
        fill(case, chunks)
        optimizer = None if case.optimizer == "none" else optimize(case, config, chunks)
        save(case, path, chunks, optimizer)


def build(case: Case) -> tuple[Any, list[Any]]:
    """(config, chunks in Megatron's wrappers) of this rank."""
    import torch
    from megatron.core import parallel_state as mpu
    from megatron.core import tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    tensor_parallel.model_parallel_cuda_manual_seed(1)
    dtype = torch.bfloat16 if case.bf16 else torch.float32
    common: dict[str, Any] = {
        "num_layers": case.layers,
        "hidden_size": 16,
        "ffn_hidden_size": 24,
        "num_attention_heads": 4,
        "tensor_model_parallel_size": case.tp,
        "pipeline_model_parallel_size": case.pp,
        "virtual_pipeline_model_parallel_size": case.vpp or None,
        "expert_model_parallel_size": case.ep,
        "num_layers_in_first_pipeline_stage": case.first or None,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": case.bf16,
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "gated_linear_unit": case.gated,
        "activation_func": torch.nn.functional.silu if case.gated else torch.nn.functional.gelu,
        "add_bias_linear": case.bias,
        "normalization": "RMSNorm" if case.rms else "LayerNorm",
    }
    if case.ahead:
        common |= {"mtp_num_layers": case.ahead, "sequence_parallel": False}
    if case.experts:
        common |= {
            "num_moe_experts": case.experts,
            "moe_router_topk": 2,
            "expert_tensor_parallel_size": case.etp,
            "moe_shared_expert_intermediate_size": 12,
            "moe_ffn_hidden_size": 24,
            "moe_router_enable_expert_bias": True,
            "moe_router_score_function": "sigmoid",
            "sequence_parallel": False,
        }
    if case.mla:
        sizes = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_head_dim": 4, "qk_pos_emb_head_dim": 4, "v_head_dim": 4}
        config = MLATransformerConfig(**common, **sizes, rope_type="rope")
    else:
        config = TransformerConfig(**common, num_query_groups=case.groups)
    spec = get_gpt_layer_local_spec(
        num_experts=case.experts or None,
        multi_latent_attention=case.mla,
        qk_layernorm=case.rms,
        normalization=config.normalization,
    )
    if case.mla:
        spec.submodules.self_attention.submodules.core_attention = _attention()
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=case.optimizer in ("distributed", "fully"),
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=bool(case.bucket),
        bucket_size=case.bucket or None,
    )
    chunks = []
    for chunk in range(case.vpp or 1):
        stage = {"ignore_virtual": False, "vp_stage": chunk if case.vpp else None}
        model = GPTModel(
            config,
            spec,
            vocab_size=case.table or case.vocab,
            max_sequence_length=8,
            pre_process=mpu.is_pipeline_first_stage(**stage),
            post_process=mpu.is_pipeline_last_stage(**stage),
            share_embeddings_and_output_weights=not case.untie,
            position_embedding_type="rope",
            vp_stage=stage["vp_stage"],
            mtp_block_spec=get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if case.ahead else None,
        )
        if case.bf16:
            model = Float16Module(config, model)
        chunks.append(DistributedDataParallel(config, ddp, model, disable_bucketing=chunk > 0))
    return config, chunks


def _attention() -> type:
    """Attention without parameters that takes the arguments that latent attention gives to Transformer Engine's."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class Attention(DotProductAttention):  # type: ignore[misc]
        def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **kwargs: Any) -> None:  # noqa: ARG002
            super().__init__(*args, **kwargs)

    return Attention


def inner(chunk: Any) -> Any:
    """The model inside of the wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def parts(model: Any) -> Iterator[tuple[str, Any]]:
    """Parameters and saved buffers by their names in the whole model."""
    from megatron.core import parallel_state as mpu

    for name, tensor in model.state_dict(keep_vars=True).items():
        words = name.split(".")
        for i, word in enumerate(list(words)):
            if word == "layers":
                words[i + 1] = str(model.get_submodule(".".join(name.split(".")[: i + 2])).layer_number - 1)
            elif word == "local_experts":
                local = len(model.get_submodule(".".join(name.split(".")[: i + 1])))
                words[i + 1] = str(int(words[i + 1]) + local * mpu.get_expert_model_parallel_rank())
        if tensor is not None and not name.endswith("_extra_state"):
            yield ".".join(words), tensor


def numbers(case: Case, name: str, tensor: Any, state: str = "") -> Any:
    """This rank's piece of what `name` holds in the whole model, as float32; the same bits for every layout."""
    import torch
    from megatron.core import parallel_state as mpu

    if name == "output_layer.weight" and not case.untie:
        name = "embedding.word_embeddings.weight"
    size, rank, dim = 1, 0, 0
    if getattr(tensor, "tensor_model_parallel", False) or (".local_experts." in name and tensor.dim() > 1 and case.etp > 1):
        expert = ".local_experts." in name
        size = mpu.get_expert_tensor_parallel_world_size() if expert else mpu.get_tensor_model_parallel_world_size()
        rank = mpu.get_expert_tensor_parallel_rank() if expert else mpu.get_tensor_model_parallel_rank()
        dim = tensor.partition_dim
    shape = list(tensor.shape)
    shape[dim : dim + 1] = [n * size for n in shape[dim : dim + 1]]
    table = name.endswith(("word_embeddings.weight", "output_layer.weight"))
    generator = torch.Generator().manual_seed(zlib.crc32(f"{case.seed} {state} {name}".encode()))
    whole = torch.zeros(shape)
    drawn = torch.randn([case.vocab, *shape[1:]] if table else shape, generator=generator)
    if shape:
        whole[: len(drawn)] = drawn
    else:
        whole = drawn
    if state == "exp_avg_sq":
        whole = whole.square()
    halves = whole.chunk(2) if case.gated and "linear_fc1" in name else (whole,)
    return torch.cat([half.chunk(size, dim)[rank] for half in halves]) if shape else whole


def fill(case: Case, chunks: list[Any]) -> None:
    """Weights are what the master copies round to."""
    import torch

    with torch.no_grad():
        for chunk in chunks:
            for name, tensor in parts(inner(chunk)):
                tensor.copy_(numbers(case, name, tensor))


def optimize(case: Case, config: Any, chunks: list[Any]) -> Any:
    """An optimizer after a step, its states replaced by numbers that follow from the names."""
    import torch
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    sharded = case.optimizer in ("distributed", "fully")
    settings = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        min_lr=0.0,
        decoupled_lr=case.embedding_rate or None,
        decoupled_min_lr=0.0 if case.embedding_rate else None,
        bf16=case.bf16,
        params_dtype=config.params_dtype,
        clip_grad=0.0,
        use_distributed_optimizer=sharded,
    )
    optimizer = get_megatron_optimizer(settings, chunks)
    for chunk in chunks:
        for parameter in chunk.parameters():
            if parameter.requires_grad:
                parameter.main_grad.fill_(1e-3)
    optimizer.step()
    fill(case, chunks)
    named = {id(tensor): (name, tensor) for chunk in chunks for name, tensor in parts(inner(chunk))}
    with torch.no_grad():
        for part in optimizer.chained_optimizers:
            if sharded:
                for parameter in part.model_param_gbuf_map:
                    name, tensor = named[id(parameter)]
                    held = part._get_model_param_range_map(parameter)["param"]
                    states = part._get_main_param_and_optimizer_states(parameter) | {
                        "param" if state == "master" else state: numbers(case, name, tensor, "" if state == "master" else state)
                        .flatten()[held.start : held.end]
                        .clone()
                        for state in STATES
                    }
                    part._set_main_param_and_optimizer_states(parameter, states)
            elif case.bf16:
                for originals, masters in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
                    for parameter, master in zip(originals, masters, strict=True):
                        name, tensor = named[id(parameter)]
                        master.copy_(numbers(case, name, tensor))
                        for state in STATES[1:]:
                            part.optimizer.state[master][state].copy_(numbers(case, name, tensor, state))
                for group in part.fp32_from_fp32_groups:
                    _states(case, part, named, group)
            else:
                for group in part.optimizer.param_groups:
                    _states(case, part, named, group["params"])
    return optimizer


def _states(case: Case, part: Any, named: dict[int, tuple[str, Any]], group: Any) -> None:
    for parameter in group:
        name, tensor = named[id(parameter)]
        for state in STATES[1:]:
            part.optimizer.state[parameter][state].copy_(numbers(case, name, tensor, state))


def namespace(case: Case) -> argparse.Namespace:
    """What a run of Megatron keeps of its arguments, some of it."""
    import torch
    from megatron.core.transformer.enums import AttnBackend

    return argparse.Namespace(
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vpp or None,
        num_layers_per_virtual_pipeline_stage=case.layers // case.pp // case.vpp if case.vpp else None,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=case.etp if case.experts else case.tp,
        data_parallel_size=case.dp,
        world_size=case.ranks,
        decoder_first_pipeline_num_layers=case.first or None,
        num_layers=case.layers,
        hidden_size=16,
        ffn_hidden_size=24,
        num_attention_heads=4,
        num_query_groups=case.groups,
        group_query_attention=case.groups != 4,
        kv_channels=4,
        multi_latent_attention=case.mla,
        num_experts=case.experts or None,
        swiglu=case.gated,
        add_bias_linear=case.bias,
        normalization="RMSNorm" if case.rms else "LayerNorm",
        untie_embeddings_and_output_weights=case.untie,
        padded_vocab_size=case.table or case.vocab,
        vocab_size=case.vocab,
        make_vocab_size_divisible_by=8,
        params_dtype=torch.bfloat16 if case.bf16 else torch.float32,
        bf16=case.bf16,
        use_distributed_optimizer=case.optimizer in ("distributed", "fully"),
        overlap_grad_reduce=bool(case.bucket),
        ddp_bucket_size=case.bucket or None,
        ckpt_format=case.kind,
        attention_backend=AttnBackend.flash,
        data_path=["corpus"],
        lr=1e-2,
        seed=1234,
        iteration=5,
    )


def save(case: Case, path: Path, chunks: list[Any], optimizer: Any) -> None:
    """As megatron.training.checkpointing.save_checkpoint."""
    import torch
    import torch.distributed as dist
    from megatron.core import dist_checkpointing, tensor_parallel
    from megatron.core import parallel_state as mpu
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    models = [inner(chunk) for chunk in chunks]
    base = path / ("release" if case.release else "iter_0000005")
    many = len(models) > 1
    state: dict[str, Any] = {"args": namespace(case), "checkpoint_version": 3.0, "iteration": 5}
    metadata: dict[str, Any] = {"singleton_local_shards": case.singleton, "chained_optim_avoid_prefix": True}
    if case.optimizer == "distributed":
        metadata["distrib_optim_sharding_type"] = "dp_reshardable"
    elif case.optimizer == "fully":
        metadata |= {"distrib_optim_sharding_type": "fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient": False}
    arguments = {"metadata": metadata | {"dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)}}
    for i, model in enumerate(models):
        made = model.sharded_state_dict(**arguments) if case.kind == "torch_dist" else model.state_dict_for_save_checkpoint()
        state[f"model{i}" if many else "model"] = made if case.kind == "torch_dist" else renamed(case, made)
    random_state: Any = [
        {
            "random_rng_state": random.Random(7).getstate(),
            "np_rng_state": ("MT19937", [1, 2, 3], 3, 0, 0.0),
            "torch_rng_state": torch.get_rng_state(),
            "cuda_rng_state": torch.cuda.get_rng_state(),
            "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
        }
    ]
    if case.kind == "torch_dist":
        sizes = (mpu.get_pipeline_model_parallel_world_size(), mpu.get_tensor_model_parallel_world_size())
        place = (mpu.get_pipeline_model_parallel_rank(), mpu.get_tensor_model_parallel_rank())
        random_state = ShardedObject("rng_state", random_state, sizes, place, replica_id=mpu.get_data_parallel_rank())
    if optimizer is not None:
        state["optimizer"] = optimizer.sharded_state_dict(state, **arguments) if case.kind == "torch_dist" else optimizer.state_dict()
        schedule = OptimizerParamScheduler(optimizer, 0.0, 1e-2, 0.0, 1, 10, "linear", 0.01, 0.01, 10, "constant")
        schedule.step(5)
        state["opt_param_scheduler"] = schedule.state_dict()
    state["rng_state"] = random_state
    state["num_floating_point_operations_so_far"] = 12345
    if case.kind == "torch_dist":
        if dist.get_rank() == 0:
            base.mkdir(parents=True)
        dist.barrier()
        dist_checkpointing.save(state, str(base), content_metadata=metadata)
    else:
        name = f"mp_rank_{mpu.get_tensor_model_parallel_rank():02d}"
        name += f"_{mpu.get_pipeline_model_parallel_rank():03d}" if case.pp > 1 else ""
        name += f"_{mpu.get_expert_model_parallel_rank():03d}" if case.ep > 1 else ""
        (base / name).mkdir(parents=True, exist_ok=True)
        if case.optimizer == "distributed":
            optimizer.save_parameter_state(str(base / name / "distrib_optim.pt"))
        if mpu.get_data_parallel_rank() == 0 or mpu.get_expert_data_parallel_rank() == 0:
            torch.save(state, base / name / "model_optim_rng.pt")
    dist.barrier()
    if dist.get_rank() == 0:
        (path / "latest_checkpointed_iteration.txt").write_text("release" if case.release else "5")
        (path / "case.txt").write_text(repr(asdict(case)))


_TE = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_", "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
_LEGACY = {
    "decoder.final_layernorm.": "encoder.final_norm.",
    "decoder.": "encoder.",
    "input_layernorm.": "input_norm.",
    "pre_mlp_layernorm.": "post_attention_norm.",
    "linear_qkv": "query_key_value",
    "self_attention.linear_proj": "self_attention.dense",
    "linear_fc1": "dense_h_to_4h",
    "linear_fc2": "dense_4h_to_h",
}


def renamed(case: Case, model: dict[str, Any]) -> dict[str, Any]:
    """The names that Transformer Engine's layers (they need a GPU) and Megatron before core give to the same tensors."""
    if case.names == "local":
        return model
    found: dict[str, Any] = {}
    for name, tensor in model.items():
        new = name
        for old, text in {"te": _TE, "legacy": _LEGACY}.get(case.names, {}).items():
            new = new.replace(old, text)
        if case.names == "grouped" and ".local_experts." in name:
            head, tail = name.split(".local_experts.")
            number, layer, kind = tail.split(".")
            new = f"{head}.{layer}.{kind}{number}"
        found[new] = tensor
    if case.names != "legacy":
        return found
    # The module tree of Megatron before core: language_model.{embedding, encoder, output_layer}.
    tree: dict[str, Any] = {"embedding": {"word_embeddings": {}}, "encoder": {}}
    for name, tensor in found.items():
        first, _, rest = name.partition(".")
        if first == "embedding":
            tree["embedding"]["word_embeddings"][rest.rpartition(".")[2]] = tensor
        elif first == "output_layer":
            tree.setdefault("output_layer", {})[rest] = tensor
        else:
            tree["encoder"][rest] = tensor
    return {"language_model": tree}


if __name__ == "__main__":
    main()
