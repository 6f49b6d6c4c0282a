"""Which update rule an optimizer follows, by its class: torch's own, and those that Megatron and DeepSpeed use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KNOWN = ("adamw", "adam", "sgd", "lion", "adagrad", "rmsprop", "muon", "lamb", "adafactor")
"""Names as `algorithm_of` gives them."""
_PREFIXES = ("fused", "deepspeedcpu", "zenflowcpu", "cpu")


def algorithm_of(optimizer: Any, group: Mapping[str, Any]) -> str:
    """Name of the rule, from `KNOWN`; empty for a class that is none of them.

    Args:
        optimizer: the torch optimizer that does the update. A subclass is what its nearest known base is.
        group: the parameter group in question (Muon optimizers update some groups with Adam).
    """
    for kind in type(optimizer).__mro__:
        name = _plain(kind.__name__.lower())
        if name.startswith("muon") or name.endswith("muon"):
            return "muon" if group.get("use_muon", True) else "adamw"
        if name == "adam":
            return "adamw" if _is_decoupled(optimizer, group) else "adam"
        if name in KNOWN:
            return name
    return ""


def _plain(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _is_decoupled(optimizer: Any, group: Mapping[str, Any]) -> bool:
    """Weight decay apart from the gradient: ``decoupled_weight_decay`` of torch, ``adam_w_mode`` of apex, Transformer Engine (where it
    may be a number) and DeepSpeed."""
    said = group.get("decoupled_weight_decay", getattr(optimizer, "adam_w_mode", False))
    return bool(said)
