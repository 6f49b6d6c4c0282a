"""torchtitan's Trainer on the CPU: a small llama3, a tokenizer and a data set made here.

Parallelism: ``fsdp2``, ``tp``, ``pp``. Features: ``validation``. Models: ``llama_tiny``, whose whole tensors are noted as the Trainer has
them, and ``llama_tiny_last_stage``, whose fault is in the second stage.
Tensor parallel is that of DTensor (``spmd_backend="partial_dtensor"``): torchtitan's own default is for a torch newer than 2.13.

torchtitan takes its device for CUDA when there is no accelerator; `stand_in` gives it the CPU instead, with the handful of questions
about memory that `torch.cpu` does not answer.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import sys
import time
import types
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch.distributed as dist

from harness.case import Training, TrainingCase
from harness.models import Model
from harness.run import digest
from harness.spy import Spy

os.environ.update(HF_DATASETS_OFFLINE="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")  # no network; read when imported
ARM = ("torchtitan",)
SCALARS = ("loss", "grad_norm", "learning_rate", "skipped")
MODELS = {
    "llama_tiny": Model(*(lambda *_: None,) * 3, spied=("RMSNorm", "rms_norm"), failing="layers.0.feed_forward.w2", drifting="norm.weight"),
    "llama_tiny_last_stage": Model(
        *(lambda *_: None,) * 3, spied=("RMSNorm", "rms_norm"), failing="layers.1.feed_forward.w2", drifting="norm.weight"
    ),
}
"""Made by torchtitan itself."""


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


def config(folder: Path, **keys: float) -> Any:
    """torchtitan's configuration: the debug model cut down to two layers of width 32."""
    if find_spec("torchtitan.trainer") is None:
        from harness.frameworks import torchtitan_before_0_3 as older

        return older.config(folder, **keys)
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
            max_norm=keys.get("max_norm", 1.0),
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


def join_alone() -> None:
    """A group of this process alone, which torchtitan wants."""
    if not dist.is_initialized():
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def keys_of(case: TrainingCase) -> dict[str, float]:
    """Of `config`; one without clipping has a limit that nothing reaches."""
    sizes = {"dp": case.parallelism.get("fsdp2", 1), "tp": case.parallelism.get("tp", 1), "pp": case.parallelism.get("pp", 1)}
    features = {"accumulate": 2 if "accumulation" in case.features else 1, "validate": int("validation" in case.features)}
    # where it logs it ends the training of a NaN
    return {**sizes, **features, "max_norm": case.clip or 1e6, "steps": case.steps, "log": 100}


def train(training: Training) -> Any:
    """Bits of this rank's parameters, and the losses."""
    from torchtitan.distributed import utils

    join_alone()
    folder = training.folder
    if os.environ.get("RANK", "0") == "0" and not (folder / "tokenizer.json").is_file():
        assets(folder)
    dist.barrier()
    trainer = config(folder, **training.launch(keys_of(training.case))).build()
    parts, losses, spy = trainer.model_parts, [], training.watcher
    clip, step, passes, whole = utils.clip_grad_norm_, trainer.optimizers.step, trainer.forward_backward_step, trainer.train_step

    def note(family: str, tensor: Any) -> None:
        if isinstance(spy, Spy):
            with spy.looking_away():
                spy.note(family, {name: tensor(p) for part in parts for name, p in part.named_parameters()})

    def clipped(*args: Any, **kwargs: Any) -> Any:
        note("grad_reduced", lambda p: p.grad)
        note("param_origin", lambda p: p)
        return clip(*args, **kwargs)

    def stepped(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        states = {p: state for optimizer in trainer.optimizers.optimizers for p, state in optimizer.state.items()}
        note("param_updated", lambda p: p)
        for name in ("exp_avg", "exp_avg_sq"):
            note(name, lambda p, name=name: states[p][name])
        return result

    def over(*args: Any, **kwargs: Any) -> Any:
        result = whole(*args, **kwargs)
        training.updated()
        return result

    def passed(*args: Any, **kwargs: Any) -> Any:
        loss = passes(*args, **kwargs)
        losses.append(float(loss))
        return loss

    utils.clip_grad_norm_, trainer.optimizers.step = clipped, stepped
    trainer.forward_backward_step, trainer.train_step = passed, over
    training.model(parts[0])
    training.start(*parts, trainer.optimizers, trainer, trainer.metrics_processor, trainer.checkpointer)
    try:
        trainer.train()
    finally:
        utils.clip_grad_norm_ = clip
        del trainer.optimizers.step, trainer.forward_backward_step, trainer.train_step
    return digest(p for part in parts for p in part.parameters()), losses


stand_in()
