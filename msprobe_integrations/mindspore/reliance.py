"""What the integration relies on in MindSpore. Read where MindSpore is not installed, too: it imports nothing of this package."""

from __future__ import annotations

import importlib

from msprobe_engine.core.errors import ProbeError
from msprobe_integrations.requirements import Requirement

NAME = "MindSpore"
PACKAGE = "mindspore"
_GRAPHS = "gradients of calls with the graph of the training as it is (identities around Cells are put in instead), of functions at all"
TABLE = (
    Requirement(
        "mindspore.graph.api:_pynative_executor | mindspore.common.api:_pynative_executor", "dumps and monitoring of any kind", "2.10"
    ),
    Requirement("mindspore.graph.api:_no_grad | mindspore.common.api:_no_grad", "dumps and monitoring of any kind", "2.10"),
    Requirement("mindspore.nn:Cell.__call__", "records and activations of Cells", "2.10"),
    Requirement(
        "mindspore.nn:Cell.register_forward_pre_hook", "steps and updates of optimizers; weights and inputs of config check", "2.7 to 2.10"
    ),
    Requirement("mindspore.nn:Cell.register_forward_hook", "updates of optimizers", "2.7 to 2.10"),
    Requirement("mindspore:Parameter.register_hook", "unreduced gradients, gradients of parameters in dumps", "2.10"),
    Requirement("mindspore:Tensor._grad_node", _GRAPHS, "2.10"),
    Requirement(
        "mindspore.graph.api:_pynative_executor.get_current_autodiff_engine_id "
        "| mindspore.common.api:_pynative_executor.get_current_autodiff_engine_id",
        _GRAPHS,
        "2.10",
    ),
    Requirement("mindspore:Tensor.data_ptr", "statistics of tensors without a copy", "2.10"),
    Requirement(
        "mindspore.graph.api:_JitExecutor.__call__ | mindspore.common.api:_JitExecutor.__call__", "records of compiled functions", "2.10"
    ),
    Requirement(
        "mindspore.graph._utils.pijit_context:PIJitCaptureContext | mindspore.common._pijit_context:PIJitCaptureContext",
        'records of functions compiled with capture_mode="bytecode"',
        "2.10",
    ),
    Requirement("mindspore._c_expression:GraphExecutor_.compile", "dumps of static graphs", "2.10"),
    Requirement(
        "mindspore._c_expression:JitExecutor_.compile | mindspore._c_expression:GraphExecutor_.compile",
        "dumps inside of compiled functions",
        "2.10",
    ),
    Requirement("mindspore.ops.operations._inner_ops:CellBackwardHook", "save_grad; gradients of Cells before 2.10", "2.10"),
    Requirement("mindspore.ops:TensorDump", "save in static graphs on an Ascend", "2.10"),
    Requirement("mindspore.ops:DumpGradient", "save_grad in static graphs on an Ascend", "2.10"),
    Requirement("mindspore.ops.function.nn_func:_inner_dropout", "dropout switched off by seed_all in nn.MultiheadAttention", "2.10"),
    Requirement("mindspore.train:Callback", "following Model.train", "2.10"),
)


def trouble() -> str:
    """Why the framework cannot work in this environment although it is installed: another numpy than it was compiled for; else empty."""
    try:
        importlib.import_module("msprobe_integrations.mindspore")
    except ProbeError as error:
        return str(error)
    return ""
