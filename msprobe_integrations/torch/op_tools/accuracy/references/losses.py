"""Losses."""

from __future__ import annotations

import torch
from torch import Tensor

from msprobe_integrations.torch.op_tools.accuracy.references.formula import Formula, require


def cross_entropy_loss(
    input: Tensor, target: Tensor, weight: Tensor | None = None, reduction: str = "mean", ignore_index: int = -100,
    label_smoothing: float = 0.0, lse_square_scale_for_zloss: float = 0.0, return_zloss: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(loss, of shape [1] unless `reduction` is ``none``; logarithms of the probabilities, without a gradient).

    A negative `ignore_index` ignores nothing. The smoothed part is divided by the same weights as the other.
    """
    require(not return_zloss and lse_square_scale_for_zloss == 0, "the z loss is not known to the formula of npu_cross_entropy_loss")
    require(reduction in ("mean", "sum", "none"), f"reduction {reduction[:20]!r} is not known to the formula")
    logs = torch.log_softmax(input, -1)
    counts = torch.ones_like(logs[:, 0]) if ignore_index < 0 else (target != ignore_index).to(logs.dtype)
    weights = torch.ones_like(logs[0]) if weight is None else weight.to(logs.dtype)
    of_target = weights[target.long()] * counts
    exact = -logs.gather(1, target.long()[:, None])[:, 0] * of_target
    smooth = -(logs * weights).sum(-1) * counts
    loss = (1 - label_smoothing) * exact + label_smoothing / input.shape[1] * smooth
    if reduction == "mean":
        loss = (loss.sum() / of_target.sum()).reshape(1)
    elif reduction == "sum":
        loss = loss.sum().reshape(1)
    return loss, logs.detach()


FORMULAS: dict[str, Formula] = {"npu_cross_entropy_loss": cross_entropy_loss}
