"""A small GPT on megatron-core, with its own loop and its own arguments. It knows nothing of the probe:

    torchrun --nproc_per_node 2 -m msprobe_integrations.megatron examples/megatron/train_gpt.py --msprobe-config probe.yaml --steps 20

Runs on CPU (gloo) as well as on GPUs (nccl).
"""

# ruff: noqa: E402
# The shim comes before torch and Megatron.

from __future__ import annotations

import argparse
import inspect
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")
sys.path.insert(0, str(Path(__file__).resolve().parent))
import cpu_shim

cpu_shim.install()
import torch
import torch.distributed as dist
from megatron.core import parallel_state as state
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

NUMBERS = {
    "tp": (1, "tensor parallel size"),
    "pp": (1, "pipeline parallel size"),
    "vpp": (0, "virtual pipeline chunks per stage"),
    "ep": (1, "expert parallel size"),
    "etp": (1, "tensor parallel size of experts"),
    "cp": (1, "context parallel size"),
    "experts": (0, "experts per layer, 0: dense"),
    "layers": (2, "transformer layers"),
    "hidden": (32, "hidden size"),
    "heads": (4, "attention heads"),
    "seq": (16, "sequence length"),
    "vocab": (64, "vocabulary size"),
    "mbs": (2, "micro batch size"),
    "nmb": (2, "micro batches per step"),
    "steps": (10, "training steps"),
    "seed": (123, "seed of weights, dropout and data"),
}
SWITCHES = {
    "distopt": "distributed optimizer",
    "overlap": "overlap gradient reduction with the backward pass",
    "overlap-param": "overlap parameter gathering with the forward pass",
    "bf16": "bfloat16 weights",
    "fp16": "float16 weights with loss scaling",
    "sp": "sequence parallelism (with tp)",
    "allgather": "experts get their tokens by all-gather, not all-to-all",
    "recompute": "recompute whole layers in the backward pass",
    "recompute-core": "recompute attention in the backward pass",
    "untie": "separate output weights",
    "quiet": "print nothing per step",
}


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The script's own arguments."""
    parser = argparse.ArgumentParser(description="A small GPT on megatron-core.")
    for name, (default, text) in NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=text)
    for name, text in SWITCHES.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--clip", type=float, default=1.0, help="gradient clipping, 0: none")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds to wait after every step, so that there is time to look")
    parser.add_argument("--linger", type=float, default=0.0, help="seconds to stay alive after the last step")
    parser.add_argument("--fault-seed", type=int, default=None, help="plant a fault that follows from this number")
    parser.add_argument("--fault-truth", type=Path, default=None, help="where the planted fault is written down, for checking")
    return parser.parse_args(argv)


def known(cls: Callable[..., Any], **arguments: Any) -> Any:
    """Call with the keywords that this version of megatron-core has."""
    names = inspect.signature(cls.__init__ if isinstance(cls, type) else cls).parameters
    return cls(**{k: v for k, v in arguments.items() if k in names})


def build(a: argparse.Namespace) -> tuple[Any, list[Any], Any]:
    """(config, DDP-wrapped model chunks, optimizer) for this rank."""
    known(
        state.initialize_model_parallel,
        tensor_model_parallel_size=a.tp,
        pipeline_model_parallel_size=a.pp,
        virtual_pipeline_model_parallel_size=a.vpp or None,
        expert_model_parallel_size=a.ep,
        **({"expert_tensor_parallel_size": a.etp} if a.experts else {}),
        **({"context_parallel_size": a.cp} if a.cp > 1 else {}),
    )
    torch.manual_seed(a.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(a.seed)
    dtype = torch.bfloat16 if a.bf16 else torch.float16 if a.fp16 else torch.float32
    experts: dict[str, Any] = {}
    if a.experts:
        experts = {
            "num_moe_experts": a.experts,
            "moe_router_topk": 2,
            "moe_token_dispatcher_type": "allgather" if a.allgather else "alltoall",
            "expert_tensor_parallel_size": a.etp,
            "moe_aux_loss_coeff": 1e-2,
            "moe_router_load_balancing_type": "aux_loss",
            "add_bias_linear": False,
        }
    config = known(
        TransformerConfig,
        num_layers=a.layers,
        hidden_size=a.hidden,
        num_attention_heads=a.heads,
        tensor_model_parallel_size=a.tp,
        pipeline_model_parallel_size=a.pp,
        virtual_pipeline_model_parallel_size=a.vpp or None,
        # As Megatron's own arguments: of two stages each is before and behind the other, and only its order tells a message of a batch.
        overlap_p2p_comm=bool(a.vpp),
        batch_p2p_comm=not a.vpp,
        expert_model_parallel_size=a.ep,
        sequence_parallel=a.sp,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=a.bf16,
        fp16=a.fp16,
        attention_dropout=0.1,
        hidden_dropout=0.1,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        context_parallel_size=a.cp,
        recompute_granularity="full" if a.recompute else "selective" if a.recompute_core else None,
        recompute_method="uniform" if a.recompute else None,
        recompute_num_layers=1 if a.recompute else None,
        **experts,
    )
    ddp = known(
        DistributedDataParallelConfig,
        use_distributed_optimizer=a.distopt,
        overlap_grad_reduce=a.overlap or a.overlap_param,
        overlap_param_gather=a.overlap_param,
        grad_reduce_in_fp32=True,
        bucket_size=4000 if a.overlap or a.overlap_param else None,
    )
    chunks = []
    for chunk in range(a.vpp or 1):
        keys = {"ignore_virtual": False}
        if "vp_stage" in inspect.signature(state.is_pipeline_first_stage).parameters:
            keys["vp_stage"] = chunk if a.vpp else None
        elif a.vpp:
            state.set_virtual_pipeline_model_parallel_rank(chunk)
        model = known(
            GPTModel,
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(num_experts=a.experts or None),
            vocab_size=a.vocab,
            max_sequence_length=a.seq,
            pre_process=state.is_pipeline_first_stage(**keys),
            post_process=state.is_pipeline_last_stage(**keys),
            position_embedding_type="rope",
            share_embeddings_and_output_weights=not a.untie,
            vp_stage=chunk if a.vpp else None,
        )
        if a.bf16 or a.fp16:
            model = Float16Module(config, model)
        chunks.append(
            DistributedDataParallel(config=config, ddp_config=ddp, module=model, disable_bucketing=chunk > 0 and not a.overlap_param)
        )
    for chunk in chunks:
        chunk.broadcast_params()
    optimizer = get_megatron_optimizer(
        known(
            OptimizerConfig,
            optimizer="adam",
            lr=a.lr,
            clip_grad=a.clip,
            bf16=a.bf16,
            fp16=a.fp16,
            params_dtype=dtype,
            use_distributed_optimizer=a.distopt,
            overlap_param_gather=a.overlap_param,
            initial_loss_scale=2.0**10 if a.fp16 else 1.0,
        ),
        chunks,
    )
    if a.overlap or a.overlap_param:
        syncs = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = syncs if len(syncs) > 1 else syncs[0]
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return config, chunks, optimizer


def batches(a: argparse.Namespace) -> Iterator[dict[str, torch.Tensor]]:
    """Endless random tokens, different on every data-parallel rank."""
    generator = torch.Generator().manual_seed(1000 * a.seed + state.get_data_parallel_rank())
    device = torch.cuda.current_device()
    mask = (torch.tril(torch.ones(1, 1, a.seq, a.seq)) < 0.5).to(device)
    positions = torch.arange(a.seq)[None].expand(a.mbs, -1).contiguous().to(device)
    while True:
        tokens = torch.randint(0, a.vocab, (a.mbs, a.seq + 1), generator=generator).to(device)
        yield {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous(), "mask": mask, "positions": positions}


def forward_step(data: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
    """One micro batch, as Megatron's schedules want it."""
    batch = next(data)
    output = model(batch["tokens"], batch["positions"], batch["mask"], labels=batch["labels"])

    def loss(out: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        value = out.float().mean()
        return value, {"lm loss": value.detach().clone()}  # a copy: the schedule divides the loss in place

    return output, loss


def train(a: argparse.Namespace, chunks: list[Any], optimizer: Any, on_step: Callable[[int], None] | None = None) -> list[float | None]:
    """The loop. Returns the loss of every step (None on ranks without the last stage)."""
    run = get_forward_backward_func()
    data = [batches(a) for _ in chunks]
    many = len(chunks) > 1
    history: list[float | None] = []
    for step in range(a.steps):
        if on_step is not None:
            on_step(step)
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        losses = run(
            forward_step_func=forward_step,
            data_iterator=data if many else data[0],
            model=chunks if many else chunks[0],
            num_microbatches=a.nmb,
            seq_length=a.seq,
            micro_batch_size=a.mbs,
            forward_only=False,
        )
        ok, norm, _ = optimizer.step()
        loss = sum(float(entry["lm loss"]) for entry in losses) / len(losses) if losses else None
        history.append(loss)
        if not a.quiet and loss is not None and state.get_data_parallel_rank() == 0 and state.get_tensor_model_parallel_rank() == 0:
            print(
                f"step {step} loss {loss:.5f} grad_norm {norm if norm is None else float(norm):.5f}{'' if ok else ' skipped'}", flush=True
            )
        time.sleep(a.pace)
    time.sleep(a.linger)
    return history


def main() -> None:
    a = arguments()
    torch.set_num_threads(1)
    for key, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}.items():
        os.environ.setdefault(key, value)
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    _, chunks, optimizer = build(a)
    now = [0]
    if a.fault_seed is not None:
        from fault import plant

        model = chunks[0].module
        while hasattr(model, "module"):
            model = model.module
        plant(
            model,
            a.fault_seed,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            steps=a.steps,
            step=lambda: now[0],
            truth=a.fault_truth,
        )
    train(a, chunks, optimizer, on_step=lambda step: now.__setitem__(0, step))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
