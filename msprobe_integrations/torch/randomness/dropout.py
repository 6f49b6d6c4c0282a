"""Dropout switched off: functions and modules keep their names and arguments, the probability is 0."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from msprobe_integrations.torch.hooks.functions import Rebinding, compiled_as
from msprobe_integrations.torch.randomness.calls import RECURRENT

_FUNCTIONS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
_patches = Rebinding()


def remove() -> None:
    """Dropout passes its input through: ``F.dropout`` and its relatives (``nn.Dropout`` and the other modules call them), the
    attention dropout of ``F.scaled_dot_product_attention``, and the dropout between the layers of recurrent modules."""
    if _patches:
        return
    for name in _FUNCTIONS:
        _patches.wrap(functional, name, _passing)
    _patches.wrap(functional, "scaled_dot_product_attention", _attention)
    for name in RECURRENT:
        _patches.wrap(torch._VF, name, _recurrent)
    _patches.early_imports()


def restore() -> None:
    """Dropout drops again."""
    _patches.undo()


def _passing(original: Any) -> Any:
    @functools.wraps(original)
    def passing(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if p < 0.0 or p > 1.0:
            raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
        return original(input, p=0.0, training=training, inplace=inplace)

    return compiled_as(passing, _unchanged)


def _unchanged(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: ARG001
    """What a compiled dropout becomes."""
    return input


def _attention(original: Any) -> Any:
    @functools.wraps(original)
    def attention(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *args: Any, **kwargs: Any) -> Any:
        return original(query, key, value, attn_mask, min(dropout_p, 0.0), *args, **kwargs)  # a negative one is an error as before

    return attention


def _recurrent(original: Any) -> Any:
    @functools.wraps(original)
    def recurrent(*args: Any, **kwargs: Any) -> Any:
        # the dropout between layers is the only float among the arguments; its place differs for packed sequences
        return original(
            *(0.0 if isinstance(a, float) else a for a in args), **{**kwargs, **({"dropout": 0.0} if "dropout" in kwargs else {})}
        )

    return recurrent
