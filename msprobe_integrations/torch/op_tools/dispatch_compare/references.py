"""Operators that a benchmark cannot simply call: fused kernels that only an accelerator has, arguments that name a type, dropout.

Formulas are those of torch's documentation; they run in whatever type their arguments have been converted to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Args = list[Any]
Named = dict[str, Any]


def run(func: Any, name: str, args: Args, kwargs: Named) -> Any:
    """Call the operator with converted arguments, or what stands for it.

    Raises:
        RuntimeError, NotImplementedError, ValueError: it does not run there.
    """
    adjust = _ADJUST.get(name)
    if adjust is not None:
        args, kwargs = adjust(args, kwargs)
    try:
        return func(*args, **kwargs)
    except (RuntimeError, NotImplementedError, ValueError):
        if name not in _FORMULAS:
            raise
        return formula(func, args, kwargs)


def formula(func: Any, args: Args, kwargs: Named) -> Any:
    """What stands for an operator.

    Raises:
        KeyError: nothing does.
    """
    return _FORMULAS[func._schema.name.partition("::")[2]](_bind_arguments(func, args, kwargs))


def _bind_arguments(func: Any, args: Args, kwargs: Named) -> Named:
    """Arguments by name, defaults filled in."""
    defaults = {argument.name: argument.default_value for argument in func._schema.arguments if argument.has_default_value()}
    return defaults | dict(zip((argument.name for argument in func._schema.arguments), args)) | kwargs


def _stay_wide(args: Args, kwargs: Named) -> tuple[Args, Named]:
    """Softmax of a low precision type with a float32 result: the argument is wide already."""
    return [*args[:2], False, *args[3:]], kwargs


def _scores(q: torch.Tensor, k: torch.Tensor, named: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
    scale = named.get("scale")
    factor = 1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    scores = (q @ k.transpose(-2, -1)) * factor
    bias = next((named[key] for key in ("attn_bias", "attn_mask") if named.get(key) is not None), None)
    if bias is not None:
        scores = scores.masked_fill(~bias, -math.inf) if bias.dtype == torch.bool else scores + bias
    if named.get("is_causal"):
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(), -math.inf)
    return scores, factor


def _heads(k: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Heads of keys or values, repeated where several heads of the queries share one."""
    return k if k.shape[1] == q.shape[1] else k.repeat_interleave(q.shape[1] // k.shape[1], 1)


def _no_dropout(named: Mapping[str, Any]) -> None:
    if named.get("dropout_p"):
        raise RuntimeError("attention with dropout has no formula")


def _attention(named: Mapping[str, Any]) -> torch.Tensor:
    """The output, the first result of every fused attention. Behind it are what the backward takes, padded as the kernel likes."""
    _no_dropout(named)
    q = named["query"]
    k, v = _heads(named["key"], q), _heads(named["value"], q)
    scores, _ = _scores(q, k, named)
    return torch.softmax(scores, -1) @ v


def _attention_backward(named: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
    """Gradients of queries, keys and values. The probabilities are computed again from the scores."""
    _no_dropout(named)
    gradient = named["grad_out"] if "grad_out" in named else named["grad_out_"]
    q, k0, v0 = named["query"], named["key"], named["value"]
    k, v = _heads(k0, q), _heads(v0, q)
    scores, factor = _scores(q, k, named)
    p = torch.softmax(scores, -1)
    dp = gradient @ v.transpose(-2, -1)
    ds = p * (dp - (dp * p).sum(-1, keepdim=True))
    dq, dk, dv = (ds @ k) * factor, (ds.transpose(-2, -1) @ q) * factor, p.transpose(-2, -1) @ gradient
    if k0.shape[1] != q.shape[1]:
        dk, dv = (g.unflatten(1, (k0.shape[1], -1)).sum(2) for g in (dk, dv))
    return dq, dk, dv


def _scaled_mm(named: Mapping[str, Any]) -> torch.Tensor:
    out: torch.Tensor = (named["self"] * named["scale_a"]) @ (named["mat2"] * named["scale_b"])
    if named.get("bias") is not None:
        out = out + named["bias"]
    return out if named.get("scale_result") is None else out * named["scale_result"]


def _batch_norm(named: Mapping[str, Any]) -> Any:
    names = ("input", "weight", "bias", "running_mean", "running_var", "training", "exponential_average_factor", "epsilon")
    return torch.ops.aten.native_batch_norm(*(named[name] for name in names))


def _rms_norm(named: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    x, dims = named["input"], tuple(range(-len(named["normalized_shape"]), 0))
    eps = torch.finfo(x.dtype).eps if named.get("eps") is None else named["eps"]
    rstd = torch.rsqrt(x.square().mean(dims, keepdim=True) + eps)
    y = x * rstd
    return (y if named.get("weight") is None else y * named["weight"]), rstd


def _dropout(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
    """From the mask that was drawn: what is kept is scaled, the rest is 0."""
    x, p = args[0], args[1] if len(args) > 1 else kwargs["p"]
    mask = result[1]
    return torch.where(mask.bool(), x / (1 - p), torch.zeros_like(x)) if p < 1 else torch.zeros_like(x), mask


_ADJUST: Mapping[str, Callable[[Args, Named], tuple[Args, Named]]] = {"_softmax": _stay_wide, "_log_softmax": _stay_wide}
_FORMULAS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    **dict.fromkeys(
        (
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_fused_attention_overrideable",
        ),
        _attention,
    ),
    **dict.fromkeys(
        (
            "_scaled_dot_product_flash_attention_backward",
            "_scaled_dot_product_flash_attention_for_cpu_backward",
            "_scaled_dot_product_efficient_attention_backward",
            "_scaled_dot_product_cudnn_attention_backward",
        ),
        _attention_backward,
    ),
    "_scaled_mm": _scaled_mm,
    "_fused_rms_norm": _rms_norm,
    "cudnn_batch_norm": _batch_norm,
    "miopen_batch_norm": _batch_norm,
}
PARTIAL = frozenset(_FORMULAS)
"""Their formulas may give the first results only: what follows are seeds and sizes of the kernel."""
FROM_RESULT: Mapping[str, Callable[[Sequence[Any], Mapping[str, Any], Any], Any]] = {"native_dropout": _dropout}
"""Random operators whose result says what was drawn."""
