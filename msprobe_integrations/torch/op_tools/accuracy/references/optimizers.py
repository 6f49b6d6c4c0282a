"""Steps of optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from msprobe_integrations.torch.op_tools.accuracy.references.formula import Formula


def apply_adam(
    beta1_power: Any, beta2_power: Any, lr: Any, beta1: Any, beta2: Any, epsilon: Any, grad: Tensor, use_locking: Any = None,
    use_nesterov: Any = None, *, out: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(parameter, first moment, second moment) after one step; `out` has them as they are before."""
    del use_locking
    var, m, v = out
    m_new = beta1 * m + (1 - beta1) * grad
    v_new = beta2 * v + (1 - beta2) * grad * grad
    rate = lr * (1 - beta2_power) ** 0.5 / (1 - beta1_power)
    direction = beta1 * m_new + (1 - beta1) * grad if use_nesterov else m_new
    return var - rate * direction / (v_new.sqrt() + epsilon), m_new, v_new


def apply_adam_w(
    beta1_power: Any, beta2_power: Any, lr: Any, weight_decay: Any, beta1: Any, beta2: Any, epsilon: Any, grad: Tensor,
    max_grad_norm: Tensor | None = None, amsgrad: bool | None = False, maximize: bool | None = False, *, out: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(parameter, first moment, second moment) after one step; `out` has them as they are before, the powers are those of the step
    before."""
    var, m, v = out
    gradient = -grad if maximize else grad
    m_new = beta1 * m + (1 - beta1) * gradient
    v_new = beta2 * v + (1 - beta2) * gradient * gradient
    largest = torch.maximum(max_grad_norm, v_new) if amsgrad and max_grad_norm is not None else v_new
    size = (largest / (1 - beta2_power * beta2)).sqrt() + epsilon
    return var * (1 - lr * weight_decay) - lr * m_new / (1 - beta1_power * beta1) / size, m_new, v_new


def apply_fused_ema_adamw(
    grad: Tensor, var: Tensor, m: Tensor, v: Tensor, s: Tensor, step: Tensor, lr: float = 1e-3, ema_decay: float = 0.9999,
    beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, mode: int = 1, bias_correction: bool = True, weight_decay: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(parameter, first moment, second moment, moving average of the parameter) after one step of AdamW (`mode` 1) or Adam (0)."""
    correction = [1 - beta**step * bias_correction for beta in (beta1, beta2)]
    gradient = grad + weight_decay * var * (1 - mode)
    m_new = beta1 * m + (1 - beta1) * gradient
    v_new = beta2 * v + (1 - beta2) * gradient * gradient
    update = m_new / correction[0] / ((v_new / correction[1]).sqrt() + eps) + weight_decay * var * mode
    var_new = var - lr * update
    return var_new, m_new, v_new, ema_decay * s + (1 - ema_decay) * var_new


FORMULAS: dict[str, Formula] = {
    "npu_apply_adam": apply_adam,
    "npu_apply_adam_w": apply_adam_w,
    "MindSpeed.npu_apply_fused_ema_adamw": apply_fused_ema_adamw,
}
