"""Hugging Face's Trainer, followed without a change of the program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hf_job
import pytest
from trainer_checks import compare, config, everything, files, installed, ranks

ACCUMULATED = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}


def on_and_off(tmp_path: Path, n: int, arguments: dict[str, Any], **sections: Any) -> list[dict[str, Any]]:
    """Train with the probe and without: the bits are the same. What each rank has seen."""
    plain = ranks(n, hf_job.train, tmp_path / "plain", None, arguments)
    followed = ranks(n, hf_job.train, tmp_path / "followed", config(tmp_path, **sections), arguments)
    assert [bits for bits, _ in plain] == [bits for bits, _ in followed]
    return [found for _, found in followed]


@pytest.mark.parametrize("n", [1, 2])
def test_ddp(tmp_path: Path, cells: Any, n: int) -> None:
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
    features = ("monitor: activations", "monitor: gradients", "monitor: parameters", "monitor: optimizer", "same bits")
    files_alone = ("dump mix", "grad probe", "incident capture")
    several = () if n == 1 else ("replica check", "collectives")
    layout = "1 rank" if n == 1 else "DDP, 2 ranks"
    cells.ran("Transformers", layout, *features, version=installed("transformers"))
    cells.wrote("Transformers", layout, *files_alone, *several, version=installed("transformers"))


@pytest.mark.parametrize("level", ["L0", "L1"])
def test_dump_levels(tmp_path: Path, cells: Any, level: str) -> None:
    """A dump of one step has that step's modules or APIs, of both micro batches."""
    found = on_and_off(tmp_path, 1, {}, monitor=None, dump={"step": [1], "level": level}, grad_probe=None)[0]
    names = found["entries"][1]
    wanted = "Module.lm_head.Linear.forward" if level == "L0" else "Functional.linear"
    assert [name for name in names if name.startswith(wanted)]
    assert not found["entries"].get(0)
    assert list((tmp_path / "probe").glob("dump/step1/*/dump.json"))
    cells.ran("Transformers", "1 rank", "same bits", version=installed("transformers"))
    cells.wrote("Transformers", "1 rank", f"dump {level}", version=installed("transformers"))
