"""What a run under Hugging Face's Trainer was started with: TrainingArguments and the model's configuration, with where they come from."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from harness.frameworks import transformers_trainer as hf
from harness.run import ranks, write_settings

from msprobe_engine.config.pack.reader import read_pack


def job(folder: Path, file: Path) -> Any:
    sys.argv = ["run.py", "--learning_rate", "0.01", "--seed=7"]
    return hf.train_with(folder, file, {"seed": 7, "hub_token": "abc", "adam_beta2": 0.95, "max_steps": 1})


def test_arguments_and_configuration(tmp_path: Path) -> None:
    """Flags of the command line, values of the program, defaults; names as Transformers has them; no token."""
    pack = tmp_path / "pack.zip"
    ranks(1, job, tmp_path / "run", write_settings(tmp_path, config_check={"path": str(pack)}))
    found = read_pack(pack).json("msprobe/hyperparameters/rank0.json")
    expected = {
        "learning_rate": (0.01, "flag", "transformers"),
        "seed": (7, "flag", "transformers"),
        "adam_beta2": (0.95, "code", "transformers"),
        "adam_beta1": (0.9, "default", "transformers"),
        "max_grad_norm": (0.1, "code", "transformers"),
        "per_device_train_batch_size": (2, "code", "transformers"),
        "gradient_accumulation_steps": (2, "code", "transformers"),
        "lr_scheduler_type": ("constant", "code", "transformers"),
        "optimizer.class": ("AdamW", "code", "transformers"),
        "model.n_layer": (2, "code", "transformers"),
        "model.resid_pdrop": (0.0, "code", "transformers"),
        "model.layer_norm_epsilon": (1e-5, "default", "transformers"),
        "accelerate.mixed_precision": ("no", "code", "accelerate"),
        "model.class": ("GPT2LMHeadModel", "code", "torch"),
    }
    assert {name: (found[name]["value"], found[name]["origin"], found[name]["framework"]) for name in expected} == expected
    assert "abc" not in read_pack(pack).text("msprobe/hyperparameters/rank0.json")
