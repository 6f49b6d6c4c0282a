"""Dropout: what was dropped is told by the result, so all the rest of it can be checked, and whether the share is right."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

_DROPOUTS = frozenset(
    ("dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "feature_dropout", "feature_dropout_", "native_dropout")
)
_PLACES = {"p": 1, "training": 2, "train": 2}
_NEVER = frozenset(("alpha_dropout", "alpha_dropout_", "feature_alpha_dropout", "feature_alpha_dropout_", "rrelu", "rrelu_"))
_ATTENTION = {"scaled_dot_product_attention": 4, "multi_head_attention_forward": 10, "_scaled_dot_product_flash_attention_for_cpu": 3}
_RECURRENT = frozenset(("lstm", "gru", "rnn_tanh", "rnn_relu"))


class Dropout(NamedTuple):
    """A call that drops.

    Attributes:
        p: probability.
        whole: channels as a whole (everything behind the first two dimensions).
    """

    p: float
    whole: bool


def dropout_of(api: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Dropout | None:
    """What a call of the dropout family drops; None when it drops nothing or everything, or is none of them."""
    if api not in _DROPOUTS:
        return None
    p = _argument("p", args, kwargs, 0.5)
    training = _argument("training", args, kwargs, None)
    training = _argument("train", args, kwargs, api != "native_dropout" or None) if training is None else training
    if training is False or not isinstance(p, (int, float)) or not 0 < p < 1:
        return None
    return Dropout(float(p), api.startswith("feature") or api[-2:] in ("1d", "2d", "3d"))


def _argument(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], default: Any) -> Any:
    return kwargs.get(name, args[_PLACES[name]] if len(args) > _PLACES[name] else default)


def draws(api: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Does a call draw random numbers in a way that its result does not tell?"""
    if api in _NEVER:
        training = kwargs.get("training", kwargs.get("train", next((argument for argument in args[1:] if type(argument) is bool), None)))
        return training is not False and not (training is None and api.startswith("rrelu"))
    if api in _ATTENTION:
        place = _ATTENTION[api]
        p = kwargs.get("dropout_p", args[place] if len(args) > place else 0.0)
        return isinstance(p, (int, float)) and p > 0 and kwargs.get("training", True) is not False
    if api in _RECURRENT:  # (..., has_biases, num_layers, dropout, train, bidirectional, batch_first): the one float is the dropout
        p = next((argument for argument in args if type(argument) is float), 0.0)
        return p > 0 and any(argument is True for argument in args)
    return False


def compute_expected_output(dropout: Dropout, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """What `out` must be, given what it has dropped: the rest of `x`, scaled. In the type of `x`."""
    return torch.where(out.to(x.device) != 0, x / (1 - dropout.p), torch.zeros((), dtype=x.dtype, device=x.device))


def wrong_share(dropout: Dropout, x: torch.Tensor, out: torch.Tensor) -> str:
    """Why the share of dropped values cannot be by chance; empty when it can.

    By chance the number of dropped ones is further than six standard deviations from the mean once in a billion calls.
    """
    nonzero = x != 0
    dropped = nonzero & (out.to(x.device) == 0)
    if dropout.whole:
        if x.dim() < 3:
            return ""
        nonzero, dropped = nonzero.flatten(2), dropped.flatten(2)
        counted, gone = nonzero.any(-1), dropped.any(-1)
        if bool((gone & (dropped != nonzero).any(-1)).any()):
            return "a channel is dropped in part"
        nonzero, dropped = counted, gone
    count, gone_count = int(nonzero.sum()), int(dropped.sum())
    if abs(gone_count - dropout.p * count) <= 6 * math.sqrt(dropout.p * (1 - dropout.p) * count) + 1:
        return ""
    return f"{gone_count} of {count} values are dropped, {dropout.p:g} of them should be"
