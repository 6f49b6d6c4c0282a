"""Arguments and results as `Entry` structures: what torch has that others do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from msprobe_engine.core.records import Opaque, TensorRef
from msprobe_integrations.common.capture.descriptions import intern
from msprobe_integrations.common.capture.structure import (
    MAX_DEPTH,
    MAX_VALUES,
    Reduce,
    converter,
    describe_foreign_array,
    describe_unknown,
    group_id,
    simple,
)
from msprobe_integrations.torch.statistics.pending import quiet
from msprobe_integrations.torch.tensors.containers import open_object

__all__ = ["MAX_DEPTH", "MAX_VALUES", "convert", "describe_unknown", "group_id", "process_group", "simple"]


def _other(value: Any, reduce: Reduce) -> Any:
    if isinstance(value, torch.Size):
        return Opaque({"type": "torch.Size", "value": [int(v) if isinstance(v, int) else str(v) for v in value]})
    if isinstance(value, (torch.dtype, torch.device)):
        return Opaque({"type": f"torch.{type(value).__name__}", "value": str(value)})
    if isinstance(value, torch.memory_format):
        return Opaque({"type": "torch.memory_format", "format": str(value).removeprefix("torch.")})
    if isinstance(value, np.ndarray):
        return _array(value, reduce)
    if torch.distributed.is_available():
        if isinstance(value, torch.distributed.ProcessGroup):
            return process_group(value)
        if isinstance(value, torch.distributed.P2POp):
            return _message(value, reduce)
    if type(value).__name__ in ("ReduceOp", "RedOpType"):
        return Opaque({"type": "torch.distributed.ReduceOp", "value": str(value).removeprefix("<").removesuffix(">")})
    return None


convert = converter(torch.Tensor, open_object, _other)


def process_group(group: Any) -> Opaque:
    """A process group: global ranks of its members and their `group_id`."""
    ranks = torch.distributed.get_process_group_ranks(group)
    return Opaque({"type": "torch.ProcessGroup", "group_ranks": ranks, "group_id": group_id(ranks)})


def _message(op: Any, reduce: Reduce) -> dict[str, Any]:
    """A `P2POp`, one send or receive of ``batch_isend_irecv``; numbers and texts stand bare, as the existing tool writes them."""
    ranks = torch.distributed.get_process_group_ranks(op.group)  # of None: the default group
    return {
        "class_type": Opaque("torch.distributed.P2POp"),
        "tensor": reduce(op.tensor),
        "op": Opaque(op.op.__name__),
        "peer": Opaque(op.peer),
        "tag": Opaque(op.tag),
        "group_id": Opaque(group_id(ranks)),
    }


def _array(value: np.ndarray[Any, Any], reduce: Reduce) -> TensorRef | Opaque:
    """A numpy array is taken as a tensor over the same memory, so it has statistics and, where tensors are saved, a file. One of a
    type that torch does not have (strings, objects) is described only."""
    plain = value.flags.writeable and value.dtype.isnative and all(stride >= 0 for stride in value.strides)
    try:
        with quiet():
            tensor = torch.from_numpy(value if plain else value.astype(value.dtype.newbyteorder("=")))
    except TypeError:
        return describe_foreign_array(value)
    ref = reduce(tensor)
    shown = ref.description
    return TensorRef(ref.row, intern("numpy.ndarray", str(value.dtype), shown.shape, None, "cpu", shown.extra))
