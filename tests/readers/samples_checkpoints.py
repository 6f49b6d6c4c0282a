"""Small checkpoints of every format, one beside the other in ``a`` and ``b``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from samples import FIXTURES

from msprobe_engine.cli.main import main


def checkpoints(root: Path) -> None:
    import torch

    for side in ("a", "b"):
        (root / side).mkdir()
        torch.save({"w": torch.ones(3, 4), "step": torch.tensor(1.0), "n": 3, "names": ["x"]}, root / side / "model.pt")


def safetensors(root: Path) -> None:
    from safetensors.numpy import save_file

    for side in ("a", "b"):
        (root / side).mkdir()
        save_file({"w": np.ones((3, 4), np.float32), "b": np.zeros(4, np.float32)}, root / side / "model.safetensors")
        index = {"metadata": {"total_size": 64}, "weight_map": {"w": "model.safetensors", "b": "model.safetensors"}}
        (root / side / "model.safetensors.index.json").write_text(json.dumps(index))
        (root / side / "trainer_state.json").write_text(
            json.dumps({"global_step": 3, "epoch": 1.0, "log_history": [{"loss": 1.0, "step": 1}]})
        )


def dcp(root: Path) -> None:
    import torch
    from torch.distributed.checkpoint import FileSystemWriter, save

    for side in ("a", "b"):
        state = {"w": torch.ones(30, 4), "step": torch.tensor(1.0)}
        save(state, storage_writer=FileSystemWriter(root / side), no_dist=True)


def zarr(root: Path) -> None:
    for side in ("a", "b"):
        shutil.copytree(FIXTURES / "megatron_zarr" / "iter_0000003", root / side)


def mindspore(root: Path) -> None:
    for side in ("a", "b"):
        (root / side).mkdir()
        shutil.copy(FIXTURES / "mindspore_checkpoints" / "adam.ckpt", root / side / "adam.ckpt")


def manifest(root: Path) -> None:
    """A checkpoint, and the digests of it."""
    safetensors(root)
    assert main(["ckpt", "digest", str(root / "b"), "-o", str(root / "digests.json")]) == 0


def mapped(root: Path) -> None:
    """Names that a file of the user's brings together."""
    import torch

    for side, name in (("a", "blocks"), ("b", "layers")):
        (root / side).mkdir()
        torch.save({f"{name}.{n}.weight": torch.ones(3, 4) for n in range(2)}, root / side / "model.pt")
    (root / "map.yaml").write_text(
        "facts: {heads: 2, kv_heads: 2, head_dim: 4, gated: true, vocab: 32}\n"
        'names:\n  - {a: "blocks.{n}.weight", b: "layers.{n}.weight"}\n  - {a: x, b: [y, z], dim: 1, transposed: false}\n'
        'ignore: ["*.running_mean", "probe.*"]\n'
    )


def megatron(root: Path) -> None:
    """As Megatron-LM saves it: two ranks of a tensor parallel group."""
    import argparse

    import torch

    args = argparse.Namespace(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=1,
        num_layers=2,
        hidden_size=4,
        num_attention_heads=2,
        padded_vocab_size=16,
        world_size=2,
    )
    model = {f"decoder.layers.{n}.self_attention.linear_proj.weight": torch.ones(4, 2) for n in range(2)}
    model |= {"embedding.word_embeddings.weight": torch.ones(8, 4), "decoder.final_layernorm.weight": torch.ones(4)}
    for side in ("a", "b"):
        for rank in range(2):
            place = root / side / "iter_0000005" / f"mp_rank_{rank:02}"
            place.mkdir(parents=True)
            whole = {"checkpoint_version": 3.0, "iteration": 5, "model": model, "args": args, "opt_param_scheduler": {"num_steps": 5}}
            torch.save(whole, place / "model_optim_rng.pt")
        (root / side / "latest_checkpointed_iteration.txt").write_text("5")


def torch_dist(root: Path) -> None:
    """A distributed checkpoint of Megatron."""
    for side in ("a", "b"):
        shutil.copytree(FIXTURES / "megatron_flattened" / "iter_0000004", root / side)


def deepspeed(root: Path) -> None:
    """ZeRO 2 on two ranks: a file of the model, and one of each rank's part of the optimizer."""
    import torch

    shapes = [{"w": torch.Size([3, 4]), "b": torch.Size([4])}]
    for side in ("a", "b"):
        place = root / side / "global_step5"
        place.mkdir(parents=True)
        (root / side / "latest").write_text("global_step5")
        head = {
            "module": {"w": torch.ones(3, 4, dtype=torch.bfloat16), "b": torch.zeros(4, dtype=torch.bfloat16)}, "buffer_names": [],
            "param_shapes": shapes, "frozen_param_shapes": None, "shared_params": {}, "dp_world_size": 2, "mp_world_size": 1,
            "global_steps": 5, "global_samples": 40, "ds_version": "0.16.0", "ds_config": {"train_batch_size": 8},
        }  # fmt: skip
        torch.save(head, place / "mp_rank_00_model_states.pt")
        for rank in range(2):
            states = {0: {"exp_avg": torch.zeros(8), "exp_avg_sq": torch.zeros(8), "step": torch.tensor(5.0)}}
            optimizer = {
                "zero_stage": 2, "partition_count": [2], "single_partition_of_fp32_groups": [torch.ones(8)], "ds_version": "0.16.0",
                "group_paddings": [0], "clip_grad": 0.0, "loss_scaler": None, "dynamic_loss_scale": False, "overflow": False,
                "base_optimizer_state": {"state": states, "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.95), "params": [0]}]},
            }  # fmt: skip
            torch.save({"optimizer_state_dict": optimizer}, place / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


def universal(root: Path) -> None:
    """DeepSpeed's universal form of it."""
    import torch

    for side in ("a", "b"):
        zero = root / side / "zero"
        for name, shape in (("w", (3, 4)), ("b", (4,))):
            (zero / name).mkdir(parents=True)
            for state in ("fp32", "exp_avg", "exp_avg_sq"):
                torch.save({"param": torch.ones(shape)} if state != "step" else 5, zero / name / f"{state}.pt")
        common = {
            "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
            "base_optimizer_state": {"param_groups": [{"lr": 1e-3}]},
        }
        torch.save({"optimizer_state_dict": common}, zero / "optimizer_state.pt")
        head = {"module": {"w": torch.ones(3, 4), "b": torch.ones(4)}, "param_shapes": [{"w": torch.Size([3, 4]), "b": torch.Size([4])}]}
        more = {"dp_world_size": 1, "mp_world_size": 1, "global_steps": 5, "ds_version": "0.16.0", "universal_checkpoint_info": {}}
        torch.save({**head, **more}, root / side / "mp_rank_00_model_states.pt")


def mindspore_ranks(root: Path) -> None:
    """Ranks of MindSpore, and the strategy by which they were cut."""
    for side in ("a", "b"):
        shutil.copytree(FIXTURES / "mindspore_checkpoints" / "ranks", root / side)


def trainer(root: Path) -> None:
    """A run of transformers' Trainer: weights, optimizer, schedule, random states."""
    import random

    import torch
    from safetensors.torch import save_file

    for side in ("a", "b"):
        place = root / side / "checkpoint-5"
        place.mkdir(parents=True)
        net = torch.nn.Linear(4, 3)
        torch.nn.init.ones_(net.weight)
        torch.nn.init.zeros_(net.bias)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        net(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        save_file({name: tensor.contiguous() for name, tensor in net.state_dict().items()}, place / "model.safetensors", {"format": "pt"})
        torch.save(optimizer.state_dict(), place / "optimizer.pt")
        torch.save({"base_lrs": [1e-3], "last_epoch": 5, "_last_lr": [1e-3]}, place / "scheduler.pt")
        states = {
            "python": random.Random(1).getstate(),
            "numpy": np.random.RandomState(1).get_state(),
            "cpu": torch.Generator().get_state(),
        }
        torch.save(states, place / "rng_state.pth")
        (place / "trainer_state.json").write_text(json.dumps({"global_step": 5, "epoch": 1.0, "log_history": [{"loss": 1.0, "step": 1}]}))
        (place / "config.json").write_text(json.dumps({"model_type": "x", "num_attention_heads": 2, "hidden_size": 4}))
