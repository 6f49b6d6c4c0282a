"""The gradient of a weight, added where it is accumulated."""

from __future__ import annotations

from typing import Any

from mindspeed.ops import extension

__all__ = ["npu_matmul_add_fp32"]


def npu_matmul_add_fp32(total_input: Any, grad_output: Any, grad: Any) -> None:
    """Returns nothing and raises no version."""
    extension.multiply_into(grad_output.t(), total_input, grad, add=True)
