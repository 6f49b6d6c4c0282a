"""A real torchtitan training on the CPU: its Trainer, a small llama3, a tokenizer and a data set made here.

    torchrun --nproc_per_node 2 titan_job.py FOLDER [key=value ...]      keys: dp, tp, pp, steps, accumulate, validate, log

Parallelism is that of DTensor (``spmd_backend="partial_dtensor"``): torchtitan's own default is for a torch newer than 2.13.

torchtitan takes its device for CUDA when there is no accelerator; `stand_in` gives it the CPU instead, with the handful of questions
about memory that `torch.cpu` does not answer.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import os
import sys
import time
import types
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.update(HF_DATASETS_OFFLINE="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")  # no network; read when imported


def stand_in() -> None:
    """The CPU for torchtitan's device; before anything else of torchtitan is imported."""
    import torch
    from torchtitan.tools import utils

    device = types.ModuleType("cpu_device")
    vars(device).update({name: getattr(torch.cpu, name) for name in torch.cpu.__all__})
    device.get_device_name = lambda *_: "CPU"
    device.get_device_properties = lambda *_: types.SimpleNamespace(total_memory=1 << 30)
    device.memory_stats = lambda *_: {}
    device.set_device = device.reset_peak_memory_stats = device.empty_cache = lambda *_: None
    device.current_device = lambda: 0
    for module in [module for name, module in sys.modules.items() if name.startswith("torchtitan") and hasattr(module, "device_type")]:
        module.device_type = "cpu"
        if hasattr(module, "device_module"):
            module.device_module = device
    utils.get_local_device = lambda: torch.device("cpu")
    torch.distributed.Backend.default_device_backend_map.setdefault("cpu", "gloo")
    from torchtitan.distributed import utils as distributed

    if not hasattr(torch.distributed, "set_timeout"):  # newer than torch 2.13
        distributed.set_pg_timeouts = lambda *_, **__: None
    with contextlib.suppress(ImportError):  # before 0.3 it is torchtitan.train
        from torchtitan import trainer

        trainer.time = types.SimpleNamespace(**{**vars(time), "sleep": lambda _: None})  # two seconds at the end of every training
    _sums_of_gloo()
    _steps_of_newer_torch()


def _sums_of_gloo() -> None:
    """torchtitan has FSDP2 multiply gradients by 1 within the reduction, which NCCL alone can."""
    from torch.distributed.fsdp import FSDPModule

    divide = FSDPModule.set_gradient_divide_factor

    def set_factor(self: Any, factor: float) -> None:
        divide(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = set_factor


def _steps_of_newer_torch() -> None:
    """torchtitan 0.3 hands a schedule the micro batches, which torch 2.13 does not take yet: its `step` makes them, and goes on as here."""
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle

    whole = PipelineScheduleSingle.step
    if "arg_mbs" in inspect.signature(whole).parameters:
        return

    def step(self: Any, *args: Any, arg_mbs: Any = None, kwarg_mbs: Any = None, target_mbs: Any = None, **keys: Any) -> Any:
        if kwarg_mbs is None:
            return whole(self, *args, **keys)
        self._stage.has_backward = self._has_backward
        self._stage.clear_runtime_states()
        inputs = arg_mbs or [()] * len(kwarg_mbs)
        loss = keys["loss_kwargs"]
        return self._step_microbatches(inputs, kwarg_mbs, target_mbs, keys["losses"], keys["return_outputs"], loss_kwargs=loss)

    PipelineScheduleSingle.step = step


def assets(folder: Path) -> None:
    """A tokenizer of 64 words and a text."""
    folder.mkdir(parents=True, exist_ok=True)
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, 64)}}
    tokenizer = {
        "version": "1.0",
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
        "added_tokens": [
            {"id": i, "content": t, "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
            for t, i in (("<unk>", 0), ("<s>", 1), ("</s>", 2))
        ],
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    lines = [json.dumps({"text": " ".join(f"w{3 + (i * 7 + j * j) % 61}" for j in range(40))}) for i in range(400)]
    (folder / "text").mkdir(exist_ok=True)
    (folder / "text" / "data.json").write_text("\n".join(lines))


def config(folder: Path, **keys: int) -> Any:
    """torchtitan's configuration: the debug model cut down to two layers of width 32."""
    if find_spec("torchtitan.trainer") is None:
        import titan_old

        return titan_old.config(folder, **keys)
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.components.validate import Validator
    from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
    from torchtitan.models.llama3 import llama3_configs, model_registry
    from torchtitan.trainer import Trainer

    llama3_configs["debugmodel"] = _small(llama3_configs["debugmodel"])
    data = HuggingFaceTextDataLoader.Config(dataset="c4_test", dataset_path=str(folder / "text"))
    dp, tp, pp = (keys.get(name, 1) for name in ("dp", "tp", "pp"))
    spec = model_registry("debugmodel")
    return Trainer.Config(
        loss=CrossEntropyLoss.Config(global_vocab_size=64),
        hf_assets_path=str(folder),
        dump_folder=str(folder / "dump"),
        model_spec=spec,
        optimizer=default_adamw(lr=8e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=2,
            global_batch_size=2 * dp * keys.get("accumulate", 1),
            seq_len=16,
            steps=keys.get("steps", 3),
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        dataloader=data,
        metrics=MetricsProcessor.Config(log_freq=keys.get("log", 2)),
        parallelism=ParallelismConfig(
            spmd_backend="partial_dtensor",
            data_parallel_shard_degree=dp,
            tensor_parallel_degree=tp,
            pipeline_parallel_degree=pp,
            pipeline_parallel_schedule="1F1B",
            pipeline_parallel_microbatch_size=1,
        ),
        activation_checkpoint=None,
        debug=DebugConfig(seed=1),
        validator=Validator.Config(enable=bool(keys.get("validate")), freq=2, steps=1, dataloader=data),
    )


def _small(make: Any) -> Any:
    import torchtitan.models.llama3 as llama

    def debug_model(attn_backend: str, tp_gemm_backend: str = "default") -> Any:
        from torchtitan.models.common import Embedding, Linear, RMSNorm
        from torchtitan.models.common.attention import ScaledDotProductAttention

        full = make(attn_backend, tp_gemm_backend)
        llama.get_attention_config = lambda _: ScaledDotProductAttention.Config()  # the others need a GPU for their backward pass
        layers = llama._build_llama3_layers(
            fuse_qkv=True,
            n_layers=2,
            dim=32,
            n_heads=4,
            hidden_dim=64,
            rope=type(full.layers[0].attention.rope)(dim=8, max_seq_len=64, theta=10000.0),
            attn_backend=attn_backend,
            tp_gemm_backend=tp_gemm_backend,
        )
        return type(full)(
            dim=32,
            vocab_size=64,
            tok_embeddings=Embedding.Config(num_embeddings=64, embedding_dim=32, param_init=llama._EMBEDDING_INIT),
            norm=RMSNorm.Config(normalized_shape=32, param_init=llama._NORM_INIT),
            lm_head=Linear.Config(in_features=32, out_features=64, param_init=llama._output_linear_init(32)),
            layers=layers,
        )

    return debug_model


def train(folder: Path, **keys: int) -> tuple[str, Any]:
    """Train; returns a hash of this rank's parameters and the Trainer."""
    import torch

    trainer = config(folder, **keys).build()
    trainer.train()
    parts = [p.to_local() if hasattr(p, "to_local") else p for part in trainer.model_parts for p in part.parameters()]
    with torch.no_grad():
        digest = hashlib.sha256(b"".join(p.contiguous().numpy().tobytes() for p in parts)).hexdigest()[:16]
    trainer.close()
    return digest, trainer


def main() -> None:
    """As a script."""
    stand_in()
    folder = Path(sys.argv[1])
    if os.environ.get("RANK", "0") == "0":
        assets(folder)
    digest, _ = train(folder, **{k: int(v) for k, _, v in (a.partition("=") for a in sys.argv[2:])})
    print("HASH", os.environ.get("RANK"), digest, flush=True)


if __name__ == "__main__":
    main()
