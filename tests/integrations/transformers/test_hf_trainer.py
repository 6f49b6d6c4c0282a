"""Hugging Face's Trainer, followed without a change of the program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hf_job
import pytest
from trainer_checks import compare, config, everything, files, ranks

ACCUMULATED = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}


def on_and_off(tmp_path: Path, n: int, arguments: dict[str, Any], **sections: Any) -> list[dict[str, Any]]:
    """Train with the probe and without: the bits are the same. What each rank has seen."""
    plain = ranks(n, hf_job.train, tmp_path / "plain", None, arguments)
    followed = ranks(n, hf_job.train, tmp_path / "followed", config(tmp_path, **sections), arguments)
    assert [bits for bits, _ in plain] == [bits for bits, _ in followed]
    return [found for _, found in followed]


@pytest.mark.parametrize("n", [1, 2])
def test_ddp(tmp_path: Path, n: int) -> None:
    """Norms of gradients, parameters and moments are those of a float64 training by hand with the global batch; steps are the
    Trainer's; evaluation and checkpoints leave nothing; scalars are the Trainer's; everything that files are asked for is written."""
    found = on_and_off(tmp_path, n, ACCUMULATED, **everything())
    for each in found:
        assert each["steps"] == [0, 1, 2]
        assert compare(each["norms"], hf_job.reference(n)) > 100
        assert each["micro"]["actv", 0] == {0, 1}
        for step in (0, 1, 2):
            assert {"loss", "grad_norm", "learning_rate", "skipped"} <= each["scalars"][step].keys()
            assert each["scalars"][step]["learning_rate"] == 1e-2
            assert each["scalars"][step]["skipped"] == 0.0
        forward = [name for name in each["entries"][1] if ".lm_head.Linear.forward" in name]
        assert len(forward) == 2  # two micro batches, no evaluation
        collectives = [key for key in each["norms"] if "all_reduce" in key[2]]
        assert n == 1 or collectives
    assert files(tmp_path) == {"dump": True, "grad_probe": True, "incident": True}
