"""Trainings under every framework, in every layout, with everything that a probe watches: see `harness.checks.check_case`.

A row of a framework is fast, with one level of the dump; the rest is slow, and so are frameworks on top of others. What a case proves is
listed in docs/evidence/integrations.md.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from harness.case import TrainingCase
from harness.checks import check_case
from harness.run import LEVELS

pytestmark = pytest.mark.framework
SHARDED = ("all_gather", "reduce_scatter")
Row = tuple[TrainingCase, tuple[str, ...]]
"""A case, and the collectives of all ranks whose arithmetic is checked."""


def case(framework: str, *features: str, ops: tuple[str, ...] = (), model: str = "mlp", precision: str = "fp32", **sizes: int) -> Row:
    return TrainingCase(framework, model, sizes, precision, features), ops


FAST: list[Row] = [
    case("torch_loop", "accumulation", "clipping", dp=2, ops=("all_reduce",)),
    case("transformers_trainer", "accumulation", "clipping", "evaluation", "checkpoint", model="gpt_tiny"),
    case("lightning_trainer", "accumulation"),
    case("torchtitan_trainer", "accumulation", "validation", model="llama_tiny"),
    case("deepspeed_engine", "accumulation", dp=2, zero=2, ops=("all_reduce", "all_gather")),
]
SLOW: list[Row] = [
    case("mindspeed_trainer", "accumulation", "clipping", fsdp2=2, ops=SHARDED),
    case("accelerate_loop", "accumulation", "clipping"),
    case("torch_loop"),
    case("torch_loop", "accumulation", "clipping"),
    case("torch_loop", "scaler"),
    case("torch_loop", "compile"),
    case("torch_loop", dp=2, ops=("all_reduce",)),
    case("torch_loop", "accumulation", fsdp2=2, ops=SHARDED),
    case("torch_loop", "clipping", fsdp2=2, ops=SHARDED),
    case("torch_loop", fsdp1=2, ops=SHARDED),
    case("torch_loop", "clipping", "flat", fsdp1=2, ops=SHARDED),
    case("torch_loop", "whole", fsdp1=2),
    case("torch_loop", dp=2, fsdp2=2),
    case("torch_loop", "accumulation", tp=2, ops=("all_reduce",)),
    case("torch_loop", fsdp2=2, tp=2),
    case("torch_loop", pp=2),
    case("torch_loop", "1f1b", pp=2),
    case("torch_loop", "interleaved", pp=2),
    case("accelerate_loop", "accumulation", "clipping", fsdp2=2, ops=SHARDED),
    case("accelerate_loop", "accumulation", "clipping", "evaluation", "checkpoint", dp=2, ops=("all_reduce",)),
    case("accelerate_loop", "accumulation", "clipping", dp=2, zero=2, ops=("all_reduce",)),
    case("transformers_trainer", "accumulation", "clipping", dp=2, model="gpt_tiny", ops=("all_reduce",)),
    case("transformers_trainer", "accumulation", "clipping", fsdp2=2, model="gpt_tiny", ops=SHARDED),
    case("transformers_trainer", "accumulation", "clipping", dp=2, zero=2, model="gpt_tiny", ops=("all_reduce",)),
    case("transformers_trainer", "accumulation", "clipping", dp=2, zero=3, model="gpt_tiny", ops=("all_gather",)),
    case("lightning_trainer", "accumulation", "clipping", "evaluation", "checkpoint"),
    case("lightning_trainer", "pytorch_lightning"),
    case("lightning_trainer", "accumulation", "clipping", dp=2, ops=("all_reduce",)),
    case("lightning_trainer", fsdp2=2, ops=SHARDED),
    case("torchtitan_trainer", "clipping", tp=2, model="llama_tiny", ops=("all_reduce", "reduce_scatter", "all_gather")),
    case("torchtitan_trainer", fsdp2=2, model="llama_tiny", ops=SHARDED),
    case("torchtitan_trainer", pp=2, model="llama_tiny_last_stage"),
    case("deepspeed_engine", "accumulation", dp=2, zero=0, ops=("all_reduce",)),
    case("deepspeed_engine", "accumulation", "clipping", dp=2, zero=1, ops=("all_reduce", "all_gather")),
    case("deepspeed_engine", "accumulation", dp=2, zero=3, ops=("all_gather",)),
    case("deepspeed_engine", "hpz", dp=2, zero=3, ops=("all_gather",)),
    case("deepspeed_engine", pp=2),
    case("mindspeed_trainer", "accumulation", "clipping", "engine", fsdp2=2, ops=SHARDED),
    case("deepspeed_engine", ep=2, model="moe", precision="bf16", ops=("all_reduce", "all_gather", "all_to_all")),
]
CASES = [
    *((*row, ("mix",)) for row in FAST),
    *(pytest.param(*row, LEVELS, marks=pytest.mark.slow) for row in [*FAST, *SLOW]),
]


def name_row(value: Any) -> str:
    return str(value) if isinstance(value, TrainingCase) else "all levels" if value == LEVELS else ""


@pytest.mark.parametrize(("case", "ops", "levels"), CASES, ids=name_row)
@pytest.mark.fast_cells("deepspeed_engine dp2 zero2 accumulation--")
def test_case(case: TrainingCase, ops: tuple[str, ...], levels: tuple[str, ...], tmp_path: Path) -> None:
    """Outputs and their gradients in dumps are those that a spy saw without the probe; gradients, parameters and moments
    those of a float64 training by hand; collectives are what the ranks gave; a drift of one rank and a NaN are named; bits are the same;
    nothing stays behind."""
    framework = importlib.import_module(f"harness.frameworks.{case.framework}")
    why = getattr(framework, "missing", lambda _: "")(case)
    if why:
        pytest.skip(why)
    check_case(case, tmp_path, *ops, levels=levels)
