"""What a run under torchtitan was started with: names as on its command line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from harness.case import TrainingCase
from harness.frameworks import torchtitan_trainer as titan
from harness.run import ranks, train, write_settings

from msprobe_engine.config.pack.reader import read_pack


def flagged(folder: Path, file: Path) -> Any:
    sys.argv = ["train.py", "--training.local_batch_size=2", "--lr-scheduler.warmup-steps", "2"]
    return train(TrainingCase("torchtitan_trainer", "llama_tiny", steps=1), folder, file)[0]


def test_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sections of the configuration as dotted names, with flags, values of the program and defaults, and sizes of dimensions."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    titan.assets(tmp_path / "run")
    pack = tmp_path / "pack.zip"
    ranks(1, flagged, tmp_path / "run", write_settings(tmp_path, config_check={"path": str(pack)}))
    found = read_pack(pack).json("msprobe/hyperparameters/rank0.json")
    expected = {
        "training.local_batch_size": (2, "flag"),
        "lr_scheduler.warmup_steps": (2, "flag"),
        "training.seq_len": (16, "code"),
        "parallelism.pipeline_parallel_degree": (1, "default"),
    }
    assert {name: (found[name]["value"], found[name]["origin"]) for name in expected} == expected
    assert found["training.seq_len"]["framework"] == "torchtitan"
    assert found["optimizer.param_groups.0.optimizer_kwargs.lr"]["value"] == 8e-3
    assert not any(name.startswith("optimizer.param_groups.1.") for name in found)
    assert found["parallel_dims.tp"]["value"] == 1
