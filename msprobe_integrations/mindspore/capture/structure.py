"""Arguments and results as `Entry` structures: what MindSpore has that others do not."""

from __future__ import annotations

from typing import Any

import mindspore
import numpy as np

from msprobe_engine.core.records import Opaque, TensorRef
from msprobe_integrations.common.capture.containers import finder, open_object
from msprobe_integrations.common.capture.descriptions import intern
from msprobe_integrations.common.capture.structure import Reduce, converter, describe_foreign_array

Tensor: Any = mindspore.Tensor
_DTYPE: Any = type(mindspore.float32).__mro__[-2]  # the class of all types of MindSpore, also of tuples and tensors
_SPARSE = tuple(kind for name in ("CSRTensor", "COOTensor", "RowTensor") if isinstance(kind := getattr(mindspore, name, None), type))


def _open_container(value: Any) -> dict[str, Any] | None:
    if _SPARSE and isinstance(value, _SPARSE):
        return {name: getattr(value, name) for name in ("indptr", "indices", "values") if hasattr(value, name)}
    return open_object(value)


def _other(value: Any, reduce: Reduce) -> Any:
    if isinstance(value, _DTYPE):
        return Opaque({"type": "mindspore.dtype", "value": str(value)})
    if isinstance(value, np.ndarray):
        return _array(value, reduce)
    return None


def _array(value: np.ndarray[Any, Any], reduce: Reduce) -> TensorRef | Opaque:
    """A numpy array is taken as a tensor over the same memory, so it has statistics and, where tensors are saved, a file."""
    try:
        tensor = Tensor.from_numpy(np.ascontiguousarray(value.astype(value.dtype.newbyteorder("="), copy=False)))
    except (TypeError, ValueError):
        return describe_foreign_array(value)
    ref = reduce(tensor)
    shown = ref.description
    return TensorRef(ref.row, intern("numpy.ndarray", str(value.dtype), value.shape, None, "cpu", shown.extra))


convert = converter(Tensor, _open_container, _other)
tensors_in = finder(Tensor, _open_container)
