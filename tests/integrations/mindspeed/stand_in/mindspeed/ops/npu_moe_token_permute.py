"""Tokens of experts."""

from __future__ import annotations

from typing import Any

from mindspeed.ops import extension

__all__ = ["npu_moe_token_permute"]


def npu_moe_token_permute(tokens: Any, indices: Any, num_out_tokens: int | None = None, padded_mode: bool = False) -> Any:
    """One call of the extension."""
    del num_out_tokens, padded_mode
    return extension.permute(tokens, indices)
