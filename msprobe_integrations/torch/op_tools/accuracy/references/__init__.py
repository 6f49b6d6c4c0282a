"""Formulas of fused operators, for the bench: operators of torch_npu and MindSpeed by operations that torch has everywhere.

Arguments, defaults and results are those of the public definitions: ``op_plugin_functions.yaml`` of op-plugin, the documentation of
torch_npu and CANN, and ``mindspeed.ops``. Of results that only a backward reads (statistics of the softmax, seeds) those that have a
meaning of their own are given. All are differentiable, so gradients come from autograd; the operators that are a backward themselves
(recorded as ``Aten.npu_swiglu_backward``) are formulas of their own. What a formula does not know it says (`formula.NotChecked`).
"""

from __future__ import annotations

from msprobe_integrations.torch.op_tools.accuracy.references import (
    activations,
    attention,
    losses,
    matmul,
    moe,
    moves,
    norms,
    optimizers,
    quantization,
)
from msprobe_integrations.torch.op_tools.accuracy.references.formula import Formula

FORMULAS: dict[str, Formula] = {
    **activations.FORMULAS,
    **attention.FORMULAS,
    **losses.FORMULAS,
    **matmul.FORMULAS,
    **moe.FORMULAS,
    **moves.FORMULAS,
    **norms.FORMULAS,
    **optimizers.FORMULAS,
    **quantization.FORMULAS,
}
"""By the last part of a name; with its first part where operators of several libraries have one name and other arguments. Results that a
formula does not give are not compared."""


def find(name: str) -> Formula | None:
    """The formula of the records ``{name}.{N}``, ``"NPU.npu_swiglu"``; None: there is none."""
    kind, api = name.partition(".")[0], name.rpartition(".")[2]
    kind = "MindSpeed" if kind == "mindspeed" else kind  # the operators behind the functions
    return FORMULAS.get(f"{kind}.{api}") or FORMULAS.get(api)
