"""A Trainer's framework with one of its names called otherwise, one at a time, in all of its code: the training is the same, and what the
probe then reports is what it reports with all of them, or is left out and said."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
from forkpool import run_ranks
from harness import renames
from harness.case import TrainingCase
from harness.run import framework_of, write_settings
from log_lines import heard

from msprobe_integrations import requirements

pytestmark = pytest.mark.framework
NAMES = {
    "transformers": (
        *("callback_handler", "model_wrapped", "_maybe_log_save_evaluate", "training_step", "evaluate", "_save_checkpoint"),
        *("optimizer_step_was_skipped", "scaler"),
    ),
    "lightning": ("_batches_that_stepped", "_should_accumulate", "_results", "precision_plugin", "save_checkpoint"),
}
PACKAGES = {"transformers": ("transformers", "accelerate"), "lightning": ("lightning",)}
TRAINER = {"transformers": "transformers_trainer", "lightning": "lightning_trainer"}


def numbers(seen: dict[str, Any]) -> dict[Any, Any]:
    """By step: norms of tensors, micro batches, scalars but the times."""
    found = {**seen.get("norms", {}), **seen.get("micro", {})}
    for step, scalars in seen.get("scalars", {}).items():
        found |= {(step, name): float(value) for name, value in scalars.items() if "second" not in name}
    return found


def trial(framework: str, folder: Path, name: str, probed: bool = True) -> tuple[str, dict[Any, Any], list[str]]:
    """In a process of its own: the bits of the parameters, what was seen, and what was said of the name."""
    lines = heard()
    requirements.MISSING.clear()
    for package in PACKAGES[framework] if name else ():
        renames.rename(name, f"{name}_of_another_version", package)
    file = write_settings(folder, monitor={"gradients": True, "parameters": True, "optimizer_states": True}) if probed else None
    bits, seen = importlib.import_module(f"harness.frameworks.{TRAINER[framework]}").train_with(folder, file, {})
    return bits, numbers(seen), [line for line in lines if name and name in line]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="instructions are as of Python 3.11")
@pytest.mark.parametrize("names", ["some", pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.parametrize("framework", NAMES)
@pytest.mark.fast_cells("lightning-some")
def test_no_number_is_another_one(framework: str, names: str, tmp_path: Path) -> None:
    """What is left out without a name is said with the name."""
    framework_of(TrainingCase(TRAINER[framework]))
    for package in PACKAGES[framework]:
        renames.functions(package)  # once, before children are forked
    ((plain, _, _),) = run_ranks(1, trial, framework, tmp_path, "", False)
    ((bits, right, _),) = run_ranks(1, trial, framework, tmp_path, "")
    assert bits == plain
    assert len(right) > 20
    for name in NAMES[framework][:: 1 if names == "all" else 3]:
        ((bits, found, said),) = run_ranks(1, trial, framework, tmp_path, name)
        assert bits == plain, name
        assert not [(key, value, right.get(key)) for key, value in found.items() if right.get(key) != value], name
        assert said or found.keys() == right.keys(), name
