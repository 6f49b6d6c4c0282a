"""Variables of torch that the user saves by hand."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from msprobe_engine.core.records import TensorRef
from msprobe_integrations.common.dump.debug_save import SavedVariables
from msprobe_integrations.torch.tensors.structure import convert


class TorchSavedVariables(SavedVariables):
    """See `SavedVariables`."""

    tensors = torch.Tensor

    @staticmethod
    def convert(variable: Any, reduce: Callable[[Any], TensorRef]) -> Any:
        return convert(variable, reduce)

    @staticmethod
    def unseen() -> AbstractContextManager[Any]:
        return torch._C.DisableTorchFunction()

    @staticmethod
    def hook(tensor: Any, arrived: Callable[[Any], None]) -> Any:
        return tensor.register_hook(arrived) if tensor.requires_grad else None
