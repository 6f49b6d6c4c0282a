"""Variables of MindSpore that the user saves by hand."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import mindspore

from msprobe_engine.core.records import TensorRef
from msprobe_integrations.common.dump.debug_save import SavedVariables
from msprobe_integrations.mindspore import environment
from msprobe_integrations.mindspore.capture.structure import convert
from msprobe_integrations.mindspore.hooks import eager as hooks


class MindSporeSavedVariables(SavedVariables):
    """See `SavedVariables`. The gradient of a tensor is the whole one: the sum of what all its uses give back."""

    tensors = mindspore.Tensor

    @staticmethod
    def convert(variable: Any, reduce: Callable[[Any], TensorRef]) -> Any:
        return convert(variable, reduce)

    @staticmethod
    def unseen() -> AbstractContextManager[Any]:
        return environment.no_grad()

    @staticmethod
    def hook(tensor: Any, arrived: Callable[[Any], None]) -> Any:
        try:
            return hooks.at_gradient(tensor, arrived)
        except RuntimeError as error:
            if "requires grad" in str(error):  # nobody records it now
                return None
            raise
