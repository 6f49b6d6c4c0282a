"""Arguments of a recorded call of MindSpore, made again; see `msprobe_integrations.common.op_tools.accuracy.arguments`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mindspore
import numpy as np
import numpy.typing as npt

from msprobe_engine.core.dtypes import plain_name
from msprobe_integrations.common.op_tools.accuracy.arguments import CannotRun, Files, RecordedArguments
from msprobe_integrations.mindspore.tensors import npy

Tensor: Any = mindspore.Tensor
_NAMES = {"bool": "bool_"}
"""Types whose name in mindspore is not the plain one."""


def type_of(name: str) -> Any:
    """A type of MindSpore by its name in a dump (``Float32``, ``float32`` of numpy arrays), None when there is none."""
    plain = plain_name(name)
    found = getattr(mindspore, _NAMES.get(plain, plain), None)
    return found if isinstance(found, type(mindspore.float32).__mro__[-2]) else None


class Arguments(RecordedArguments):
    """Makes arguments of records, see there."""

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, Tensor)

    def load(self, files: Files, name: str, item: Mapping[str, Any]) -> Any:
        """A saved tensor; ``.npy`` files hold types that numpy has not in a wider one, so the record says which it was."""
        loaded = files.load(name, npy)
        return self.tensor(loaded, str(item.get("dtype"))) if isinstance(loaded, np.ndarray) else loaded

    def tensor(self, values: npt.NDArray[Any], dtype: str) -> Any:
        kind = type_of(dtype)
        if kind is None:
            raise CannotRun(f"a tensor of type {dtype[:40]} and shape {list(values.shape)}")
        return Tensor(np.ascontiguousarray(values).reshape(values.shape), kind)

    def special(self, kind: str, item: Mapping[str, Any]) -> Any:
        found = type_of(str(item.get("value"))) if kind == "mindspore.dtype" else None
        if found is None:
            raise CannotRun(f"an argument of type {kind[:80]} cannot be made from a dump")
        return found
