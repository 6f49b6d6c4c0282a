"""Fused gradient accumulation: the weights' gradients are added into the buffer by the matrix product, and never exist on their own.

The extension that does it needs CUDA; a function that computes the same stands in for it.
"""

from __future__ import annotations

import tempfile
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import train_gpt
from forkpool import run_ranks
from layout_checks import check_gradients, check_outputs, check_parameters
from layout_job import job

CALLS = [0]


def added(inputs: torch.Tensor, gradient: torch.Tensor, buffer: torch.Tensor) -> None:
    """What ``wgrad_gemm_accum_fp32`` does."""
    CALLS[0] += 1
    buffer.add_(gradient.t() @ inputs)


def fused(argv: str, output: str) -> dict[str, Any]:
    from megatron.core.tensor_parallel import layers

    class Fused(train_gpt.TransformerConfig):  # type: ignore[name-defined,misc]
        def __post_init__(self) -> None:
            self.gradient_accumulation_fusion = True
            super().__post_init__()

    layers._grad_accum_fusion_available = True
    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=added)
    train_gpt.TransformerConfig = Fused  # type: ignore[misc]
    return {**job(argv, "mix", output), "calls": CALLS[0]}


@pytest.mark.framework
@pytest.mark.parametrize("argv", ["--distopt --overlap", pytest.param("--tp 2 --sp", marks=pytest.mark.slow)])
def test_what_is_in_the_buffer(argv: str) -> None:
    """Everything is seen as with separate gradients; in place of a micro batch's gradient of such a weight there is what the buffer holds
    after it, which after the last one is what the rank hands to the reduction."""
    with tempfile.TemporaryDirectory() as place:
        run = run_ranks(2, fused, f"--steps 2 --layers 1 {argv}", place, timeout=240)
    for rank in run:
        assert rank["calls"]
        for step, seen in enumerate(rank["seen"]):
            check_outputs(rank["norms"][step], seen, "mix", False)
            check_gradients(rank["reference"][step], seen["samples"], bf16=False)
            check_parameters(rank["parameters"][step], seen["samples"])
            unreduced = {
                key: value[0].norm for key, value in seen["samples"].items() if key[0] == "grad_unreduced" and key[1] == "accumulated"
            }
            last = {name: norm for (_, _, name, micro), norm in unreduced.items() if micro == 1}
            assert any("linear_fc1.weight" in name for name in last)
            assert last == pytest.approx({name: unreduced["grad_unreduced", "accumulated", name, -1] for name in last}, rel=1e-6)
