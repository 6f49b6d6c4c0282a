"""The cases of the fault set: which defect in which training, and what is true about it; and variations that are no defects.

A case names the records that are true: the one whose output is wrong first, or its direct producer (a module whose only content is that
call, the call inside of it). Patterns are regular expressions for whole record names; layers count from 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import fault_defects as plant
import torch
from fault_model import Shape, Training

SINGLE = Shape()
ACCUMULATED = Shape(micro=2)
TP, SP, DP = Shape(parallel="tp"), Shape(parallel="sp"), Shape(parallel="dp")
DROPOUT, DROPOUT_TP = Shape(dropout=0.1), Shape(parallel="tp", dropout=0.1)
FP16 = Shape(dtype=torch.float16, scale=128.0)
BF16 = Shape(dtype=torch.bfloat16)


@dataclass(frozen=True)
class Case:
    """One planted defect.

    Attributes:
        name: what went wrong, as a person would say it.
        shape: the training, of both sides.
        plant: changes the candidate's training before its first step.
        truth: patterns of record names, any of which is right as first suspect.
        finding: what `diagnose` may call it.
        step: where it shows first.
        ranks: ranks it may be blamed on; empty: any.
    """

    name: str
    shape: Shape
    plant: Callable[[Training], None]
    truth: tuple[str, ...]
    finding: tuple[str, ...] = ("divergence",)
    step: int = 0
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Harmless:
    """A variation that must be called no difference beyond round-off."""

    name: str
    golden: Shape
    shape: Shape
    plant: Callable[[Training], None] = lambda training: None


CASES: tuple[Case, ...] = (
    Case(
        "wrong eps of a norm",
        SINGLE,
        plant.wrong_eps,
        (r"Functional\.layer_norm\.3\.forward", r"Module\.layers\.1\.norm2\.Norm\.forward\.0"),
    ),
    Case(
        "attention mask one off",
        SINGLE,
        plant.wrong_mask,
        (r"Tensor\.masked_fill\.1\.forward", r"Tensor\.triu\..*", r"Module\.layers\.1\.attention\.Attention\.forward\.0"),
    ),
    Case(
        "gradient scaled by 1.3",
        SINGLE,
        plant.scaled_gradient,
        (
            r"Module\.layers\.1\.mlp\.up\.Linear\.backward\.0",
            r"Functional\.linear\.6\.backward",
            r"Functional\.gelu\.1\.backward",
            r"Module\.layers\.1\.norm2\.Norm\.backward\.0",
            r"Tensor\.__mul__\.14\.forward",  # the multiplication itself, in a hook
        ),
    ),
    Case(
        "weight loaded transposed",
        SINGLE,
        plant.transposed_weight,
        (r"Functional\.linear\.1\.forward", r"Module\.layers\.0\.attention\.proj\.Linear\.forward\.0"),
    ),
    Case(
        "norm gradients not summed over the sequence",
        SP,
        plant.missing_sum,
        (r".*norm.*", r"Distributed\.all_reduce\..*"),
        ("divergence", "desync", "collective"),
        0,
    ),
    Case(
        "rotary cache stale in the second step",
        SINGLE,
        plant.stale_buffer,
        (
            r"Tensor\.(mul|__mul__)\.\d+\.forward",
            r"Torch\.mul\.\d+\.forward",
            r"Module\.layers\.0\.attention\.rope\.Rope\.forward\.0",
            r"Tensor\.(roll|to)\.[01]\.forward",
        ),
        step=1,
    ),
    Case(
        "one product accumulated in bf16",
        SINGLE,
        plant.low_accumulation,
        (r"Functional\.linear\.7\.forward", r"Module\.layers\.1\.mlp\.down\.Linear\.forward\.0", r"Tensor\.bfloat16\..*"),
        ("divergence", "structure"),
    ),
    Case(
        "rotary base",
        SINGLE,
        plant.rope_base,
        (
            r"Tensor\.(mul|__mul__)\.[0-3]\.forward",
            r"Torch\.mul\.[0-3]\.forward",
            r"Module\.layers\.0\.attention\.rope\.Rope\.forward\.[01]",
            r"Tensor\.to\.[0-3]\.forward",
        ),
    ),
    Case(
        "query and key swapped",
        SINGLE,
        plant.swapped_qkv,
        (
            r"Module\.layers\.1\.attention\.rope\.Rope\.forward\.[01]",
            r"Tensor\.transpose\.\d+\.forward",
            r"Tensor\.(mul|__mul__|chunk)\.\d+\.forward",
            r"Torch\.(mul|chunk)\.\d+\.forward",
        ),
    ),
    Case(
        "query and key weights swapped",
        SINGLE,
        plant.swapped_qkv_weight,
        (r"Functional\.linear\.4\.forward", r"Module\.layers\.1\.attention\.qkv\.Linear\.forward\.0"),
    ),
    Case(
        "loss not divided by the micro batches",
        ACCUMULATED,
        plant.loss_normalisation,
        (r"Tensor\.(mul|__mul__)\.\d+\.forward", r"Torch\.mul\.\d+\.forward", r"Functional\.cross_entropy\.0\.backward"),
    ),
    Case(
        "the same micro batch twice",
        ACCUMULATED,
        plant.other_micro_batch,
        (r"Functional\.embedding\.1\.forward", r"Module\.embedding\.Embedding\.forward\.1", r"Tensor\.chunk\..*"),
    ),
    Case(
        "labels shifted", SINGLE, plant.labels_shifted, (r"Functional\.cross_entropy\.0\.forward", r"Tensor\.(flatten|roll)\.\d+\.forward")
    ),
    Case(
        "a gradient not averaged over data-parallel ranks",
        DP,
        plant.missing_reduction,
        (r".*layers\.1\.mlp\.up.*", r"Distributed\.all_reduce.*"),
        ("divergence", "desync", "collective", "structure"),
        0,
    ),
    Case(
        "dropout differs over tensor-parallel ranks",
        DROPOUT_TP,
        plant.tp_dropout,
        (
            r"Functional\.dropout\.1\.forward",
            r"Module\.layers\.0\.drop\.Dropout\.forward\.0",
            r"Functional\.dropout\.0\.forward",
            r"Module\.layers\.0\.attention\.drop\.Dropout\.forward\.0",
        ),
        ("divergence", "desync"),
    ),
    Case(
        "one rank's collective corrupted",
        TP,
        plant.corrupted_collective,
        (
            r"Distributed\.all_reduce\.\d+\.forward",
            r"Module\.layers\.1\.attention\.proj\.Linear\.forward\.0",
            r".*_Leave.*\.2\.forward",
            r"Tensor\.__i?mul__\..*",
            r"Tensor\.mul_\..*",
            r"Tensor\.__(get|set)item__\..*",
        ),
        ("divergence", "collective"),
        ranks=(1,),
    ),
    Case(
        "missing sum after a row-parallel product",
        TP,
        plant.missing_row_sum,
        (
            r"Module\.layers\.1\.mlp\.down\.Linear\.forward\.0",
            r"Distributed\.all_reduce\..*",
            r".*_Leave.*",
            r"Tensor\.__add__\..*",
            r"Torch\.add\..*",
        ),
        ("divergence", "structure", "collective"),
    ),
    Case(
        "missing sum of gradients before a column-parallel product",
        TP,
        plant.missing_enter_sum,
        (
            r"Module\.layers\.1\.mlp\.up\.Linear\.backward\.0",
            r"Distributed\.all_reduce\..*",
            r".*_Enter.*",
            r"Module\.layers\.1\.norm2\.Norm\.backward\.0",
            r"Functional\.layer_norm\.3\.backward",
        ),
        ("divergence", "structure", "collective", "desync"),
    ),
    Case("NaN in a fused softmax", SINGLE, plant.nan_in_fused, (r".*_Fused.*\.forward", r"Torch\.softmax\.1\.forward"), ("nonfinite",)),
    Case(
        "overflow in float16 scores",
        FP16,
        plant.fp16_overflow,
        (r"Torch\.matmul\.2\.forward", r"Tensor\.matmul\.2\.forward", r"Tensor\.__r?mul__\..*", r"Torch\.mul\..*"),
        ("overflow", "nonfinite"),
    ),
    Case(
        "overflow in a float16 gradient",
        FP16,
        plant.fp16_backward_overflow,
        (
            r"Module\.layers\.2\.mlp\.down\.Linear\.backward\.0",
            r"Functional\.linear\.11\.backward",
            r"Functional\.gelu\.2\.backward",
            r"Tensor\.__mul__\.1[45]\.forward",  # the multiplications themselves, in a hook
        ),
        ("overflow", "nonfinite"),
    ),
    Case(
        "scores not scaled",
        SINGLE,
        plant.no_scale,
        (r"Torch\.matmul\.2\.forward", r"Tensor\.(__truediv__|div|masked_fill)\.1\.forward", r"Torch\.div\.1\.forward"),
        ("divergence", "structure"),
    ),
    Case("other gelu formula", SINGLE, plant.tanh_gelu, (r"Functional\.gelu\.1\.forward",)),
    Case(
        "residual lost",
        SINGLE,
        plant.no_residual,
        (
            r"Tensor\.(__add__|add)\.\d+\.forward",
            r"Torch\.add\.\d+\.forward",
            r"Functional\.dropout\.\d+\.forward",
            r"Module\.layers\.1\.(drop|norm2)\.\w+\.forward\.0",
            r"Functional\.layer_norm\.3\.forward",
        ),
        ("divergence", "structure"),
    ),
    Case(
        "heads merged without transposing",
        SINGLE,
        plant.heads_mixed,
        (r"Tensor\.(transpose|reshape)\.\d+\.forward",),
        ("divergence", "structure"),
    ),
    Case(
        "branch detached",
        SINGLE,
        plant.detached,
        (r"Tensor\.detach\..*", r"Module\.layers\.1\.mlp\..*backward.*", r"Functional\.(gelu|linear)\.\d+\.backward"),
        ("divergence", "structure"),
    ),
    Case(
        "softmax in bf16",
        SINGLE,
        plant.low_softmax,
        (r"Torch\.softmax\.1\.forward", r"Tensor\.(bfloat16|float)\..*"),
        ("divergence", "structure"),
    ),
    Case(
        "one weight scaled at start",
        SINGLE,
        plant.wrong_initial_weight,
        (r"Functional\.linear\.10\.forward", r"Module\.layers\.2\.mlp\.up\.Linear\.forward\.0"),
    ),
    Case(
        "a norm writes into its input",
        SINGLE,
        plant.in_place_residual,
        (r"Tensor\.mul_\..*", r"Module\.layers\.1\.norm2\.Norm\.forward\.0", r"Functional\.layer_norm\.3\.forward"),
        ("divergence", "structure"),
    ),
    Case(
        "positions one off",
        SINGLE,
        plant.wrong_position,
        (
            r"Module\.layers\.1\.attention\.rope\.Rope\.forward\.0",
            r"Tensor\.(roll|__mul__|mul)\.\d+\.forward",
            r"Torch\.(roll|mul)\.\d+\.forward",
        ),
        ("divergence", "structure"),
    ),
    Case(
        "dropout of one block with another p",
        DROPOUT,
        plant.wrong_dropout,
        (r"Functional\.dropout\.4\.forward", r"Module\.layers\.1\.drop\.Dropout\.forward\.0"),
    ),
    Case(
        "learning rate doubled",
        SINGLE,
        plant.learning_rate,
        (r"Tensor\.(mul_|addcdiv_)\.0\.forward", r"Functional\.embedding\.0\.forward", r"Module\.embedding\.Embedding\.forward\.0"),
    ),
    Case(
        "one parameter not updated",
        SINGLE,
        plant.skipped_parameter,
        (r"Functional\.linear\.6\.forward", r"Module\.layers\.1\.mlp\.up\.Linear\.forward\.0"),
        step=1,
    ),
    Case(
        "loss taken in bf16",
        SINGLE,
        plant.wrong_loss_dtype,
        (r"Functional\.cross_entropy\.0\.forward", r"Tensor\.(bfloat16|flatten)\..*"),
        ("divergence", "structure"),
    ),
    Case("a token taken for padding", SINGLE, plant.padded_loss, (r"Functional\.cross_entropy\.0\.forward",)),
    Case(
        "one rank reads another token",
        DP,
        plant.wrong_token,
        (r"Tensor\.(clone|__setitem__|chunk)\..*", r"Functional\.embedding\.0\.forward", r"Module\.embedding\.Embedding\.forward\.0"),
        ranks=(1,),
    ),
)
"""At least 25 are asked for; forward and backward ones, on one and two ranks."""

HARMLESS: tuple[Harmless, ...] = (
    Harmless("products summed in another order", SINGLE, SINGLE, plant.other_order),
    Harmless("products summed in two halves", SINGLE, SINGLE, plant.two_halves),
    Harmless("products summed in two halves, bf16", BF16, BF16, plant.two_halves),
    Harmless("tensor parallel 2 against 1", SINGLE, TP),
    Harmless("sequence parallel 2 against 1", SINGLE, SP),
    Harmless("two micro batches against one", SINGLE, ACCUMULATED),
    Harmless("data parallel 2 against 1", SINGLE, DP),
    Harmless("products read ten bits of mantissa (tf32)", SINGLE, SINGLE, plant.tf32_noise),
    Harmless("weights off by one rounding unit", SINGLE, SINGLE, plant.ulp_noise),
    Harmless("weights off by one rounding unit, bf16", BF16, BF16, plant.ulp_noise),
    Harmless("nothing changed", SINGLE, SINGLE),
    Harmless("compiled against not", SINGLE, SINGLE, plant.compiled),
    Harmless("compiled block by block against not", SINGLE, SINGLE, plant.compiled_blocks),
)
