"""One Qwen3 in every format: what megatron-core wrote (see `megatron_writer`) goes into a model of transformers, and from there into the
files of transformers, torch, torch's distributed checkpoints and DeepSpeed."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import deepspeed_runs as runs
import numpy as np
import torch
import torch.distributed.checkpoint as dcp
import transformers
from forkpool import run_ranks
from stored_arrays import array_of, checkpoint_of, fill
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Qwen3Config, Qwen3ForCausalLM

from msprobe_engine.align.parameters.align_names import align_checkpoints
from msprobe_engine.formats.checkpoint.open import open_checkpoint

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 24,
    "vocab_size": 56,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}
STAGES = (0, 1, 2, 3)


def write(target: Path) -> None:
    """All of them beside ``qwen`` of `megatron_writer` in `target`."""
    transformers.logging.set_verbosity_error()
    run_ranks(1, plain, target)  # in a process of its own: it seeds torch
    run_ranks(2, sharded, target)
    for stage in STAGES:
        run_ranks(2 if stage else 1, deepspeed, target, stage)
    run_ranks(1, universal, target)


def universal(target: Path) -> None:
    """DeepSpeed's own conversion of ZeRO 2."""
    tag = (target / "zero2" / "latest").read_text()
    (target / "universal").mkdir()
    workers = ["--inject_missing_state", "--num_extract_workers", "1", "--num_merge_workers", "1"]
    places = ["--input_folder", str(target / "zero2" / tag), "--output_folder", str(target / "universal" / f"{tag}_universal")]
    sys.argv = ["ds_to_universal", *workers, *places]
    runpy.run_module("deepspeed.checkpoint.ds_to_universal", run_name="__main__")


def model() -> Any:
    """The model of transformers, bfloat16, with weights of its own."""
    torch.manual_seed(1)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES)).to(torch.bfloat16)


def weights(target: Path) -> dict[str, Any]:
    """Megatron's weights under the names of transformers, by the map of names that `names/test_transformers_and_megatron.py` proves."""
    arrays = {key: value.float().numpy() for key, value in model().state_dict().items()}
    facts = {"heads": SIZES["num_attention_heads"], "kv_heads": SIZES["num_key_value_heads"]}
    mine = checkpoint_of(arrays, target / "floats", facts)
    found = align_checkpoints(open_checkpoint(target / "qwen"), mine)
    assert {pair.b.name for pair in found.pairs} >= arrays.keys()
    for pair in found.pairs:
        fill(pair.b, array_of(pair.a).astype(np.float32))
    (there,) = {tensor.boxes[0].file for tensor in mine.tensors.values()}
    filled = {key: torch.from_numpy(array_of(tensor).copy()).to(torch.bfloat16) for key, tensor in mine.tensors.items()}
    there.unlink()
    return filled


def plain(target: Path) -> None:
    """Files of one process."""
    net, held = model(), weights(target)
    net.load_state_dict(held)
    net.save_pretrained(target / "hf", max_shard_size="6KB")
    torch.save(held, target / "weights.pth")
    torch.save({"model": held, "iteration": 5}, target / "single.pt")
    (target / "bin").mkdir()
    torch.save(held, target / "bin" / "pytorch_model.bin")
    net.config.save_pretrained(target / "bin")


def sharded(target: Path) -> None:
    """torch's distributed checkpoint of the model under FSDP2."""
    net = model()
    net.load_state_dict(torch.load(target / "weights.pth", weights_only=True))
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    dcp.save({"model": get_model_state_dict(net)}, checkpoint_id=target / "dcp")


def deepspeed(target: Path, stage: int) -> None:
    """A checkpoint before the first step. Without weight decay, which ZeRO 0 applies to its copies already when it is made, nothing has
    moved."""
    net = model()
    net.load_state_dict(torch.load(target / "weights.pth", weights_only=True))
    config = runs.config(stage, "bf16")
    config["optimizer"]["params"]["weight_decay"] = 0.0
    engine, *_ = runs.deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
    engine.save_checkpoint(target / f"zero{stage}")
