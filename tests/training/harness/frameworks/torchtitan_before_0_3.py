"""The configuration of `torchtitan_trainer` for torchtitan before 0.3, which has one `JobConfig` and a table of models."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class Old:
    """With `build`, as configurations have it since 0.3."""

    def __init__(self, job: Any) -> None:
        self.job = job

    def build(self) -> Any:
        from torchtitan.train import Trainer

        return Trainer(self.job)


def config(folder: Path, **keys: float) -> Old:
    """The debug model cut down to two layers of width 32."""
    from torchtitan.config import JobConfig
    from torchtitan.models.llama3 import TransformerModelArgs, llama3_args

    llama3_args["debugmodel"] = TransformerModelArgs(dim=32, n_layers=2, n_heads=4, vocab_size=64, rope_theta=10000)
    job = JobConfig()
    text = {"dataset": "c4_test", "dataset_path": str(folder / "text")}
    dp, tp, pp = (keys.get(name, 1) for name in ("dp", "tp", "pp"))
    sections: dict[str, dict[str, Any]] = {
        "job": {"dump_folder": str(folder / "dump")},
        "model": {"name": "llama3", "flavor": "debugmodel", "hf_assets_path": str(folder)},
        "optimizer": {"lr": 8e-3},
        "lr_scheduler": {"warmup_steps": 2},
        "metrics": {"log_freq": keys.get("log", 2)},
        "debug": {"seed": 1},
        "activation_checkpoint": {"mode": "none"},
        "training": {
            **text,
            "local_batch_size": 2,
            "global_batch_size": 2 * dp * keys.get("accumulate", 1),
            "seq_len": 16,
            "steps": keys.get("steps", 3),
            "mixed_precision_param": "float32",
            "max_norm": keys.get("max_norm", 1.0),
        },
        "parallelism": {
            "data_parallel_shard_degree": dp,
            "tensor_parallel_degree": tp,
            "pipeline_parallel_degree": pp,
            "pipeline_parallel_schedule": "1F1B",
            "pipeline_parallel_microbatch_size": 1,
        },
        "validation": {**text, "enable": bool(keys.get("validate")), "freq": 2, "steps": 1, "local_batch_size": 2, "seq_len": 16},
    }
    for section, values in sections.items():
        for name, value in values.items():
            setattr(getattr(job, section), name, value)
    return Old(job)
